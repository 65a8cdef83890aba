"""Stream packs in a global order that does not depend on the number of ranks and workers.

The files of an epoch, shuffled by seed and epoch, form one sequence of packs, which is cut into
`lanes` of about equal length. Pack `i` of the global order is the next pack of lane `i mod lanes`,
and rank `r` of `W` reads packs `r`, `r + W`, `r + 2W`, ... So each pack is read once with any world
size, and a run that stopped after `n` packs resumes with pack `n`, even with a different world
size. If `W` divides `lanes`, or the reverse, each rank reads only the files of its own lanes.

    10 packs, 3 lanes of 4 + 3 + 3:  lane 0: packs 0 1 2 3    lane 1: 4 5 6    lane 2: 7 8 9
    global order:                    0 4 7 1 5 8 2 6 9 3
    2 ranks:                         rank 0: 0 7 5 2 9        rank 1: 4 1 8 6 3

Memory: one decoded row group (about 2 M tokens or 16 MB; the limit is 256 MB) and an open file per
lane that a rank reads, plus `prefetch` rows. A file is downloaded and its digest checked when a
lane reaches it. Before the first epoch on a machine, a worker process decodes it once to measure
how much memory its row groups take.
"""

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from packhouse.errors import ConfigError
from packhouse.load import mapped_rows
from packhouse.load.dataset import ArrowRows, Row
from packhouse.load.known_packs import MOST_ROWS, users_level, watch_read, watch_rows
from packhouse.pack.shuffle import permutation, splitmix64
from packhouse.store import FileEntry, OpenVersion, open_store
from packhouse.store.version_reader import reading

# Indices into the state shared between processes. From `_ENDED` on: 1 for each reader of the pass
# (each worker, or the process itself) that has reached the end of its part.
_EPOCH, _START, _NUM_WORKERS, _ENDED = range(4)
_MOST_WORKERS = 4096  # 8 bytes each of shared memory


class StreamingPackedDataset(torch.utils.data.IterableDataset):
    """Packs of a published version, shuffled, divided among ranks and workers, and resumable.

    Args:
        uri: `<store>/<dataset>`, as for `load_packed`.
        version: a ref, a version or a version ID.
        split: `train` or `eval`.
        shuffle: shuffle by seed and epoch; False keeps the published order.
        seed: seed for the order.
        rank: rank of this process; by default from torch.distributed, else RANK, else 0. Ranks that
            train one replica together (context, tensor or pipeline parallel) must pass the number
            of their replica, so that they read the same packs.
        world_size: number of ranks, or of replicas; by default from torch.distributed, else
            WORLD_SIZE, else 1.
        batch_size: batch size of the DataLoader, by default 1. Workers take turns after this many
            rows, so that batches have the same order with any number of workers. Without it,
            `state_dict` does not work with several workers, because the first batch of two workers
            may be rows 0 2 4 6.
        lanes: parts of the global order that are read in parallel; keep it the same when resuming.
        prefetch: maximum number of rows that a thread reads ahead; 0: no thread.
        drop_uneven: skip the last few packs of an epoch, so that all ranks have the same number.
        cache: folder of local copies, as for `load_packed`.
        verify: compare each file's sha256 before a process first reads it, as for `load_packed`.

    Call `set_epoch` before every epoch. After `load_state_dict`, passes start at the loaded state
    until one of them reaches its end; the next pass covers a whole epoch. The state of a finished
    pass has nothing left in its epoch. Workers read ahead, so if a pass is abandoned within its
    last batches, they may already have finished it. With `transformers.Trainer` or accelerate,
    which distribute batches themselves, set `rank=0, world_size=1`, and on several ranks also
    `accelerator_config={"dispatch_batches": False}`.

    Raises:
        ConfigError: a rank, size or count is invalid, or `drop_uneven` would drop all packs,
            because there are fewer packs than ranks.
        VersionNotFoundError: the dataset, version or split does not exist.

    Example:
        >>> from packhouse import prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> ranks = [StreamingPackedDataset(folder / "numbers", rank=n, world_size=2,
        ...     cache=folder / "cache") for n in (0, 1)]
        >>> sum(len(list(rank)) for rank in ranks) == version.train.num_rows
        True
    """

    def __init__(
        self,
        uri: str,
        version: str = "latest",
        split: str = "train",
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        lanes: int = 8,
        prefetch: int = 64,
        drop_uneven: bool = False,
        cache: str | Path | None = None,
        verify: bool = True,
    ) -> None:
        self._verify = verify
        self._opened, self._entries = mapped_rows.open_split(uri, version, split)
        self._process = os.getpid()
        self.rank, self.world_size = _find_rank(rank, world_size)
        self._is_rank_given = rank is not None
        self._has_batch_size = batch_size is not None
        batch_size = 1 if batch_size is None else batch_size
        if batch_size < 1 or lanes < 1 or prefetch < 0:
            raise ConfigError(
                f"batch_size {batch_size} and lanes {lanes} must be positive, and prefetch "
                f"{prefetch} must not be negative"
            )
        balance = self._opened.manifest.facts.configuration.pack.balance
        if shuffle and balance > 1:
            warnings.warn(
                f"this version has pack.balance {balance}, which shuffle=True undoes. Set "
                "shuffle=False to keep packs of equal cost in the same step.",
                stacklevel=users_level(),
            )
        self._cache = mapped_rows.cache_folder(cache)
        self._batch_size, self._prefetch, self._drop_uneven = batch_size, prefetch, drop_uneven
        self._order: dict[str, Any] = {
            "dataset": self._opened.dataset,
            "version": self._opened.version,
            "split": split,
            "shuffle": shuffle,
            "seed": int(seed),
            "lanes": lanes if shuffle else 1,
        }
        """Everything that decides the order except the epoch; part of every state."""
        self.num_rows = sum(entry.rows for entry in self._entries)
        if drop_uneven and self.num_rows < self.world_size:
            raise ConfigError(
                f"drop_uneven drops all {self.num_rows:,} packs, which are too few for "
                f"{self.world_size:,} ranks. Remove it, use fewer ranks, or pack with a "
                "smaller seq_len."
            )
        # Shared with worker processes: epoch, packs done before this pass, number of workers that
        # read it, and which of them have reached the end.
        self._shared = torch.zeros(_ENDED + _MOST_WORKERS, dtype=torch.int64)
        self._shared.share_memory_()
        self._seen = 0  # rows that this process has returned in this pass
        self._skip = 0  # rows of a worker's part that it had returned before a resume

    @property
    def opened(self) -> OpenVersion:
        """The version being read."""
        return self._opened

    def __len__(self) -> int:
        """Return the number of rows left for this rank in this epoch."""
        return self._num_left(0 if self._is_over() else int(self._shared[_START]))

    def _num_left(self, start: int) -> int:
        left = self.num_rows - start
        if self._drop_uneven:
            return left // self.world_size
        return len(range(self.rank, left, self.world_size))

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return int(self._shared[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; a different epoch starts at its beginning.

        With the same epoch, the next pass starts at the loaded state, whatever was read since.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}. Set it to 0 or more.")
        if epoch != self.epoch:
            self._start_at(epoch, 0)
        self._shared[_ENDED:] = 0

    def _start_at(self, epoch: int, packs: int, skip: int = 0) -> None:
        self._shared.zero_()
        self._shared[_EPOCH], self._shared[_START] = epoch, packs
        self._seen, self._skip = 0, skip

    def _is_over(self) -> bool:
        """Return True if all readers of the last pass have reached the end."""
        return bool(self._shared[_ENDED:][: max(1, int(self._shared[_NUM_WORKERS]))].all())

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, num_workers = (0, 0) if worker is None else (worker.id, worker.num_workers)
        dist = torch.distributed
        if not self._is_rank_given and dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            if (rank, world_size) != (self.rank, self.world_size):
                raise ConfigError(
                    f"this is rank {rank} of {world_size}, but the dataset was created for rank "
                    f"{self.rank} of {self.world_size} before torch.distributed was initialized, "
                    "so ranks would read the same packs. Create it after init_process_group, or "
                    "pass rank and world_size."
                )
        if self._process != os.getpid():  # after a fork, the parent's connections must not be used
            store = open_store(self._opened.store.uri)
            self._opened, self._process = replace(self._opened, store=store), os.getpid()
        # After a finished pass, start a whole one. Check before setting the number of workers.
        if self._is_over():
            self._shared[_START] = 0
            self._shared[_ENDED:] = 0
        self._shared[_NUM_WORKERS] = num_workers
        self._shared[_ENDED + number] = 0  # it may be set from an abandoned pass
        start = int(self._shared[_START])
        # Workers take turns by batches. Batches of 2, 3 workers, worker 1: rows 2 3, 8 9, ...
        places = (
            start + self.rank + row * self.world_size
            for row in range(self._num_left(start))
            if row // self._batch_size % (num_workers or 1) == number
        )
        self._seen, skip, self._skip = self._skip, self._skip, 0
        # `places` counts this worker's rows only, so rows before a resume are skipped here.
        rows = map(Reader(self, self.epoch).row, islice(places, skip, None))
        # Not a generator itself, so that everything above runs when the pass begins.
        return self._pass(rows, number)

    def _pass(self, rows: Iterator[Row], number: int) -> Iterator[dict[str, torch.Tensor]]:
        for row in read_ahead(rows, self._prefetch):
            watch = watch_rows if self._seen < MOST_ROWS else watch_read
            watch([(row.input_ids, row.seq_lengths)])
            self._seen += 1
            yield row.to_tensors()
        self._shared[_ENDED + number] = 1

    def _dealing(self) -> dict[str, int]:
        """Return the settings that decide which rows a worker reads."""
        worker = torch.utils.data.get_worker_info()
        num_workers = 0 if worker is None else worker.num_workers
        own = {"world_size": self.world_size, "num_workers": num_workers}
        return own | {"batch_size": self._batch_size}

    def state_dict(self, rows_seen: int | None = None) -> dict[str, Any]:
        """Return the position of the pass, which is the same on all ranks after equally many rows.

        At the end of an epoch the first ranks may read one row more than the others, so save the
        state of rank 0, which has always read the most.

        Args:
            rows_seen: rows that this rank's training loop has received in this pass. Required with
                worker processes, which read ahead; without workers the dataset counts itself. In a
                worker (torchdata's StatefulDataLoader calls each one) it counts its own part.

        Raises:
            ConfigError: there are workers and `rows_seen` is missing; there are several and the
                dataset has no `batch_size`; or `rows_seen` is negative.
        """
        in_worker = torch.utils.data.get_worker_info() is not None
        if rows_seen is not None and rows_seen < 0:
            raise ConfigError(f"rows_seen is {rows_seen}. Set it to 0 or more.")
        state = self._order | {"epoch": self.epoch}
        start = int(self._shared[_START])
        if in_worker:
            return state | {"packs": start, "worker_rows": self._seen} | self._dealing()
        if rows_seen is None and self._shared[_NUM_WORKERS]:
            raise ConfigError(
                "worker processes read ahead of training. Call state_dict(rows_seen=<batches "
                "received in this pass> * <batch size>)."
            )
        num_workers = int(self._shared[_NUM_WORKERS])
        if num_workers > 1 and not self._has_batch_size:
            raise ConfigError(
                f"{num_workers} workers take turns by batches, so without batch_size it is unknown "
                "which rows were read. Pass the DataLoader's batch_size to StreamingPackedDataset."
            )
        if rows_seen is None and self._is_over():
            left_out = (self.num_rows - start) % self.world_size if self._drop_uneven else 0
            return state | {"packs": self.num_rows - left_out}
        done = start + (self._seen if rows_seen is None else rows_seen) * self.world_size
        return state | {"packs": min(done, self.num_rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a state, with the same or a different world size.

        Raises:
            ConfigError: the state is of another version, order or split, or is not a state.
        """
        epoch, packs, skip = self.check_state(state)
        self._start_at(epoch, min(packs, self.num_rows), skip)

    def check_state(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        """Check a state of this dataset, and return its epoch, packs and rows of a worker.

        Raises:
            ConfigError: the state is of another version, order or split, or is not a state.
        """
        for name in (*self._order, "epoch", "packs"):
            if not isinstance(state, Mapping) or name not in state:
                raise ConfigError(
                    f"the loader state has no '{name}'. Pass the value that state_dict() returned."
                )
        counts = (state["epoch"], state["packs"], state.get("worker_rows", 0))
        if any(not isinstance(count, int) or not 0 <= count < 2**63 for count in counts):
            raise ConfigError(
                "the loader state has a negative or non-integer count. Pass the value that "
                "state_dict() returned."
            )
        for name, own in self._order.items():
            if state[name] != own:
                raise ConfigError(
                    f"the loader state was saved with {name} {state[name]!r:.100}, but this "
                    f"dataset has {own!r}. Use the same value, or start a new epoch."
                )
        if "worker_rows" not in state:
            return counts
        if torch.utils.data.get_worker_info() is None:
            raise ConfigError(
                "the loader state is from a DataLoader worker. Pass the value that "
                "state_dict(rows_seen=...) returned outside of workers."
            )
        for name, own in self._dealing().items():
            if state.get(name) != own:
                raise ConfigError(
                    f"the state of a worker was saved with {name} {state.get(name)!r:.100}, but "
                    f"here it is {own}. Use the same value, or save state_dict(rows_seen=...), "
                    "which works with any value."
                )
        return counts


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Row group that a lane reads from."""

    file: int
    """Number of the file in the epoch's order."""
    first: int
    """First row of the group within the file, in the epoch's order of groups."""
    rows: Sequence[Any]
    """Rows in the epoch's order, from `Reader.view`."""


class Reader:
    """Reads the row at any place in the global order of an epoch."""

    columns: ClassVar[list[str] | None] = None
    """Columns to read; None: all."""

    def __init__(self, data: StreamingPackedDataset, epoch: int) -> None:
        self._data = data
        self._entries = data._entries
        self._seed = _mix(data._order["seed"], epoch) if data._order["shuffle"] else None
        if self._seed is not None:
            order = permutation(len(self._entries), self._seed)
            self._entries = [self._entries[number] for number in order]
        self._file_starts = np.cumsum([0, *(entry.rows for entry in self._entries)])
        # 10 packs in 3 lanes: 4 + 3 + 3 packs, starting at 0 4 7.
        shorter, num_longer = divmod(data.num_rows, data._order["lanes"])
        lengths = [shorter + (lane < num_longer) for lane in range(data._order["lanes"])]
        self._lane_starts = np.cumsum([0, *lengths])
        self._groups: dict[int, _Group] = {}
        self._files: dict[int, RowGroups] = {}

    @staticmethod
    def view(table: pa.Table, order: npt.NDArray[np.int64] | None) -> Sequence[Any]:
        """Return the rows of a row group in the given order."""
        return ArrowRows(table, indices=order)

    def row(self, place: int) -> Any:
        """Return the row at a place; consecutive rows of a lane come from one row group."""
        # With 3 lanes, place 5 is the second pack of lane 2, so position 7 + 1 in the files.
        offset, lane = divmod(place, len(self._lane_starts) - 1)
        position = int(self._lane_starts[lane]) + offset
        file = int(np.searchsorted(self._file_starts, position, side="right")) - 1
        within = position - int(self._file_starts[file])
        group = self._groups.get(lane)
        if group is None or group.file != file or not 0 <= within - group.first < len(group.rows):
            self._groups.pop(lane, None)  # free its memory before decoding the next one
            if file not in self._files:
                opened, entry, data = self._data.opened, self._entries[file], self._data
                self._files[file] = RowGroups(opened, entry, data._cache, data._verify)
            groups = self._files[file]
            order = np.arange(len(groups.sizes))
            if self._seed is not None:
                order = permutation(len(order), _mix(self._seed, file))
            starts = np.cumsum([0, *groups.sizes[order]])
            slot = int(np.searchsorted(starts, within, side="right")) - 1
            number, rows_order = int(order[slot]), None
            if self._seed is not None:
                size = int(groups.sizes[number])
                rows_order = permutation(size, _mix(self._seed, file, number))
            rows = self.view(groups.read(number, self.columns), rows_order)
            group = _Group(file=file, first=int(starts[slot]), rows=rows)
            self._groups[lane] = group
            in_use = {each.file for each in self._groups.values()}
            # Close the others: a version may have more files than a process may open.
            self._files = {n: each for n, each in self._files.items() if n in in_use}
        return group.rows[within - group.first]


def _mix(*parts: int) -> int:
    state = 0
    for part in parts:
        state = splitmix64(state ^ splitmix64(part))
    return state >> 1


class RowGroups:
    """Row groups of a published Parquet file, or batches of an Arrow or JSON Lines file.

    Args:
        opened: version.
        entry: one of its data files.
        cache: folder of local copies.
        verify: compare its sha256 once in this process.

    Raises:
        IntegrityError: the store's bytes are not the published ones, or not a valid file.
    """

    def __init__(self, opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._parquet: pq.ParquetFile | None = None
        self._uri = opened.uri(entry)
        if entry.key.endswith(".parquet"):
            path = mapped_rows.verified_file(opened, entry, cache, verify)
            mapped_rows.check_row_groups(path, entry, cache)
            self._parquet = pq.ParquetFile(path, page_checksum_verification=True)
            about = self._parquet.metadata
            sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        else:
            path = mapped_rows.mapped_file(opened, entry, cache, verify)
            with pa.memory_map(str(path)) as source:
                self._batches = pa.ipc.open_stream(source).read_all().to_batches()
            sizes = [batch.num_rows for batch in self._batches]
        self.sizes: npt.NDArray[np.int64] = np.array(sizes, dtype=np.int64)
        """Number of rows of each group."""

    def read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of a group with all or some columns.

        Raises:
            IntegrityError: the file is damaged.
        """
        if self._parquet is None:
            table = pa.Table.from_batches([self._batches[group]])
            return table if columns is None else table.select(columns)
        # One row group is about 2 M tokens or 16 MB, and each lane holds one.
        with reading(self._uri):
            return self._parquet.read_row_group(group, columns)


def _find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError("only one of rank and world_size is set. Pass both, or neither.")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            # torchrun sets them before a process group exists.
            found = {"RANK": "0", "WORLD_SIZE": "1"}
            for name, default in found.items():
                found[name] = text = os.environ.get(name, default)
                if not text.isdecimal():
                    raise ConfigError(
                        f"environment variable {name} is '{text}'. Set it to an integer."
                    )
            rank, world_size = map(int, found.values())
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} must be at least 0 and below world_size {world_size}")
    return rank, world_size


def read_ahead(rows: Iterator[Row], depth: int) -> Iterator[Row]:
    """Yield the same rows, reading up to `depth` ahead in a thread that ends with the iterator.

    The thread hands over several rows at a time, because handing over a row takes longer than
    reading it.
    """
    if depth < 1:
        yield from rows
        return
    step = max(1, depth // 4)
    # Reading 64 ahead, 16 at a time: three lists wait while a fourth is being consumed.
    num_waiting = max(1, (depth + 1) // step - 1)
    waiting: deque[Future[list[Row]]] = deque()
    thread = ThreadPoolExecutor(1, "packhouse-prefetch")
    # Keep a local reference: at exit, modules are cleared before the last iterator closes.
    is_exiting = sys.is_finalizing
    try:
        while True:
            while len(waiting) <= num_waiting:
                waiting.append(thread.submit(lambda: list(islice(rows, step))))
            some = waiting.popleft().result()
            yield from some
            if len(some) < step:
                return
    finally:
        if not is_exiting():  # at exit, Python has already stopped the thread
            thread.shutdown(cancel_futures=True)
