"""Decompression bombs end in a typed error or a bad row, and use little memory.

Peaks are measured where the kernel records them, for a process and its children.
"""

import gzip
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from packhouse.errors import SourceError
from packhouse.read import parquet_files
from packhouse.system import worker
from tests.prepared import python

MIB = 2**20

READ = """
import json, resource, sys
from packhouse.errors import PackhouseError
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.read import read_shard, scan_source

def peak():
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024

before, rows, bad, error = peak(), 0, {}, None
try:
    for shard in scan_source(SourceConfig(path=sys.argv[1])):
        found = read_shard(shard, SourceConfig(path=sys.argv[1]), ValidateConfig(), "prompt")
        rows += found.num_records
        for reason in found.quarantined["reason"].to_pylist():
            bad[reason] = bad.get(reason, 0) + 1
except PackhouseError as raised:
    error = [type(raised).__name__, str(raised)]
print(json.dumps({"rows": rows, "bad": bad, "error": error, "grown": peak() - before}))
"""


def read(path: Path) -> dict[str, Any]:
    done = python("-c", READ, path)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def chats(num_rows: int, text: str) -> pa.Table:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([text]))
    return pa.table({"prompt": texts, "completion": texts})


def parquet(table: pa.Table, path: Path, **options: Any) -> None:
    pq.write_table(table, path, compression="zstd", **options)


def arrow(table: pa.Table, path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as out,
        pa.ipc.new_file(out, table.schema, options=options) as f,
    ):
        f.write_table(table)


def dictionary_parquet(path: Path) -> None:
    """A few kilobytes; 2,000,000 rows share a text of 1 MB."""
    parquet(chats(2_000_000, "x" * MIB), path)


def prefixes_parquet(path: Path) -> None:
    """Each text contains the one before it."""
    table = pa.table({"text": ["x" * MIB] * 2000})
    parquet(table, path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def page_parquet(path: Path) -> None:
    """A page that zstd expands 10,000 times."""
    parquet(pa.table({"text": ["x" * 300 * MIB]}), path, use_dictionary=False)


def body_arrow(path: Path) -> None:
    arrow(pa.table({"text": pa.array(["x" * 300 * MIB], pa.large_string())}), path)


def lying_parquet(path: Path) -> None:
    """A page that claims 2 GB, in a file of a few kilobytes."""
    schema = pa.schema([pa.field("text", pa.string(), nullable=False)])
    table = pa.table({"text": ["x" * 130 * MIB]}, schema=schema)
    parquet(table, path, use_dictionary=False)
    data = path.read_bytes()
    size = _varint(2 * (130 * MIB + 4))  # of the page, as in its header
    assert size in data
    path.write_bytes(data.replace(size, _varint(2 * (2**31 - 2)), 1))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def nothing_arrow(path: Path) -> None:
    """2**30 rows of a column without bytes."""
    arrow(pa.table({"text": pa.nulls(2**30)}), path)


def runs_arrow(path: Path) -> None:
    """2**30 rows in one run."""
    text = pa.RunEndEncodedArray.from_arrays(pa.array([2**30], pa.int32()), pa.array(["x" * 1000]))
    arrow(pa.table({"text": text}), path)


def nested_arrow(path: Path) -> None:
    kind = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    arrow(pa.table({"text": pa.nulls(1, kind)}), path)


def wide_parquet(path: Path) -> None:
    parquet(pa.table({f"c{i}": [1] for i in range(parquet_files.MAX_COLUMNS + 1)}), path)


def gzip_bomb(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text": "' + b"x" * 500 * MIB + b'"}\n', 6))


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("rows.jsonl", b" " * 100 * MIB)


def open_quote(path: Path) -> None:
    with path.open("wb") as out:
        out.write(b'text\n"')
        for _ in range(40):
            out.write(b"x" * 1023 * 1024 + b"\n" * 1024)


def deep_json(path: Path) -> None:
    path.write_bytes(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + b'{"text": "a"}\n')


def deep_array(path: Path) -> None:
    path.write_bytes(b'[{"text": "a"}, ' + b"[" * 100_000 + b"]" * 100_000 + b"]")


def long_string(path: Path) -> None:
    """A text of 512 MB."""
    with path.open("wb") as out:
        out.write(b'{"text": "')
        for _ in range(512):
            out.write(b"x" * MIB)
        out.write(b'"}\n')


def long_field(path: Path) -> None:
    """A quote opened in line 3, followed by 512 MB of rows."""
    with path.open("wb") as out:
        out.write(b'question,answer\n"a\n5"" disk","b\n')
        rows = b"Where is it?,It is here.\n" * (MIB // 25)
        for _ in range(512):
            out.write(rows)


SMALL = 256 * MIB
DECODER = 1024 * MIB + SMALL  # of a child

BOMBS = [
    (dictionary_parquet, "a.parquet", DECODER, "bomb"),
    (prefixes_parquet, "a.parquet", DECODER, "bomb"),
    (page_parquet, "a.parquet", DECODER, "a row has 314,57"),
    (body_arrow, "a.arrow", DECODER, "a row has 314,57"),
    (lying_parquet, "a.parquet", DECODER, "needs more memory than its limit of 1,024 MB"),
    (nothing_arrow, "a.arrow", DECODER, "bomb"),
    (runs_arrow, "a.arrow", SMALL, "type run_end_encoded"),
    (nested_arrow, "a.arrow", SMALL, "nests deeper than 32"),
    (wide_parquet, "a.parquet", SMALL, "10,001 columns"),
    (gzip_bomb, "a.jsonl.gz", SMALL, "bomb"),
    (zip_bomb, "a.zip", SMALL, "zip archive"),
    (long_string, "a.jsonl", SMALL, "the row that begins at line 1 does not end"),
    (long_field, "a.csv", 2 * SMALL, "the quote opened at line 3 is never closed"),
]


@pytest.mark.parametrize(("make", "name", "bound", "said"), BOMBS)
def test_a_bomb_is_refused_in_little_memory(
    make: Any, name: str, bound: int, said: str, tmp_path: Path
) -> None:
    make(tmp_path / name)

    found = read(tmp_path / name)

    assert found["error"] is not None
    assert found["error"][0] == "SourceError"
    assert said in found["error"][1]
    assert name in found["error"][1]
    assert found["grown"] < bound


BAD_ROWS = [
    # 40 MiB of raw bytes take about 450, as rows do.
    (open_quote, "a.csv", 2 * SMALL, {"rows": 40, "bad": {"csv": 1, "too_many_chars": 39}}),
    (deep_json, "a.jsonl", SMALL, {"rows": 2, "bad": {"depth": 1}}),
    (deep_array, "a.json", SMALL, {"rows": 2, "bad": {"depth": 1}}),
]


@pytest.mark.parametrize(("make", "name", "bound", "expected"), BAD_ROWS)
def test_bytes_that_are_not_rows_are_skipped_in_little_memory(
    make: Any, name: str, bound: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path / name)

    found = read(tmp_path / name)

    assert {key: found[key] for key in expected} == expected
    assert found["error"] is None
    assert found["grown"] < bound


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("a.json", b"[" + b"," * 20_000_000 + b"]"),
        ("a.csv", b"instruction,output\n" + b"x\n" * 4_000_000),
    ],
)
def test_more_bad_rows_than_allowed_are_not_collected(
    name: str, body: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(body)

    found = read(tmp_path / name)

    assert (
        "has more than 500,000 bad rows, counted from row 0; the first is line "
        in found["error"][1]
    )
    assert found["grown"] < 1536 * MIB


def test_more_csv_records_than_memory_is_for_are_refused_by_the_scan(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\n" + b"x\n" * 16_000_000)

    found = read(tmp_path / "a.csv")

    assert "has 16,000,000 records" in found["error"][1]
    assert "a shard can have at most 4,194,304" in found["error"][1]
    assert found["grown"] < 1536 * MIB


def test_decoders_have_a_limit_of_time_and_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHOUSE_CHILD_SECONDS", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    parquet(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_files, "_rows", slow_rows)

    found = parquet_files.parse_tables(str(tmp_path / "a.parquet"), "parquet", 0, 1)
    assert next(found).rows == [{"environment": []}]
    with pytest.raises(SourceError, match=r"a\.parquet', row group 7: takes more CPU time than"):
        next(found)


def slow_rows(*_: Any) -> Iterator[pa.RecordBatch]:
    """In a worker: look for its parent's secrets, then hang."""
    yield pa.record_batch({"environment": [[v for v in os.environ.values() if v == "canary"]]})
    worker.at("row group 7")
    while True:
        pass
