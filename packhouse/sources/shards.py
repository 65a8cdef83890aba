"""Cut the files of a source into shards: byte ranges that hold whole records.

Cuts are made at the last record boundary within `max_shard_bytes` of the shard's start, so they
depend only on what lies before them: rows appended to a JSONL file or to a JSON array leave every
earlier shard byte for byte the same, and work keyed by a shard's content is found again. One
pass per file hashes it, counts its records and finds the cuts; memory is two shards at most.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from packhouse.errors import SourceError
from packhouse.recipe import SourceConfig
from packhouse.recipe.source import FileFormat
from packhouse.registry import function_of_addon
from packhouse.sources.delimited import CommaFile, SemicolonFile, TabFile
from packhouse.sources.file_formats import (
    BOM,
    Compression,
    compression_of,
    format_of,
)
from packhouse.sources.files import (
    SourceFile,
    file_errors,
    find_files,
    local_path,
    open_file,
    source_name,
)
from packhouse.sources.json_arrays import ArrayFile
from packhouse.sources.json_lines import LinesFile
from packhouse.sources.json_objects import ObjectsFile
from packhouse.sources.kinds import Kind
from packhouse.sources.records import unwrapped
from packhouse.sources.row_formats import check_fields, find_row_format
from packhouse.sources.streams import CHUNK_BYTES, FileStream, read_range
from packhouse.sources.tabular import TABULAR, scan_tables
from packhouse.sources.text_files import Parsing, TextFile

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

    The rows of a source with `where` or `select` have no format yet: `packhouse.sources.scanning`
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
