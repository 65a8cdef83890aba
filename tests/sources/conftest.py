"""For tests of sources: write rows as a file, read all its shards, check that no row is lost."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.read import SourceShard, read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.records.table_schemas import DROPPED, QUARANTINED, VALIDATED


def lines(rows: list[Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def delimited(rows: list[dict[str, Any]]) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = io.BytesIO()
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


@dataclass
class Source:
    shards: list[SourceShard]
    validated: pa.Table
    quarantined: pa.Table
    dropped: pa.Table
    notes: dict[str, int]
    extra_paths: int
    extra_fields: dict[str, int]
    unread_text: dict[str, int]

    @property
    def reasons(self) -> list[str]:
        return self.quarantined["reason"].to_pylist()

    @property
    def messages(self) -> list[list[dict[str, Any]]]:
        rows = self.validated["messages"].to_pylist()
        return [[{k: v for k, v in m.items() if v is not None} for m in row] for row in rows]

    @property
    def texts(self) -> list[list[tuple[str, str]]]:
        return [[(m["role"], m["content"]) for m in row] for row in self.messages]


def read_source(
    path: str | Path,
    *,
    max_shard_bytes: int = 2**25,
    group_by: str = "prompt",
    rules: dict[str, Any] | None = None,
    **config: Any,
) -> Source:
    source = SourceConfig(path=str(path), **config)
    shards = scan_source(source, max_shard_bytes)
    parts = [read_shard(s, source, ValidateConfig(**(rules or {})), group_by) for s in shards]
    notes = {}
    extra_fields = {}
    unread_text = {}
    for shard, part in zip(shards, parts, strict=True):
        seen = part.validated.num_rows + part.quarantined.num_rows + part.dropped.num_rows
        assert seen == part.num_records + part.extra_paths
        assert shard.num_rows in (None, part.num_records)
        for name, count in part.notes.items():
            notes[name] = notes.get(name, 0) + count
        for name, count in part.extra_fields.items():
            extra_fields[name] = extra_fields.get(name, 0) + count
        for name, unread in part.unread_text.items():
            unread_text[name] = unread_text.get(name, 0) + unread.rows
    validated = pa.concat_tables([part.validated for part in parts])
    quarantined = pa.concat_tables([part.quarantined for part in parts])
    assert validated.schema.equals(VALIDATED)
    assert quarantined.schema.equals(QUARANTINED)
    validated.validate(full=True)
    extra_paths = sum(part.extra_paths for part in parts)
    dropped = pa.concat_tables([part.dropped for part in parts])
    assert dropped.schema.equals(DROPPED)
    tables = [table.combine_chunks() for table in (validated, quarantined, dropped)]
    return Source(shards, *tables, notes, extra_paths, extra_fields, unread_text)


@pytest.fixture
def read():
    return read_source


@pytest.fixture
def read_bytes(tmp_path):
    def write_and_read(data: bytes, name: str = "rows.jsonl", **kwargs: Any) -> Source:
        path = tmp_path / name
        path.write_bytes(data)
        return read_source(path, **kwargs)

    return write_and_read
