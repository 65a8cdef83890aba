"""The audit of a run, made for publish: shard by shard, kept in the step store.

A shard's audit has a key of its own beside its tokenize step, so an appended file costs its own
shard here, too, and a better audit does not tokenize anything again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.audit import (
    VERSION,
    audit_packs,
    audit_records,
    audit_shard,
    combine,
    combine_contamination,
    find_contamination,
    read_benchmarks,
)
from packhouse.fingerprint import digest
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.sources.files import source_name
from packhouse.step_store import Receipt
from packhouse.steps.shard_io import inputs_of
from packhouse.tokenization import TokenizerSnapshot, load_snapshot
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.workspace import Workspace, read_table

__all__ = ["audit_run"]

_BATCH_PACKS = 256


def audit_run(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    """Audit all that the publish job reads; see `packhouse.audit`.

    Returns:
        Plain JSON: `dataset` and `sources` (counts), `packs`, `worst` (rows by finding).
    """
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    steps = (inputs_of(job, workspace, step) for step in ("validate", "format", "tokenize"))
    shards = list(zip(*steps, strict=True))
    audited = [_audit_shard(shard, recipe, workspace, snapshot) for shard in shards]
    named = [
        (_source(validated), shard, tokenized.facts["notes"])
        for (validated, _, tokenized), shard in zip(shards, audited, strict=True)
    ]
    (packed,) = inputs_of(job, workspace, "pack")
    audit = combine(named)
    audit["packs"] = _audit_packs(packed, recipe, snapshot)
    _add_repetition(audit, audit_records(read_table(packed.path("records.arrow"))))
    if recipe.audit.benchmarks:
        audit["contamination"] = _contamination(job, recipe, workspace, [s[0] for s in shards])
    return audit


def _audit_shard(
    shard: tuple[Receipt, ...], recipe: Recipe, workspace: Workspace, snapshot: TokenizerSnapshot
) -> dict[str, Any]:
    validated, formatted, tokenized = shard
    names = {source_name(source): source.label_names for source in recipe.sources}

    def compute(folder: Path) -> dict[str, Any]:
        return audit_shard(
            read_table(validated.path("validated.arrow")),
            read_table(formatted.path("formatted.arrow")),
            read_table(tokenized.path("tokenized.arrow")),
            snapshot,
            recipe.format,
            names[_source(validated)],
        )

    key = digest({"step": "audit", "engine": VERSION, "inputs": [tokenized.key]})
    return dict(workspace.steps.run("audit", key, compute).facts)


def _contamination(
    job: Job, recipe: Recipe, workspace: Workspace, validated: Sequence[Receipt]
) -> dict[str, Any]:
    found = read_benchmarks(recipe.audit.benchmarks, recipe.audit.benchmark_ngram)

    def look_at(shard: Receipt) -> dict[str, Any]:
        parts = {"engine": VERSION, "input": shard.key, "benchmarks": job.parts["benchmarks"]}
        return dict(
            workspace.steps.run(
                "contamination",
                digest(parts),
                lambda _: find_contamination(read_table(shard.path("validated.arrow")), found),
            ).facts
        )

    return combine_contamination([look_at(shard) for shard in validated], found)


def _source(validated: Receipt) -> str:
    file: str = validated.facts["origin"]["file"]
    return file.split("/")[0]


def _audit_packs(packed: Receipt, recipe: Recipe, snapshot: TokenizerSnapshot) -> dict[str, int]:
    is_control = read_pipeline(snapshot.backend).is_control
    counts = audit_packs(_batches(packed), np.asarray(is_control))
    if recipe.pack.strategy == "concat" or recipe.format.train_on == "all":
        counts["cut_sequences"] = 0  # it cuts on purpose; or trains what stands behind end tokens
    return counts


def _batches(packed: Receipt) -> Iterator[pa.RecordBatch]:
    for side in ("train", "eval"):
        yield from read_table(packed.path(f"{side}.arrow")).to_batches(_BATCH_PACKS)


def _add_repetition(audit: dict[str, Any], repetition: dict[str, Any]) -> None:
    for name in ("duplicates", "prompt_groups", "prompt_group_records", "both_sides"):
        audit["dataset"][name] = repetition[name]
    for source, number in repetition["sources"].items():
        audit["sources"][source]["duplicates"] = number
    if repetition["worst"]:
        audit["worst"]["duplicates"] = repetition["worst"]
