"""Benchmarks: packhouse and its peers on the same input, in one interleaved run."""
