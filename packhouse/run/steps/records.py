"""Records as pack left them: which shard holds each, which split it is in, whether it was packed.

The pack step writes 14 bytes a record; names and keys stay in the shards, and are read beside them
a block of rows at a time. So lineage of any number of records costs the memory of one block.
"""

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.ledger import RowCounts
from packhouse.records.lists import one_chunk
from packhouse.records.tables import TOKENIZED, read_table
from packhouse.run.cache.steps import Receipt
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.workspace import Workspace

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
RECORDS = pa.schema(
    [
        *(TOKENIZED.field(name) for name in ("record_id", "source", "row", "group_key")),
        *OUTCOMES,
    ]
)


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
    columns: Sequence[str] = tuple(RECORDS.names),
) -> Iterator[pa.RecordBatch]:
    """Yield lineage, schema `RECORDS`, in batches of `block` rows whatever the shards are.

    Args:
        packed: receipt of the pack step.
        workspace: where its shards lie.
        rows: records [first, last); all by default.
        block: rows of a batch; the last one may be smaller.
        columns: which ones to read, in the order of the schema.
    """
    schema = pa.schema([RECORDS.field(name) for name in columns])
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
    return pa.table(named, schema=pa.schema([RECORDS.field(name) for name in named]))
