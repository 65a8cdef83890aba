"""format: conversations -> text with its trained spans."""

from pathlib import Path
from typing import Any

from packhouse.errors import ContractError
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.steps.shard_io import read_input, write_outputs
from packhouse.templates import make_renderer
from packhouse.tokenization import load_snapshot
from packhouse.workspace import Workspace

__all__ = ["compute"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `formatted.arrow`, and `quarantined.arrow` where a template refuses a row."""
    assert job.source is not None
    validated = read_input(job, workspace, "validate", "validated")
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    renderer = make_renderer(recipe.format, snapshot, job.source.label_names)
    rendered = renderer.render(validated)
    facts = write_outputs(
        folder, workspace, "formatted", rendered.formatted, rendered.quarantined, rendered.notes
    )
    if facts["rows_in"] != validated.num_rows:
        raise ContractError(
            f"format took {validated.num_rows:,} rows, put out {facts['rows_in']:,}"
        )
    return facts
