"""Records as pack left them: which shard holds each, which split it is in, where it was packed.

The pack step writes 14 bytes a record; names and keys stay in the shards, and are read beside them
a block of rows at a time. So lineage of any number of records costs the memory of one block, and
12 bytes for each record of a published file, whose places come from the plan.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.ledger import RowCounts
from packhouse.records.lists import flat_weights, one_chunk, read_ranges
from packhouse.records.tables import TOKENIZED, read_table
from packhouse.run.cache import Receipt, Workspace
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.system.arrays import Int64s

if TYPE_CHECKING:
    from packhouse.run.steps.pack import PackFacts

# Which shards there are, in order: key of the tokenize step, number of its first record, records.
PLACES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("num_records", pa.int64(), nullable=False),
    ]
)

OUTCOMES = pa.schema(
    [
        pa.field("split", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("outcome", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        # Of one copy, as far as it is packed; of a dropped record, before anything was cut.
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("times", pa.int32(), nullable=False),  # copies of it in packs; 0: dropped
        # What it was dropped for: id of a record, row of a benchmark.
        pa.field("repeats", pa.string()),
    ]
)

# Lineage, a row per record: its raw row, its side, and what became of it.
LINEAGE = pa.schema(
    [
        *(TOKENIZED.field(name) for name in ("record_id", "source", "row", "group_key")),
        *OUTCOMES,
    ]
)

# Lineage as it is published, with the place of the first copy in the packs: null for what is in
# none. So most questions to a version read no pack.
RECORDS = pa.schema(
    [
        *LINEAGE,
        pa.field("num_trained", pa.int32()),  # of this copy
        pa.field("total_weight", pa.float64()),  # loss weights of these tokens, added up
        TOKENIZED.field("label"),
        pa.field("pack", pa.int64()),  # number in its split
        pa.field("position", pa.int32()),  # of its first token in the pack
    ]
)
_TRAINED = ["trained_ranges", "range_weights", "label"]


class ShardIndex:
    """Where the records of a pack step lie."""

    def __init__(self, packed: Receipt[RowCounts], workspace: Workspace) -> None:
        table = read_table(packed.path("places.arrow"))
        self.keys = table["key"]
        self.bounds = np.append(table["first"].to_numpy(), packed.facts.rows_in)
        """Number of each shard's first record, and of all records."""
        self._workspace = workspace

    def shard(self, number: int) -> pa.Table:
        """Map the tokenized records of a shard."""
        receipt = TOKENIZE.peek(self.keys[number].as_py(), self._workspace)
        assert receipt is not None, f"pack was done before tokenize {self.keys[number]} was"
        return read_table(receipt.path("tokenized.arrow"))

    def between(self, first: int, last: int) -> Iterator[tuple[pa.Table, int, int]]:
        """Yield each shard that holds some of the records [first, last), and which of its rows."""
        # Bounds [0 500 900], records [450, 600): rows [450, 500) of shard 0, [0, 100) of shard 1.
        low = int(np.searchsorted(self.bounds, first, side="right")) - 1
        for number in range(max(low, 0), len(self.keys)):
            start, end = self.bounds[number : number + 2].tolist()
            if start >= last:
                return
            if end > start:
                yield self.shard(number), max(first - start, 0), min(last, end) - start


def read_records(
    packed: Receipt[RowCounts],
    workspace: Workspace,
    rows: tuple[int, int] | None = None,
    block: int = 2**18,
    columns: Sequence[str] = tuple(LINEAGE.names),
) -> Iterator[pa.RecordBatch]:
    """Yield lineage, schema `LINEAGE`, in batches of `block` rows whatever the shards are.

    Args:
        packed: receipt of the pack step.
        workspace: where its shards lie.
        rows: records [first, last); all by default.
        block: rows of a batch; the last one may be smaller.
        columns: which ones to read, in the order of the schema.
    """
    schema = pa.schema([LINEAGE.field(name) for name in columns])
    index = ShardIndex(packed, workspace)
    sources = pa.array(json.loads(packed.path("sources.json").read_bytes()), pa.string())
    outcomes = read_table(packed.path("outcomes.arrow"))
    first, last = rows or (0, packed.facts.rows_in)
    for start in range(first, last, block):
        end = min(start + block, last)
        read = dict(zip(OUTCOMES.names, outcomes.slice(start, end - start).columns, strict=True))
        if not set(columns) <= set(read):
            parts = [
                _named(shard.slice(low, high - low), sources, columns)
                for shard, low, high in index.between(start, end)
            ]
            named = pa.concat_tables(parts)
            read.update(zip(named.column_names, named.columns, strict=True))
        arrays = [one_chunk(read[name]) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _named(shard: pa.Table, sources: pa.Array, columns: Sequence[str]) -> pa.Table:
    """Those of the columns that shards have, with one dictionary of files for all of them."""
    named = {name: shard[name] for name in columns if name in shard.column_names}
    named.pop("num_tokens", None)  # before anything was cut; the outcome's counts
    if "source" in named:
        indices = pc.index_in(named["source"].cast(pa.string()), sources).combine_chunks()
        named["source"] = pa.DictionaryArray.from_arrays(indices, sources)
    return pa.table(named, schema=pa.schema([LINEAGE.field(name) for name in named]))


def read_placed(
    packed: "Receipt[PackFacts]", workspace: Workspace, rows: tuple[int, int], block: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records [first, last) as they are published, schema `RECORDS`, in such batches."""
    index, places = ShardIndex(packed, workspace), _Places(packed, rows)
    start = rows[0]
    for batch in read_records(packed, workspace, rows, block):
        stop = start + batch.num_rows
        parts = [
            shard.select(_TRAINED).slice(low, high - low)
            for shard, low, high in index.between(start, stop)
        ]
        made = places.columns(start - rows[0], pa.concat_tables(parts), batch)
        yield pa.RecordBatch.from_arrays([*batch.columns, *made], schema=RECORDS)
        start = stop


class _Places:
    """Where the first copy of each of the records [first, last) lies, by the plan of the packs."""

    def __init__(self, packed: "Receipt[PackFacts]", rows: tuple[int, int]) -> None:
        self._first, self._last = rows
        self.pack = np.full(self._last - self._first, -1, np.int64)
        self.position = np.zeros(len(self.pack), np.int32)
        self._cuts: list[Int64s] = []
        for side in packed.facts.sides:
            offsets = read_table(packed.path(f"{side}-offsets.arrow"))["offset"].to_numpy()
            sequences = read_table(packed.path(f"{side}-sequences.arrow"))
            self._add(offsets, sequences)
        # Record << 32 | token: first tokens of the pieces of a record that `concat` cut, but for
        # the first one. No token before them is in their pack, so none predicts them.
        self.cuts = np.unique(np.concatenate([np.zeros(0, np.int64), *self._cuts]))

    def _add(self, offsets: Int64s, sequences: pa.Table) -> None:
        number = tokens = 0  # sequences and tokens before the batch
        pack_start = 0  # tokens before the pack that goes on in the batch
        is_first = np.zeros(1, np.bool_)  # of the last head before it: a first copy
        head_record = np.full(1, -1, np.int64)
        for batch in sequences.to_batches():
            record, start, end = (column.to_numpy() for column in batch.columns)
            # Pack offsets [0 2 3], pieces of 3, 2 and 4 tokens: packs 0 0 1, positions 0 3 0.
            pack = np.searchsorted(offsets, np.arange(number, number + len(record)), "right") - 1
            before = tokens + np.concatenate([[0], np.cumsum(end - start, dtype=np.int64)])
            begins = offsets[pack] - number
            pack_starts = np.where(begins >= 0, before[np.maximum(begins, 0)], pack_start)
            own = (record >= self._first) & (record < self._last)
            heads = np.flatnonzero(start == 0)
            chosen = heads[own[heads]]
            _, at = np.unique(record[chosen], return_index=True)
            chosen = chosen[at]
            chosen = chosen[self.pack[record[chosen] - self._first] < 0]
            self.pack[record[chosen] - self._first] = pack[chosen]
            self.position[record[chosen] - self._first] = (before[:-1] - pack_starts)[chosen]
            # Pieces behind a head go on with its copy; packs may have been put in another order.
            firsts = np.zeros(len(record), np.bool_)
            firsts[chosen] = True
            is_first = np.concatenate([is_first[-1:], firsts[heads]])
            head_record = np.concatenate([head_record[-1:], record[heads]])
            head = np.searchsorted(heads, np.arange(len(record)), "right")
            goes_on = own & (start > 0) & (is_first[head] | (head_record[head] != record))
            cuts = (record[goes_on] - self._first) << 32 | start[goes_on]
            self._cuts.append(cuts.astype(np.int64))
            number, tokens, pack_start = number + len(record), before[-1], pack_starts[-1]

    def columns(self, start: int, shards: pa.Table, lineage: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns that `RECORDS` adds, of the rows of a batch, `start` being its first.

        Args:
            start: counted from the first of these records.
            shards: what the batch's records have of `_TRAINED`.
            lineage: the batch.
        """
        rows = slice(start, start + lineage.num_rows)
        is_missing = self.pack[rows] < 0
        ranges = read_ranges(shards["trained_ranges"])
        weights = flat_weights(shards["range_weights"], ranges.counts())
        weights = np.ones(len(ranges.starts), np.float32) if weights is None else weights
        row = ranges.row_of_each()
        # Of 8 tokens, ranges [0, 3) and [6, 9): tokens 1, 2, 6 and 7 are trained. The first one of
        # a pack's sequence never is.
        ends = np.minimum(ranges.ends, lineage["num_tokens"].to_numpy()[row])
        sizes = np.maximum(ends - np.maximum(ranges.starts, 1), 0)
        num_trained = np.bincount(row, sizes, lineage.num_rows).astype(np.int32)
        total = np.bincount(row, sizes * weights.astype(np.float64), lineage.num_rows)
        low, high = np.searchsorted(self.cuts, [start << 32, rows.stop << 32])
        cut_row, token = (self.cuts[low:high] >> 32) - start, self.cuts[low:high] & (2**32 - 1)
        at = np.searchsorted(row << 32 | ranges.starts, cut_row << 32 | token, "right") - 1
        is_trained = (at >= 0) & (row[at] == cut_row) & (token < ends[at]) if len(row) else at >= 0
        np.subtract.at(num_trained, cut_row[is_trained], 1)
        np.subtract.at(total, cut_row[is_trained], weights[at[is_trained]])
        return [
            pa.array(num_trained, mask=is_missing),
            pa.array(np.round(total, 4), mask=is_missing),
            one_chunk(shards["label"]),
            pa.array(self.pack[rows], mask=is_missing),
            pa.array(self.position[rows], mask=is_missing),
        ]
