"""Run the step loop, and be reachable from other processes."""
