"""One file per family of architectures; nobody imports one by name, the registry does."""
