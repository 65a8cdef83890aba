"""Fetch selected columns of a version's Parquet files and leave the rest in the store.

Each file gets a sparse local copy of the same size. It contains the footer and the requested
columns; everything else is a hole:

    [ PAR1 | hole | num_tokens | hole | num_tokens | hole | footer ]
                    row group 0         row group 1

A partial copy cannot be checked by the digest of the file. Instead, every response of the store
must report the size in the manifest and an unchanged tag, the footer must have the manifest's row
count, and readers verify the CRC32 of each page (`contracts.read_batches`). Reading a hole by
mistake is an error, because zeros are not a valid page.

The footer is untrusted: it is parsed in a worker process, and the ranges that it gives are limited
to the size of the file before anything is requested. Files below 256 KiB, and files other than
Parquet, are fetched whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import IntegrityError
from packhouse.store.contracts import stored_names
from packhouse.store.manifest import FileEntry
from packhouse.store.objects import ObjectNotFoundError, ObjectStore
from packhouse.store.protocol import ask, in_parallel, run
from packhouse.store.read import OpenVersion
from packhouse.system.worker import at, stream_from_worker

_WHOLE_BYTES = 2**18  # smaller files are fetched whole and checked by digest
_TAIL_BYTES = 2**16  # first read from the end; footers take about 100 bytes per column chunk
_GAP_BYTES = 2**14  # smaller gaps between columns are fetched too, which saves a request
_PART_BYTES = 2**23  # per request, held in memory; `_THREADS` requests run at a time
_MAX_PIECES = 2**16  # column chunks per file; 5 GiB of packhouse's own files have 7,000
_THREADS = 8
_FOOTER_END = 8  # bytes: length of the footer (4, little-endian), then `PAR1`


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Local copies that contain at least the requested columns."""

    files: Mapping[str, list[tuple[Path, str]]]
    """Path and split of each file in published order, by kind."""
    num_bytes: int
    """Number of bytes fetched."""


def fetch_columns(
    opened: OpenVersion, wanted: Mapping[str, Collection[str]], folder: Path
) -> Fetched:
    """Fetch columns of all files of some kinds. Small and non-Parquet files are fetched whole.

    Args:
        opened: the version.
        wanted: column names by kind of file; names that a file does not have are ignored.
        folder: folder for the copies.

    Raises:
        VersionNotFoundError: a file was deleted.
        IntegrityError: a file differs from the published size, digest or row count, changed
            while it was read, or has an invalid footer.
    """
    copies = [
        _Copy(opened=opened, entry=entry, path=folder / entry.key)
        for entry in opened.manifest.files
        if entry.kind in wanted
    ]
    in_parallel(_Copy.begin, copies, _THREADS)
    sparse = [copy for copy in copies if not copy.is_whole]
    found = stream_from_worker(
        partial(
            _find_columns,
            [(c.path, stored_names(wanted[c.entry.kind]), c.entry.rows) for c in sparse],
        ),
        what=f"the footers of {opened.dataset}",
        blames=IntegrityError,
        num_bytes=sum(copy.num_bytes for copy in sparse),
    )
    parts = [
        (copy, *part)
        for copy, pieces in zip(sparse, found if sparse else (), strict=True)
        for part in _parts(pieces, copy.tail)
    ]
    in_parallel(lambda part: part[0].read(*part[1:]), parts, _THREADS)
    # Requests of all files share one thread pool, so one big file does not wait for the others.
    files: dict[str, list[tuple[Path, str]]] = {}
    for copy in copies:
        files.setdefault(copy.entry.kind, []).append((copy.path, copy.entry.split))
    num_bytes = sum(copy.num_bytes for copy in copies) + sum(end - start for _, start, end in parts)
    return Fetched(files=files, num_bytes=num_bytes)


@dataclass(kw_only=True, slots=True)
class _Copy:
    """A local copy of one file, whole or sparse."""

    opened: OpenVersion
    entry: FileEntry
    path: Path
    tag: str | None = None
    """Tag of the object, known after the first read."""
    tail: int = 0
    """Offset of the part already fetched, which ends with the footer."""

    @property
    def is_whole(self) -> bool:
        return self.path.suffix != ".parquet" or self.entry.size < _WHOLE_BYTES

    @property
    def num_bytes(self) -> int:
        """Number of bytes that `begin` fetches."""
        return self.entry.size - self.tail

    def begin(self) -> None:
        """Fetch the footer, or the whole file if it is small.

        Reads the last 64 KiB first, then the rest of the footer if it is longer. With a footer of
        100 KB in a file of 1 MB, 36 KB more are read, and columns must end before byte 900,000.

        Raises:
            IntegrityError: the file does not end with a Parquet footer.
        """
        if self.is_whole:
            self.opened.fetch(self.entry, self.path)
            return
        size = self.entry.size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb") as file:
            file.truncate(size)
        self.tail = size - _TAIL_BYTES
        end = self.read(self.tail, size)[-_FOOTER_END:]
        footer = size - _FOOTER_END - int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or footer < 0:
            raise self._damaged("it does not end with a footer of Parquet")
        if footer < self.tail:
            for start, stop in _parts([(footer, self.tail)], size):
                self.read(start, stop)
            self.tail = footer

    def read(self, start: int, end: int) -> bytes:
        """Fetch bytes [start, end), write them at the same offset of the copy, and return them.

        Raises:
            VersionNotFoundError: the file was deleted.
            IntegrityError: the size or the tag of the object has changed.
        """
        key, store = self.opened.key(self.entry), self.opened.store
        try:
            part = run(store, ask(ObjectStore.get_range, key, start, end - start))
        except ObjectNotFoundError:
            raise self.opened.gone(self.entry) from None
        if part.size != self.entry.size:
            raise self._damaged(f"it has {part.size:,} bytes, and was {self.entry.size:,}")
        if len(part.data) != end - start:
            raise self._damaged(
                f"the store gave {len(part.data):,} of the {end - start:,} bytes it was asked for"
            )
        self.tag = self.tag or part.tag
        if part.tag != self.tag:
            raise self._damaged("it was written anew while it was read")
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(part.data)
        return part.data

    def _damaged(self, problem: str) -> IntegrityError:
        return IntegrityError(
            f"'{self.opened.uri(self.entry)}' does not hold the published bytes: {problem}. "
            "Restore it, or publish the version again elsewhere",
            key=self.entry.key,
        )


def _parts(pieces: Sequence[Any], limit: int) -> Iterator[tuple[int, int]]:
    """Merge ranges that nearly touch, cut them into requests, and stop at `limit`.

    Example:
        >>> list(_parts([(30_000, 40_000), (4, 20_000), (2**20, 2**24)], 10_000_000))
        [(4, 40000), (1048576, 9437184), (9437184, 10000000)]
    """
    joined: list[list[int]] = []
    for start, end in sorted((max(0, int(each[0])), int(each[1])) for each in pieces):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    for start, end in joined:
        end = min(end, limit)
        for first in range(start, end, _PART_BYTES):
            yield first, min(first + _PART_BYTES, end)


def _find_columns(
    files: Sequence[tuple[Path, list[str], int]],
) -> Iterator[list[tuple[int, int]]]:
    """Yield the byte ranges [start, end) of the requested columns of each file (in a worker).

    Args:
        files: for each file, the copy with its footer, column names, and rows in the manifest.

    Raises:
        IntegrityError: a footer is invalid or gives impossible ranges.
    """
    for path, columns, rows in files:
        at(f"file '{path.name}'")
        try:
            yield _pieces(pq.read_metadata(path), columns, rows, path.stat().st_size)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def _pieces(
    footer: pq.FileMetaData, columns: list[str], rows: int, size: int
) -> list[tuple[int, int]]:
    """Return the byte ranges of the requested columns, checked against the size of the file."""
    if footer.num_rows != rows:
        raise ValueError(f"it has {footer.num_rows:,} rows, and the manifest says {rows:,}")
    names = [footer.schema.column(number).path for number in range(footer.num_columns)]
    wanted = [number for number, name in enumerate(names) if name.partition(".")[0] in columns]
    # Names of nested columns are paths: `input_ids.list.element` belongs to `input_ids`.
    if footer.num_row_groups * len(wanted) > _MAX_PIECES:
        raise ValueError(f"{footer.num_row_groups:,} row groups of {len(wanted):,} columns")
    pieces = []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, wanted):
            # The dictionary page, if there is one, comes before the data pages of its column.
            start = min(chunk.data_page_offset, chunk.dictionary_page_offset or size)
            end = start + chunk.total_compressed_size
            if not 0 <= start <= end <= size:
                raise ValueError(f"column '{chunk.path_in_schema}' lies at {start:,} to {end:,}")
            pieces.append((start, end))
    return pieces
