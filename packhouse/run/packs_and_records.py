"""Read the packs and the records of a finished pack step from its input shards.

The plan says which records are in which pack, and what happened to each record; tokens, ids and
keys stay in the input shards, which are mapped.

`read_packs` gathers the tokens of some packs. It maps the shards that hold their records, copies
only the needed rows if they are few, and joins them one batch at a time.

`read_records` and `read_placed` read lineage one block of rows at a time, so the lineage of any
number of records takes the memory of one block, plus 12 bytes for each record of a published file.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack.gather_tokens import GatherTally, gather
from packhouse.pack.pack_columns import check_packed
from packhouse.pack.strategies import PackPlan
from packhouse.records.arrays import Int64s, flat_weights, one_chunk, read_ranges
from packhouse.records.ledger import RowCounts
from packhouse.records.preference_pairs import as_sequences
from packhouse.records.table_schemas import LINEAGE, OUTCOMES, RECORDS, read_table
from packhouse.run.step import JobContext
from packhouse.run.step_cache import Receipt, Workspace
from packhouse.run.steps.pack import PACK, PackFacts, Side
from packhouse.run.steps.tokenize import TOKENIZE

# Columns that `gather` does not read: without them, a copy of a few rows takes no text.
_NOT_PACKED = ["source", "row", "group_key"]
_TRAINED = ["trained_ranges", "range_weights", "label"]


class ShardIndex:
    """Index of the shards that hold the records of a pack step."""

    def __init__(self, packed: Receipt[RowCounts], workspace: Workspace) -> None:
        table = read_table(packed.path("places.arrow"))
        self.keys = table["key"]
        self.bounds = np.append(table["first"].to_numpy(), packed.facts.rows_in)
        """Number of each shard's first record, then the number of all records."""
        self._workspace = workspace

    def shard(self, number: int) -> pa.Table:
        """Map the tokenized records of a shard."""
        receipt = TOKENIZE.peek(self.keys[number].as_py(), self._workspace)
        assert receipt is not None, f"pack ran before tokenize {self.keys[number]}"
        return read_table(receipt.path("tokenized.arrow"))

    def between(self, first: int, last: int) -> Iterator[tuple[pa.Table, int, int]]:
        """Yield each shard that holds records in [first, last), with the range of its rows."""
        # Bounds [0 500 900], records [450, 600): rows [450, 500) of shard 0, [0, 100) of shard 1.
        low = int(np.searchsorted(self.bounds, first, side="right")) - 1
        for number in range(max(low, 0), len(self.keys)):
            start, end = self.bounds[number : number + 2].tolist()
            if start >= last:
                return
            if end > start:
                yield self.shard(number), max(first - start, 0), min(last, end) - start


def read_packs(
    work: JobContext[Any], side: Side, packs: tuple[int, int], batch_packs: int, tally: GatherTally
) -> Iterator[pa.RecordBatch]:
    """Yield the packs [first, last) of one side, schema `table_schemas.PACKED`, in batches.

    Args:
        work: job that reads the pack step.
        side: train or eval.
        packs: the packs [first, last).
        batch_packs: packs per batch; the last batch may be smaller.
        tally: counts to update while batches are yielded.

    Raises:
        ContractError: a pack breaks its contract.
    """
    packed, recipe, workspace = work.input(PACK), work.recipe, work.workspace
    # Packs [1, 3) of offsets [0 2 3 5]: bounds [2 3 5], so sequences [2, 5), cut at [0 1 3].
    offsets = read_table(packed.path(f"{side}-offsets.arrow"))["offset"]
    bounds = offsets.slice(packs[0], packs[1] - packs[0] + 1).to_numpy()
    table = read_table(packed.path(f"{side}-sequences.arrow"))
    table = table.slice(bounds[0], bounds[-1] - bounds[0])
    starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
    seq_len, facts = recipe.pack.seq_len, packed.facts
    plan = PackPlan(
        np.arange(len(table)),
        bounds - bounds[0],
        seq_len,
        int(np.subtract(ends, starts).sum(dtype=np.int64)),
        strategy=recipe.pack.strategy,
        starts=starts,
        ends=ends,
    )
    shards, rows = _shards_of(ShardIndex(packed, workspace), table["record"].to_numpy())
    unused = np.zeros(0, np.int32)  # lengths, because the plan has its own starts and ends
    for batch in gather(shards, plan, unused, rows, batch_packs=batch_packs, tally=tally):
        batch = as_sequences(batch) if recipe.preferences == "pairs" else batch
        check_packed(batch, seq_len, facts.vocab_size, allow_untrained=facts.allow_untrained)
        workspace.check("packed", pa.Table.from_batches([batch]))
        yield batch


def _shards_of(index: ShardIndex, records: Int64s) -> tuple[list[pa.Table], Int64s]:
    """Return tables that hold the records, and the row of each sequence's record in them.

    With shards of 500 rows, records 3 and 900 are row 3 of shard 0 and row 400 of shard 1: two
    tables of one row each, and rows [0, 1].
    """
    # Packs are shuffled, so a file's records come from all shards, and `concat` cuts some in two.
    wanted, sequence = np.unique(records, return_inverse=True)
    shard_of = np.searchsorted(index.bounds, wanted, side="right") - 1
    numbers, firsts = np.unique(shard_of, return_index=True)
    tables, local, base = [], [], 0
    for number, rows in zip(numbers.tolist(), np.split(wanted, firsts[1:]), strict=True):
        # Opening a shard takes 0.1 ms, and every file opens nearly all of them: 80 core-hours at 10
        # TB with shards of 256 MiB.
        table = index.shard(number).drop_columns(_NOT_PACKED)
        rows = rows - index.bounds[number]
        # Copying pays only for few rows: with 2 in place of 16, gathering 520,020 rows took 1.8 s
        # of CPU, not 0.85.
        if 16 * len(rows) < table.num_rows:
            table, rows = table.take(pa.array(rows)), np.arange(len(rows))
        tables.append(table)
        local.append(base + rows)
        base += table.num_rows
    return tables, np.concatenate(local)[sequence]


def read_records(
    packed: Receipt[RowCounts],
    workspace: Workspace,
    rows: tuple[int, int] | None = None,
    block: int = 2**18,
    columns: Sequence[str] = tuple(LINEAGE.names),
) -> Iterator[pa.RecordBatch]:
    """Yield lineage, schema `LINEAGE`, in batches of `block` rows, independent of shard sizes.

    Args:
        packed: receipt of the pack step.
        workspace: workspace with its shards.
        rows: records [first, last); all by default.
        block: rows per batch; the last batch may be smaller.
        columns: columns to read, in the order of the schema.
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
            parts = []
            for shard, low, high in index.between(start, end):
                # Not the shard's `num_tokens`, the length before any cut: outcomes have the packed
                # length.
                names = [n for n in columns if n in shard.column_names and n != "num_tokens"]
                part = {name: shard[name].slice(low, high - low) for name in names}
                if "source" in part:
                    # One dictionary for all shards: that of a shard has only its own file.
                    numbers = pc.index_in(part["source"].cast(pa.string()), sources)
                    part["source"] = pa.DictionaryArray.from_arrays(one_chunk(numbers), sources)
                own_schema = pa.schema([LINEAGE.field(name) for name in names])
                parts.append(pa.table(part, schema=own_schema))
            named = pa.concat_tables(parts)
            read.update(zip(named.column_names, named.columns, strict=True))
        yield pa.RecordBatch.from_arrays([one_chunk(read[n]) for n in columns], schema=schema)


def read_placed(
    packed: Receipt[PackFacts], workspace: Workspace, rows: tuple[int, int], block: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records [first, last) as published, schema `RECORDS`, `block` rows at a time."""
    index, places = ShardIndex(packed, workspace), _Places(packed, rows)
    start = rows[0]
    for batch in read_records(packed, workspace, rows, block):
        stop = start + batch.num_rows
        shards = index.between(start, stop)
        parts = [s.select(_TRAINED).slice(low, high - low) for s, low, high in shards]
        made = places.columns(start - rows[0], pa.concat_tables(parts), batch)
        yield pa.RecordBatch.from_arrays([*batch.columns, *made], schema=RECORDS)
        start = stop


class _Places:
    """Place of the first copy of each of the records [first, last), from the plan of the packs."""

    def __init__(self, packed: Receipt[PackFacts], rows: tuple[int, int]) -> None:
        low, high = rows
        self.pack = np.full(high - low, -1, np.int64)
        self.position = np.zeros(len(self.pack), np.int32)
        all_cuts = [np.zeros(0, np.int64)]
        for side in packed.facts.sides:
            offsets = read_table(packed.path(f"{side}-offsets.arrow"))["offset"].to_numpy()
            sequences = read_table(packed.path(f"{side}-sequences.arrow"))
            number = tokens = 0  # sequences and tokens before the batch
            pack_start = 0  # tokens before the pack that continues into the batch
            is_first = np.zeros(1, np.bool_)  # whether the last head so far is of a first copy
            head_record = np.full(1, -1, np.int64)
            for batch in sequences.to_batches():
                record, start, end = (column.to_numpy() for column in batch.columns)
                # Pack offsets [0 2 3], pieces of 3, 2 and 4 tokens: packs 0 0 1, positions 0 3 0.
                numbers = np.arange(number, number + len(record))
                pack = np.searchsorted(offsets, numbers, "right") - 1
                before = tokens + np.concatenate([[0], np.cumsum(end - start, dtype=np.int64)])
                begins = offsets[pack] - number
                pack_starts = np.where(begins >= 0, before[np.maximum(begins, 0)], pack_start)
                own = (record >= low) & (record < high)
                heads = np.flatnonzero(start == 0)
                chosen = heads[own[heads]]
                _, at = np.unique(record[chosen], return_index=True)
                chosen = chosen[at]
                chosen = chosen[self.pack[record[chosen] - low] < 0]
                self.pack[record[chosen] - low] = pack[chosen]
                self.position[record[chosen] - low] = (before[:-1] - pack_starts)[chosen]
                # A head is a piece that starts at token 0; the pieces after it belong to its copy.
                # Packs may have been reordered, so a piece may follow a head of another record.
                firsts = np.zeros(len(record), np.bool_)
                firsts[chosen] = True
                is_first = np.concatenate([is_first[-1:], firsts[heads]])
                head_record = np.concatenate([head_record[-1:], record[heads]])
                head = np.searchsorted(heads, np.arange(len(record)), "right")
                goes_on = own & (start > 0) & (is_first[head] | (head_record[head] != record))
                all_cuts.append(((record[goes_on] - low) << 32 | start[goes_on]).astype(np.int64))
                number, tokens, pack_start = number + len(record), before[-1], pack_starts[-1]
        # First tokens of the later pieces of records that `concat` cut, as record << 32 | token.
        # They do not count as trained: no earlier token in their pack predicts them.
        self.cuts = np.unique(np.concatenate(all_cuts))

    def columns(self, start: int, shards: pa.Table, lineage: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns that `RECORDS` adds to a batch of lineage.

        Args:
            start: first row of the batch, counted from the first of these records.
            shards: columns `_TRAINED` of the batch's records.
            lineage: the batch.
        """
        rows = slice(start, start + lineage.num_rows)
        is_missing = self.pack[rows] < 0
        ranges = read_ranges(shards["trained_ranges"])
        weights = flat_weights(shards["range_weights"], ranges.counts)
        weights = np.ones(len(ranges.starts), np.float32) if weights is None else weights
        row = ranges.rows
        # 8 packed tokens, ranges [0, 3) and [6, 9): tokens 1, 2, 6 and 7 are trained. Token 0 never
        # is, because no token before it in its sequence predicts it.
        ends = np.minimum(ranges.ends, lineage["num_tokens"].to_numpy()[row])
        sizes = np.maximum(ends - np.maximum(ranges.starts, 1), 0)
        num_trained = np.bincount(row, sizes, lineage.num_rows).astype(np.int32)
        total = np.bincount(row, sizes * weights.astype(np.float64), lineage.num_rows)
        low, high = np.searchsorted(self.cuts, [start << 32, rows.stop << 32])
        cut_row, token = (self.cuts[low:high] >> 32) - start, self.cuts[low:high] & (2**32 - 1)
        at = np.searchsorted(row << 32 | ranges.starts, cut_row << 32 | token, "right") - 1
        is_trained = (at >= 0) & (row[at] == cut_row) & (token < ends[at]) if len(row) else at >= 0
        # A record may be cut several times: `num_trained[cut_row] -= 1` would count one cut per
        # record.
        np.subtract.at(num_trained, cut_row[is_trained], 1)
        np.subtract.at(total, cut_row[is_trained], weights[at[is_trained]])
        return [
            pa.array(num_trained, mask=is_missing),
            pa.array(np.round(total, 4), mask=is_missing),
            one_chunk(shards["label"]),
            pa.array(self.pack[rows], mask=is_missing),
            pa.array(self.position[rows], mask=is_missing),
        ]
