"""Small versions for the tests of the store."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.store import LocalFile
from packhouse.store.version_reader import scan_versions

INT32S = pa.list_(pa.int32())
FACTS = {
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


def canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def sha256(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def forged(document: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with correct digests."""
    body = {k: v for k, v in document.items() if k not in ("manifest_id", "digest")}
    hashed = {k: v for k, v in body.items() if k != "provenance"}
    body["manifest_id"] = sha256(hashed)
    return canonical(body | {"digest": sha256(body)})


def list_versions(store, dataset):
    """Return every committed version by name; none may be damaged."""
    versions, damaged = scan_versions(store, dataset)
    assert damaged == []
    return versions
