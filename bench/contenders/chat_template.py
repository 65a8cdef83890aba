"""transformers: `apply_chat_template` on each conversation, then the tokenizer on batches."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

from bench.contenders.alpaca import size_of

BATCH = 1000


def run(data: Path, tokenizer: Path, seq_len: int, out: Path) -> dict[str, Any]:
    """Render and encode every conversation, and write the ids as one Parquet file."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    engine = AutoTokenizer.from_pretrained(tokenizer)
    rows: list[list[int]] = []
    with data.open(encoding="utf-8") as file:
        while batch := [json.loads(line) for line in islice(file, BATCH)]:
            texts = [
                engine.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
                for row in batch
            ]
            rows += engine(texts, add_special_tokens=False)["input_ids"]
    path = out / "rows.parquet"
    Dataset.from_dict({"input_ids": rows}).to_parquet(str(path))
    tokens = sum(map(len, rows))
    return {"rows": len(rows), "tokens": tokens, "packs": 0, "bytes": size_of(path)}
