"""`packhouse new`: a project of one's own."""
