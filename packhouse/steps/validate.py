"""validate: one shard of raw rows -> conversations, and rows that are not."""

from pathlib import Path
from typing import Any

from packhouse.confine import start_early
from packhouse.jobs import Job
from packhouse.recipe import MIXING, Recipe
from packhouse.sources import read_shard
from packhouse.steps.shard_io import check_outputs
from packhouse.workspace import Workspace, write_table

__all__ = ["compute"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `validated.arrow`, and `quarantined.arrow` where a row is bad."""
    assert job.shard is not None
    assert job.source is not None
    start_early()  # format comes next
    rows = read_shard(job.shard, job.source, recipe.validate_, recipe.split.group_by)
    write_table(folder / "validated.arrow", rows.validated)
    facts = check_outputs(folder, workspace, "validated", rows.quarantined, rows.notes)
    facts["rows_in"] = rows.num_records  # what was read, not what came out: the ledger compares
    facts["added"] = {"extra_paths": rows.extra_paths} if rows.extra_paths else {}
    facts["extra_fields"] = rows.extra_fields
    origin = {"file": job.shard.file, "row_start": job.shard.row_start, "sha256": job.shard.sha256}
    origin["settings"] = job.source.model_dump(mode="json", exclude={"path", "name", *MIXING})
    return {**facts, "origin": origin}
