"""The HTTP door: OpenAI's routes over the same engine as every other door."""
