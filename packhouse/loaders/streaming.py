"""Stream packs in a global order that does not depend on how many ranks read it.

The files of an epoch, shuffled by seed and epoch, are one long row of packs, cut into `lanes` of
equal length. Pack `i` of the global order is the next one of lane `i mod lanes`, and rank `r` of
`W` reads packs `r`, `r + W`, `r + 2W`, ... So any world size sees each pack once, a run that
stopped after `n` packs goes on with pack `n` whatever the new world size, and where `W` divides
`lanes` (or the other way round) each rank reads only its own lanes' files.

Memory: a decoded row group (about 2 M tokens, 16 MB) and an open file for each lane that a rank
reads, and `prefetch` rows. A file is fetched and its digest checked when a lane comes to it.
"""

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from packhouse.errors import ConfigError, IntegrityError
from packhouse.loaders.dataset import row_to_tensors
from packhouse.loaders.rows import ArrowRows, Row
from packhouse.loaders.versions import (
    cache_folder,
    check_verify,
    mapped_file,
    open_split,
    verified_file,
)
from packhouse.packing.shuffle import permutation, splitmix64
from packhouse.store import FileEntry, OpenVersion, open_store

__all__ = ["StreamingPackedDataset"]

# Places in the state that processes share. The last is followed by those of further workers.
_EPOCH, _START, _NUM_WORKERS, _IS_OVER, _FIRST_WORKER = range(5)
_MOST_WORKERS = 4096


class StreamingPackedDataset(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Packs of a published version, dealt to ranks and workers, shuffled, resumable mid-epoch.

    Args:
        uri: `<store>/<dataset>` as for `load_packed`.
        version: a ref, a version or a version id.
        split: `train` or `eval`.
        shuffle: by seed and epoch; off, the published order.
        seed: another seed is another order.
        rank: of this process; by default torch.distributed's, else RANK, else 0.
        world_size: number of ranks; by default torch.distributed's, else WORLD_SIZE, else 1.
        batch_size: rows of a batch of the DataLoader. Its workers take turns by so many rows, so
            that batches come in the same order with any number of workers.
        lanes: parts of the global order that are read side by side; the same at every resume.
        prefetch: most rows that a thread reads ahead, 2 at least; 0: no thread.
        drop_uneven: leave out the last few packs of an epoch, so that every rank has as many.
        cache: folder of local copies, as for `load_packed`.
        verify: compare each file's sha256 before a process first reads it, as for `load_packed`.

    Call `set_epoch` before every epoch. After `load_state_dict` passes start where the state says
    until one of them came to its end; the next one is a whole one. The state of a pass that came to
    its end has nothing left in its epoch. Under `transformers.Trainer` or accelerate, which deal
    out batches themselves, set `rank=0, world_size=1`.

    Raises:
        ConfigError: a rank, size or count that makes no sense; or `drop_uneven` with fewer packs
            than ranks, which would leave nothing.
        VersionNotFoundError: no such dataset, version or split.
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
        batch_size: int = 1,
        lanes: int = 8,
        prefetch: int = 64,
        drop_uneven: bool = False,
        cache: str | Path | None = None,
        verify: bool = True,
    ) -> None:
        self._verify = check_verify(verify)
        self._opened, self._entries = open_split(uri, version, split)
        self._process = os.getpid()
        self.rank, self.world_size = _place(rank, world_size)
        if batch_size < 1 or lanes < 1 or prefetch < 0:
            raise ConfigError(
                f"batch_size {batch_size} and lanes {lanes} must be positive, and prefetch "
                f"{prefetch} not negative"
            )
        self._cache = cache_folder(cache)
        self._shuffle, self._seed, self._split = shuffle, int(seed), split
        self._lanes = lanes if shuffle else 1
        self._batch_size, self._prefetch, self._drop_uneven = batch_size, prefetch, drop_uneven
        self.num_rows = sum(entry.rows for entry in self._entries)
        if drop_uneven and self.num_rows < self.world_size:
            raise ConfigError(
                f"drop_uneven leaves nothing of {self.num_rows:,} packs for {self.world_size:,} "
                "ranks; leave it out, take fewer ranks, or pack with a smaller seq_len"
            )
        # Shared with worker processes: epoch, packs done before this pass, workers that read it,
        # whether it came to its end, and whether each worker's part of it did.
        self._shared = torch.zeros(_FIRST_WORKER + _MOST_WORKERS, dtype=torch.int64)
        self._shared.share_memory_()
        self._seen = 0  # rows that this process was given in this pass
        self._skip = 0  # rows of a worker's own part that it was given before a resume

    def __len__(self) -> int:
        """Rows of this rank that are left in this epoch."""
        return self._num_left(0 if self._is_over() else int(self._shared[_START]))

    def _num_left(self, start: int) -> int:
        left = self.num_rows - start
        if self._drop_uneven:
            return left // self.world_size
        return len(range(self.rank, left, self.world_size))

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._shared[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; another epoch than before begins at its start."""
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; it must not be negative")
        if epoch != self.epoch:
            self._start_at(epoch, 0)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        if self._process != os.getpid():  # forked: connections of the parent are not ours to use
            store = open_store(self._opened.store.uri)
            self._opened, self._process = replace(self._opened, store=store), os.getpid()
        start = self._begin(worker)
        self._seen, skip, self._skip = self._skip, self._skip, 0
        places = itertools.islice(self._places(start, worker), skip, None)
        return self._pass(_Order(self, self.epoch), places, worker)

    def _pass(
        self, order: "_Order", places: Iterator[int], worker: Any
    ) -> Iterator[dict[str, torch.Tensor]]:
        for row in _ahead((order.row(place) for place in places), self._prefetch):
            self._seen += 1
            yield row_to_tensors(row)
        self._shared[_IS_OVER if worker is None else _FIRST_WORKER + worker.id] = 1

    def _start_at(self, epoch: int, packs: int, skip: int = 0) -> None:
        self._shared.zero_()
        self._shared[_EPOCH], self._shared[_START] = epoch, packs
        self._seen, self._skip = 0, skip

    def _begin(self, worker: Any) -> int:
        """Packs done before the pass that begins: none if the pass before it came to its end."""
        self._shared[_NUM_WORKERS] = 0 if worker is None else worker.num_workers
        if self._is_over():
            self._shared[_START] = 0
            self._shared[_IS_OVER:] = 0
        return int(self._shared[_START])

    def _is_over(self) -> bool:
        """Whether the last pass came to its end, by all who read it."""
        num_workers = int(self._shared[_NUM_WORKERS])
        if num_workers:
            return bool(self._shared[_FIRST_WORKER : _FIRST_WORKER + num_workers].all())
        return bool(self._shared[_IS_OVER])

    def state_dict(self, rows_seen: int | None = None) -> dict[str, Any]:
        """Where the pass stands; equal on every rank that has taken as many rows.

        At the end of an epoch the first ranks may take a row more than the others: keep the state
        of rank 0, which is never behind.

        Args:
            rows_seen: rows that this rank's training loop took in this pass. Needed with worker
                processes, which read ahead of it; without them the dataset counts itself.

        Raises:
            ConfigError: workers read, and `rows_seen` is missing; or it is negative.
        """
        in_worker = torch.utils.data.get_worker_info() is not None
        if rows_seen is not None and rows_seen < 0:
            raise ConfigError(f"rows_seen is {rows_seen}; it must not be negative")
        if rows_seen is None and self._shared[_NUM_WORKERS] and not in_worker:
            raise ConfigError(
                "DataLoader workers read ahead of the training loop; call "
                "state_dict(rows_seen=<batches taken in this pass> * <batch size>)"
            )
        state = {
            "dataset": self._opened.dataset,
            "version": self._opened.version,
            "split": self._split,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "lanes": self._lanes,
            "epoch": self.epoch,
        }
        if in_worker:
            place = {"packs": int(self._shared[_START]), "worker_rows": self._seen}
        else:
            taken = self._seen if rows_seen is None else rows_seen
            done = int(self._shared[_START]) + taken * self.world_size
            is_over = rows_seen is None and self._is_over()
            place = {"packs": self.num_rows if is_over else min(done, self.num_rows)}
        return state | place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on this or another world size.

        Raises:
            ConfigError: the state is of another version, order or split, or is no state.
        """
        own = self.state_dict(rows_seen=0)
        needed = ("dataset", "version", "split", "shuffle", "seed", "lanes", "epoch", "packs")
        missing = [key for key in needed if key not in state]
        if missing:
            raise ConfigError(f"the state has no '{missing[0]}'; give what state_dict() returned")
        counts = [state["epoch"], state["packs"], state.get("worker_rows", 0)]
        if any(not isinstance(count, int) or count < 0 for count in counts):
            raise ConfigError(
                "the state counts less than 0 packs, or in no whole numbers; give what "
                "state_dict() returned"
            )
        if "worker_rows" in state and torch.utils.data.get_worker_info() is None:
            raise ConfigError(
                "the state is that of one DataLoader worker; give what "
                "state_dict(rows_seen=...) returned outside of workers"
            )
        for key in needed[:6]:
            if state[key] != own[key]:
                raise ConfigError(
                    f"the state was taken with {key} {state[key]!r}, this dataset has "
                    f"{own[key]!r}; give the same, or start a new epoch"
                )
        packs = min(state["packs"], self.num_rows)
        self._start_at(state["epoch"], packs, state.get("worker_rows", 0))

    def _places(self, start: int, worker: Any) -> Iterator[int]:
        """Places in the global order that this rank and worker read, in turn."""
        for number in range(self._num_left(start)):
            if worker is None or number // self._batch_size % worker.num_workers == worker.id:
                yield start + self.rank + number * self.world_size


class _Order:
    """The global order of one epoch, and the row at each place of it."""

    def __init__(self, data: StreamingPackedDataset, epoch: int) -> None:
        self._open = partial(_File, data._opened, cache=data._cache, verify=data._verify)
        self._mix: Callable[..., int] | None = None
        entries = data._entries
        if data._shuffle:
            seed = _mixed(data._seed, epoch)
            self._mix = lambda *parts: _mixed(seed, *parts)
            entries = [entries[i] for i in permutation(len(entries), seed)]
        self._entries = entries
        self._starts = np.cumsum([0, *(entry.rows for entry in entries)])
        short, longer = divmod(data.num_rows, data._lanes)
        lengths = [short + (lane < longer) for lane in range(data._lanes)]
        self._lane_starts = np.cumsum([0, *lengths])
        self._groups: dict[int, tuple[int, int, ArrowRows, npt.NDArray[Any] | None]] = {}
        self._files: dict[int, _File] = {}

    def row(self, place: int) -> Row:
        """The row at a place; neighbours of a lane come from one row group."""
        num_lanes = len(self._lane_starts) - 1
        lane, offset = place % num_lanes, place // num_lanes
        position = int(self._lane_starts[lane]) + offset
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        within = position - int(self._starts[number])
        held = self._groups.get(lane)
        if held is None or held[0] != number or not 0 <= within - held[1] < len(held[2]):
            self._groups.pop(lane, None)
            held = self._groups[lane] = self._group(number, within)
            in_use = {number for number, *_ in self._groups.values()}
            self._files = {n: file for n, file in self._files.items() if n in in_use}
        _, first, rows, order = held
        return rows[within - first if order is None else int(order[within - first])]

    def _group(
        self, number: int, within: int
    ) -> tuple[int, int, ArrowRows, npt.NDArray[Any] | None]:
        """The row group that holds row `within` of a file, in the epoch's order of groups."""
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = self._open(self._entries[number])
        groups = np.arange(len(file.sizes))
        if self._mix is not None:
            groups = permutation(len(file.sizes), self._mix(number)).astype(np.int64)
        starts = np.cumsum([0, *file.sizes[groups]])
        slot = int(np.searchsorted(starts, within, side="right")) - 1
        rows = file.read(int(groups[slot]))
        order = None
        if self._mix is not None:
            order = permutation(len(rows), self._mix(number, int(groups[slot])))
        return number, int(starts[slot]), rows, order


class _File:
    """A published file, read a row group at a time."""

    def __init__(self, opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool) -> None:
        self._batches: list[pa.RecordBatch] | None = None
        self._parquet: pq.ParquetFile | None = None
        if entry.key.endswith(".parquet"):
            path = verified_file(opened, entry, cache, verify)
            self._parquet = pq.ParquetFile(path, page_checksum_verification=True)
            about = self._parquet.metadata
            sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        else:
            with pa.memory_map(str(mapped_file(opened, entry, cache, verify))) as source:
                self._batches = pa.ipc.open_stream(source).read_all().to_batches()
            sizes = [batch.num_rows for batch in self._batches]
        self.sizes = np.array(sizes, dtype=np.int64)
        if int(self.sizes.sum()) != entry.rows:
            raise IntegrityError(
                f"'{opened.uri(entry)}' holds {int(self.sizes.sum()):,} rows, and its version "
                f"counts {entry.rows:,}; publish the version again",
                key=entry.key,
            )

    def read(self, group: int) -> ArrowRows:
        if self._parquet is not None:
            return ArrowRows(self._parquet.read_row_group(group))
        assert self._batches is not None
        return ArrowRows(pa.Table.from_batches([self._batches[group]]))


def _mixed(*parts: int) -> int:
    state = 0
    for part in parts:
        state = splitmix64(state ^ splitmix64(part))
    return state >> 1


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError("give rank and world_size both, or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = _environment("RANK", 0), _environment("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not one of {world_size} ranks")
    return rank, world_size


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} is '{text}', no whole number") from None


def _ahead(rows: Iterator[Row], depth: int) -> Iterator[Row]:
    """The same rows, read up to `depth` ahead in a thread that ends with the iterator.

    Rows change threads a few at a time: one by one, handing them over took longer than reading.
    """
    if depth < 1:
        yield from rows
        return
    step = max(1, depth // 4)
    # The reader fills one list more than the queue holds, and one is being given out.
    ready: queue.Queue[list[Row] | BaseException] = queue.Queue(max(1, depth // step - 2))
    is_over = threading.Event()

    def put(item: list[Row] | BaseException) -> None:
        while not is_over.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            while not is_over.is_set():
                some = list(itertools.islice(rows, step))
                put(some)
                if len(some) < step:
                    return
        except BaseException as error:  # raised again by the reader
            put(error)

    thread = threading.Thread(target=read, name="packhouse-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            some = ready.get()
            if isinstance(some, BaseException):
                raise some
            yield from some
            if len(some) < step:
                return
    finally:
        is_over.set()
        thread.join()
