"""Templates of dart-math, and datasets made as its users make them."""
