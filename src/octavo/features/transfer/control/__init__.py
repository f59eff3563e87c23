"""What is moved, when, and who may be forgotten: bookkeeping without I/O."""
