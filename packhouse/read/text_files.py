"""Cut text files into shards of whole records.

A subclass of `TextFile` for each kind of file says where records end, and parses shards. Fed a
file's uncompressed bytes, it holds those of the shard under way and gives it up at the last record
boundary within `max_shard_bytes`. What pieces the bytes come in never changes a cut.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from packhouse.errors import SourceError
from packhouse.read.file_formats import BOM
from packhouse.read.records import Records

SAMPLE_ROWS = 100
"""Rows looked at to find the format of a file's rows."""

MAX_RECORD_BYTES = 2**29
"""A record beyond this is no record: a quote or a bracket was left open. Bounds memory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One shard: bytes [start, end) of the uncompressed file."""

    start: int
    end: int
    row_start: int
    num_rows: int | None
    sha256: str


class Parsing(NamedTuple):
    """What parsing a shard depends on, beside its bytes."""

    uri: str
    """For messages."""
    header: tuple[str, ...]
    """Column names of CSV and TSV."""
    num_rows: int | None
    """Records that the scan counted."""
    max_row_bytes: int


class NotInBlocksError(Exception):
    """Blocks of a shard cannot be parsed one by one; the shard can."""


class TextFile(ABC):
    """One kind of text file: cuts a file into shards, and parses a shard."""

    rows_at: str | None = None
    """The field of a JSON file's one object that holds its rows."""

    def __init__(self, uri: str, max_shard_bytes: int) -> None:
        self.uri = uri
        self.max_shard_bytes = max_shard_bytes
        self.buffer = bytearray()
        self.position = 0  # offset in the file of the buffer's first byte
        self.num_rows = 0
        self.header: tuple[str, ...] | None = None
        self.notes: dict[str, int] = {}

    def cut(self, chunks: Iterable[bytes]) -> Iterator[Cut]:
        """Yield the shards of a file; one of no rows for a file without any."""
        has_begun = False
        searched = 0  # buffer size at the last search without a boundary
        for chunk in chunks:
            self.buffer += chunk
            has_begun = has_begun or self._begin(at_end=False)
            # A search goes through the whole buffer, so it is tried again when that has doubled: a
            # record of 512 MiB is searched 4 times behind 32 MiB, and not once for each chunk.
            while has_begun and len(self.buffer) > max(self.max_shard_bytes, 2 * searched):
                end = self.boundary(self.buffer)
                if end is None:
                    searched = len(self.buffer)
                    self.check_record_size()
                else:
                    searched = 0
                    yield self._take(end)
        if not has_begun:
            self._begin(at_end=True)
        while len(self.buffer) > self.max_shard_bytes:
            end = self.boundary(self.buffer)
            if end is None or end >= len(self.buffer):
                break
            yield self._take(end)
        self.end_of_file()
        if self.buffer or self.num_rows == 0:
            yield self._take(len(self.buffer))
        if self.num_rows == 0:
            self.notes["empty_files"] = 1

    @abstractmethod
    def boundary(self, data: bytearray) -> int | None:
        """Offset of the last record boundary within a shard; else of the first one; else None."""

    @abstractmethod
    def count(self, size: int, *, is_last: bool) -> int | None:
        """Records in the buffer's first `size` bytes, a shard; None: not known, but some."""

    @abstractmethod
    def sample(self, head: bytes) -> list[object]:
        """Return the first rows as values, to find their format; called after `cut`.

        Args:
            head: first bytes of the file, without a byte order mark.
        """

    @staticmethod
    @abstractmethod
    def parse(data: bytes, how: Parsing) -> Records:
        """Parse a whole shard.

        Raises:
            SourceError: what is bad is not a record but the file.
        """

    @staticmethod
    def parse_blocks(data: bytes, how: Parsing) -> Iterator[tuple[int, int, Records]]:
        """Yield start, end and records of blocks of a shard, to bound memory.

        Raises:
            NotInBlocksError: use `parse`, which may give other records than the blocks so far.
        """
        raise NotInBlocksError

    def begin(self, *, at_end: bool) -> bool:
        """Skip what precedes the first record; False where more bytes are needed."""
        return True

    def after_cut(self) -> None:  # noqa: B027 (most kinds of files need none)
        """Drop what divides the shard just taken from the next."""

    def end_of_file(self) -> None:  # noqa: B027
        """Check and drop what follows the last record."""

    def skip(self, size: int) -> None:
        """Drop bytes before the next shard."""
        del self.buffer[:size]
        self.position += size

    def check_record_size(self) -> None:
        """Refuse a record that does not end.

        Raises:
            SourceError: says where it begins.
        """
        if len(self.buffer) > MAX_RECORD_BYTES:
            raise SourceError(
                f"source file '{self.uri}': record {self.num_rows} at byte {self.position:,} does "
                f"not end within {MAX_RECORD_BYTES:,} bytes; is a quote or bracket left open?",
                uri=self.uri,
                row=self.num_rows,
                byte_offset=self.position,
            )

    def _begin(self, *, at_end: bool) -> bool:
        if len(self.buffer) < len(BOM) and not at_end:
            return False
        if self.position == 0 and self.buffer.startswith(BOM):
            self.notes["bom"] = 1
            self.skip(len(BOM))
        return self.begin(at_end=at_end)

    def _take(self, size: int) -> Cut:
        num_rows = self.count(size, is_last=size == len(self.buffer))
        with memoryview(self.buffer) as view:
            sha256 = hashlib.sha256(view[:size]).hexdigest()
        end = self.position + size
        cut = Cut(self.position, end, self.num_rows, num_rows, sha256)
        self.num_rows += 1 if num_rows is None else num_rows
        self.skip(size)
        self.after_cut()
        return cut


def parse_sample(pieces: Iterable[bytes]) -> list[object]:
    """Values of the pieces that are JSON."""
    rows: list[object] = []
    for piece in pieces:
        with suppress(orjson.JSONDecodeError):
            rows.append(orjson.loads(piece))
    return rows
