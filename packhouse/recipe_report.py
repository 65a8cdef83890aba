"""The report of a recipe: of its version where it ran, else of what a run would make.

What a run would make is the estimate of `packhouse plan`, with lengths and records of the first
megabyte of each source. Nothing is written but the tokenizer's snapshot in the cache.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from packhouse.engine.workspace import Workspace
from packhouse.errors import VersionNotFoundError
from packhouse.estimate import Estimate, estimate, sample_rows
from packhouse.pages import html_text
from packhouse.recipe import Recipe
from packhouse.report.figures import length_figures, seq_len_figure
from packhouse.report.html import figure, header, numbers, page, preformatted, section, table, tiles
from packhouse.report.measure import MAX_RECORD_TOKENS
from packhouse.report.other_seq_lens import alternatives
from packhouse.report.sections import samples_section
from packhouse.report.version_report import pipeline_of, version_report, with_texts
from packhouse.sources.files import source_name
from packhouse.steps.plan import Plan, plan_jobs
from packhouse.store import open_version
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.tokenization.loading import find_snapshot

__all__ = ["recipe_report"]

_SOURCES = 8
_SHOWN_TOKENS = 4_000  # of a source


def recipe_report(recipe: Recipe, cache: Path) -> str:
    """Return the report of a recipe as HTML.

    Args:
        recipe: with its tokenizer pinned.
        cache: folder of finished steps.

    Raises:
        PackhouseError: a source, tokenizer or template that a run would refuse as well.
    """
    workspace = Workspace(cache=cache)
    plan = plan_jobs(recipe)
    try:
        opened = open_version(recipe.publish.store, recipe.dataset, plan.version_id)
    except VersionNotFoundError:
        return _foreseen(recipe, plan, workspace)
    return version_report(opened, workspace.tokenizers)


def _foreseen(recipe: Recipe, plan: Plan, workspace: Workspace) -> str:
    expected = estimate(recipe, plan, workspace)
    lengths: dict[str, Counter[int]] = {}
    groups: list[dict[str, Any]] = []
    for source in recipe.sources[:_SOURCES]:
        name = source_name(source)
        uri = next(v.parameters.shard.uri for v in plan.validate if v.parameters.source == source)
        sample, _ = sample_rows(recipe, source, uri, workspace)
        lengths[name] = Counter(sample["num_tokens"].to_pylist())
        groups.append({"name": name, "packs": [_sample(name, sample)]})
    load = find_snapshot(fingerprint_tokenizer(recipe.tokenizer), workspace.tokenizers)
    pipeline = pipeline_of(lambda: load)
    for group in groups:
        group["packs"] = [with_texts(each, pipeline) for each in group["packs"] if each["records"]]
    shown = sum(len(r["ids"]) for g in groups for p in g["packs"] for r in p["records"])
    parts = [
        _lengths_section(recipe, lengths),
        samples_section(
            sum(len(group["packs"]) for group in groups),
            shown,
            pipeline is not None and pipeline.token_bytes is not None,
            f"The first rows of each source, {numbers(shown, 'token')}, as a run would train them.",
        ),
        _settings_section(recipe, expected),
    ]
    return page(
        f"{recipe.dataset} - packhouse report",
        _head(recipe, plan.version_id, expected),
        parts,
        {"samples-data": groups},
    )


def _head(recipe: Recipe, version_id: str, expected: Estimate) -> str:
    about = "" if expected.is_exact else "about "
    notes = "".join(f"<p class=quiet>Note: {html_text(note)}.</p>" for note in expected.notes)
    boxes = tiles(
        [
            ("Rows", f"{about}{expected.rows:,}", numbers(len(recipe.sources), "source")),
            ("Tokens", f"{about}{expected.tokens:,}", ""),
            ("Packs", f"{about}{expected.packs:,}", f"of {recipe.pack.seq_len:,} tokens"),
            ("Size", f"{about}{expected.bytes / 2**20:,.1f} MiB", "of data files"),
        ]
    )
    said = "<p>A recipe that was not run: what a run would make.</p>"
    top = header(recipe.dataset, f"<code class=quiet>{html_text(version_id)}</code>{said}")
    return f"{top}{boxes}{notes}"


def _sample(name: str, sample: Any) -> dict[str, Any]:
    """The first rows of a source as the page's script takes a pack."""
    records: list[dict[str, Any]] = []
    tokens = 0
    for row in sample.slice(0, 200).to_pylist():
        if tokens >= _SHOWN_TOKENS:
            break
        cut = row["input_ids"][:MAX_RECORD_TOKENS]
        spans = [[span["start"], min(span["end"], len(cut))] for span in row["trained_ranges"]]
        records.append(
            {
                "id": row["record_id"],
                "place": f"{row['source']}:{row['row']}",
                "start": 0,
                "length": len(row["input_ids"]),
                "num_trained": row["num_trained"],
                "ids": cut,
                "trained": [span for span in spans if span[0] < span[1]],
            }
        )
        tokens += len(cut)
    label = f"the front of {name}"
    counts = {"num_tokens": tokens, "num_records": len(records)}
    return {"pack": 0, "label": label, **counts, "records": records}


def _lengths_section(recipe: Recipe, lengths: dict[str, Counter[int]]) -> str:
    if not any(lengths.values()):
        return ""
    seq_len = recipe.pack.seq_len
    drawn = "".join(figure(each) for each in length_figures(lengths, seq_len))
    whole: Counter[int] = Counter()
    for own in lengths.values():
        whole.update(own)
    choices = alternatives([whole], seq_len, recipe.pack.strategy, recipe.pack.seed)
    other = figure(seq_len_figure(choices, seq_len)) if choices else ""
    said = "<p class=quiet>Of the first megabyte of each source.</p>"
    return section("lengths", "Lengths", said, f"<div class=grid>{drawn}</div><br>", other)


def _settings_section(recipe: Recipe, expected: Estimate) -> str:
    rows = [[name, line["rows"], line["tokens"]] for name, line in expected.sources.items()]
    settings = recipe.model_dump_json(indent=2, by_alias=True, exclude_unset=True)
    return section(
        "recipe",
        "Recipe",
        table(("source file", "rows", "tokens"), rows, "Sources"),
        preformatted(settings, "Settings"),
    )
