"""Which server behind the router answers a request, and what happens when it does not (PDX-12)."""
