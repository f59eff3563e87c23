"""One callable per math operation, with a torch reference beside every fast version."""
