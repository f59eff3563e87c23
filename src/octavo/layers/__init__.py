"""The parallel building blocks that models are written in."""
