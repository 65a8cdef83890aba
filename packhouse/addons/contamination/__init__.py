"""Rows that share a run of words with a benchmark: searched shard by shard, counted, left out."""
