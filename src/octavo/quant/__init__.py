"""Describe how a weight is stored and how to multiply by it."""
