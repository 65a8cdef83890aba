"""Read a file as a stream of uncompressed chunks, hashing what is stored; count its lines.

Compression goes by first bytes, never by name. A stream that expands more than 100:1 is refused
before it fills memory, as are truncated streams, wrong checksums and garbage after the end: a
reader that stops quietly there (many do) publishes half a dataset.

People count rows as an editor does: by the line of their file on which they begin, from 1. Tables
hold the number of a record and the offset of its first byte, so for a message to a person a file
of this machine is read up to there.
"""

import codecs
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa

from packhouse.errors import PackhouseError, SourceError
from packhouse.read.file_formats import Compression, compression_of
from packhouse.read.files import file_errors, find_files, local_path, open_file, source_name
from packhouse.recipe import SourceConfig

CHUNK_BYTES = 4 * 2**20
MAX_RATIO = 100
"""Uncompressed bytes per stored byte; beyond it a file counts as a decompression bomb."""

_RATIO_FREE_BYTES = 2**20  # small files of one repeated row may compress better than the limit


class FileStream:
    """Chunks of a file, uncompressed, with the stored bytes' sha256 and size known at its end."""

    closed = False  # this and `close` are asked for by Arrow

    def __init__(
        self, uri: str, compression: Compression = "none", encoding: str = "utf-8"
    ) -> None:
        self.uri = uri
        self.compression = compression
        self.encoding = encoding
        self.stored_sha256 = hashlib.sha256()
        self.stored_bytes = 0
        self._file: IO[bytes]
        self._storage_error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self._uncompressed() if self.encoding == "utf-8" else self._in_utf8()

    def _in_utf8(self) -> Iterator[bytes]:
        """Chunks of text in another encoding as UTF-8.

        A byte that is no text becomes three that are no UTF-8, so that its row is a bad row.
        """
        decoder = codecs.getincrementaldecoder(self.encoding)("surrogateescape")
        try:
            for chunk in self._uncompressed():
                if text := decoder.decode(chunk):
                    yield text.encode("utf-8", "surrogatepass")
            if text := decoder.decode(b"", final=True):
                yield text.encode("utf-8", "surrogatepass")
        except UnicodeError as error:  # without a mark of its byte order, UTF-16 is no decode error
            why = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
            raise SourceError(
                f"source file '{self.uri}' is not {self.encoding} text ({why}); correct "
                "the encoding of the source, or mend the file",
                uri=self.uri,
            ) from None

    def _uncompressed(self) -> Iterator[bytes]:
        with file_errors(self.uri), open_file(self.uri) as self._file:
            if self.compression == "none":
                while chunk := self.read(CHUNK_BYTES):
                    yield chunk
                return
            bytes_out = 0
            stored = pa.PythonFile(self, mode="r")
            reader = pa.CompressedInputStream(stored, self.compression)
            while chunk := self._decompress(reader):
                bytes_out += len(chunk)
                if bytes_out > max(_RATIO_FREE_BYTES, MAX_RATIO * self.stored_bytes):
                    raise SourceError(
                        f"source file '{self.uri}' expands more than {MAX_RATIO}:1 "
                        f"({bytes_out:,} bytes from {self.stored_bytes:,}): refused as a "
                        "decompression bomb; unpack it yourself if it is not one",
                        uri=self.uri,
                    )
                yield chunk

    def read(self, size: int) -> bytes:
        """At most `size` next stored bytes, hashed; empty at the end."""
        try:
            chunk = self._file.read(size)
        except Exception as error:
            self._storage_error = error  # which Arrow may hand on as an error of its own
            raise
        self.stored_sha256.update(chunk)
        self.stored_bytes += len(chunk)
        return chunk

    def close(self) -> None:
        """Nothing: iteration closes the file."""

    def _decompress(self, reader: pa.CompressedInputStream) -> bytes:
        try:
            chunk: bytes = reader.read(CHUNK_BYTES)
        except OSError as error:
            if self._storage_error is not None:
                raise self._storage_error from None
            raise SourceError(
                f"source file '{self.uri}': its {self.compression} stream is damaged, truncated or "
                f"followed by garbage ({error}); fetch or compress it again",
                uri=self.uri,
            ) from None
        return chunk


def read_range(
    uri: str,
    compression: Compression,
    start: int,
    end: int,
    pin: str = "",
    encoding: str = "utf-8",
) -> bytes:
    """Bytes [start, end) of a file, uncompressed and in UTF-8; fewer where it ends before.

    A compressed file can only be read from its beginning, and so is one of another encoding. So the
    stream of the last read is kept open where it stopped: reading shards in order decompresses the
    file once for each process that does, and holds two chunks of it. A read of bytes before that
    begins anew.

    Args:
        uri: the file.
        compression: of the file.
        start: first byte, uncompressed.
        end: one past the last byte.
        pin: what changes when the file does; a stream is gone on with only under the same pin.
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
    key = (uri, compression, pin, encoding)
    cursor = _CURSORS.take(key, start) or _Cursor(FileStream(uri, compression, encoding))
    data = cursor.read(start, end)
    if len(data) == end - start:
        _CURSORS.keep(key, cursor)
    return data


class _Cursor:
    """A place in an uncompressed stream, from which it can be read on."""

    def __init__(self, stream: FileStream) -> None:
        self.chunks = iter(stream)
        self.chunk = b""
        self.position = 0  # of the chunk's first byte

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end); `start` is not before the position."""
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


_Key = tuple[str, str, str, str]
_MAX_CURSORS = 8


class _Cursors:
    """Streams that lie idle in this process; the ones used longest ago are closed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[tuple[_Key, _Cursor]] = []

    def take(self, key: _Key, start: int) -> _Cursor | None:
        """The stream of this file that stopped nearest before `start`."""
        with self.lock:
            known = [item for item in self.idle if item[0] == key and item[1].position <= start]
            if not known:
                return None
            nearest = max(known, key=lambda item: item[1].position)
            self.idle.remove(nearest)
            return nearest[1]

    def keep(self, key: _Key, cursor: _Cursor) -> None:
        """Keep a stream to go on with."""
        with self.lock:
            self.idle.append((key, cursor))
            del self.idle[:-_MAX_CURSORS]

    def forget(self) -> None:
        """In a forked child: its parent reads on with the same open files."""
        self.lock = threading.Lock()
        self.idle = []


_CURSORS = _Cursors()
os.register_at_fork(after_in_child=_CURSORS.forget)


def lines_at(uri: str, offsets: Sequence[int], encoding: str = "utf-8") -> list[int]:
    """Return the line, from 1, that holds each byte of a file's text.

    Args:
        uri: a file, which may be compressed.
        offsets: into its uncompressed text in UTF-8, rising.
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
    """Return the line of each row of a table whose file is on this machine, by its file and number.

    Args:
        rows: with `source`, `row` and `byte_offset`, as in `tables.QUARANTINED`.
        sources: of the recipe that the rows were read for.
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
        with suppress(PackhouseError):  # the file is gone; the row's number is there
            for file in find_files(source):
                of_file = places.get(f"{name}/{file.name}", {})
                offsets = sorted(of_file)
                lines = lines_at(file.uri, offsets, source.encoding) if offsets else []
                for offset, line in zip(offsets, lines, strict=False):
                    found[f"{name}/{file.name}", of_file[offset]] = line
    return found


def place_of(row: Mapping[str, Any], lines: Mapping[tuple[str, int], int]) -> str:
    """Return where a row stands, for people.

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
