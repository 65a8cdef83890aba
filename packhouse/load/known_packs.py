"""Remember packs, so that a guarded model notices lost record boundaries; warn without a guard.

A batch does not show how many records its rows had before a collator or trainer changed them. So
this process remembers where the second record of each pack begins. If a batch has the same tokens
at the same place of a single record, its boundaries are lost. A place is one number, made of 48
tokens: 16 spread over the first record, and 16 on both sides of the boundary. Nothing else is read,
about 1 us per pack, and it also finds packs that a trainer cut off at a later token.

Packs are remembered by `load_packed` and `pack_dataset`, and as soon as a model is guarded, from
every `datasets.Dataset` with `input_ids` and `seq_lengths`, whoever loads it: published Parquet
files are often read by `datasets.load_dataset`. The packs of a `PackedDataset` or a
`StreamingPackedDataset` may exist only when they are read; see `watch_read`.
"""

import functools
import gc
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.records.arrays import flat_list

Ints = npt.NDArray[np.integer[Any]]
Packs = Iterable[tuple[Ints, Ints]]
"""`input_ids` and `seq_lengths` of each pack."""

GUARDS: set[object] = set()
"""Active handles of `enable_packing`."""

MOST_ROWS = 1024
"""Rows of a `PackedDataset` that are remembered before they are read."""

_OURS = ("packhouse", "functools", "datasets", "torch")
"""Packages whose lines may be between the user's line and ours."""

_BATCH = 4096
_AROUND = np.arange(-16, 16)
_SPREAD = np.arange(16)
# Random factors, so that different tokens at one place hardly ever have the same sum.
_FACTORS = np.random.default_rng(0).integers(2**64, size=49, dtype=np.uint64)

_KNOWN: set[int] = set()
"""Numbers of the boundaries after the first record of packs."""
_LAST: set[int] = set()
"""Ids of the tokens before these boundaries; mostly one, the end of a conversation."""
_WARNED: set[int] = set()


def watch_table(table: pa.Table) -> None:
    """Remember the packs of a table, and warn once if no model is guarded."""
    _warn_of(_remember_table(table))


def watch_rows(packs: Packs) -> None:
    """Remember packs, and warn once if no model is guarded."""
    _warn_of(_remember(packs))


def watch_read(packs: Packs) -> None:
    """Remember packs that are read while a model is guarded."""
    if GUARDS:
        _remember(packs)


@functools.cache
def watch_datasets() -> None:
    """From now on, remember the packs of every `datasets.Dataset` of this process."""
    from datasets import Dataset

    plain = Dataset.__init__

    @functools.wraps(plain)
    def watched(self: Dataset, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        _remember_table(self.data.table)

    Dataset.__init__ = watched
    for each in gc.get_objects():
        if type(each) is Dataset and hasattr(each, "_data"):
            _remember_table(each.data.table)


def holds_pack(ids: Ints, starts: Ints) -> bool:
    """Return True if a record of a row of a batch begins like a known pack.

    Args:
        ids: tokens of the row.
        starts: first token of each record, the first of which is 0.
    """
    seams = 1 + np.flatnonzero(np.isin(ids[:-1], [*_LAST]))
    record = np.searchsorted(starts, seams, side="right") - 1
    ends = np.append(starts[1:], len(ids))
    found = _numbers(ids, starts[record], seams, ends[record])
    return not _KNOWN.isdisjoint(found)


def warn_of_packs() -> None:
    """Warn about rows with several records, if no model is guarded."""
    if not GUARDS:
        warnings.warn(
            "each row contains several records, and most models attend across them without an "
            "error. Call enable_packing(model) before training, and use PackedCollator "
            "or SFTConfig(padding_free=True, max_length=None) "
            "(docs/how-to/keep-records-apart.md)",
            stacklevel=users_level(),
        )


def users_level() -> int:
    """Return the `stacklevel` of a warning that points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level


def _warn_of(numbers: list[int]) -> None:
    if numbers and not GUARDS and numbers[0] not in _WARNED:
        _WARNED.add(numbers[0])
        warn_of_packs()


def _remember(packs: Packs) -> list[int]:
    several = [(ids, lengths) for ids, lengths in packs if len(lengths) > 1]
    if not several:
        return []
    ends = np.cumsum([len(ids) for ids, _ in several])
    starts = np.append(0, ends[:-1])
    seams = starts + [int(lengths[0]) for _, lengths in several]
    return _add(np.concatenate([ids for ids, _ in several]), starts, seams, ends)


def _remember_table(table: pa.Table) -> list[int]:
    numbers: list[int] = []
    if not {"input_ids", "seq_lengths"} <= set(table.column_names):
        return numbers
    columns = table.select(["input_ids", "seq_lengths"])
    if not all(_holds_integers(column) for column in columns.columns):
        return numbers  # made by others, who may mean something else by `seq_lengths`
    for batch in columns.to_batches(max_chunksize=_BATCH):
        (ids, at), (lengths, bounds) = (flat_list(column) for column in batch.columns)
        rows = np.flatnonzero(np.diff(bounds) > 1)
        starts, ends = at[rows], at[rows + 1]
        seams = starts + lengths[bounds[rows]]
        is_inside = (starts < seams) & (seams < ends)
        numbers += _add(ids, starts[is_inside], seams[is_inside], ends[is_inside])
    return numbers


def _holds_integers(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    parts = column.chunks
    return pa.types.is_integer(kind.value_type) and not any(
        part.null_count or part.values.null_count for part in parts
    )


def _add(ids: Ints, starts: Ints, seams: Ints, ends: Ints) -> list[int]:
    numbers = _numbers(ids, starts, seams, ends)
    _KNOWN.update(numbers)
    _LAST.update(np.unique(ids[seams - 1]).tolist())
    return numbers


def _numbers(ids: Ints, starts: Ints, seams: Ints, ends: Ints) -> list[int]:
    """Return a number for each place where a second record may begin.

    Args:
        ids: tokens of all rows.
        starts: for each place, the first token of its pack or record.
        seams: the places.
        ends: ends of the packs or records.
    """
    starts, seams, ends = (each.astype(np.int64)[:, None] for each in (starts, seams, ends))
    length = seams - starts
    at = np.concatenate([starts + length * _SPREAD // len(_SPREAD), seams + _AROUND], axis=1)
    is_inside = (at >= starts) & (at < ends)
    tokens = np.where(is_inside, ids.take(at, mode="clip").astype(np.int64), -1)
    parts = np.concatenate([tokens, length], axis=1).view(np.uint64) * _FACTORS
    numbers: list[int] = parts.sum(axis=1).tolist()
    return numbers
