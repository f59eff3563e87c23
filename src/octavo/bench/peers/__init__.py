"""Engines that the comparison starts, one module each; see `api` for what a peer is."""
