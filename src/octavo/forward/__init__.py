"""Carry per-step metadata to ops the compiler cannot see through."""
