"""`packhouse plan`: what a run would give, before any work."""
