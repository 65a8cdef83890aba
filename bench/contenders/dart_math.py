"""The method that dart-math describes: tokenize everything into memory, then next-fit packs.

Prompts and whole texts are both encoded to find where the answer starts. Ids and labels of all rows
are kept as tensors, joined row by row into packs in the order of the file, and saved.
"""

import json
from pathlib import Path
from typing import Any

from bench.contenders.alpaca import prompt_of, size_of

IGNORE = -100


def run(data: Path, tokenizer: Path, seq_len: int, out: Path) -> dict[str, Any]:
    """Encode into memory, pack next-fit, save as a dataset."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    engine = AutoTokenizer.from_pretrained(tokenizer)
    with data.open(encoding="utf-8") as file:
        rows = json.load(file)
    prompts = [prompt_of(row) for row in rows]
    texts = [p + row["output"] + engine.eos_token for p, row in zip(prompts, rows, strict=True)]
    whole = [torch.tensor(ids) for ids in engine(texts)["input_ids"]]
    prompt_lengths = [len(ids) for ids in engine(prompts)["input_ids"]]
    labels = [ids.clone() for ids in whole]
    for row, length in zip(labels, prompt_lengths, strict=True):
        row[:length] = IGNORE
    packs = _next_fit([len(ids) for ids in whole], seq_len)
    joined = (
        {
            "input_ids": torch.cat([whole[i] for i in pack]).tolist(),
            "labels": torch.cat([labels[i] for i in pack]).tolist(),
            "seq_lengths": [len(whole[i]) for i in pack],
        }
        for pack in packs
    )
    Dataset.from_list(list(joined)).save_to_disk(str(out / "packed"))
    return {
        "rows": len(rows),
        "tokens": sum(map(len, whole)),
        "packs": len(packs),
        "bytes": size_of(out / "packed"),
    }


def _next_fit(lengths: list[int], seq_len: int) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    room = seq_len
    for row, length in enumerate(lengths):
        if length > room and packs[-1]:
            packs.append([])
            room = seq_len
        packs[-1].append(row)
        room -= length
    return packs
