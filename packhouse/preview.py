"""How a recipe shows itself in a notebook: numbers, lengths and three records, before any run.

The estimate of `packhouse plan`, and records of the first megabyte of the first source. Takes a
second or two, so it is for files of this machine up to 64 MiB, and a tokenizer that is here; of
other recipes, only the settings are shown.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packhouse.api import recipe_for
from packhouse.cache.places import check_cache, find_cache
from packhouse.engine.workspace import Workspace
from packhouse.estimate import estimate, sample_rows
from packhouse.packing import PackStatistics, plan_packs
from packhouse.packing.gather import GatherTally
from packhouse.pages import html_table
from packhouse.recipe import Recipe
from packhouse.report.pictures import lengths_svg
from packhouse.report.samples import trained_mask_of
from packhouse.report.version_page import Record, records_html
from packhouse.sources.files import find_files
from packhouse.steps.plan import plan_jobs
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.tokenization.loading import find_snapshot

__all__ = ["preview_html"]

_MOST_BYTES = 2**26


def preview_html(recipe: Recipe) -> str:
    """Return what a recipe would make as HTML; empty where that takes a network or much time.

    Raises:
        PackhouseError: the sources, the tokenizer or the template cannot be used.
    """
    if not Path(recipe.tokenizer).is_dir() or any("://" in each.path for each in recipe.sources):
        return ""
    if sum(file.size for each in recipe.sources for file in find_files(each)) > _MOST_BYTES:
        return ""
    cache = check_cache(find_cache(None).folder)
    workspace = Workspace(cache=cache)
    recipe = recipe_for(recipe, cache=cache, settings={})
    plan = plan_jobs(recipe)
    expected = estimate(recipe, plan, workspace)
    sample, _ = sample_rows(recipe, recipe.sources[0], plan.shards[0].uri, workspace)
    lengths = sample["num_tokens"].to_numpy()
    packs = plan_packs(lengths[lengths <= recipe.pack.seq_len], recipe.pack.seq_len)
    tally = GatherTally(
        num_packs=packs.num_packs, num_tokens=packs.num_tokens, num_sequences=len(lengths)
    )
    sides = {"front of the first source": PackStatistics.of(packs, lengths, tally)}
    about = "" if expected.is_exact else "about "
    numbers = (
        f"{about}{expected.rows:,} rows, {expected.tokens:,} tokens, {expected.packs:,} packs of "
        f"{recipe.pack.seq_len:,} tokens, {expected.bytes / 2**20:,.1f} MiB"
    )
    lines = [("a run would make", numbers), *(("note", note) for note in expected.notes)]
    snapshot = find_snapshot(fingerprint_tokenizer(recipe.tokenizer), workspace.tokenizers)
    records = _records(sample.slice(0, 3).to_pylist())
    return "".join([html_table(lines), lengths_svg(sides), *records_html(records, snapshot)])


def _records(rows: list[dict[str, list[int]]]) -> Iterator[Record]:
    for row in rows:
        ids = np.asarray(row["input_ids"], np.int64)
        yield f"row {row['row']}", ids, trained_mask_of(row)
