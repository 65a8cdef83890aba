"""Cut the files of a source into shards: byte ranges that hold whole records.

Cuts are made at the last record boundary within `max_shard_bytes` of the shard's start, so they
depend only on what lies before them: rows appended to a JSONL file or to a JSON array leave every
earlier shard byte for byte the same, and work keyed by a shard's content is found again. One
pass per file hashes it, counts its records and finds the cuts; memory is two shards at most.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from packhouse.errors import SourceError
from packhouse.read.decoding import decode_head
from packhouse.read.delimited import CommaFile, SemicolonFile, TabFile
from packhouse.read.file_formats import (
    BOM,
    Compression,
    compression_of,
    format_of,
)
from packhouse.read.files import (
    SourceFile,
    file_errors,
    find_files,
    local_path,
    open_file,
    pin_of,
    source_name,
)
from packhouse.read.json_arrays import ArrayFile
from packhouse.read.json_lines import LinesFile, ObjectsFile
from packhouse.read.kinds import Kind, joined_kinds, kind_of_type, kind_of_values
from packhouse.read.records import Records, Rows, gc_paused, unwrapped
from packhouse.read.reshaping import check_types, columns_of, reshape, wanted_columns
from packhouse.read.row_formats import ROW_FORMATS, check_fields, find_row_format
from packhouse.read.streams import CHUNK_BYTES, FileStream, read_range
from packhouse.read.tabular import TABULAR, parse_tables, scan_tables
from packhouse.read.text_files import NotInBlocksError, Parsing, TextFile
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.recipe.source import FileFormat
from packhouse.registry import function_of_addon

TEXT_FILES: dict[FileFormat, type[TextFile]] = {
    "jsonl": LinesFile,
    "json": ArrayFile,
    "objects": ObjectsFile,
    "csv": CommaFile,
    "csv_semicolon": SemicolonFile,
    "tsv": TabFile,
}

MAX_SHARD_BYTES = 32 * 2**20
"""Raw bytes of a shard: what bounds a step's memory, and what an appended row costs."""
HEAD_BYTES = 2**20
"""Uncompressed bytes looked at to tell formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShard:
    """A range of whole records in one file, and all that is needed to read it again.

    JSON-able: `SourceShard(**json.loads(json.dumps(asdict(shard))))` equals the shard.
    """

    source: str
    """Name of the source."""
    file: str
    """`source/name`, where the name is the file's path below the source."""
    uri: str
    """Absolute path or URL."""
    file_format: FileFormat
    compression: Compression
    byte_start: int
    """First byte, uncompressed. A JSON array's shards leave out brackets and dividing commas."""
    byte_end: int
    """One past the last byte. Parquet and Arrow: 0 and the file's size; rows say what is read."""
    row_start: int
    """Number in the file, from 0, of its first record; blank lines and header do not count."""
    num_rows: int | None
    """Records in it; None if that needs parsing."""
    sha256: str
    """Of the shard's uncompressed bytes; of the whole file for Parquet and Arrow."""
    file_sha256: str
    """Of the file as stored."""
    file_size: int
    """Bytes of the file as stored."""
    row_format: str = "auto"
    """Format of the rows; `auto` only where no row of the file is an object or a list."""
    header: tuple[str, ...] | None = None
    """Column names of CSV and TSV."""
    pin: str = ""
    """Modification time or ETag when scanned; says whether the file changed since."""
    encoding: str = "utf-8"
    """Of the file. Bytes, their places and their digest are those of its text in UTF-8."""
    table: str | None = None
    """Of a database."""
    columns: dict[str, Kind] | None = None
    """Kinds of the columns that `where` and `select` of the source read; None without these."""
    notes: dict[str, int] = field(default_factory=dict)
    """What the scan saw: `bom`, `empty_files`, `misnamed_compression`, ... On the first shard."""

    def __post_init__(self) -> None:
        if self.header is not None:
            object.__setattr__(self, "header", tuple(self.header))

    def identity(self) -> dict[str, Any]:
        """What decides the rows that reading gives; key work on it, not on the whole shard.

        Leaves out where the file lies, its time and the digest of the whole file, so that a copied
        or appended file keeps the identity of its unchanged shards.
        """
        known = asdict(self)
        left_out = ["uri", "pin", "file_sha256", "file_size", "num_rows", "compression", "encoding"]
        left_out += [name for name in ("columns", "table") if known[name] is None]  # older keys
        return {name: value for name, value in known.items() if name not in left_out}


def cut_source(config: SourceConfig, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[SourceShard]:
    """Find a source's files and cut them into shards.

    The rows of a source with `where` or `select` have no format yet: `packhouse.read.scanning`
    finds it. Arguments, order and errors are those of `scan_source` there.
    """
    check_fields(config)
    files = find_files(config)
    return [shard for file in files for shard in _scan_file(file, config, max_shard_bytes)]


def _scan_file(
    file: SourceFile, config: SourceConfig, max_shard_bytes: int
) -> Iterator[SourceShard]:
    with file_errors(file.uri), open_file(file.uri) as opened:
        head = opened.read(CHUNK_BYTES)
    compression, notes = compression_of(head, file.name)
    if compression != "none" or config.encoding != "utf-8":
        head = b""
        for chunk in FileStream(file.uri, compression, config.encoding):
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
    file_format = format_of(head, file.name, config.file_format, file.uri)
    if config.rows_at is not None and file_format in ("jsonl", "objects"):
        file_format = "json"  # its one object holds the array
    name = source_name(config)
    common: dict[str, Any] = {
        "source": name,
        "file": f"{name}/{file.name}",
        "uri": file.uri,
        "file_format": file_format,
        "compression": compression,
        "file_size": file.size,
        "pin": file.pin,
        "encoding": config.encoding,
    }
    if file_format in ("sqlite", "duckdb"):
        common["table"] = config.table
        if (path := local_path(file.uri)) is not None:
            function_of_addon("refuse_unsaved")(file.uri, str(path))
    elif config.table is not None:
        raise SourceError(f"source file '{file.uri}' is no database, and `table` names a table")
    if file_format in TABULAR:
        if compression != "none":
            raise SourceError(f"source file '{file.uri}' is compressed {file_format}; unpack it")
        for facts in scan_tables(file, file_format, config, max_shard_bytes):
            yield SourceShard(**common, **facts)
        return
    text_file = TEXT_FILES[file_format](file.uri, max_shard_bytes)
    text_file.rows_at = config.rows_at
    stream = FileStream(file.uri, compression, config.encoding)
    cuts = list(text_file.cut(stream))
    if stream.stored_bytes != file.size:
        raise SourceError(
            f"source file '{file.uri}' changed while it was read: {file.size:,} bytes when found, "
            f"{stream.stored_bytes:,} read; run again when nothing writes to it",
            uri=file.uri,
        )
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        sample = text_file.sample(head[:HEAD_BYTES].removeprefix(BOM))
        row_format = find_row_format(unwrapped(sample, config), config, file.uri)
        for cut in cuts:  # where the head tells nothing: look at all rows
            if row_format != "auto":
                break
            data = read_range(file.uri, compression, cut.start, cut.end, file.pin, config.encoding)
            how = Parsing(file.uri, text_file.header or (), cut.num_rows, len(data))
            rows = unwrapped(text_file.parse(data, how).rows, config)
            row_format = find_row_format(rows, config, file.uri)
    for number, cut in enumerate(cuts):
        yield SourceShard(
            **common,
            byte_start=cut.start,
            byte_end=cut.end,
            row_start=cut.row_start,
            num_rows=cut.num_rows,
            sha256=cut.sha256,
            file_sha256=stream.stored_sha256.hexdigest(),
            row_format=row_format,
            header=text_file.header,
            notes=(notes | text_file.notes) if number == 0 else {},
        )


# The parts of a shard that are read by themselves, so that memory holds the rows of one.


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a shard that is read by itself, and its records."""

    shard: SourceShard
    """With the bytes and the rows of the part."""
    data: bytes | None
    records: Records


def for_parts(shard: SourceShard, rules: ValidateConfig, use: Callable[[Part], _T]) -> list[_T]:
    """What `use` returns for each part of a shard, in order.

    Parts bound memory and nothing else: where they cannot be judged alone (an array that is not
    JSON), the shard is one part, and what `use` returned before is dropped.
    """
    is_whole = shard.row_format in ROW_FORMATS and ROW_FORMATS[shard.row_format].needs_all_rows
    if shard.file_format in TABULAR:
        parts = _table_parts(shard)
        return [use(_as_one(shard, parts))] if is_whole else [use(part) for part in parts]
    place = (shard.byte_start, shard.byte_end, shard.pin, shard.encoding)
    data = read_range(shard.uri, shard.compression, *place)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(shard)
    text_file = TEXT_FILES[shard.file_format]
    how = Parsing(shard.uri, shard.header or (), shard.num_rows, rules.max_row_bytes)
    try:
        if is_whole:
            raise NotInBlocksError
        return [use(part) for part in _block_parts(shard, data, text_file.parse_blocks(data, how))]
    except NotInBlocksError:
        return [use(Part(shard, data, text_file.parse(data, how)))]


def _block_parts(
    shard: SourceShard, data: bytes, blocks: Iterator[tuple[int, int, Records]]
) -> Iterator[Part]:
    row, first = shard.row_start, shard.byte_start
    for start, end, records in blocks:
        part = replace(shard, byte_start=first + start, byte_end=first + end, row_start=row)
        yield Part(part, data[start:end], records)
        row += records.num_records


def _table_parts(shard: SourceShard) -> Iterator[Part]:
    if pin_of(shard.uri) != (shard.file_size, shard.pin):
        raise _changed(shard)
    assert shard.num_rows is not None
    row = shard.row_start
    rows = (shard.row_start, shard.num_rows)
    for records in parse_tables(shard.uri, shard.file_format, *rows, shard.table):
        yield Part(replace(shard, row_start=row), None, records)
        row += records.num_records


def _as_one(shard: SourceShard, parts: Iterator[Part]) -> Part:
    every = Records(Rows(), np.arange(0), 0)
    for records in (part.records for part in parts):
        first = every.num_records
        every.rows += records.rows
        every.numbers = np.append(every.numbers, records.numbers + first)
        every.failures += [bad._replace(number=bad.number + first) for bad in records.failures]
        every.failed |= {number + first: row for number, row in records.failed.items()}
        every.num_records += records.num_records
    return Part(shard, None, every)


def _changed(shard: SourceShard) -> SourceError:
    return SourceError(
        f"source file '{shard.uri}' changed since it was scanned (bytes {shard.byte_start:,} to "
        f"{shard.byte_end:,}); run again when nothing writes to it",
        uri=shard.uri,
    )


# Scan a source: its files cut to shards, the format of its rows, and the types of its columns.


MAX_WHOLE_BYTES = 2**29
"""Bytes of a file whose rows are read together."""

_ANY_SIZE = ValidateConfig(max_row_bytes=2**31)


def scan_source(config: SourceConfig, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[SourceShard]:
    """Find a source's files and cut them into shards.

    Where the source has `where` or `select`, all its rows are parsed once for the types of the
    columns that these read, and the expressions are checked against them.

    Args:
        config: the source.
        max_shard_bytes: uncompressed bytes of a shard; one record larger than that is a shard.

    Returns:
        Shards sorted by uri, then by place in the file. A file without rows gives one shard of 0
        rows, noted as `empty_files`.

    Raises:
        ConfigError: `fields` names what no format has; an expression is not allowed, names no
            column, or does not fit the types of the columns.
        SourceError: a file cannot be read; names it and the place.
        TransientError: the storage did not answer.
    """
    shards = cut_source(config, max_shard_bytes)
    if config.is_reshaped:
        with gc_paused():
            shards = _with_columns(shards, config)
    _refuse_other_shapes(shards, config)
    return [shard for _, group in _by_file(shards) for shard in _whole(list(group))]


def _refuse_other_shapes(shards: list[SourceShard], config: SourceConfig) -> None:
    """Files of one source have one shape, as the rows of one file have."""
    first: dict[str, str] = {}
    for shard in shards:
        if shard.row_format != "auto":
            first.setdefault(shard.row_format, shard.uri)
    if len(first) > 1:
        shown = ", ".join(f"'{uri}' is {name}" for name, uri in list(first.items())[:3])
        raise SourceError(
            f"source '{config.path}' mixes shapes: {shown}; give each shape a source of its own",
            path=config.path,
        )


def _whole(shards: list[SourceShard]) -> list[SourceShard]:
    """The shards of a file; one, where its rows mean something only together.

    Raises:
        SourceError: the file is too large for that.
    """
    first, last = shards[0], shards[-1]
    row_format = ROW_FORMATS.get(first.row_format)
    if row_format is None or not row_format.needs_all_rows or len(shards) == 1:
        return shards
    size = last.byte_end - first.byte_start
    if size > MAX_WHOLE_BYTES:
        raise SourceError(
            f"source file '{first.uri}': format {first.row_format} needs all rows of a file at "
            f"once, and it has {size:,} bytes, over {MAX_WHOLE_BYTES:,}; split it by tree",
            uri=first.uri,
        )
    counts = [shard.num_rows for shard in shards]
    sha256 = first.file_sha256
    if first.file_format not in TABULAR:
        place = (first.byte_start, last.byte_end, first.pin, first.encoding)
        data = read_range(first.uri, first.compression, *place)
        sha256 = hashlib.sha256(data).hexdigest()
    return [
        replace(
            first,
            byte_end=last.byte_end,
            num_rows=None if None in counts else sum(n for n in counts if n is not None),
            sha256=sha256,
        )
    ]


def _by_file(shards: Sequence[SourceShard]) -> Iterator[tuple[str, Iterator[SourceShard]]]:
    return groupby(shards, key=lambda shard: shard.uri)


def _with_columns(shards: list[SourceShard], config: SourceConfig) -> list[SourceShard]:
    """Add the kinds of the columns, which hold for all files, and the format of the rows."""
    wanted = wanted_columns(config)
    kinds: dict[str, Kind] = {}
    has_rows = False

    def look(part: Part) -> None:
        nonlocal has_rows
        has_rows = has_rows or len(part.records.rows) > 0
        rows = [row for row in unwrapped(part.records.rows, config) if type(row) is dict]
        for name in dict.fromkeys(key for keys in set(map(tuple, rows)) for key in keys):
            kinds.setdefault(name, "null")
            if name.lower() in wanted:
                kinds[name] = kind_of_values([row.get(name) for row in rows], kinds[name])

    for uri, of_file in _by_file(shards):
        first, *rest = of_file
        if first.file_format in TABULAR:
            _, *batches = decode_head(uri, first.file_format, 1, config.table)
            found = {name: "null" for name in first.header or ()}
            for each in batches:
                found |= {field.name: kind_of_type(field.type) for field in each.schema}
            for name, kind in found.items():
                kinds[name] = joined_kinds(kinds.get(name, "null"), kind)
        else:
            for name in first.header or ():  # a column of CSV, though no row follows
                kinds.setdefault(name, "text")
            for shard in (first, *rest):
                for_parts(shard, _ANY_SIZE, look)
    columns: dict[str, Kind] = {}
    if kinds or has_rows:  # a file without rows and header misses no field
        columns = columns_of(config, kinds)
        check_types(config, columns)
    typed = [replace(shard, columns=columns) for shard in shards]
    if config.format != "auto":
        return typed
    return [shard for _, group in _by_file(typed) for shard in _with_format(list(group), config)]


def _with_format(shards: Sequence[SourceShard], config: SourceConfig) -> list[SourceShard]:
    """Add the format of the first row of a file that has one, as the expressions leave it."""

    def look(part: Part) -> None:
        rows = unwrapped(part.records.rows, config)
        reshaped = reshape(rows, config, part.shard.columns or {})
        row_format = find_row_format(reshaped.rows, config, part.shard.uri)
        if row_format != "auto":
            raise _FoundError(row_format)

    try:
        for shard in shards:
            for_parts(shard, _ANY_SIZE, look)
    except _FoundError as found:
        return [replace(shard, row_format=str(found)) for shard in shards]
    return list(shards)


class _FoundError(Exception):
    """The format of a file's rows: the rest of it need not be parsed."""
