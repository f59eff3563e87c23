"""Attend over paged KV with the first backend that has no objection."""
