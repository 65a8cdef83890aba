"""Packs in the memory of a trainer: of token ids that are there, or of raw rows in one call."""
