"""Measure the served thing from outside, the same way every time."""
