"""Features: one folder each, both halves together; none is imported by the spine by name."""
