"""Small versions for the tests of this room."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.store import LocalFile

INT32S = pa.list_(pa.int32())
FACTS: dict[str, Any] = {
    "content_id": "c1",
    "configuration": {"pack": {"seq_len": 8}},
    "counts": {"rows_in": 3},
}


def pack_table(first: int = 1) -> pa.Table:
    """Two packs: records a and b of 3 and 2 tokens, and c of 2."""
    return pa.table(
        {
            "input_ids": pa.array([[first, 2, 3, 4, 5], [6, 7]], INT32S),
            "labels": pa.array([[-100, 2, -100, -100, 5], [-100, 7]], INT32S),
            "seq_lengths": pa.array([[3, 2], [2]], INT32S),
            "record_ids": [["a", "b"], ["c"]],
        }
    )


def write_file(folder: Path, table: pa.Table, name: str, split: str = "train") -> LocalFile:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    pq.write_table(table, path, write_page_checksum=True)
    tokens = sum(len(row) for row in table["input_ids"].to_pylist())
    return LocalFile(path, split, rows=table.num_rows, tokens=tokens)


def pack_file(folder: Path, first: int = 1) -> LocalFile:
    return write_file(folder, pack_table(first), f"train-{first}")
