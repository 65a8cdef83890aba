"""Remember how packs begin, so that a guarded model notices if a collator lost record boundaries.

A batch does not say how many records its rows had before a collator or trainer changed them. So
this process remembers the first record, and the beginning of the second, of the first packs that it
loads: if a batch has both in a single record, the boundaries are lost. A collator loses either all
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
"""Number of packs of a dataset that are remembered."""

_OF_SECOND = 16
"""Remembered tokens of the second record. Few, because TRL may cut a pack after them, but enough
that no other record begins like this."""

GUARDS: set[object] = set()
"""Active handles of `enable_packing`."""

_BEGINNINGS: set[bytes] = set()
_WARNED: set[bytes] = set()

Packs = Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""`input_ids` and `seq_lengths` of each pack."""


def watch_packs(packs: Packs, *, stacklevel: int = 2) -> None:
    """Remember how packs of several records begin, and warn once if no model is guarded."""
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
    """Yield the first packs of a dataset."""
    table = rows.data.table.select(["input_ids", "seq_lengths"]).slice(0, MOST_PACKS)
    for batch in table.to_batches():
        (ids, at), (lengths, bounds) = (flat_list(column) for column in batch.columns)
        for row in range(batch.num_rows):
            yield ids[at[row] : at[row + 1]], lengths[bounds[row] : bounds[row + 1]]


def warn_of_packs(stacklevel: int = 2) -> None:
    """Warn about rows with several records, if no model is guarded."""
    if not GUARDS:
        warnings.warn(
            "each row contains several records, and most models attend across them without an "
            "error. Call enable_packing(model) before training, and use PackedCollator "
            "or SFTConfig(padding_free=True, max_length=None) "
            "(docs/how-to/keep-records-apart.md)",
            stacklevel=stacklevel + 1,
        )


def begins_with_packs(record: bytes) -> bool:
    """Return True if a single record of a batch begins like a known pack."""
    return record.startswith(tuple(_BEGINNINGS))


def as_bytes(ids: npt.NDArray[Any]) -> bytes:
    """Return ids in the form that `begins_with_packs` takes, 4 bytes each."""
    return ids.astype(np.int32).tobytes()
