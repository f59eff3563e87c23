"""Own one device: its weights, its KV memory, and one step at a time."""
