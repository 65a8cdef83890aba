"""Text and trained spans to ids and trained ranges, and what a tokenizer is."""

from packhouse.tokenize.encoders import TokenizerSnapshot
from packhouse.tokenize.loading import fingerprint_tokenizer, load_snapshot, run_tokenizer
from packhouse.tokenize.tokenizing import VERSION, Tokenized, tokenize_shard, tokenize_table

__all__ = [
    "VERSION",
    "Tokenized",
    "TokenizerSnapshot",
    "fingerprint_tokenizer",
    "load_snapshot",
    "run_tokenizer",
    "tokenize_shard",
    "tokenize_table",
]
