"""Read exports of packhouse with Megatron-Bridge's reader of packed Parquet, and compare.

Its modules come from its checkout; stand-ins replace Megatron-Core (`names.py`).
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset
from transformers import AutoTokenizer

import packhouse
from packhouse.addons.exports import export_version
from packhouse.store import open_version

SHARED = Path(os.environ.get("PACKHOUSE_SHARED", "../shared"))


@pytest.mark.parametrize(
    ("name", "multiple"),
    [("qwen2.5-instruct", 1), ("qwen2.5-instruct", 16), ("mistral-7b-instruct-v0.3", 16)],
)
def test_its_reader_trains_the_tokens_of_the_version(
    name: str, multiple: int, tmp_path: Path
) -> None:
    tokenizer, data = SHARED / "tokenizers" / name, SHARED / "data" / "alpaca_data.json"
    if not (tokenizer.is_dir() and data.is_file()):
        pytest.skip("PACKHOUSE_SHARED has no such tokenizer or data")
    version = packhouse.prepare(
        json.loads(data.read_bytes())[:1000],
        tokenizer=str(tokenizer),
        seq_len=2048,
        dataset="rows",
        store=tmp_path / "store",
        cache=tmp_path / "cache",
        format={"template": "alpaca"},
        pack={"pad_record_to_multiple_of": multiple},
    )
    opened = open_version(str(tmp_path / "store"), "rows")
    folder = export_version(opened, "megatron", tmp_path / "out", cache=tmp_path / "cache").folder
    path = folder / "train.idx.parquet"
    rows = pq.read_table(path).to_pylist()
    told = sum(sum(row["loss_mask"]) for row in rows)
    assert told == sum(int((np.array(row["labels"]) >= 0).sum()) for row in version.train)

    eos = AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    for pad_cu_seqlens in (False, True):
        reader: Any = GPTSFTPackedParquetDataset(
            str(path),
            SimpleNamespace(eos_id=eos, eod=eos),
            max_seq_length=2048,
            memmap_workers=1,
            seed=1,
            pad_to_max_length=pad_cu_seqlens,
            prompt_template="{input} {output}",
            label_key="output",
            truncation_field="input",
            is_test=True,
            pad_seq_to_mult=multiple,
            pad_cu_seqlens=pad_cu_seqlens,
            pack_metadata_file_path=str(folder / "train.metadata.json"),
        )
        trained, shapes = 0, set()
        for number, row in enumerate(rows):
            batch = reader.collate_fn([reader[number]])
            trained += int(batch["loss_mask"].sum())
            assert not batch["loss_mask"][batch["padding_mask"]].any()
            shapes.add((tuple(batch["tokens"].shape), tuple(batch["cu_seqlens_q"].shape)))
            if multiple > 1:
                padded = batch["cu_seqlens_q_padded"][0].tolist()
                assert padded[: len(row["cu_seqlens_padded"])] == row["cu_seqlens_padded"]
        assert trained == told
        assert len(reader) == len(rows)
        assert len(shapes) == 1 or not pad_cu_seqlens
