"""Choose tokens from logits exactly as the parameters say."""
