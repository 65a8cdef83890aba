"""`packhouse plan`: estimate the result of a run before any work is done."""
