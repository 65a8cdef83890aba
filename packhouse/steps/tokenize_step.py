"""tokenize: text -> token ids with their trained ranges."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.foreign import run_tokenizer, tokenize_shard
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.steps.shard_io import check_rendered, inputs_of
from packhouse.tokenization.loading import tokenizer_bytes
from packhouse.workspace import Workspace, read_table

__all__ = ["compute"]


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `tokenized.arrow`, and `quarantined.arrow` where nothing of a row is trained."""
    (formatted,) = inputs_of(job, workspace, "format")
    path = formatted.path("formatted.arrow")
    call = partial(tokenize_shard, path, recipe, workspace.tokenizers, folder)
    num_bytes = path.stat().st_size + tokenizer_bytes(recipe.tokenizer)
    done = run_tokenizer(call, recipe.tokenizer, num_bytes)
    facts = check_rendered(job, recipe, workspace, folder, "tokenized", done["notes"])
    num_rows = formatted.facts["rows_out"]
    if facts["rows_in"] != num_rows:
        raise ContractError(f"tokenize took {num_rows:,} rows, put out {facts['rows_in']:,}")
    tokenized = read_table(folder / "tokenized.arrow")
    return {
        **facts,
        "tokens_out": pc.sum(tokenized["num_tokens"]).as_py() or 0,
        "trained_tokens": pc.sum(tokenized["num_trained"]).as_py() or 0,
        "encoder": done["encoder"],
        "tokenizer": done["tokenizer"],
    }
