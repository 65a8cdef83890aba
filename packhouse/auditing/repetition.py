"""What occurs more than once among all records, and what is on both sides."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.shard import NUM_WORST
from packhouse.records.hex_keys import is_among, leading_bits, sort_leading_bits
from packhouse.system.arrays import Uint64s

Read: TypeAlias = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def audit_records(read: Read, num_records: int) -> dict[str, Any]:
    """Count what occurs more than once, in each source and in all, and what is on both sides.

    Ids and groups are compared by their leading 64 bits. Memory: 9 bytes a record, and 70 more for
    each that shares its content; so records are read three or four times.

    Args:
        read: gives the named columns of all records, of schema `steps.records.RECORDS`, in batches,
            each time in the same order; those that were dropped do not count.
        num_records: at most so many.

    Returns:
        `duplicates`: records beyond the first of their content; `prompt_groups`: prompts that
        several different records share, and `prompt_group_records`, how many do; `both_sides`:
        contents in train and eval; `sources`: duplicates within each; `worst`: most frequent ones.
    """
    repeated = _repeated(read, num_records)
    sources = dict.fromkeys(_sources(read), 0)
    if not len(repeated):
        found = {"duplicates": 0, "both_sides": 0, "sources": sources, "worst": []}
        return {**found, **_shared_prompts(_groups(read, num_records))}
    sharing = []
    for batch in _packed(read, "record_id", "group_key", "source", "row", "split"):
        is_repeated = pa.array(is_among(leading_bits(batch["record_id"]), repeated))
        sharing.append(batch.filter(is_repeated))
    records = pa.Table.from_batches(sharing)
    # Ids [7 5 7 7]: order [1 0 2 3] of ids [5 7 7 7], which start at [0 1] and occur [1 3] times.
    ids = leading_bits(records["record_id"])
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=~ids[order][:1]))
    times = np.diff(starts, append=len(order))
    first = order[starts]  # of each content, the first in the order of file and row
    is_eval = pc.equal(records["split"], "eval").to_numpy()
    in_eval = np.add.reduceat(is_eval[order], starts, dtype=np.int64)
    groups = records["group_key"].take(pa.array(first))
    chosen = np.lexsort((first, -times))[:NUM_WORST]  # the most frequent, the first ones first
    places = records.select(["source", "row", "record_id"]).take(pa.array(first[chosen]))
    return {
        "duplicates": int((times - 1).sum()),
        "both_sides": int(np.count_nonzero((in_eval > 0) & (in_eval < times))),
        "sources": sources | _within_sources(records),
        "worst": [
            {**place, "value": value}
            for place, value in zip(places.to_pylist(), times[chosen].tolist(), strict=True)
        ],
        **_shared_prompts(_groups(read, num_records, repeated, groups)),
    }


def _packed(read: Read, *columns: str) -> Iterable[pa.RecordBatch]:
    for batch in read([*columns, "times"]):
        yield batch.filter(pc.greater(batch["times"], 0))


def _repeated(read: Read, num_records: int) -> Uint64s:
    """Ids that occur more than once, ascending."""
    parts = (batch["record_id"] for batch in _packed(read, "record_id"))
    ids = sort_leading_bits(parts, num_records)
    return np.unique(ids[1:][ids[1:] == ids[:-1]])


def _groups(
    read: Read,
    num_records: int,
    repeated: Uint64s | None = None,
    of_repeated: pa.ChunkedArray | None = None,
) -> Uint64s:
    """The group of each content, ascending."""

    def parts() -> Iterator[pa.Array | pa.ChunkedArray]:
        if repeated is None:
            yield from (batch["group_key"] for batch in _packed(read, "group_key"))
            return
        yield of_repeated
        for batch in _packed(read, "record_id", "group_key"):
            is_repeated = is_among(leading_bits(batch["record_id"]), repeated)
            yield batch["group_key"].filter(pa.array(~is_repeated))

    return sort_leading_bits(parts(), num_records)


def _shared_prompts(groups: Uint64s) -> dict[str, int]:
    """How many groups occur more than once, and how often in all.

    Example:
        >>> _shared_prompts(np.array([1, 2, 2, 3, 4, 4, 4], np.uint64))
        {'prompt_groups': 2, 'prompt_group_records': 5}
    """
    is_again = groups[1:] == groups[:-1]
    num_again = int(np.count_nonzero(is_again))
    num_groups = num_again - int(np.count_nonzero(is_again[1:] & is_again[:-1]))
    return {"prompt_groups": num_groups, "prompt_group_records": num_again + num_groups}


def _sources(read: Read) -> list[str]:
    """Names of all sources."""
    files: set[str] = set()
    for batch in _packed(read, "source"):
        files.update(batch["source"].unique().to_pylist())
    return sorted({file.split("/")[0] for file in files})


def _within_sources(records: pa.Table) -> dict[str, int]:
    """Records beyond the first of their content within each source."""
    found: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for batch in records.select(["record_id", "source"]).to_batches():
        for record_id, file in zip(*map(pa.Array.to_pylist, batch.columns), strict=True):
            name = file.split("/")[0]
            found[name] += (record_id, name) in seen
            seen.add((record_id, name))
    return found
