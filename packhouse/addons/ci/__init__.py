"""`packhouse ci`: a data refresh as a job of a pipeline."""
