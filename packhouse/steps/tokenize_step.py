"""tokenize: text -> token ids with their trained ranges."""

from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.sources import with_raw_rows
from packhouse.steps.shard_io import read_input, write_outputs
from packhouse.tokenization import load_snapshot, tokenize_table
from packhouse.workspace import Workspace

__all__ = ["compute"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `tokenized.arrow`, and `quarantined.arrow` where nothing of a row is trained."""
    formatted = read_input(job, workspace, "format", "formatted")
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    result = tokenize_table(formatted, snapshot, recipe.tokenize, cache=workspace.tokenizers)
    assert job.shard is not None
    quarantined = with_raw_rows(result.quarantined, job.shard, recipe.validate_)
    facts = write_outputs(
        folder, workspace, "tokenized", result.tokenized, quarantined, result.notes
    )
    if facts["rows_in"] != formatted.num_rows:
        raise ContractError(
            f"tokenize took {formatted.num_rows:,} rows, put out {facts['rows_in']:,}"
        )
    tokens = pc.sum(result.tokenized["num_tokens"]).as_py() or 0
    trained = pc.sum(result.tokenized["num_trained"]).as_py() or 0
    return {
        **facts,
        "tokens_out": tokens,
        "trained_tokens": trained,
        "encoder": dict(result.encoder),
        "tokenizer": {
            "fingerprint": snapshot.fingerprint,
            "class": snapshot.class_name,
            "vocab_size": snapshot.vocab_size,
        },
    }
