"""Read a file as a stream of uncompressed chunks, hashing what is stored on the way.

Compression goes by magic number, never by name. A stream that expands more than 100:1 is refused
before it fills memory, as are truncated streams, wrong checksums and garbage after the end: a
reader that stops quietly there (many do) publishes half a dataset.
"""

import hashlib
import os
import threading
import zlib
from collections.abc import Iterator
from typing import IO, Any, Literal

import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.sources.files import file_errors, open_file

__all__ = ["Compression", "FileStream", "read_range"]

Compression = Literal["none", "gzip", "zstd"]

CHUNK_BYTES = 4 * 2**20
MAX_RATIO = 100
"""Uncompressed bytes per stored byte; beyond it a file counts as a decompression bomb."""

_RATIO_FREE_BYTES = 2**20  # small files of one repeated row may compress better than the limit


class FileStream:
    """Chunks of a file, uncompressed, with the stored bytes' sha256 and size known at its end."""

    def __init__(self, uri: str, compression: Compression = "none") -> None:
        self.uri = uri
        self.compression = compression
        self.stored_sha256 = hashlib.sha256()
        self.stored_bytes = 0
        self.bytes_out = 0

    def __iter__(self) -> Iterator[bytes]:
        with file_errors(self.uri), open_file(self.uri) as file:
            for chunk in _DECODERS[self.compression](self, file):
                self.bytes_out += len(chunk)
                self._check_ratio()
                yield chunk

    def read_stored(self, file: IO[bytes], size: int = CHUNK_BYTES) -> bytes:
        """At most `size` next stored bytes, hashed; empty at the end."""
        chunk = file.read(size)
        self.stored_sha256.update(chunk)
        self.stored_bytes += len(chunk)
        return chunk

    def _check_ratio(self) -> None:
        if self.compression == "none" or self.bytes_out <= _RATIO_FREE_BYTES:
            return
        if self.bytes_out > MAX_RATIO * self.stored_bytes:
            raise SourceError(
                f"source file '{self.uri}' expands more than {MAX_RATIO}:1 "
                f"({self.bytes_out:,} bytes from {self.stored_bytes:,}): refused as a "
                "decompression bomb; unpack it yourself if it is not one",
                uri=self.uri,
            )


def read_range(uri: str, compression: Compression, start: int, end: int, pin: str = "") -> bytes:
    """Uncompressed bytes [start, end) of a file; fewer where it ends before.

    A compressed file can only be read from its beginning, so the stream of the last read is kept
    open where it stopped: reading shards in order decompresses the file once for each process that
    does, and holds two chunks of it. A read of bytes before that begins anew.

    Args:
        uri: the file.
        compression: of the file.
        start: first byte, uncompressed.
        end: one past the last byte.
        pin: what changes when the file does; a stream is gone on with only under the same pin.
    """
    if compression == "none":
        with file_errors(uri), open_file(uri) as file:
            file.seek(start)
            return _read_fully(file, end - start)
    key = (uri, compression, pin)
    cursor = _CURSORS.take(key, start) or _Cursor(FileStream(uri, compression))
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


_Key = tuple[str, str, str]
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


def _read_fully(file: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0 and (chunk := file.read(size)):
        parts.append(chunk)
        size -= len(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _plain(stream: FileStream, file: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read_stored(file):
        yield chunk


def _gunzip(stream: FileStream, file: IO[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    pending = b""
    members = 0
    try:
        while True:
            pending = pending or stream.read_stored(file, CHUNK_BYTES // 16)
            if not pending:
                break
            if decoder.eof:
                members += 1
                _expect_member(stream, pending, members)
                decoder = zlib.decompressobj(wbits=31)
            out = decoder.decompress(pending, CHUNK_BYTES)
            pending = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            if out:
                yield out
    except zlib.error as error:
        raise _damaged(stream, f"gzip stream is damaged ({error})") from None
    if not decoder.eof:
        raise _damaged(stream, "gzip stream is truncated")


def _expect_member(stream: FileStream, pending: bytes, members: int) -> None:
    if not pending.startswith(b"\x1f"):
        place = f"after {stream.bytes_out:,} uncompressed bytes"
        raise _damaged(stream, f"garbage follows gzip member {members} {place}")


def _unzstd(stream: FileStream, file: IO[bytes]) -> Iterator[bytes]:
    stored = pa.PythonFile(_Stored(stream, file), mode="r")
    try:
        reader = pa.CompressedInputStream(stored, "zstd")
        while chunk := reader.read(CHUNK_BYTES):
            yield chunk
    except OSError as error:
        raise _damaged(stream, f"zstd stream is damaged ({error})") from None


class _Stored:
    """The stored bytes as a file object, hashed as they are read."""

    closed = False

    def __init__(self, stream: FileStream, file: IO[bytes]) -> None:
        self.stream = stream
        self.file = file

    def read(self, size: int) -> bytes:
        """At most `size` next bytes; Arrow asks for 64 KiB at a time."""
        return self.stream.read_stored(self.file, size)

    def close(self) -> None:
        """The stream closes its file."""


def _damaged(stream: FileStream, what: str) -> SourceError:
    return SourceError(
        f"source file '{stream.uri}': {what}; fetch or compress it again", uri=stream.uri
    )


_DECODERS: dict[Compression, Any] = {"none": _plain, "gzip": _gunzip, "zstd": _unzstd}
