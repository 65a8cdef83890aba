"""Read a file as a stream of uncompressed chunks, hash the stored bytes, and count lines.

Compression is detected from the first bytes, never from the name. A stream that expands more than
100:1 is refused before it fills memory. So are truncated streams, wrong checksums and garbage after
the end: many readers stop there silently, which would publish half a dataset.
"""

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

import pyarrow as pa

from packhouse.errors import PackhouseError, SourceError
from packhouse.read.file_formats import Compression, compression_of, file_error
from packhouse.read.source_files import file_errors, find_files, local_path, open_file, source_name
from packhouse.recipe import SourceConfig

CHUNK_BYTES = 4 * 2**20
MAX_RATIO = 100
"""Uncompressed bytes per stored byte. A file above this counts as a decompression bomb."""

_RATIO_FREE_BYTES = 2**20  # a small file of one repeated row may compress better than 100:1


@dataclass(eq=False)
class FileStream:
    """Uncompressed chunks of a file; `stored_sha256` and `stored_bytes` are complete at the end."""

    closed: ClassVar[bool] = False  # Arrow needs this and `close`

    uri: str
    compression: Compression = "none"
    encoding: str = "utf-8"
    stored_sha256: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    stored_bytes: int = 0
    _file: IO[bytes] = field(init=False)
    _storage_error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        if self.encoding == "utf-8":
            yield from self._uncompressed()
            return
        # A byte that cannot be decoded becomes three bytes of invalid UTF-8, so its row is bad.
        try:
            for text in codecs.iterdecode(self._uncompressed(), self.encoding, "surrogateescape"):
                yield text.encode("utf-8", "surrogatepass")
        except UnicodeError as error:  # UTF-16 without a byte-order mark is not a decode error
            why = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
            fix = "Correct the source's `encoding`, or fix the file"
            problem = f" is not {self.encoding} text ({why}). {fix}"
            raise file_error(self.uri, problem) from None

    def _uncompressed(self) -> Iterator[bytes]:
        with file_errors(self.uri), open_file(self.uri) as self._file:
            if self.compression == "none":
                while chunk := self.read(CHUNK_BYTES):
                    yield chunk
                return
            bytes_out = 0
            # Arrow reads through `self.read`, so bytes are hashed as they are stored. It refuses a
            # wrong checksum and garbage after the end, and reads gzip files of several members.
            # DuckDB returns the rows of a gzip file with a wrong checksum.
            stored = pa.PythonFile(self, mode="r")
            reader = pa.CompressedInputStream(stored, self.compression)
            while True:
                try:
                    chunk = reader.read(CHUNK_BYTES)
                except OSError as error:
                    if self._storage_error is not None:
                        raise self._storage_error from None
                    raise SourceError(
                        f"the {self.compression} stream of source file '{self.uri}' is damaged, "
                        f"truncated or followed by garbage ({error}). Download or compress it "
                        "again",
                        uri=self.uri,
                    ) from None
                if not chunk:
                    return
                bytes_out += len(chunk)
                # Checked before the chunk is passed on: of a bomb, only this chunk is in memory.
                if bytes_out > max(_RATIO_FREE_BYTES, MAX_RATIO * self.stored_bytes):
                    raise file_error(
                        self.uri,
                        f" expands more than {MAX_RATIO}:1 ({bytes_out:,} bytes from "
                        f"{self.stored_bytes:,}), like a decompression bomb. If it is not one, "
                        "unpack it before the run",
                    )
                yield chunk

    def read(self, size: int) -> bytes:
        """Return the next stored bytes, at most `size`, and hash them; empty at the end."""
        try:
            chunk = self._file.read(size)
        except Exception as error:
            self._storage_error = error  # Arrow may replace it with a different error
            raise
        self.stored_sha256.update(chunk)
        self.stored_bytes += len(chunk)
        return chunk

    def close(self) -> None:
        """Do nothing: iteration closes the file."""


def read_range(
    uri: str, compression: Compression, start: int, end: int, pin: str = "", encoding: str = "utf-8"
) -> bytes:
    """Return bytes [start, end) of a file, uncompressed and in UTF-8; fewer if the file is shorter.

    Args:
        uri: the file.
        compression: of the file.
        start: first byte, uncompressed.
        end: one past the last byte.
        pin: changes when the file changes; an open stream is reused only with the same pin.
        encoding: of the file.
    """
    if compression == "none" and encoding == "utf-8":
        with file_errors(uri), open_file(uri) as file:
            file.seek(start)
            parts = []
            while start < end and (chunk := file.read(end - start)):
                parts.append(chunk)
                start += len(chunk)
            return parts[0] if len(parts) == 1 else b"".join(parts)
    # Such a file can only be read from its beginning. So the stream of the last read is kept open
    # at its position: reading shards in order decompresses the file once per process and keeps two
    # chunks in memory. A read of earlier bytes starts over.
    key = (uri, compression, pin, encoding)
    cursor = _Cursor(iter(FileStream(uri, compression, encoding)))
    # A copy of the list, because threads take streams from it. The nearest stream comes first: the
    # bytes between its position and `start` are decompressed only to be skipped.
    known = [item for item in tuple(_IDLE) if item[0] == key and item[1].position <= start]
    for item in sorted(known, key=lambda item: item[1].position, reverse=True):
        with suppress(ValueError):  # another thread took it meanwhile
            _IDLE.remove(item)
            cursor = item[1]
            break
    data = cursor.read(start, end)
    # After fewer bytes the stream has ended, and no later read can use it.
    if len(data) == end - start:
        _IDLE.append((key, cursor))
        del _IDLE[:-_MAX_IDLE]
    return data


@dataclass(eq=False)
class _Cursor:
    """A position in an uncompressed stream, from which reading continues."""

    chunks: Iterator[bytes]
    chunk: bytes = b""
    position: int = 0  # of the chunk's first byte

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end); `start` is not before the position."""
        # Chunks of 4 bytes: read(2, 6) -> bytes 2:4 of the first and 0:2 of the second, whose rest
        # is kept with position 6.
        parts = []
        while True:
            parts.append(self.chunk[max(0, start - self.position) : max(0, end - self.position)])
            if self.position + len(self.chunk) >= end:
                self.chunk = self.chunk[max(0, end - self.position) :]
                self.position = max(self.position, end)
                return b"".join(parts)
            self.position += len(self.chunk)
            self.chunk = next(self.chunks, b"")
            if not self.chunk:
                return b"".join(parts)


# Each keeps a file open, and in memory two chunks of 4 MiB.
_MAX_IDLE = 8
# Open streams and what they were opened with, the least recently used first.
_IDLE: list[tuple[tuple[str, str, str, str], _Cursor]] = []
os.register_at_fork(after_in_child=_IDLE.clear)  # because the parent uses the same open files


# Messages give the line on which a row begins, counted from 1 as in an editor. Tables have only the
# number of a record and the offset of its first byte, so to find a line, a local file is read up to
# that byte.


def lines_at(uri: str, offsets: Sequence[int], encoding: str = "utf-8") -> list[int]:
    """Return the line number, from 1, of each byte offset in a file's text.

    Args:
        uri: a file, which may be compressed.
        offsets: into its uncompressed text in UTF-8, in ascending order.
        encoding: of the file.

    Raises:
        SourceError: the file cannot be read.
    """
    with file_errors(uri), open_file(uri) as file:
        compression, _ = compression_of(file.read(4), uri)
    lines: list[int] = []
    position = line = 0
    for chunk in FileStream(uri, compression, encoding):
        while len(lines) < len(offsets) and offsets[len(lines)] < position + len(chunk):
            lines.append(1 + line + chunk.count(b"\n", 0, offsets[len(lines)] - position))
        if len(lines) == len(offsets):
            break
        position += len(chunk)
        line += chunk.count(b"\n")
    return lines


def lines_of_rows(
    rows: Iterable[Mapping[str, Any]], sources: Iterable[SourceConfig]
) -> dict[tuple[str, int], int]:
    """Return the line of each row whose file is on this machine, keyed by file and row number.

    Args:
        rows: with `source`, `row` and `byte_offset`, as in `table_schemas.QUARANTINED`.
        sources: of the recipe that the rows belong to.
    """
    places: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["byte_offset"] is not None:
            places.setdefault(row["source"], {})[row["byte_offset"]] = row["row"]
    found: dict[tuple[str, int], int] = {}
    for source in sources:
        name = source_name(source)
        if "://" in source.path or not any(file.split("/")[0] == name for file in places):
            continue
        with suppress(PackhouseError):  # if the file is gone, the row number has to do
            for file in find_files(source):
                of_file = places.get(f"{name}/{file.name}", {})
                offsets = sorted(of_file)
                lines = lines_at(file.uri, offsets, source.encoding) if offsets else []
                for offset, line in zip(offsets, lines, strict=False):
                    found[f"{name}/{file.name}", of_file[offset]] = line
    return found


def place_of(row: Mapping[str, Any], lines: Mapping[tuple[str, int], int]) -> str:
    """Return the place of a row for a message.

    Args:
        row: with `source` and `row`.
        lines: from `lines_of_rows`.

    Example:
        >>> row = {"source": "a/a.jsonl", "row": 17}
        >>> place_of(row, {("a/a.jsonl", 17): 18}), place_of(row, {})
        ('a/a.jsonl line 18', 'a/a.jsonl row 17')
    """
    line = lines.get((row["source"], row["row"]))
    place = f"row {row['row']:,}" if line is None else f"line {line:,}"
    return f"{row['source']} {place}"


def name_row(uri: str, row: int, byte_offset: int | None, encoding: str = "utf-8") -> str:
    """Return `line 18` for a row of a text file on this machine, else `row 17`."""
    with suppress(PackhouseError):
        if byte_offset is not None and local_path(uri) is not None:
            return f"line {lines_at(uri, [byte_offset], encoding)[0]:,}"
    return f"row {row:,}"
