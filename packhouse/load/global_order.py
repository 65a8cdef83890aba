"""The packs of one epoch in their global order, which `streaming.py` defines: read by place.

Memory: a decoded row group and an open file for each lane that is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import IntegrityError
from packhouse.load.copies import mapped_file, verified_file
from packhouse.load.rows import ArrowRows
from packhouse.pack.shuffle import permutation, splitmix64
from packhouse.store import FileEntry, OpenVersion
from packhouse.store.contracts import check_footer

if TYPE_CHECKING:
    from packhouse.load.streaming import StreamingPackedDataset


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The row group that a lane reads from."""

    file: int
    """Number of its file in the epoch's order."""
    first: int
    """Row of the file, in the epoch's order of groups, that the group begins with."""
    rows: Sequence[Any]
    """In the epoch's order, as `Reader.view` gives them."""


class Reader:
    """Reads the row at any place of the global order of one epoch."""

    columns: ClassVar[list[str] | None] = None
    """Those that are read; None: all."""

    def __init__(self, data: "StreamingPackedDataset", epoch: int) -> None:
        self._data = data
        self._entries = data._entries
        self._seed = _mix(data._order["seed"], epoch) if data._order["shuffle"] else None
        if self._seed is not None:
            order = permutation(len(self._entries), self._seed)
            self._entries = [self._entries[number] for number in order]
        self._file_starts = np.cumsum([0, *(entry.rows for entry in self._entries)])
        # 10 packs in 3 lanes: 4 + 3 + 3, which begin at 0 4 7.
        shorter, num_longer = divmod(data.num_rows, data._order["lanes"])
        lengths = [shorter + (lane < num_longer) for lane in range(data._order["lanes"])]
        self._lane_starts = np.cumsum([0, *lengths])
        self._groups: dict[int, _Group] = {}
        self._files: dict[int, RowGroups] = {}

    @staticmethod
    def view(table: pa.Table, order: npt.NDArray[np.int64] | None) -> Sequence[Any]:
        """Return the rows of a row group in this order."""
        return ArrowRows(table, indices=order)

    def row(self, place: int) -> Any:
        """Return the row at a place; neighbours of a lane come from one row group."""
        # Place 5 of 3 lanes is the pack behind the first one of lane 2: 7 + 1 in the row of files.
        offset, lane = divmod(place, len(self._lane_starts) - 1)
        position = int(self._lane_starts[lane]) + offset
        file = int(np.searchsorted(self._file_starts, position, side="right")) - 1
        within = position - int(self._file_starts[file])
        group = self._groups.get(lane)
        if group is None or group.file != file or not 0 <= within - group.first < len(group.rows):
            self._groups.pop(lane, None)  # freed before the next one is decoded
            group = self._groups[lane] = self._read_group(file, within)
            in_use = {each.file for each in self._groups.values()}
            self._files = {n: each for n, each in self._files.items() if n in in_use}
        return group.rows[within - group.first]

    def _read_group(self, number: int, within: int) -> _Group:
        """Read the row group that holds row `within` of a file, in the epoch's order of groups."""
        if number not in self._files:
            data = self._data
            self._files[number] = RowGroups(
                data._opened, self._entries[number], data._cache, data._verify
            )
        file = self._files[number]
        groups = np.arange(len(file.sizes))
        if self._seed is not None:
            groups = permutation(len(file.sizes), _mix(self._seed, number))
        starts = np.cumsum([0, *file.sizes[groups]])
        slot = int(np.searchsorted(starts, within, side="right")) - 1
        group = int(groups[slot])
        order = None
        if self._seed is not None:
            order = permutation(int(file.sizes[group]), _mix(self._seed, number, group))
        rows = self.view(file.read(group, self.columns), order)
        return _Group(file=number, first=int(starts[slot]), rows=rows)


def _mix(*parts: int) -> int:
    state = 0
    for part in parts:
        state = splitmix64(state ^ splitmix64(part))
    return state >> 1


class RowGroups:
    """The row groups of a published file; of an Arrow or JSON Lines file, its batches.

    Args:
        opened: the version.
        entry: one of its data files.
        cache: folder of local copies.
        verify: compare its sha256 once in this process.

    Raises:
        IntegrityError: the store's bytes are not the published ones, or no file of a run.
    """

    def __init__(self, opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._parquet: pq.ParquetFile | None = None
        self._uri = opened.uri(entry)
        if entry.key.endswith(".parquet"):
            path = verified_file(opened, entry, cache, verify)
            try:
                self._parquet = pq.ParquetFile(path, page_checksum_verification=True)
            except (pa.ArrowException, OSError) as error:
                raise IntegrityError(f"'{self._uri}' cannot be read: {error}") from None
            about = self._parquet.metadata
            check_footer(about, entry)
            sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        else:
            path = mapped_file(opened, entry, cache, verify)
            with pa.memory_map(str(path)) as source:
                self._batches = pa.ipc.open_stream(source).read_all().to_batches()
            sizes = [batch.num_rows for batch in self._batches]
        self.sizes: npt.NDArray[np.int64] = np.array(sizes, dtype=np.int64)
        """Rows of each group."""

    def read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of a group, all of their columns or some.

        Raises:
            IntegrityError: the file is damaged.
        """
        if self._parquet is None:
            table = pa.Table.from_batches([self._batches[group]])
            return table if columns is None else table.select(columns)
        try:
            table = self._parquet.read_row_group(group, columns)
        except MemoryError:  # of Arrow, too
            raise
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError(f"'{self._uri}' cannot be read: {error}") from None
        return table
