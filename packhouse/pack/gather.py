"""Bring the tokens of planned packs together: one pass of slices, a few hundred packs at a time.

A batch's tokens are one `bytes.join` over memory views of the mapped shards, so a token is copied
once and no Python object stands for less than a sequence. Measured on Alpaca (mean 104 tokens):
1.8 ns a token for that copy; `np.take` over an index per token 2.5, `np.concatenate` of slices 4.9.
Everything else (ranges, ids of records) is numpy over the sequences of the batch.

Shards stay mapped: beside the plan, memory holds offsets (12 bytes a record, 8 a trained range)
and one batch. What is read does not depend on how the records are cut into shards.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.pack.plan import PackPlan, lower_bound
from packhouse.records.lists import (
    Ranges,
    count_up,
    flat_list,
    flat_weights,
    list_array,
    one_chunk,
    ranges_array,
    read_ranges,
    string_bytes,
    weights_column,
)
from packhouse.records.tables import PACKED
from packhouse.system.arrays import Float32s, Int32s, Int64s

BATCH_TOKENS = 2**19
"""Tokens of a batch, about: 256 packs of 2,048. It bounds memory and decides no published byte."""

# Memory views alive at once: below the 700 that set off Python's garbage collector, which made a
# slice cost 440 ns in place of 100 when a whole batch's were alive.
_BLOCK_VIEWS = 256


@dataclass(slots=True)
class GatherTally:
    """What a gather saw, to be read when it has ended."""

    num_packs: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    num_trained: int = 0
    num_first_masked: int = 0
    """Tokens that were trained alone but are the first of their sequence in a pack."""


def gather(
    shards: Sequence[pa.Table],
    plan: PackPlan,
    lengths: Int32s,
    rows: npt.NDArray[np.integer] | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    tally: GatherTally | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the packs of a plan as batches of schema `tables.PACKED`.

    The first token of a sequence in a pack is never trained, for it would be predicted from the
    record before it: a range that begins there is shrunk by one token, and counted.

    Args:
        shards: tables of schema `tables.TOKENIZED`; their records are numbered through.
        plan: a plan over `lengths`.
        lengths: tokens to take of each planned sequence, from its first one (`concat`: its length).
        rows: record number of each planned sequence; by default sequence `i` is record `i`.
        batch_tokens: tokens of a batch, about.
        tally: is counted up while batches are yielded.

    Yields:
        Batches that stay valid; together they hold all packs in order.

    Example:
        >>> from packhouse.pack.plan import plan_packs
        >>> from packhouse.records.tables import TOKENIZED
        >>> record = {"record_id": "a", "source": "s", "row": 0, "input_ids": [7, 8, 9],
        ...     "trained_ranges": [{"start": 0, "end": 3}], "range_weights": None,
        ...     "num_tokens": 3, "num_trained": 3,
        ...     "label": None, "group_key": "g"}
        >>> lengths = np.array([3], dtype=np.int32)
        >>> tally = GatherTally()
        >>> table = pa.Table.from_pylist([record], TOKENIZED)
        >>> [batch] = gather([table], plan_packs(lengths, 8), lengths, tally=tally)
        >>> batch["trained_ranges"].to_pylist(), tally.num_first_masked
        ([[{'start': 1, 'end': 3}]], 1)
    """
    records = _Records(shards)
    tally = GatherTally() if tally is None else tally
    step = max(1, batch_tokens * plan.num_packs // max(1, plan.num_tokens))
    for first in range(0, plan.num_packs, step):
        packs = first, min(first + step, plan.num_packs)
        yield _gather_batch(records, plan, lengths, rows, packs, tally)


class _Records:
    """All shards as one: per-record offsets in memory, tokens and names where they are."""

    def __init__(self, shards: Sequence[pa.Table]) -> None:
        # A chunk is a shard of its own, so that several chunks need no copy.
        batches = [batch for shard in shards for batch in shard.to_batches() if batch.num_rows]
        self.first_rows = np.cumsum([0] + [batch.num_rows for batch in batches])
        ids = [flat_list(batch["input_ids"]) for batch in batches]
        names = [string_bytes(batch["record_id"]) for batch in batches]
        self.ids = [memoryview(values.data) for values, _ in ids]
        self.names = [memoryview(values.data) for values, _ in names]
        # Record r of chunk s has its offsets in places r + s and r + s + 1. Chunks of 2 and 3
        # records have offsets [0 5 9 | 0 2 4 8]: those of record 3, in chunk 1, are 4 and 5.
        self.id_offsets = _concatenate([offsets for _, offsets in ids])
        self.name_offsets = _concatenate([offsets for _, offsets in names])
        ranges = [read_ranges(batch["trained_ranges"]) for batch in batches]
        before = np.cumsum([0] + [len(each.starts) for each in ranges])
        offsets = [each.offsets + base for each, base in zip(ranges, before, strict=False)]
        self.ranges = Ranges(
            _concatenate([each.starts for each in ranges]),
            _concatenate([each.ends for each in ranges]),
            _concatenate([each.astype(np.int32) for each in offsets]),
        )
        weights = [
            flat_weights(batch["range_weights"], each.counts())
            for batch, each in zip(batches, ranges, strict=True)
        ]
        self.weights: Float32s | None = None
        """Of every range; None where each is 1."""
        if any(each is not None for each in weights):
            ones = [np.ones(len(each.starts), np.float32) for each in ranges]
            self.weights = np.concatenate(
                [one if each is None else each for each, one in zip(weights, ones, strict=True)]
            )
        self.labels = pa.chunked_array([batch["label"] for batch in batches], pa.int64())


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Join arrays; a single one is not copied, and none at all are the offsets of no record."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(1, dtype=np.int32)


def _gather_batch(
    records: _Records,
    plan: PackPlan,
    lengths: Int32s,
    rows: npt.NDArray[np.integer] | None,
    packs: tuple[int, int],
    tally: GatherTally,
) -> pa.RecordBatch:
    first, last = packs
    low, high = plan.pack_offsets[first], plan.pack_offsets[last]
    pack_offsets = plan.pack_offsets[first : last + 1] - low
    sequence = plan.order[low:high]
    row = np.asarray(sequence if rows is None else rows[sequence], dtype=np.int64)
    starts = np.zeros(len(row), np.int64) if plan.starts is None else plan.starts[low:high]
    ends = lengths[sequence] if plan.ends is None else plan.ends[low:high]
    # First rows [0 2 5] of chunks: records [3 0] are in chunks [1 0], with offsets at [4 0].
    chunk = np.searchsorted(records.first_rows, row, side="right") - 1
    slot = row + chunk

    # Two packs of pieces of [3 2] and [4] tokens: pack offsets [0 2 3], token offsets [0 3 5 9], of
    # which packs begin at [0 5 9].
    seq_lengths = (ends - starts).astype(np.int32)
    token_offsets = np.concatenate([[0], np.cumsum(seq_lengths, dtype=np.int64)])
    begin = records.id_offsets[slot].astype(np.int64)
    assert (begin + ends <= records.id_offsets[slot + 1]).all(), "a length is over its record's"
    input_ids = _join(records.ids, chunk, begin + starts, begin + ends)
    ids = pa.Array.from_buffers(pa.int32(), int(token_offsets[-1]), [None, input_ids])
    ranges, weights, num_first_masked = _shift_ranges(
        records, slot, starts, ends, pack_offsets, token_offsets
    )
    name_begin, name_end = records.name_offsets[slot], records.name_offsets[slot + 1]
    name_offsets = np.concatenate([[0], np.cumsum(name_end - name_begin)]).astype(np.int32)
    names = pa.StringArray.from_buffers(
        len(slot),
        pa.py_buffer(name_offsets),
        _join(records.names, chunk, name_begin, name_end),
    )
    labels = pa.nulls(last - first, pa.int64())
    if plan.strategy == "none":
        labels = one_chunk(records.labels.take(pa.array(row)))

    tally.num_packs += last - first
    tally.num_tokens += int(token_offsets[-1])
    tally.num_sequences += len(row)
    tally.num_first_masked += num_first_masked
    spans = ranges.values
    tally.num_trained += int(np.subtract(spans.field("end"), spans.field("start")).sum())
    columns = [
        list_array(ids, token_offsets[pack_offsets], pa.int32()),
        ranges,
        weights,
        list_array(pa.array(seq_lengths), pack_offsets, pa.int32()),
        list_array(names, pack_offsets, pa.string()),
        labels,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED)


def _join(
    views: list[memoryview],
    chunk: Int64s,
    begin: np.ndarray,
    end: np.ndarray,
) -> pa.Buffer:
    """Join the slices [begin, end) of the views' chunks."""
    places = zip(chunk.tolist(), begin.tolist(), end.tolist(), strict=True)
    blocks = iter(lambda: [views[k][i:j] for k, i, j in islice(places, _BLOCK_VIEWS)], [])
    return pa.py_buffer(b"".join(map(b"".join, blocks)))


def _shift_ranges(
    records: _Records,
    slot: Int64s,
    starts: np.ndarray,
    ends: np.ndarray,
    pack_offsets: Int64s,
    token_offsets: Int64s,
) -> tuple[pa.Array, pa.Array, int]:
    """Return trained ranges of every piece in tokens of its pack, their weights, and first tokens.

    A piece [2, 8) at token 10 of its pack: range [0, 5) -> [0, 3) -> [1, 3) -> [11, 13), one lost.
    """
    ranges = records.ranges
    num_ranges = ranges.offsets[slot + 1] - ranges.offsets[slot]
    piece = np.repeat(np.arange(len(slot)), num_ranges)
    each = np.repeat(ranges.offsets[slot], num_ranges) + count_up(num_ranges)
    start = ranges.starts[each] - starts[piece]
    end = np.minimum(ranges.ends[each], ends[piece]) - starts[piece]
    num_first_masked = int(np.count_nonzero((start <= 0) & (end > 0)))
    start = np.maximum(start, 1)
    kept = start < end
    sizes = np.diff(pack_offsets)
    pack = np.repeat(np.arange(len(sizes)), sizes)
    shift = (token_offsets[:-1] - np.repeat(token_offsets[pack_offsets[:-1]], sizes))[piece[kept]]
    counts = np.bincount(pack[piece[kept]], minlength=len(sizes))
    shifted = ranges_array(
        (start[kept] + shift).astype(np.int32), (end[kept] + shift).astype(np.int32), counts
    )
    weights = None if records.weights is None else records.weights[each[kept]]
    return shifted, weights_column(weights, counts), num_first_masked


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStatistics:
    """Statistics of the packs of one side; `num_` fields are 0 until tokens were gathered."""

    seq_len: int
    """Pack size in tokens."""
    strategy: str
    """How the packs were planned."""
    num_sequences: int = 0
    """Sequences in packs; with `concat`, pieces."""
    num_packs: int = 0
    """Packs."""
    num_tokens: int = 0
    """Tokens in packs."""
    num_trained: int = 0
    """Tokens with a label."""
    num_first_masked: int = 0
    """Tokens that lost their label as the first of their sequence in a pack."""
    lower_bound: int
    """Packs that no plan without cuts goes below."""
    length_histogram: list[tuple[int, int]]
    """(longest length, sequences) of classes a quarter octave wide, without the empty ones."""

    @classmethod
    def of(cls, plan: PackPlan, lengths: Int32s, tally: GatherTally) -> "PackStatistics":
        """Put together what the planner and a complete gather know.

        Example:
            >>> from packhouse.pack.plan import plan_packs
            >>> lengths = np.array([5, 3, 2, 6, 4], dtype=np.int32)
            >>> tally = GatherTally(num_packs=3, num_tokens=20, num_sequences=5, num_trained=9)
            >>> statistics = PackStatistics.of(plan_packs(lengths, 8), lengths, tally)
            >>> statistics.num_padding, round(statistics.fill, 3), statistics.lower_bound
            (4, 0.833, 3)
        """
        return cls(
            seq_len=plan.seq_len,
            strategy=plan.strategy,
            lower_bound=lower_bound(lengths, plan.seq_len),
            length_histogram=length_histogram(lengths),
            **asdict(tally),
        )

    @property
    def num_padding(self) -> int:
        """Tokens that a trainer pads to bring every pack to `seq_len`."""
        return self.num_packs * self.seq_len - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of `num_packs * seq_len` that is tokens; 1.0 without packs."""
        capacity = self.num_packs * self.seq_len
        return self.num_tokens / capacity if capacity else 1.0

    def to_dict(self) -> dict[str, object]:
        """Fields and derived numbers, JSON-able."""
        return {**asdict(self), "num_padding": self.num_padding, "fill": round(self.fill, 6)}


def length_class(length: int) -> tuple[int, int]:
    """Return the least and the largest length of a length's class; a power of 2 has four classes.

    Classes end at 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., and so at every `seq_len` that
    is a power of 2.

    Example:
        >>> length_class(6), length_class(9), length_class(10), length_class(2048)
        ((6, 6), (9, 10), (9, 10), (1793, 2048))
    """
    width = max(1, (1 << (length - 1).bit_length()) // 8)
    largest = -(-length // width) * width
    return largest - width + 1, largest


def length_histogram(lengths: Int32s) -> list[tuple[int, int]]:
    """Count sequences by length class: (largest length, sequences).

    Example:
        >>> length_histogram(np.array([5, 9, 10, 100], dtype=np.int32))
        [(5, 1), (10, 2), (112, 1)]
    """
    counts: Counter[int] = Counter()
    for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
        counts[length_class(int(length))[1]] += int(count)
    return sorted(counts.items())
