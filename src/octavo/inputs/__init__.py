"""Turn what people send into a checked request: text, chats and ids to token ids."""
