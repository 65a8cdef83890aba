"""Cut the files of a source into shards: byte ranges of whole records.

A shard of a text file has at most `max_shard_bytes` and ends after the record in its second half
that has the smallest checksum. So appended rows leave all earlier shards unchanged, and their
cached results are found again. A changed or inserted row usually changes one shard; those after it
move (`packhouse.run.moved_shards`). One pass per file hashes it, counts its records and finds the
cuts. It needs memory for two shards at most.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from packhouse.errors import SourceError
from packhouse.read.compression import CHUNK_BYTES, FileStream, read_range
from packhouse.read.csv_files import DELIMITERS, DelimitedFile
from packhouse.read.file_formats import Compression, compression_of, file_error, format_of
from packhouse.read.json_parsing import Records, Rows, gc_paused, unwrapped
from packhouse.read.parquet_files import TABULAR, decode_head, parse_tables
from packhouse.read.record_boundaries import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    ArrayFile,
    LinesFile,
    ObjectsFile,
    TextFile,
)
from packhouse.read.row_formats import check_fields, find_row_format, row_formats
from packhouse.read.source_files import (
    SourceFile,
    file_errors,
    find_files,
    local_path,
    open_file,
    pin_of,
    source_name,
)
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.recipe.sections import FileFormat
from packhouse.registry import function_of_addon

TEXT_FILES: dict[FileFormat, Callable[..., TextFile]] = {
    "jsonl": LinesFile,
    "json": ArrayFile,
    "objects": ObjectsFile,
    **{name: partial(DelimitedFile, delimiter=sign) for name, sign in DELIMITERS.items()},
}

# With 16 or 8 MiB, a run takes 10% more CPU and 40 MB less memory. Alpaca (22.8 MB) is one shard:
# after a change of one row, a run costs 81% of a cold one.
MAX_SHARD_BYTES = 32 * 2**20
"""Uncompressed bytes of a shard. Bounds the memory of a step and the work for an appended row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShard:
    """A range of whole records in one file, with all that is needed to read it again.

    JSON-able: `SourceShard(**json.loads(json.dumps(asdict(shard))))` equals the shard.
    """

    source: str
    """Name of the source."""
    file: str
    """`source/name`; the name is the file's path relative to the source."""
    uri: str
    """Absolute path or URL."""
    file_format: FileFormat
    compression: Compression
    byte_start: int = 0
    """First byte, uncompressed. Brackets and separating commas of a JSON array are left out."""
    byte_end: int
    """One past the last byte. For Parquet and Arrow, 0 to the file's size: rows limit the range."""
    row_start: int = 0
    """Number of its first record in the file, from 0, not counting blank lines and the header."""
    num_rows: int | None = None
    """Number of records; None if counting needs parsing."""
    sha256: str = ""
    """Digest of the shard's uncompressed bytes; of the whole file for Parquet and Arrow."""
    file_sha256: str = ""
    """Digest of the stored file."""
    file_size: int
    """Bytes of the stored file."""
    row_format: str = "auto"
    """Format of the rows; `auto` only if no row of the file is an object or a list."""
    header: tuple[str, ...] | None = None
    """Column names of CSV and TSV."""
    pin: str = ""
    """Modification time or ETag at the scan; differs if the file changed since."""
    encoding: str = "utf-8"
    """Encoding of the file. Offsets and digests of text refer to its UTF-8 form."""
    table: str | None = None
    """Table of a database."""
    columns: dict[str, Any] | None = None
    """Kinds of the columns that the source's `where` and `select` read; None without these."""
    notes: dict[str, int] = field(default_factory=dict)
    """Counts from the scan, on a file's first shard: `bom`, `empty_files`, ..."""

    def __post_init__(self) -> None:
        if self.header is not None:
            object.__setattr__(self, "header", tuple(self.header))

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine the rows; use it in cache keys, not the whole shard."""
        known = asdict(self)
        # Without the file's location, time and digest, unchanged shards of a copied or appended
        # file keep their identity.
        left_out = ["uri", "pin", "file_sha256", "file_size", "num_rows", "compression", "encoding"]
        left_out += [name for name in ("columns", "table") if known[name] is None]  # older keys
        identity = {name: value for name, value in known.items() if name not in left_out}
        # The last shard of a JSON array is not counted, so if the array is broken, its rows may be
        # split in another way there than in a shard that is.
        if self.file_format == "json" and self.num_rows:
            identity["is_counted"] = True
        return identity


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
        problem = " is not a database, so `table` does not apply. Remove `table`"
        raise file_error(file.uri, problem)
    name = source_name(config)
    whole = SourceShard(
        source=name,
        file=f"{name}/{file.name}",
        uri=file.uri,
        file_format=file_format,
        compression=compression,
        byte_end=file.size,
        file_size=file.size,
        row_format=config.format,
        pin=file.pin,
        encoding=config.encoding,
        table=config.table,
    )
    if file_format in TABULAR:
        if compression != "none":
            problem = f" is compressed {file_format}, which cannot be read. Unpack it"
            raise file_error(file.uri, problem)
        yield from _scan_table(whole, config, max_shard_bytes)
        return
    kind = partial(TEXT_FILES[file_format], max_record_bytes=max_record_bytes)
    text_file = kind(file.uri, max_shard_bytes, rows_at=config.rows_at, encoding=config.encoding)
    stream = FileStream(file.uri, compression, config.encoding)
    # All cuts before the first shard: the digest of the file, which every shard has, is known only
    # at its end.
    cuts = list(text_file.cut(stream))
    if stream.stored_bytes != file.size:
        sizes = f"it had {file.size:,} bytes, but {stream.stored_bytes:,} were read"
        problem = f" changed while it was being read: {sizes}. {_AGAIN}"
        raise file_error(file.uri, problem)
    whole = replace(whole, file_sha256=stream.stored_sha256.hexdigest(), header=text_file.header)
    shards = [replace(whole, **asdict(cut)) for cut in cuts]
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        sample = text_file.sample(head[text_file.first : HEAD_BYTES])
        row_format = find_row_format(sample, config, file.uri)
        if row_format == "auto":  # the head has no row that tells: look at all rows
            row_format = _format_of_all(shards, config)
    notes |= text_file.notes
    for shard in shards:
        yield replace(shard, row_format=row_format, notes=notes)
        notes = {}


def _scan_table(
    whole: SourceShard, config: SourceConfig, max_shard_bytes: int
) -> Iterator[SourceShard]:
    """Cut a columnar file into shards: runs of row groups of bounded size."""
    stream = FileStream(whole.uri)
    deque(stream, maxlen=0)  # reads it
    sha256 = stream.stored_sha256.hexdigest()
    facts, *batches = decode_head(whole.uri, whole.file_format, 1000, whole.table)
    row_format: str = config.format
    if row_format == "auto" and not config.is_reshaped:
        head = [row for batch in batches for row in batch.to_pylist()]
        row_format = find_row_format(head, config, whole.uri)
    ranges = list(_group_ranges(facts["sizes"], max_shard_bytes))
    for row_start, num_rows in ranges:
        # From the digest of the file, so one changed row gives all shards of a Parquet file new
        # keys. Only text files keep the keys of unchanged shards.
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
    """Yield (row_start, num_rows) of runs of groups (rows, bytes) that fit a shard.

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


# A shard is read in parts.


def read_parts(shard: SourceShard, rules: ValidateConfig) -> Iterator[Records]:
    """Parse a shard part by part, in order, so that only the rows of one part are in memory."""
    data = b""
    blocks: Iterable[tuple[int, int, Records]]
    if shard.file_format in TABULAR:
        if pin_of(shard.uri) != (shard.file_size, shard.pin):
            raise _changed(shard)
        assert shard.num_rows is not None
        rows = (shard.row_start, shard.num_rows)
        tables = parse_tables(shard.uri, shard.file_format, *rows, shard.table)
        if _needs_all_rows(shard):
            tables = iter([_joined(tables)])
        blocks = ((0, 0, records) for records in tables)
    else:
        data = read_shard_bytes(shard, shard.byte_end)
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise _changed(shard)
        kind = TEXT_FILES[shard.file_format]
        text_file = kind(shard.uri, header=shard.header, position=shard.byte_start)
        limits = rules.max_row_bytes, shard.num_rows
        if _needs_all_rows(shard):
            blocks = [(0, len(data), text_file.parse(data, *limits))]
        else:
            blocks = text_file.blocks(data, *limits)
    row = shard.row_start
    for start, end, records in blocks:
        records.row_start, records.byte_start = row, shard.byte_start + start
        records.data = data[start:end]
        yield records
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
    """Return the bytes of a text file from the shard's first byte to `byte_end`."""
    start, encoding = shard.byte_start, shard.encoding
    return read_range(shard.uri, shard.compression, start, byte_end, shard.pin, encoding)


def _needs_all_rows(shard: SourceShard) -> bool:
    known = row_formats().get(shard.row_format)
    return known is not None and known.needs_all_rows


_AGAIN = "Run again when nothing is writing to it"


def _changed(shard: SourceShard) -> SourceError:
    place = f"bytes {shard.byte_start:,} to {shard.byte_end:,}"
    return file_error(shard.uri, f" changed since it was scanned ({place}). {_AGAIN}")


# Scan a source: cut its files into shards, find the format of its rows and the types of columns.


MAX_WHOLE_BYTES = 2**29
"""Largest file, in bytes, whose rows can be read together."""

# A scan looks at all rows; those over the recipe's limit become bad when their shard is read.
ANY_SIZE = ValidateConfig(max_row_bytes=2**31)


def scan_source(
    config: SourceConfig,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_row_bytes: int = MAX_RECORD_BYTES,
) -> list[SourceShard]:
    """Find a source's files and cut them into shards.

    If the source has `where` or `select`, all its rows are parsed once to find the types of the
    columns that these read, and the expressions are checked against them.

    Args:
        config: the source.
        max_shard_bytes: uncompressed bytes of a shard; a larger record is a shard by itself.
        max_row_bytes: the recipe's limit. A file with a record above both this and
            `MAX_RECORD_BYTES` is refused.

    Returns:
        Shards sorted by uri, then by position in the file. A file without rows gives one shard of
        0 rows, counted in `empty_files`.

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
    if len(first) > 1:  # all files of a source have one format, like all rows of a file
        shown = ", ".join(f"'{uri}' is {name}" for name, uri in list(first.items())[:3])
        what = f"source '{config.path}' mixes formats: {shown}"
        raise SourceError(f"{what}. Make each format a separate source", path=config.path)
    return [shard for shards in files for shard in _whole(shards)]


def _whole(shards: list[SourceShard]) -> list[SourceShard]:
    """Return the shards of a file, joined into one if its format needs all rows together.

    Raises:
        SourceError: the file is too large to be read at once.
    """
    first, last = shards[0], shards[-1]
    if not _needs_all_rows(first) or len(shards) == 1:
        return shards
    size = last.byte_end - first.byte_start
    if size > MAX_WHOLE_BYTES:
        raise file_error(
            first.uri,
            f" has {size:,} bytes. Format {first.row_format} reads all rows of a file at once, up "
            f"to {MAX_WHOLE_BYTES:,} bytes. Split the file by tree",
        )
    counts = [shard.num_rows for shard in shards]
    num_rows = None if None in counts else sum(n for n in counts if n is not None)
    sha256 = first.file_sha256
    if first.file_format not in TABULAR:
        sha256 = hashlib.sha256(read_shard_bytes(first, last.byte_end)).hexdigest()
    return [replace(first, byte_end=last.byte_end, num_rows=num_rows, sha256=sha256)]


def _with_columns(files: list[list[SourceShard]], config: SourceConfig) -> list[list[SourceShard]]:
    """Add the kinds of the columns, over all files, and the format of the rows."""
    columns, made = function_of_addon("find_columns")(files, config), []
    for shards in files:
        shards = [replace(shard, columns=columns) for shard in shards]
        row_format = _format_of_all(shards, config) if config.format == "auto" else config.format
        made.append([replace(shard, row_format=row_format) for shard in shards])
    return made


def _format_of_all(shards: Sequence[SourceShard], config: SourceConfig) -> str:
    """Return the format of the first row that has one, after `where` and `select`; else `auto`."""
    for shard in shards:
        for records in read_parts(shard, ANY_SIZE):
            rows: list[Any] = records.rows
            if config.is_reshaped:
                rows = unwrapped(rows) if config.unwrap else rows
                reshape = function_of_addon("reshape")
                rows = reshape(rows, config, shard.columns or {}).rows
            found = find_row_format(rows, config, shard.uri)
            if found != "auto":
                return found
    return "auto"
