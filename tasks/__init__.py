"""Tasks: one file per step of the chain, thin over `packhouse.steps`."""
