"""What the three steps of a shard share: their input, their two output tables, their counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from packhouse.jobs import Job
from packhouse.step_store import Receipt
from packhouse.workspace import Workspace, read_table, write_table

__all__ = ["MappedTables", "inputs_of", "read_input", "write_outputs"]


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


def read_input(job: Job, workspace: Workspace, step: str, artefact: str) -> pa.Table:
    """Map the one table that a shard's step reads."""
    (receipt,) = inputs_of(job, workspace, step)
    return read_table(receipt.path(f"{artefact}.arrow"))


def write_outputs(
    folder: Path,
    workspace: Workspace,
    artefact: str,
    table: pa.Table,
    quarantined: pa.Table,
    notes: Mapping[str, int],
) -> dict[str, Any]:
    """Check and write the rows that passed and those that did not; return the counts of both."""
    workspace.check(artefact, table)
    workspace.check("quarantined", quarantined)
    write_table(folder / f"{artefact}.arrow", table)
    if quarantined.num_rows:
        write_table(folder / "quarantined.arrow", quarantined)
    reasons = Counter(quarantined["reason"].to_pylist())
    return {
        "rows_in": table.num_rows + quarantined.num_rows,
        "rows_out": table.num_rows,
        "quarantined": dict(sorted(reasons.items())),
        "notes": dict(sorted(notes.items())),
    }
