"""Questions about a version: `sql`, `stats`, `dropped`, `trace`, `diff` and `inspect`."""
