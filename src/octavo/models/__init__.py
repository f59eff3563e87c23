"""Each supported architecture, as short as its paper."""
