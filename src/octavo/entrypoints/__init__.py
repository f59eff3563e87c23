"""The front doors; no door holds logic another door needs."""
