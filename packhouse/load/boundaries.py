"""Remember how packs begin, so that a guarded model sees where a collator lost their boundaries.

A batch does not say how many records its rows held before a collator or trainer changed them. So
the first packs that this process loads are remembered by their first record and the beginning of
the second: a batch in which these are one record has lost the boundaries. A collator loses all
boundaries or none, so the first packs are enough.
"""

import warnings
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packhouse.records.lists import flat_list

if TYPE_CHECKING:
    from datasets import Dataset

MOST_PACKS = 1024
"""Packs of a dataset that are remembered."""

_OF_SECOND = 16
"""Tokens of the second record; TRL may cut a pack after them. Longer records do not begin so."""

GUARDS: set[object] = set()
"""Handles of `enable_packing` that are active."""

_BEGINNINGS: set[bytes] = set()
_WARNED: set[bytes] = set()

Packs = Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""`input_ids` and `seq_lengths` of each."""


def watch_packs(packs: Packs, *, stacklevel: int = 2) -> None:
    """Remember how packs of several records begin, and warn of them once if no model is guarded."""
    found = {
        as_bytes(ids[: int(lengths[0] + min(lengths[1], _OF_SECOND))])
        for ids, lengths in islice(packs, MOST_PACKS)
        if len(lengths) > 1
    }
    _BEGINNINGS.update(found)
    if not GUARDS and not found <= _WARNED:
        _WARNED.update(found)
        warn_of_packs(stacklevel + 1)


def first_packs(rows: "Dataset") -> Packs:
    """Yield the packs of a dataset that are remembered."""
    table = rows.data.table.select(["input_ids", "seq_lengths"]).slice(0, MOST_PACKS)
    for batch in table.to_batches():
        (ids, at), (lengths, bounds) = (flat_list(column) for column in batch.columns)
        for row in range(batch.num_rows):
            yield ids[at[row] : at[row + 1]], lengths[bounds[row] : bounds[row + 1]]


def warn_of_packs(stacklevel: int = 2) -> None:
    """Warn of rows that hold several records each, if no model is guarded."""
    if not GUARDS:
        warnings.warn(
            "rows hold several records each, across which most models and collators train without "
            "an error. Call enable_packing(model) before training, and use PackedCollator or "
            "SFTConfig(padding_free=True, max_length=None) (docs/how-to/keep-records-apart.md)",
            stacklevel=stacklevel + 1,
        )


def begins_with_packs(record: bytes) -> bool:
    """Return True if what a batch calls one record begins as a known pack does."""
    return record.startswith(tuple(_BEGINNINGS))


def as_bytes(ids: npt.NDArray[Any]) -> bytes:
    """Return ids in the form that `begins_with_packs` takes, 4 bytes each."""
    return ids.astype(np.int32).tobytes()
