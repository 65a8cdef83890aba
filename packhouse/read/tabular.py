"""Read Parquet, Arrow IPC, XLSX and database files, whole row groups or record batches to a shard.

These formats carry their own structure, so shards are ranges of rows, and offsets in bytes do not
exist for them. `packhouse.read.decoding` makes rows of their bytes, within its limits.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.read.decoding import decode_head, decode_rows
from packhouse.read.files import SourceFile
from packhouse.read.records import WITH_FAULTS, Failure, Records, Rows
from packhouse.read.row_formats import find_row_format
from packhouse.read.streams import FileStream
from packhouse.recipe import SourceConfig

TABULAR = ("parquet", "arrow", "xlsx", "sqlite", "duckdb")
"""Formats of files that are read here."""


def scan_tables(
    file: SourceFile, file_format: str, config: SourceConfig, max_shard_bytes: int
) -> Iterator[dict[str, Any]]:
    """Facts of each shard of such a file: groups of row groups of bounded size.

    Raises:
        SourceError: the file is damaged.
    """
    stream = FileStream(file.uri)
    for _ in stream:
        pass
    sha256 = stream.stored_sha256.hexdigest()
    facts, *batches = decode_head(file.uri, file_format, 1000, config.table)
    header = tuple(facts["names"])
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        head = [row for batch in batches for row in batch.to_pylist()]
        row_format = find_row_format(head, config, file.uri)
    ranges = list(_group_ranges(facts["sizes"], max_shard_bytes))
    for number, (row_start, num_rows) in enumerate(ranges):
        yield {
            "byte_start": 0,
            "byte_end": file.size,
            "row_start": row_start,
            "num_rows": num_rows,
            "sha256": hashlib.sha256(f"{sha256}:{row_start}:{num_rows}".encode()).hexdigest()
            if len(ranges) > 1
            else sha256,
            "file_sha256": sha256,
            "row_format": row_format,
            "header": header,
            "notes": {"empty_files": 1} if number == 0 and num_rows == 0 else {},
        }


def parse_tables(
    uri: str, file_format: str, row_start: int, num_rows: int, table: str | None = None
) -> Iterator[Records]:
    """Rows [row_start, row_start + num_rows) as dicts, some megabytes at a time; none at once.

    Columns give every struct all keys that any row has, null where a row has none: what another
    row's tool call was given must not become an argument of this one. So nulls inside structs are
    left out, also those that a writer meant; JSON text keeps its nulls.

    Raises:
        SourceError: the file is damaged, or over a limit of `packhouse.read.decoding`.
    """
    if not num_rows:
        yield Records(Rows(), np.arange(0), 0)
        return
    for batch in decode_rows(uri, file_format, row_start, row_start + num_rows, table):
        faults: list[dict[str, str] | None] = [None] * batch.num_rows
        if file_format in WITH_FAULTS:
            faults = batch.column(-1).to_pylist()
            batch = batch.select(range(batch.num_columns - 1))
        nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
        found = Rows(batch.to_pylist())
        for row in found:
            row.update({name: without_fill(row[name]) for name in nested})
        records = Records(found, np.arange(len(found)), len(found))
        bad = {number: fault for number, fault in enumerate(faults) if fault is not None}
        if bad:
            records.failures = [Failure(n, **fault) for n, fault in bad.items()]
            records.failed = {number: found[number] for number in bad}
            records.keep([number for number in range(len(found)) if number not in bad])
        yield records


def without_fill(value: Any) -> Any:
    """A nested value without the keys whose value is null.

    Example:
        >>> without_fill([{"city": "Rome", "unit": None}, {"city": None, "tags": ["a", None]}])
        [{'city': 'Rome'}, {'tags': ['a', None]}]
    """
    if isinstance(value, dict):
        return {key: without_fill(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_fill(item) for item in value]
    return value


def _group_ranges(sizes: list[tuple[int, int]], max_shard_bytes: int) -> Iterator[tuple[int, int]]:
    """(row_start, num_rows) of runs of groups (rows, bytes) that fit a shard.

    Example:
        >>> list(_group_ranges([(3, 6), (3, 6), (2, 2)], max_shard_bytes=10))
        [(0, 3), (3, 5)]
    """
    row_start = rows = size = 0
    for group_rows, group_bytes in sizes:
        if rows and size + group_bytes > max_shard_bytes:
            yield row_start, rows
            row_start, rows, size = row_start + rows, 0, 0
        rows += group_rows
        size += group_bytes
    if rows or not row_start:
        yield row_start, rows
