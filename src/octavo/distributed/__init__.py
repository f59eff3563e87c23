"""Hand out process groups and move tensors inside them."""
