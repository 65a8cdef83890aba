"""gather: collect the tokens of planned packs from all input shards.

One job gathers one shard of output. It maps the input shards that hold its records one by one,
copies only the needed rows if they are less than half of a shard, and joins them. Memory is the
job's own tokens (64 MiB of ids, up to 512 MiB in very large datasets) and their record ids,
whatever the size of the dataset.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from packhouse import pack
from packhouse.pack.gather import GatherTally, gather
from packhouse.pack.layout import check_packed
from packhouse.pack.plan import PackPlan
from packhouse.recipe import PackConfig
from packhouse.records.pairs import as_sequences
from packhouse.records.tables import PACKED, read_table, write_batches
from packhouse.run.cache import Receipt
from packhouse.run.step import Job, Step, Work
from packhouse.run.steps.pack import PACK, PackFacts, PackParameters, PlannedSide, ShardIndex, Side
from packhouse.system.arrays import Int64s
from packhouse.system.progress import advance

_SHARD_TOKENS = 2**24
"""Approximate tokens of a gathered shard: 64 MiB of ids, which a worker holds in memory."""
_MOST_SHARDS = 1024
"""Above this number shards grow instead, because every job reads from all input shards."""
_MOST_TOKENS = 2**27

_NOT_PACKED = ["source", "row", "group_key"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRange:
    """Parameters of one job: the packs [first, last) of one side."""

    side: Side
    first: int
    last: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key: the range of packs."""
        return {"packs": asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherFacts:
    """The gathered packs and their counts."""

    packs: PackRange
    tally: GatherTally


def jobs(pack: Job[PackParameters], side: Side, planned: PlannedSide) -> tuple[Job[PackRange], ...]:
    """Return the jobs that gather the tokens of one side; none for an empty side.

    Shard boundaries do not affect published bytes: a published file is cut at rows of its side.
    """
    num_packs, num_tokens = planned.num_packs, planned.num_tokens
    # 40 million tokens in 20,000 packs, at 16.8 million a shard: 3 shards of 6,667 packs.
    size = min(max(_SHARD_TOKENS, num_tokens // _MOST_SHARDS), _MOST_TOKENS)
    step = max(1, -(-num_packs // max(1, -(-num_tokens // size))))
    pack_bytes = 4 * num_tokens // max(1, num_packs)
    return tuple(
        GATHER.job(
            PackRange(side=side, first=first, last=min(first + step, num_packs)),
            inputs=[pack.ref],
            label=f"{side} packs from {first:,}",
            size=pack_bytes * min(step, num_packs - first),
        )
        for first in range(0, num_packs, step)
    )


def compute(work: Work[PackRange], folder: Path) -> GatherFacts:
    """Write `packs.arrow`: the packs [first, last) of one side.

    Raises:
        ContractError: a pack breaks its contract.
    """
    packed = work.input(PACK)
    plan, records = _read_plan(packed, work.recipe.pack, work.parameters)
    shards, rows = _shards_of(ShardIndex(packed, work.workspace), records)
    tally = GatherTally()
    ends = np.zeros(0, np.int32)  # unused, because the plan has its own starts and ends
    batches = gather(shards, plan, ends, rows, tally=tally)
    if work.recipe.preferences == "pairs":
        batches = map(as_sequences, batches)

    def checked() -> Iterator[pa.RecordBatch]:
        facts = packed.facts
        for batch in batches:
            check_packed(
                batch, plan.seq_len, facts.vocab_size, allow_untrained=facts.allow_untrained
            )
            advance(batch.num_rows / plan.num_packs)
            yield batch

    write_batches(folder / "packs.arrow", PACKED, checked())
    return GatherFacts(packs=work.parameters, tally=tally)


def _read_plan(
    packed: Receipt[PackFacts], config: PackConfig, packs: PackRange
) -> tuple[PackPlan, Int64s]:
    """Return a plan of only the packs [first, last), and the record of each sequence."""
    # Packs [1, 3) of offsets [0 2 3 5]: bounds [2 3 5], so sequences [2, 5), cut at [0 1 3].
    offsets = read_table(packed.path(f"{packs.side}-offsets.arrow"))["offset"]
    bounds = offsets.slice(packs.first, packs.last - packs.first + 1).to_numpy()
    table = read_table(packed.path(f"{packs.side}-sequences.arrow"))
    table = table.slice(bounds[0], bounds[-1] - bounds[0])
    starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
    plan = PackPlan(
        np.arange(len(table)),
        bounds - bounds[0],
        config.seq_len,
        int(np.subtract(ends, starts).sum(dtype=np.int64)),
        strategy=config.strategy,
        starts=starts,
        ends=ends,
    )
    return plan, table["record"].to_numpy()


def _shards_of(index: ShardIndex, records: Int64s) -> tuple[list[pa.Table], Int64s]:
    """Return tables that hold the records, and the row of each sequence's record in them.

    With shards of 500 rows, records 3 and 900 are row 3 of shard 0 and row 400 of shard 1: two
    tables of one row each, and rows [0, 1].
    """
    wanted, sequence = np.unique(records, return_inverse=True)
    shard_of = np.searchsorted(index.bounds, wanted, side="right") - 1
    numbers, firsts = np.unique(shard_of, return_index=True)
    tables, local, base = [], [], 0
    for number, rows in zip(numbers.tolist(), np.split(wanted, firsts[1:]), strict=True):
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


GATHER = Step(
    name="gather",
    title="Gather the tokens of the packs of one output shard.",
    version=f"1.{pack.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=GatherFacts,
    compute=compute,
    contracts={"packs.arrow": "packed"},
)
