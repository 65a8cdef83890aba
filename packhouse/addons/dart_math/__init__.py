"""Templates of dart-math, and datasets created in the same way as in dart-math."""
