"""Text and trained spans to ids and trained ranges, and what a tokenizer is."""

from packhouse.tokenization.loading import fingerprint_tokenizer, load_snapshot
from packhouse.tokenization.snapshot import TokenizerSnapshot
from packhouse.tokenization.tokenizing import VERSION, Tokenized, tokenize_table

__all__ = [
    "VERSION",
    "Tokenized",
    "TokenizerSnapshot",
    "fingerprint_tokenizer",
    "load_snapshot",
    "tokenize_table",
]
