"""State the facts of a device and the few things only it can do."""
