"""One request in, a stream of outputs back, cancel anywhere."""
