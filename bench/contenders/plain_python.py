"""Plain Python, as in many articles: json, lists, greedy packs, one Parquet file.

Prompt and answer are encoded separately, each once, in lists of 1,000 (one call per row takes about
twice the time). Packs are filled in the order of the file; nothing is checked.
"""

import json
from pathlib import Path
from typing import Any

from bench.contenders.alpaca import prompt_of, size_of

IGNORE = -100
BATCH = 1000


def run(data: Path, tokenizer: Path, seq_len: int, out: Path) -> dict[str, Any]:
    """Read, encode, pack and write with Python lists."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    engine = AutoTokenizer.from_pretrained(tokenizer)
    with data.open(encoding="utf-8") as file:
        rows = json.load(file)
    packs: list[dict[str, list[int]]] = []
    ids: list[int] = []
    labels: list[int] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        prompts = engine([prompt_of(row) for row in batch])["input_ids"]
        answers = engine([row["output"] + engine.eos_token for row in batch])["input_ids"]
        for prompt, answer in zip(prompts, answers, strict=True):
            if len(ids) + len(prompt) + len(answer) > seq_len:
                packs.append({"input_ids": ids, "labels": labels})
                ids, labels = [], []
            ids = ids + prompt + answer
            labels = labels + [IGNORE] * len(prompt) + answer
    packs.append({"input_ids": ids, "labels": labels})
    path = out / "packed.parquet"
    Dataset.from_list(packs).to_parquet(str(path))
    return {
        "rows": len(rows),
        "tokens": sum(len(pack["input_ids"]) for pack in packs),
        "packs": len(packs),
        "bytes": size_of(path),
    }
