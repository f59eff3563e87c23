"""Turn token ids back into what people asked for, incrementally."""
