"""split: prove that train and eval share no record and no group, and count both.

A record's side follows from its group key, so pack keeps the sides apart already; what is left is
the proof, over the records that were really packed.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from packhouse.fingerprint import canonical_json
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.splitting import prove_disjoint
from packhouse.steps.records import read_records
from packhouse.steps.shard_io import inputs_of
from packhouse.workspace import Workspace

__all__ = ["compute"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `sides.json`: records, groups and tokens of each side, and of their intersection: 0.

    Raises:
        ContractError: a group or a record is on both sides.
    """
    (packed,) = inputs_of(job, workspace, "pack")
    columns = ["record_id", "group_key", "split", "num_tokens", "times"]
    batches = [batch.select(columns) for batch in read_records(packed, workspace)]
    records = pa.Table.from_batches(batches)
    records = records.filter(pc.greater(records["num_tokens"], 0))
    train, evaluation = (_side(records, name) for name in ("train", "eval"))
    for column in ("record_id", "group_key"):
        prove_disjoint(train[column].chunks, evaluation[column].chunks, what=column)
    sides = {"train": _count(train), "eval": _count(evaluation)}
    (folder / "sides.json").write_bytes(canonical_json(sides))
    tokens = packed.facts["tokens_out"]
    return {
        "rows_in": pc.sum(records["times"]).as_py() or 0,
        "rows_out": sum(side["records"] for side in sides.values()),
        "tokens_in": tokens,
        "tokens_out": sum(side["tokens"] for side in sides.values()),
        "sides": sides,
    }


def _side(records: pa.Table, split: str) -> pa.Table:
    return records.filter(pc.equal(records["split"], split))


def _count(side: pa.Table) -> dict[str, int]:
    """Records as often as they stand in packs."""
    tokens = pc.multiply(side["num_tokens"].cast(pa.int64()), side["times"].cast(pa.int64()))
    return {
        "records": pc.sum(side["times"]).as_py() or 0,
        "groups": pc.count_distinct(side["group_key"]).as_py(),
        "tokens": pc.sum(tokens).as_py() or 0,
    }
