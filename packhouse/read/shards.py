"""Cut the files of a source into shards: byte ranges that hold whole records.

Cuts are made at the last record boundary within `max_shard_bytes` of the shard's start, so they
depend only on what lies before them: rows appended to a JSONL file or to a JSON array leave every
earlier shard byte for byte the same, and work keyed by a shard's content is found again. One
pass per file hashes it, counts its records and finds the cuts; memory is two shards at most.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from packhouse.errors import SourceError
from packhouse.read.delimited import CommaFile, SemicolonFile, TabFile
from packhouse.read.file_formats import BOM, Compression, compression_of, format_of
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
from packhouse.read.records import Records, Rows, gc_paused, unwrapped
from packhouse.read.row_formats import check_fields, find_row_format, row_formats
from packhouse.read.streams import CHUNK_BYTES, FileStream, read_range
from packhouse.read.tabular import TABULAR, decode_head, parse_tables
from packhouse.read.text_files import (
    MAX_RECORD_BYTES,
    LinesFile,
    NotInBlocksError,
    ObjectsFile,
    TextFile,
)
from packhouse.read.where_select import (
    Kind,
    check_types,
    columns_of,
    joined_kinds,
    kind_of_type,
    kind_of_values,
    reshape,
    wanted_columns,
)
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


def _scan_file(
    file: SourceFile, config: SourceConfig, max_shard_bytes: int, max_record_bytes: int
) -> Iterator[SourceShard]:
    with file_errors(file.uri), open_file(file.uri) as opened:
        head = opened.read(CHUNK_BYTES)
    compression, notes = compression_of(head[:4], file.name)
    if compression != "none" or config.encoding != "utf-8":
        head = b""
        for chunk in FileStream(file.uri, compression, config.encoding):
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
    file_format = format_of(head, file.name, config.file_format, file.uri)
    if config.rows_at is not None and file_format in ("jsonl", "objects"):
        file_format = "json"  # its one object holds the array
    is_database = file_format in ("sqlite", "duckdb")
    if is_database and (path := local_path(file.uri)) is not None:
        function_of_addon("refuse_unsaved")(file.uri, str(path))
    if config.table is not None and not is_database:
        raise SourceError(f"source file '{file.uri}' is no database, and `table` names a table")
    name = source_name(config)
    whole = SourceShard(
        source=name,
        file=f"{name}/{file.name}",
        uri=file.uri,
        file_format=file_format,
        compression=compression,
        byte_start=0,
        byte_end=file.size,
        row_start=0,
        num_rows=None,
        sha256="",
        file_sha256="",
        file_size=file.size,
        row_format=config.format,
        pin=file.pin,
        encoding=config.encoding,
        table=config.table,
    )
    if file_format in TABULAR:
        if compression != "none":
            raise SourceError(f"source file '{file.uri}' is compressed {file_format}; unpack it")
        yield from _scan_table(whole, config, max_shard_bytes)
        return
    text_file = TEXT_FILES[file_format](
        file.uri,
        max_shard_bytes,
        rows_at=config.rows_at,
        encoding=config.encoding,
        max_record_bytes=max_record_bytes,
    )
    stream = FileStream(file.uri, compression, config.encoding)
    cuts = list(text_file.cut(stream))
    if stream.stored_bytes != file.size:
        raise SourceError(
            f"source file '{file.uri}' changed while it was read: {file.size:,} bytes when found, "
            f"{stream.stored_bytes:,} read; run again when nothing writes to it",
            uri=file.uri,
        )
    whole = replace(whole, file_sha256=stream.stored_sha256.hexdigest(), header=text_file.header)
    shards = [
        replace(
            whole,
            byte_start=cut.start,
            byte_end=cut.end,
            row_start=cut.row_start,
            num_rows=cut.num_rows,
            sha256=cut.sha256,
        )
        for cut in cuts
    ]
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        sample = text_file.sample(head[:HEAD_BYTES].removeprefix(BOM))
        row_format = find_row_format(sample, config, file.uri)
        if row_format == "auto":  # where the head tells nothing: look at all rows
            row_format = _format_of_all(shards, config)
    notes |= text_file.notes
    for shard in shards:
        yield replace(shard, row_format=row_format, notes=notes)
        notes = {}


def _scan_table(
    whole: SourceShard, config: SourceConfig, max_shard_bytes: int
) -> Iterator[SourceShard]:
    """The shards of a file of columns: groups of row groups of bounded size."""
    stream = FileStream(whole.uri)
    for _ in stream:
        pass
    sha256 = stream.stored_sha256.hexdigest()
    facts, *batches = decode_head(whole.uri, whole.file_format, 1000, whole.table)
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        head = [row for batch in batches for row in batch.to_pylist()]
        row_format = find_row_format(head, config, whole.uri)
    ranges = list(_group_ranges(facts["sizes"], max_shard_bytes))
    for row_start, num_rows in ranges:
        of_rows = hashlib.sha256(f"{sha256}:{row_start}:{num_rows}".encode()).hexdigest()
        yield replace(
            whole,
            row_start=row_start,
            num_rows=num_rows,
            sha256=of_rows if len(ranges) > 1 else sha256,
            file_sha256=sha256,
            row_format=row_format,
            header=tuple(facts["names"]),
            notes={} if row_start or num_rows else {"empty_files": 1},
        )


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


# The parts of a shard that are read by themselves, so that memory holds the rows of one.


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a shard that is read by itself."""

    shard: SourceShard
    row_start: int
    """Number in the file of its first record."""
    byte_start: int
    data: bytes
    """Empty for formats of columns, whose rows have no bytes of their own."""
    records: Records


def for_parts(shard: SourceShard, rules: ValidateConfig, use: Callable[[Part], _T]) -> list[_T]:
    """What `use` returns for each part of a shard, in order.

    Parts bound memory and nothing else: where they cannot be judged alone (an array that is not
    JSON), the shard is one part, and what `use` returned before is dropped.
    """
    needs_all_rows = _needs_all_rows(shard)
    if shard.file_format in TABULAR:
        if pin_of(shard.uri) != (shard.file_size, shard.pin):
            raise _changed(shard)
        assert shard.num_rows is not None
        rows = (shard.row_start, shard.num_rows)
        tables = parse_tables(shard.uri, shard.file_format, *rows, shard.table)
        if needs_all_rows:
            tables = iter([_joined(tables)])
        return list(map(use, _parts(shard, b"", ((0, 0, records) for records in tables))))
    data = read_shard_bytes(shard, shard.byte_end)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(shard)
    text_file = TEXT_FILES[shard.file_format](shard.uri, header=shard.header)
    try:
        if needs_all_rows:
            raise NotInBlocksError
        return list(map(use, _parts(shard, data, text_file.blocks(data, rules.max_row_bytes))))
    except NotInBlocksError:
        records = text_file.parse(data, rules.max_row_bytes, shard.num_rows)
        return [use(Part(shard, shard.row_start, shard.byte_start, data, records))]


def _parts(
    shard: SourceShard, data: bytes, blocks: Iterable[tuple[int, int, Records]]
) -> Iterator[Part]:
    row = shard.row_start
    for start, end, records in blocks:
        yield Part(shard, row, shard.byte_start + start, data[start:end], records)
        row += records.num_records


def _joined(tables: Iterable[Records]) -> Records:
    rows, numbers, every = Rows(), [np.arange(0)], Records(Rows(), np.arange(0), 0)
    for records in tables:
        first = every.num_records
        rows += records.rows
        numbers.append(records.numbers + first)
        every.failures += [bad._replace(number=bad.number + first) for bad in records.failures]
        every.failed |= {number + first: row for number, row in records.failed.items()}
        every.num_records += records.num_records
    every.rows, every.numbers = Rows(rows), np.concatenate(numbers)
    return every


def read_shard_bytes(shard: SourceShard, byte_end: int) -> bytes:
    """The bytes of a text file from a shard's first one on."""
    start, encoding = shard.byte_start, shard.encoding
    return read_range(shard.uri, shard.compression, start, byte_end, shard.pin, encoding)


def _needs_all_rows(shard: SourceShard) -> bool:
    known = row_formats().get(shard.row_format)
    return known is not None and known.needs_all_rows


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


def scan_source(
    config: SourceConfig,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_row_bytes: int = MAX_RECORD_BYTES,
) -> list[SourceShard]:
    """Find a source's files and cut them into shards.

    Where the source has `where` or `select`, all its rows are parsed once for the types of the
    columns that these read, and the expressions are checked against them.

    Args:
        config: the source.
        max_shard_bytes: uncompressed bytes of a shard; one record larger than that is a shard.
        max_row_bytes: the recipe's. A file with a record beyond this, and beyond
            `MAX_RECORD_BYTES`, is refused.

    Returns:
        Shards sorted by uri, then by place in the file. A file without rows gives one shard of 0
        rows, noted as `empty_files`.

    Raises:
        ConfigError: `fields` names what no format has; an expression is not allowed, names no
            column, or does not fit the types of the columns.
        SourceError: a file cannot be read; names it and the place.
        TransientError: the storage did not answer.
    """
    check_fields(config)
    with gc_paused():
        sizes = max_shard_bytes, max(max_row_bytes, MAX_RECORD_BYTES)
        files = [list(_scan_file(file, config, *sizes)) for file in find_files(config)]
        if config.is_reshaped:
            files = _with_columns(files, config)
    first: dict[str, str] = {}
    for shards in files:
        if shards[0].row_format != "auto":
            first.setdefault(shards[0].row_format, shards[0].uri)
    if len(first) > 1:  # files of one source have one shape, as the rows of one file have
        shown = ", ".join(f"'{uri}' is {name}" for name, uri in list(first.items())[:3])
        raise SourceError(
            f"source '{config.path}' mixes shapes: {shown}; give each shape a source of its own",
            path=config.path,
        )
    return [shard for shards in files for shard in _whole(shards)]


def _whole(shards: list[SourceShard]) -> list[SourceShard]:
    """The shards of a file; one, where its rows mean something only together.

    Raises:
        SourceError: the file is too large for that.
    """
    first, last = shards[0], shards[-1]
    if not _needs_all_rows(first) or len(shards) == 1:
        return shards
    size = last.byte_end - first.byte_start
    if size > MAX_WHOLE_BYTES:
        raise SourceError(
            f"source file '{first.uri}': format {first.row_format} needs all rows of a file at "
            f"once, and it has {size:,} bytes, over {MAX_WHOLE_BYTES:,}; split it by tree",
            uri=first.uri,
        )
    counts = [shard.num_rows for shard in shards]
    num_rows = None if None in counts else sum(n for n in counts if n is not None)
    sha256 = first.file_sha256
    if first.file_format not in TABULAR:
        sha256 = hashlib.sha256(read_shard_bytes(first, last.byte_end)).hexdigest()
    return [replace(first, byte_end=last.byte_end, num_rows=num_rows, sha256=sha256)]


def _with_columns(files: list[list[SourceShard]], config: SourceConfig) -> list[list[SourceShard]]:
    """Add the kinds of the columns, which hold for all files, and the format of the rows."""
    wanted = wanted_columns(config)
    kinds: dict[str, Kind] = {}

    def look(part: Part) -> bool:
        values = unwrapped(part.records.rows) if config.unwrap else part.records.rows
        rows = [row for row in values if type(row) is dict]
        for name in dict.fromkeys(key for keys in set(map(tuple, rows)) for key in keys):
            kinds.setdefault(name, "null")
            if name.lower() in wanted:
                kinds[name] = kind_of_values([row.get(name) for row in rows], kinds[name])
        return len(part.records.rows) > 0

    has_rows = False
    for shards in files:
        first = shards[0]
        if first.file_format in TABULAR:
            _, *batches = decode_head(first.uri, first.file_format, 1, config.table)
            found: dict[str, Kind] = {name: "null" for name in first.header or ()}
            for each in batches:
                found |= {field.name: kind_of_type(field.type) for field in each.schema}
            for name, kind in found.items():
                kinds[name] = joined_kinds(kinds.get(name, "null"), kind)
        else:
            for name in first.header or ():  # a column of CSV, though no row follows
                kinds.setdefault(name, "text")
            for shard in shards:
                has_rows |= any(for_parts(shard, _ANY_SIZE, look))
    columns: dict[str, Kind] = {}
    if kinds or has_rows:  # a file without rows and header misses no field
        columns = columns_of(config, kinds)
        check_types(config, columns)
    files = [[replace(shard, columns=columns) for shard in shards] for shards in files]
    if config.format != "auto":
        return files
    formats = [_format_of_all(shards, config) for shards in files]
    return [
        [replace(shard, row_format=row_format) for shard in shards]
        for row_format, shards in zip(formats, files, strict=True)
    ]


def _format_of_all(shards: Sequence[SourceShard], config: SourceConfig) -> str:
    """Format of the first row of a file that has one, as expressions leave it; else `auto`."""

    def look(part: Part) -> str:
        rows = part.records.rows
        if config.is_reshaped:
            rows = reshape(
                unwrapped(rows) if config.unwrap else rows, config, part.shard.columns or {}
            ).rows
        return find_row_format(rows, config, part.shard.uri)

    for shard in shards:
        for found in for_parts(shard, _ANY_SIZE, look):
            if found != "auto":
                return found
    return "auto"
