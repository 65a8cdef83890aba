"""Read Parquet and Arrow IPC files, whole row groups or record batches to a shard.

Both formats carry their own structure, so shards are ranges of rows, and offsets in bytes do not
exist for them. Bytes that claim to be Arrow are validated in full before use: bad offsets would
read beyond their buffers.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from packhouse.errors import SourceError
from packhouse.recipe import SourceConfig
from packhouse.sources.files import SourceFile, file_errors, open_file
from packhouse.sources.records import Records
from packhouse.sources.rows import Rows
from packhouse.sources.shapes import find_row_format_of_rows
from packhouse.sources.streams import FileStream
from packhouse.without_pandas import recall_pandas

__all__ = ["parse_tables", "scan_tables"]


def scan_tables(
    file: SourceFile, file_format: str, config: SourceConfig, max_shard_bytes: int
) -> Iterator[dict[str, Any]]:
    """Facts of each shard of a Parquet or Arrow file: groups of row groups of bounded size.

    Raises:
        SourceError: the file is damaged.
    """
    stream = FileStream(file.uri)
    for _ in stream:
        pass
    sha256 = stream.stored_sha256.hexdigest()
    with _Opened(file.uri, file_format) as groups:
        sizes = groups.sizes()
        header = tuple(groups.schema.names)
        row_format: str = config.format
        if row_format == "auto":
            head = groups.head() if sizes else []
            row_format = find_row_format_of_rows(head, config, file.uri) if head else "auto"
        ranges = list(_group_ranges(sizes, max_shard_bytes))
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


def parse_tables(uri: str, file_format: str, row_start: int, num_rows: int) -> Records:
    """Rows [row_start, row_start + num_rows) as dicts.

    Columns give every struct all keys that any row has, null where a row has none: what another
    row's tool call was given must not become an argument of this one. So nulls inside structs are
    left out, also those that a writer meant; JSON text keeps its nulls.
    """
    with _Opened(uri, file_format) as groups:
        rows = groups.rows(row_start, num_rows)
        nested = [field.name for field in groups.schema if pa.types.is_nested(field.type)]
    for row in rows:
        row.update({name: without_fill(row[name]) for name in nested})
    return Records(Rows(rows), np.arange(len(rows)), len(rows))


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
    """(row_start, num_rows) of runs of groups (rows, bytes) that fit a shard."""
    row_start = rows = size = 0
    for group_rows, group_bytes in sizes:
        if rows and size + group_bytes > max_shard_bytes:
            yield row_start, rows
            row_start, rows, size = row_start + rows, 0, 0
        rows += group_rows
        size += group_bytes
    if rows or not row_start:
        yield row_start, rows


class _Groups:
    """Row groups of a Parquet file or record batches of an Arrow file."""

    def __init__(self, uri: str, file_format: str) -> None:
        recall_pandas()  # for rows with times in nanoseconds
        self.uri = uri
        self.file: Any = open_file(uri)
        self.is_parquet = file_format == "parquet"
        try:
            self._open(pa.PythonFile(self.file, mode="r"))
        except BaseException:
            self.file.close()
            raise

    def _open(self, source: Any) -> None:
        self.reader: Any = pq.ParquetFile(source) if self.is_parquet else _open_arrow(source)
        self.schema = self.reader.schema_arrow if self.is_parquet else self.reader.schema

    def sizes(self) -> list[tuple[int, int]]:
        """(rows, uncompressed bytes) of each group."""
        if self.is_parquet:
            meta = self.reader.metadata
            groups = (meta.row_group(i) for i in range(meta.num_row_groups))
            return [(group.num_rows, group.total_byte_size) for group in groups]
        batches = (self.batch(i) for i in range(self.reader.num_record_batches))
        return [(batch.num_rows, batch.nbytes) for batch in batches]

    def batch(self, number: int) -> Any:
        """One group as a table."""
        if self.is_parquet:
            table = self.reader.read_row_group(number)
        else:
            table = pa.Table.from_batches([self.reader.get_batch(number)])
        table.validate(full=True)
        return table

    def head(self) -> list[dict[str, Any]]:
        """The first rows."""
        return list(self.batch(0).slice(0, 1000).to_pylist())

    def rows(self, row_start: int, num_rows: int) -> list[dict[str, Any]]:
        """Rows of whole groups."""
        rows: list[dict[str, Any]] = []
        position = 0
        for number, (group_rows, _) in enumerate(self.sizes()):
            if row_start <= position < row_start + num_rows and group_rows:
                rows.extend(self.batch(number).to_pylist())
            position += group_rows
        return rows

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _open_arrow(source: Any) -> Any:
    if source.read(6) == b"ARROW1":
        return pa.ipc.open_file(source)
    source.seek(0)
    return _Stream(pa.ipc.open_stream(source).read_all())


class _Stream:
    """A stream file, read whole, behind the face of a random-access one."""

    def __init__(self, table: Any) -> None:
        self.batches = table.to_batches()
        self.schema = table.schema
        self.num_record_batches = len(self.batches)

    def get_batch(self, number: int) -> Any:
        """One record batch."""
        return self.batches[number]


class _Opened:
    """Context of an open file whose damage is an error that names it."""

    def __init__(self, uri: str, file_format: str) -> None:
        self.uri = uri
        self.file_format = file_format
        self.groups: _Groups | None = None

    def __enter__(self) -> _Groups:
        with file_errors(self.uri):
            try:
                self.groups = _Groups(self.uri, self.file_format)
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(error) from None
        return self.groups

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.groups is not None:
            self.groups.close()
        if isinstance(error, pa.ArrowException | OSError):
            raise self._damaged(error) from None

    def _damaged(self, error: BaseException) -> SourceError:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return SourceError(
            f"source file '{self.uri}' is damaged {self.file_format.capitalize()}: {said}",
            uri=self.uri,
        )
