"""The bytes: KV blocks, host memory, and what lies behind it."""
