"""Estimate a run before doing it: rows, tokens, packs and bytes, from a sample of each source.

Reads, renders and tokenizes about a megabyte from the front of each source with the very code of
the run, then scales by bytes. Shards that are tokenized already are counted exactly instead. The
estimate is as good as the sample is like the rest: a file sorted by length is estimated badly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packhouse.jobs import Plan
from packhouse.packing import plan_packs
from packhouse.recipe import Recipe, SourceConfig
from packhouse.sources import read_shard, scan_source
from packhouse.sources.files import source_name
from packhouse.templates import make_renderer
from packhouse.tokenization import load_snapshot, tokenize_table
from packhouse.workspace import Workspace, read_table

__all__ = ["Estimate", "estimate"]

_Lengths = npt.NDArray[np.integer[Any]]
_SAMPLE_BYTES = 2**20
_BYTES_PER_TOKEN = {"labels": 2.6, "compact": 1.5}  # zstd-1 Parquet, docs/performance.md


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run would give."""

    rows: int
    tokens: int
    packs: int
    bytes: int
    is_exact: bool
    """True where every shard is tokenized already."""
    sources: Mapping[str, Mapping[str, int]]
    """Rows and tokens by source file, before sources are mixed."""
    notes: tuple[str, ...] = ()
    """What is not in the numbers."""


def estimate(recipe: Recipe, plan: Plan, workspace: Workspace) -> Estimate:
    """Estimate the run of `recipe`; costs a second or two for each source that is not cached."""
    lengths: dict[str, list[_Lengths]] = {}
    sources: dict[str, dict[str, int]] = {}
    samples: dict[str, tuple[_Lengths, int]] = {}
    for validate, tokenize in zip(plan.validate, plan.tokenize, strict=True):
        shard = validate.shard
        assert shard is not None
        assert validate.source is not None
        receipt = workspace.steps.peek("tokenize", tokenize.key)
        if receipt is not None:
            counted = read_table(receipt.path("tokenized.arrow"))["num_tokens"].to_numpy()
        else:
            if shard.uri not in samples:
                samples[shard.uri] = _sample(recipe, validate.source, shard.uri, workspace)
            sampled, sample_bytes = samples[shard.uri]
            scale = (shard.byte_end - shard.byte_start) / max(1, sample_bytes)
            checked = workspace.steps.peek("validate", validate.key)
            rows = checked.facts["rows_out"] if checked else round(len(sampled) * scale)
            counted = np.resize(sampled, rows)
        lengths.setdefault(source_name(validate.source), []).append(counted)
        line = sources.setdefault(shard.file, {"rows": 0, "tokens": 0})
        line["rows"] += len(counted)
        line["tokens"] += int(counted.sum())
    mixed = _mixed(recipe, lengths)
    tokens = sum(int(each.sum()) for each in mixed)
    return Estimate(
        rows=sum(len(each) for each in mixed),
        tokens=tokens,
        packs=_packs(recipe, mixed),
        bytes=round(tokens * _BYTES_PER_TOKEN[recipe.publish.layout]),
        is_exact=not samples,
        sources=sources,
        notes=tuple(_not_counted(recipe)),
    )


def _mixed(recipe: Recipe, lengths: Mapping[str, list[_Lengths]]) -> list[_Lengths]:
    """Lengths by source as often as its `weight` and `max_records` will take them, about."""
    mixed = []
    for source in recipe.sources:
        own = np.concatenate([np.zeros(0, np.int32), *lengths.get(source_name(source), [])])
        taken = len(own) if source.max_records is None else min(len(own), source.max_records)
        mixed.append(np.resize(own, round(taken * source.weight)))
    return mixed


def _not_counted(recipe: Recipe) -> Iterator[str]:
    policies = {"exact": recipe.dedup.exact, "near": recipe.dedup.near}
    dropped = [f"dedup.{name}" for name, policy in policies.items() if policy == "drop"]
    if dropped:
        yield f"duplicates are not subtracted, though {' and '.join(dropped)} will drop them"


def _sample(
    recipe: Recipe, source: SourceConfig, uri: str, workspace: Workspace
) -> tuple[_Lengths, int]:
    """Token counts of the first megabyte of a file, and how many bytes they come from."""
    shards = [shard for shard in scan_source(source, _SAMPLE_BYTES) if shard.uri == uri]
    rows = read_shard(shards[0], source, recipe.validate_, recipe.split.group_by)
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    rendered = make_renderer(recipe.format, snapshot, source.label_names).render(rows.validated)
    result = tokenize_table(
        rendered.formatted, snapshot, recipe.tokenize, cache=workspace.tokenizers
    )
    num_bytes = shards[0].byte_end - shards[0].byte_start
    return result.tokenized["num_tokens"].to_numpy(), num_bytes


def _packs(recipe: Recipe, lengths: list[_Lengths]) -> int:
    """Packs of all lengths in one plan, as the run would plan them (but for the two sides)."""
    every = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
    if recipe.pack.strategy != "concat":
        every = every[every <= recipe.pack.seq_len]
    if not len(every):
        return 0
    plan = plan_packs(every, recipe.pack.seq_len, recipe.pack.strategy, recipe.pack.seed)
    return plan.num_packs
