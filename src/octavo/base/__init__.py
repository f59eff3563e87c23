"""Every word the rest of the system speaks, and nothing that does work."""
