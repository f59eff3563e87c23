"""Choose which tokens run next, and turn what came back into request state."""
