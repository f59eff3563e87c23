"""Find an implementation by name without importing its neighbours."""
