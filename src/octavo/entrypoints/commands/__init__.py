"""One file a command; each has `run(call) -> exit code` and is imported only when it is the one that runs."""
