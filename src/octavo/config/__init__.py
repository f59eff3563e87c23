"""Turn flags, a model folder and device facts into one frozen, explained EngineConfig."""
