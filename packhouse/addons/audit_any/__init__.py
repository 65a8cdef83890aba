"""`packhouse audit`: check tokens and masks of rows from any tool, also in tokenized sources."""
