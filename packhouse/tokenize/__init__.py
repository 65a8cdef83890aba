"""Text and trained spans to ids and trained ranges, and what a tokenizer is."""

from packhouse.tokenize.encoders import TokenizerSnapshot as TokenizerSnapshot
from packhouse.tokenize.text_to_tokens import (
    VERSION as VERSION,
    tokenize_shard as tokenize_shard,
    tokenize_table as tokenize_table,
)
from packhouse.tokenize.tokenizer_loading import (
    fingerprint_tokenizer as fingerprint_tokenizer,
    load_snapshot as load_snapshot,
    run_tokenizer as run_tokenizer,
)
