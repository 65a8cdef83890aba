"""What the three steps of a shard share: their two output tables, their counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from packhouse.foreign import REFUSED
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.sources import with_raw_rows
from packhouse.step_store import Receipt
from packhouse.workspace import Workspace, read_table, write_table

__all__ = ["MappedTables", "check_outputs", "check_rendered", "inputs_of"]


class MappedTables(Sequence[pa.Table]):
    """Tables of files, mapped when they are looked at: no number of shards is too large."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> pa.Table: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[pa.Table]: ...

    def __getitem__(self, index: int | slice) -> pa.Table | Sequence[pa.Table]:
        if isinstance(index, slice):
            return MappedTables(self._paths[index])
        return read_table(self._paths[index])


def inputs_of(job: Job, workspace: Workspace, step: str) -> list[Receipt]:
    """Return the receipts of the jobs of `step` that this job reads, in the job's order."""
    receipts = []
    for input_step, key in job.inputs:
        if input_step == step:
            receipt = workspace.steps.peek(step, key)
            assert receipt is not None, f"{job.step} was started before {step} {key} was done"
            receipts.append(receipt)
    return receipts


def check_rendered(
    job: Job,
    recipe: Recipe,
    workspace: Workspace,
    folder: Path,
    artefact: str,
    notes: Mapping[str, int],
) -> dict[str, Any]:
    """Check what a child left in a folder; give the rows that it refused their raw bytes."""
    assert job.shard is not None
    refused = folder / REFUSED
    quarantined = with_raw_rows(read_table(refused), job.shard, recipe.validate_)
    refused.unlink()
    return check_outputs(folder, workspace, artefact, quarantined, notes)


def check_outputs(
    folder: Path,
    workspace: Workspace,
    artefact: str,
    quarantined: pa.Table,
    notes: Mapping[str, int],
) -> dict[str, Any]:
    """Check the rows that passed, check and write those that did not; return the counts of both."""
    table = read_table(folder / f"{artefact}.arrow")
    workspace.check(artefact, table)
    workspace.check("quarantined", quarantined)
    if quarantined.num_rows:
        write_table(folder / "quarantined.arrow", quarantined)
    reasons = Counter(quarantined["reason"].to_pylist())
    return {
        "rows_in": table.num_rows + quarantined.num_rows,
        "rows_out": table.num_rows,
        "quarantined": dict(sorted(reasons.items())),
        "notes": dict(sorted(notes.items())),
    }
