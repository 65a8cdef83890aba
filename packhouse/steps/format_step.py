"""format: conversations -> text with its trained spans."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.foreign import cuts_windows, render_shard, run_template
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps.shard_io import check_rendered, inputs_of
from packhouse.templates import rewrites
from packhouse.workspace import Workspace, read_table

__all__ = ["compute", "conversations", "keeps_examples"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `formatted.arrow`, and `quarantined.arrow` where a template refuses a row.

    Where conversations are rendered otherwise than they came (split, or without thinking),
    `examples.arrow` has them as they were: what the audit and deduplication hold the text against.
    """
    assert job.source is not None
    (validated,) = inputs_of(job, workspace, "validate")
    path = validated.path("validated.arrow")
    call = partial(render_shard, path, recipe, job.source.label_names, workspace.tokenizers, folder)
    done = run_template(call, recipe, max(job.size, path.stat().st_size))
    facts = check_rendered(job, recipe, workspace, folder, "formatted", done["notes"])
    num_rows = validated.facts["rows_out"]
    if facts["rows_in"] != num_rows + sum(done["added"].values()):
        raise ContractError(f"format took {num_rows:,} rows, put out {facts['rows_in']:,}")
    if keeps_examples(recipe):
        workspace.check("validated", read_table(folder / "examples.arrow"))
    return {**facts, "rows_in": num_rows, "added": done["added"]}


def keeps_examples(recipe: Recipe) -> bool:
    """Return True if a recipe renders conversations otherwise than they came."""
    return cuts_windows(recipe) or rewrites(recipe.format)


def conversations(validated: Receipt, formatted: Receipt) -> pa.Table:
    """The conversations that a shard's texts are renderings of."""
    if "examples.arrow" in formatted.files:
        return read_table(formatted.path("examples.arrow"))
    return read_table(validated.path("validated.arrow"))
