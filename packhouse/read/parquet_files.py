"""Read Parquet, Arrow IPC, XLSX and database files: ranges of rows, decoded in a worker process.

Shards of these formats are ranges of rows, without byte offsets. A page, dictionary or run of a few
bytes can expand to gigabytes, and the sizes that a file states may be false, so nothing is decoded
in the main process. A worker (`packhouse.system.worker`) gets the file's bytes from this process,
decodes and checks them, and returns plain batches of a few megabytes. A file that exceeds a limit,
or that crashes the decoder, ends in an error that names it.

    56 KB of Parquet, 2,000,000 rows that share one text of 1 MB:
        1,024 rows do not fit in 1 GiB: the worker ends, and the file is refused
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from packhouse.errors import SourceError
from packhouse.read.file_formats import file_error
from packhouse.read.json_parsing import Records, Rows
from packhouse.read.source_files import file_errors, open_file
from packhouse.registry import DECODERS, decoder
from packhouse.system.wording import first_line
from packhouse.system.worker import at, file_of_parent, stream_from_worker

TABULAR = ("parquet", "arrow", "xlsx", "sqlite", "duckdb")
"""File formats read by this module."""

WITH_FAULTS = ("xlsx", "sqlite", "duckdb")
"""Formats whose last column marks the rows that could not be read. It is found by its position,
because a column of the file may have any name. A row with a fault is quarantined. Its bad cell is
null, and the detail describes the original value."""

_FAULT = pa.struct([("reason", pa.string()), ("detail", pa.string())])
fault_field = pa.field("packhouse fault", _FAULT)

BATCH_BYTES = 8 * 2**20
"""Decoded bytes of a batch returned by the worker, unless one row is larger."""

MAX_ROW_BYTES = 128 * 2**20
"""Decoded bytes of one row."""

MAX_SHARD_DECODED_BYTES = 4 * 2**30
"""Decoded bytes of one shard, which is at least one row group."""

MAX_RATIO = 100
"""Decoded bytes of a shard per stored byte of its file, as for compressed text..."""

RATIO_FREE_BYTES = 256 * 2**20
"""... but this many bytes are allowed for a file of any size."""

MAX_COLUMNS = 10_000
"""Columns of a file; a Parquet struct counts as its fields."""

_ROW_BYTES = 256  # Python objects of a row, even of an empty one
_MAX_DEPTH = 32
_BATCH_ROWS = 1024
_NAMES = dict(zip(TABULAR, ("Parquet", "Arrow", "XLSX", "SQLite", "DuckDB"), strict=True))


def too_many_columns(number: int) -> str:
    """Return the message for a file with more than `MAX_COLUMNS` columns."""
    fix = "Remove the columns that are not needed"
    return f"has {number:,} columns; at most {MAX_COLUMNS:,} can be read. {fix}"


def parse_tables(
    uri: str, file_format: str, row_start: int, num_rows: int, table: str | None = None
) -> Iterator[Records]:
    """Yield rows [row_start, row_start + num_rows) as dicts, a few megabytes at a time.

    Nulls inside structs are left out, even if the writer meant them; JSON text keeps its nulls.

    Raises:
        SourceError: the file is damaged, or over a limit of this module.
    """
    if not num_rows:
        yield Records(Rows(), np.arange(0), 0)
        return
    call = partial(_rows, uri, file_format, row_start, row_start + num_rows, table)
    for batch in _decode(uri, call):
        bad: dict[int, tuple[str, str]] = {}
        if file_format in WITH_FAULTS:
            faults = batch.column(-1).to_pylist()
            bad = {n: (fault["reason"], fault["detail"]) for n, fault in enumerate(faults) if fault}
            batch = batch.select(range(batch.num_columns - 1))
        # Columnar formats give every struct the keys of all rows, with null where a row has none.
        # The argument of one row's tool call must not become an argument of another.
        nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
        found = batch.to_pylist()
        for row in found:
            row.update({name: without_fill(row[name]) for name in nested})
        records = Records(Rows(found), np.arange(len(found)), len(found))
        records.reject(bad)
        yield records


def without_fill(value: Any) -> Any:
    """Remove keys with null values from a nested value.

    Example:
        >>> without_fill([{"city": "Rome", "unit": None}, {"city": None, "tags": ["a", None]}])
        [{'city': 'Rome'}, {'tags': ['a', None]}]
    """
    if isinstance(value, dict):
        return {key: without_fill(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_fill(item) for item in value]
    return value


def fault_column(faults: Mapping[int, tuple[str, str]], num_rows: int) -> pa.Array:
    """Return the fault column of a table; `faults` maps a row, from 0, to reason and detail."""
    values: list[dict[str, str] | None] = [None] * num_rows
    for row, (reason, detail) in faults.items():
        values[row] = {"reason": reason, "detail": detail}
    return pa.array(values, fault_field.type)


def decode_head(
    uri: str, file_format: str, num_rows: int, table: str | None = None
) -> Iterator[Any]:
    """Yield a file's facts, then batches of the first rows of its first group with any rows.

    At most `num_rows` rows, including bad ones. The facts are `names` of the columns and `sizes`,
    [rows, bytes] of each group. `table` names the table of a database.

    Raises:
        SourceError: the file is damaged or exceeds a limit, which the message names.
        TransientError: the storage did not answer.
    """
    return _decode(uri, partial(_head, uri, file_format, num_rows, table))


def _decode(uri: str, call: Callable[[], Any]) -> Iterator[Any]:
    with file_errors(uri), open_file(uri) as file:
        yield from stream_from_worker(
            call,
            what=f"source file '{uri}'",
            blames=SourceError,
            remedy="This looks like a decompression bomb. If it is not one, write the file again "
            "with smaller row groups and pages, or as JSON Lines",
            num_bytes=file.seek(0, os.SEEK_END),
            file=file,
        )


# The code below runs in the worker.


def _head(uri: str, file_format: str, num_rows: int, table: str | None) -> Iterator[Any]:
    with _damage(uri, file_format):
        decoder = _Decoder(uri, file_format, table)
        sizes = decoder.sizes()
        names = decoder.schema.names[: -1 if file_format in WITH_FAULTS else None]
        yield {"names": names, "sizes": sizes}
        decoder = _Decoder(uri, file_format, table)  # a stream can be read only once
        first_rows = next((rows for rows, _ in sizes if rows), 0)
        for batch in decoder.plain_batches(0, min(num_rows, first_rows)):
            yield batch.select(range(len(names)))


def _rows(
    uri: str, file_format: str, first: int, end: int, table: str | None
) -> Iterator[pa.RecordBatch]:
    with _damage(uri, file_format):
        decoder = _Decoder(uri, file_format, table)
        decoder.count(_ROW_BYTES * (end - first))  # billions of empty rows are refused up front
        decoder.decoded = 0
        yield from decoder.plain_batches(first, end)


@contextmanager
def _damage(uri: str, file_format: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, RecursionError) as damage:
        what = f"damaged {_NAMES.get(file_format, file_format)}: {first_line(damage, 500)}"
        raise file_error(uri, f" is {what}") from None


class _Decoder:
    """Reads a file group by group."""

    def __init__(self, uri: str, file_format: str, table: str | None) -> None:
        self.uri = uri
        self.is_parquet = file_format == "parquet"
        self.group = 0
        self.decoded = 0
        stored = file_of_parent()
        ratio_bytes = MAX_RATIO * stored.seek(0, os.SEEK_END)
        stored.seek(0)
        if file_format in DECODERS:
            stored = decoder(file_format)(stored, uri, file_format, table)
        file = pa.PythonFile(stored, mode="r")
        self.allowed = min(MAX_SHARD_DECODED_BYTES, max(RATIO_FREE_BYTES, ratio_bytes))
        self.reader: Any
        if self.is_parquet:
            # Columns are read through a buffer of 1 MiB; `pre_buffer` would load them whole, in
            # threads.
            self.reader = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
            self.schema = self.reader.schema_arrow
            num_columns = len(self.reader.metadata.schema)
        else:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            self.reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            self.schema = self.reader.schema
            num_columns = len(self.schema)
        if num_columns > MAX_COLUMNS:
            raise self.refusal(f"the file {too_many_columns(num_columns)}")
        fields = [field.with_type(self.plain(field.type, field.name)) for field in self.schema]
        self.plain_schema = pa.schema(fields)

    @property
    def place(self) -> str:
        return f"{'row group' if self.is_parquet else 'record batch'} {self.group}"

    def refusal(self, why: str) -> SourceError:
        return file_error(self.uri, f", {self.place}: {why}")

    def plain(self, kind: pa.DataType, column: str, depth: int = 0) -> pa.DataType:
        """Return the type without dictionaries, views and runs, so that rows share no values."""
        if depth > _MAX_DEPTH:
            raise self.refusal(f"column '{column}' nests deeper than {_MAX_DEPTH}")

        def inner(field: pa.Field) -> pa.Field:
            return field.with_type(self.plain(field.type, column, depth + 1))

        types = pa.types
        if types.is_dictionary(kind):
            # Large, because text that rows shared is repeated: a batch of 1,024 rows that share 2
            # MB of text has 2 GiB, the limit of 32-bit offsets.
            kind = self.plain(kind.value_type, column, depth + 1)
            return pa.large_string() if types.is_string(kind) else kind
        if types.is_string_view(kind):
            return pa.large_string()
        if types.is_binary_view(kind):
            return pa.large_binary()
        if types.is_struct(kind):
            return pa.struct([inner(field) for field in kind])
        if types.is_map(kind):
            return pa.map_(inner(kind.key_field), inner(kind.item_field))
        if types.is_list(kind) or types.is_fixed_size_list(kind):
            return pa.list_(inner(kind.value_field), getattr(kind, "list_size", -1))
        if types.is_large_list(kind):
            return pa.large_list(inner(kind.value_field))
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if storage != kind and self.plain(storage, column, depth + 1) == storage:
            return kind
        if storage != kind or types.is_nested(kind) or types.is_run_end_encoded(kind):
            what = f"column '{column}' has the unsupported type {str(kind)[:60]}"
            raise self.refusal(f"{what}. Write it as plain values, lists or structs")
        return kind

    def sizes(self) -> list[tuple[int, int]]:
        """Return (rows, uncompressed bytes) of each group."""
        if self.is_parquet:
            meta = self.reader.metadata
            groups = (meta.row_group(i) for i in range(meta.num_row_groups))
            return [(group.num_rows, group.total_byte_size) for group in groups]
        return [(batch.num_rows, batch.nbytes) for batch in self.groups()]

    def groups(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of an Arrow file."""
        reader, self.group = self.reader, 0
        is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
        with suppress(StopIteration):
            while is_stream or self.group < reader.num_record_batches:
                at(self.place)
                batch = reader.read_next_batch() if is_stream else reader.get_batch(self.group)
                self.check(batch)
                yield batch
                self.group += 1

    def check(self, batch: pa.RecordBatch, first: int = 0) -> None:
        """Refuse a damaged batch and name the text that is not UTF-8, if any.

        `first` is the batch's first row in its group.
        """
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if column.type not in (pa.string(), pa.large_string()):
                    continue
                is_large = column.type == pa.large_string()
                values = column.view(pa.large_binary() if is_large else pa.binary())
                values.validate(full=True)  # raises if the offsets are what is wrong
                for row, value in enumerate(values.to_pylist(), first):
                    try:
                        (value or b"").decode()
                    except UnicodeDecodeError as error:
                        where = f"byte 0x{value[error.start]:02x} in row {row:,}, column '{name}'"
                        fix = "Convert the column, or remove the row"
                        raise self.refusal(f"{where}, is not UTF-8. {fix}") from None
            raise

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [first, end) in their encoded types."""
        position = 0
        if not self.is_parquet:
            for batch in self.groups():
                if position >= end:
                    return
                start = max(first - position, 0)
                stop = min(end - position, batch.num_rows)
                for row in range(start, stop, _BATCH_ROWS):
                    yield batch.slice(row, min(_BATCH_ROWS, stop - row))
                position += batch.num_rows
            return
        for number, (num_rows, size) in enumerate(self.sizes()):
            self.group = number
            if first < position + num_rows and position < end:
                # A guess: the file states this size, which may be false. `small` counts what was
                # decoded.
                at_once = BATCH_BYTES * num_rows // max(size, 1)  # 1,000 rows of 80 MB: 104
                at_once, row = min(max(at_once, 1), _BATCH_ROWS), position
                at(self.place)
                read = partial(self.reader.iter_batches, use_threads=False)
                for batch in read(at_once, row_groups=[number]):
                    self.check(batch, row - position)
                    start, stop = max(first - row, 0), min(end - row, batch.num_rows)
                    if start < stop:
                        yield batch.slice(start, stop - start)
                    row += batch.num_rows
                    if row >= end:
                        break
            position += num_rows

    def plain_batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [first, end) as plain values, in batches of at most `BATCH_BYTES`."""
        for raw in self.batches(first, end):
            yield from self.small(raw.cast(self.plain_schema))

    def small(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Split a plain batch until its parts are small, and count their bytes."""
        # 1,024 rows of 30 MB -> two of 15 MB -> four of 7.5 MB.
        size = _ROW_BYTES * batch.num_rows + sum(map(_decoded_bytes, batch.columns))
        if size > BATCH_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self.small(batch.slice(0, half))
            yield from self.small(batch.slice(half))
            return
        if size > MAX_ROW_BYTES:
            raise self.refusal(f"a row has {size:,} decoded bytes; at most {MAX_ROW_BYTES:,} fit")
        self.count(size)
        yield batch

    def count(self, size: int) -> None:
        """Refuse the file if the decoded bytes of this shard exceed the limit."""
        self.decoded += size
        if self.decoded > self.allowed:
            raise self.refusal(
                f"rows read together have over {self.allowed:,} decoded bytes (the limit is "
                f"{MAX_RATIO} per stored byte, at most {MAX_SHARD_DECODED_BYTES:,}), like a "
                "decompression bomb. If it is not one, write the file with smaller row groups, or "
                "as JSON Lines"
            )


def _decoded_bytes(array: pa.Array) -> int:
    """Return the bytes of a plain array: 8 per value, plus those of its text."""
    size: int = 8 * len(array)
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return size + _decoded_bytes(array.storage)
    if pa.types.is_map(kind):
        entries = pa.list_(pa.struct([kind.key_field, kind.item_field]))
        return size + _decoded_bytes(array.cast(entries))
    if pa.types.is_struct(kind):
        return size + sum(map(_decoded_bytes, array.flatten()))
    if pa.types.is_nested(kind):
        return size + _decoded_bytes(array.flatten())
    if kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        return size + (pc.sum(pc.binary_length(array)).as_py() or 0)
    return max(size, len(array) * kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0)
