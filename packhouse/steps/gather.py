"""gather: the tokens of some planned packs, brought together from all shards.

One job gathers one shard of output. It maps the shards that hold its records one by one, takes
what it needs where that is less than half of a shard, and joins. Memory is its own tokens (64 MiB
of ids, up to 512 in very large datasets) and their names, whatever the size of the dataset.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.jobs import Job
from packhouse.packing import GatherTally, PackPlan, check_packed, gather
from packhouse.progress import advance
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps.records import Places, write_batches
from packhouse.steps.shard_io import inputs_of
from packhouse.tables import PACKED
from packhouse.workspace import Workspace, read_table

__all__ = ["compute"]

_NOT_PACKED = ["source", "row", "group_key"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `packs.arrow`: the packs [first, last) of one side.

    Raises:
        ContractError: a pack breaks its contract.
    """
    (packed,) = inputs_of(job, workspace, "pack")
    packs = dict(job.parts["packs"])
    plan, records = _read_plan(packed, recipe, **packs)
    shards, rows = _shards_of(Places(packed, workspace), records)
    tally = GatherTally()
    ends = np.zeros(0, np.int32)  # the plan has starts and ends of its own
    batches = _checked(gather(shards, plan, ends, rows, tally=tally), plan, packed)
    write_batches(folder / "packs.arrow", PACKED, batches)
    workspace.check("packed", read_table(folder / "packs.arrow"))
    return {"packs": packs, "tally": asdict(tally)}


def _read_plan(
    packed: Receipt, recipe: Recipe, side: str, first: int, last: int
) -> tuple[PackPlan, npt.NDArray[np.int64]]:
    """The packs [first, last) as a plan of their own, and the record of each sequence."""
    offsets = read_table(packed.path(f"{side}-offsets.arrow"))["offset"]
    bounds = offsets.slice(first, last - first + 1).to_numpy()
    table = read_table(packed.path(f"{side}-sequences.arrow"))
    table = table.slice(bounds[0], bounds[-1] - bounds[0])
    starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
    plan = PackPlan(
        np.arange(len(table)),
        bounds - bounds[0],
        recipe.pack.seq_len,
        int(np.subtract(ends, starts).sum(dtype=np.int64)),
        strategy=recipe.pack.strategy,
        starts=starts,
        ends=ends,
    )
    return plan, table["record"].to_numpy()


def _shards_of(
    places: Places, records: npt.NDArray[np.int64]
) -> tuple[list[pa.Table], npt.NDArray[np.int64]]:
    """Tables that hold the records, and the number of each sequence's record in them.

    Records 3 and 900 of shards of 500: tables [row 3 of shard 0, row 400 of shard 1], rows [0, 1].
    """
    wanted, sequence = np.unique(records, return_inverse=True)
    shard_of = np.searchsorted(places.bounds, wanted, side="right") - 1
    numbers, firsts = np.unique(shard_of, return_index=True)
    tables, local, base = [], [], 0
    for number, rows in zip(numbers.tolist(), np.split(wanted, firsts[1:]), strict=True):
        table = places.shard(number).drop_columns(_NOT_PACKED)
        rows = rows - places.bounds[number]
        if 2 * len(rows) < table.num_rows:
            table, rows = table.take(pa.array(rows)), np.arange(len(rows))
        tables.append(table)
        local.append(base + rows)
        base += table.num_rows
    return tables, np.concatenate(local)[sequence]


def _checked(
    batches: Iterator[pa.RecordBatch], plan: PackPlan, packed: Receipt
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        check_packed(
            batch,
            plan.seq_len,
            packed.facts["vocab_size"],
            allow_untrained=packed.facts["allow_untrained"],
        )
        advance(batch.num_rows / plan.num_packs)
        yield batch
