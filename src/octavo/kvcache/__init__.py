"""Know which block holds which tokens, and who holds the block."""
