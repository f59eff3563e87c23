"""What servers over HTTP share: the edge, bodies, errors, streams, and their life. Nothing here knows a route."""
