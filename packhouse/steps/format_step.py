"""format: conversations -> text with its trained spans."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.sources import with_raw_rows
from packhouse.step_store import Receipt
from packhouse.steps.shard_io import read_input, write_outputs
from packhouse.tables import FORMATTED
from packhouse.templates import WindowRule, make_renderer, rewrites
from packhouse.tokenization import TokenizerSnapshot, load_snapshot, tokenize_table
from packhouse.workspace import Workspace, read_table, write_table

__all__ = ["compute", "conversations", "keeps_examples", "make_window_rule"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `formatted.arrow`, and `quarantined.arrow` where a template refuses a row.

    Where conversations are rendered otherwise than they came (split, or without thinking),
    `examples.arrow` has them as they were: what the audit and deduplication hold the text against.
    """
    assert job.source is not None
    validated = read_input(job, workspace, "validate", "validated")
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    window = make_window_rule(recipe, snapshot, workspace.tokenizers)
    renderer = make_renderer(recipe.format, snapshot, job.source.label_names, window)
    rendered = renderer.render(validated)
    assert job.shard is not None
    quarantined = with_raw_rows(rendered.quarantined, job.shard, recipe.validate_)
    facts = write_outputs(
        folder, workspace, "formatted", rendered.formatted, quarantined, rendered.notes
    )
    num_rows = validated.num_rows + sum(rendered.added.values())
    if facts["rows_in"] != num_rows:
        raise ContractError(f"format took {num_rows:,} rows, put out {facts['rows_in']:,}")
    if keeps_examples(recipe):
        workspace.check("validated", rendered.examples)
        write_table(folder / "examples.arrow", rendered.examples)
    return {**facts, "rows_in": validated.num_rows, "added": rendered.added}


def keeps_examples(recipe: Recipe) -> bool:
    """Return True if a recipe renders conversations otherwise than they came."""
    return _cuts_windows(recipe) or rewrites(recipe.format)


def conversations(validated: Receipt, formatted: Receipt) -> pa.Table:
    """The conversations that a shard's texts are renderings of."""
    if "examples.arrow" in formatted.files:
        return read_table(formatted.path("examples.arrow"))
    return read_table(validated.path("validated.arrow"))


def make_window_rule(
    recipe: Recipe, snapshot: TokenizerSnapshot, cache: Path | None = None
) -> WindowRule | None:
    """What fits into a window, by the recipe's own tokens; None where there are no windows."""
    if not _cuts_windows(recipe):
        return None

    def measure(formatted: pa.Table) -> npt.NDArray[np.int64]:
        numbered = formatted.set_column(
            formatted.schema.get_field_index("row"),
            FORMATTED.field("row"),
            pa.array(np.arange(formatted.num_rows)),
        )
        done = tokenize_table(numbered, snapshot, recipe.tokenize, cache=cache).tokenized
        lengths = np.full(formatted.num_rows, -1, np.int64)
        lengths[done["row"].to_numpy()] = done["num_tokens"].to_numpy()
        return lengths

    return WindowRule(recipe.pack.seq_len, measure)


def _cuts_windows(recipe: Recipe) -> bool:
    return recipe.pack.over_length == "window" and recipe.pack.strategy != "concat"
