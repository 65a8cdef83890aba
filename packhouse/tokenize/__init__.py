"""Text and trained spans to ids and trained ranges, and what a tokenizer is."""

from packhouse.tokenize.encoders import TokenizerSnapshot
from packhouse.tokenize.text_to_tokens import VERSION, Tokenized, tokenize_shard, tokenize_table
from packhouse.tokenize.tokenizer_loading import fingerprint_tokenizer, load_snapshot, run_tokenizer

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
