"""audit: what the tokens of a shard, of gathered packs, of all records would teach.

One job looks at one thing: a shard from its row to its tokens, a shard beside the benchmarks, the
packs of one output shard, or repetition among all records. An appended file costs its own shard
here, too, and a better audit does not tokenize anything again. Publish adds them up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.audit import (
    Benchmarks,
    audit_packs,
    audit_records,
    audit_shard,
    combine,
    combine_contamination,
    find_contamination,
    read_benchmarks,
)
from packhouse.fingerprint import canonical_json
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps.format_step import conversations
from packhouse.steps.records import read_records
from packhouse.steps.shard_io import inputs_of
from packhouse.tokenization import load_snapshot
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.workspace import Workspace, read_table

__all__ = ["combine_audits", "compute"]

_BATCH_PACKS = 256


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Return what was `found`, and in what (`of`); no file is written."""
    of = job.parts["of"]
    return {"of": of, "found": _KINDS[of](job, recipe, workspace)}


def _shard(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    assert job.source is not None
    validated, formatted, tokenized = (
        inputs_of(job, workspace, step)[0] for step in ("validate", "format", "tokenize")
    )
    return audit_shard(
        conversations(validated, formatted),
        read_table(formatted.path("formatted.arrow")),
        read_table(tokenized.path("tokenized.arrow")),
        load_snapshot(recipe.tokenizer, cache=workspace.tokenizers),
        recipe.format,
        job.source.label_names,
    )


def _benchmarks(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    (validated,) = inputs_of(job, workspace, "validate")
    found = _read_benchmarks(recipe)
    return find_contamination(read_table(validated.path("validated.arrow")), found)


_last_read: dict[bytes, Benchmarks] = {}


def _read_benchmarks(recipe: Recipe) -> Benchmarks:
    """Read the benchmarks once for all jobs that a process does, one after another."""
    section = recipe.audit.model_dump(mode="json", include={"benchmarks", "benchmark_ngram"})
    key = canonical_json(section)
    found = _last_read.get(key)
    if found is None:
        found = read_benchmarks(recipe.audit.benchmarks, recipe.audit.benchmark_ngram)
        _last_read.clear()
        _last_read[key] = found
    return found


def _packs(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, int]:
    (gathered,) = inputs_of(job, workspace, "gather")
    snapshot = load_snapshot(recipe.tokenizer, cache=workspace.tokenizers)
    is_control = read_pipeline(snapshot.backend).is_control
    return audit_packs(_batches(gathered), np.asarray(is_control))


def _batches(gathered: Receipt) -> Iterator[pa.RecordBatch]:
    yield from read_table(gathered.path("packs.arrow")).to_batches(_BATCH_PACKS)


def _records(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    (packed,) = inputs_of(job, workspace, "pack")

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return read_records(packed, workspace, columns=columns)

    found = audit_records(read, packed.facts["rows_in"])
    if recipe.dedup.near != "ignore":
        near = packed.facts["dedup"]["near"]
        found["near_duplicates"] = near["rows"] - near["dropped"]
        if recipe.dedup.near != "keep":
            found["both_sides"] += near["on_both_sides"]
    return found


_KINDS: dict[str, Callable[[Job, Recipe, Workspace], dict[str, Any]]] = {
    "shard": _shard,
    "benchmarks": _benchmarks,
    "packs": _packs,
    "records": _records,
}


def combine_audits(job: Job, recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    """Add up all audits that the publish job reads.

    Returns:
        Plain JSON: `dataset` and `sources` (counts), `packs`, `worst` (rows by finding).
    """
    found: dict[str, list[dict[str, Any]]] = {of: [] for of in _KINDS}
    for receipt in inputs_of(job, workspace, "audit"):
        found[receipt.facts["of"]].append(receipt.facts["found"])
    steps = [inputs_of(job, workspace, step) for step in ("validate", "tokenize")]
    audit = combine(
        [
            (_source(validated), audited, tokenized.facts["notes"])
            for validated, tokenized, audited in zip(*steps, found["shard"], strict=True)
        ]
    )
    audit["packs"] = _add_packs(found["packs"], recipe)
    _add_repetition(audit, found["records"][0])
    if recipe.audit.benchmarks:
        benchmarks = _read_benchmarks(recipe)
        audit["contamination"] = combine_contamination(found["benchmarks"], benchmarks)
    return audit


def _add_packs(shards: list[dict[str, int]], recipe: Recipe) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard)
    if recipe.pack.strategy == "concat" or recipe.format.train_on == "all":
        counts["cut_sequences"] = 0  # it cuts on purpose; or trains what stands behind end tokens
    return dict(counts)


def _source(validated: Receipt) -> str:
    file: str = validated.facts["origin"]["file"]
    return file.split("/")[0]


def _add_repetition(audit: dict[str, Any], repetition: dict[str, Any]) -> None:
    for name in ("duplicates", "prompt_groups", "prompt_group_records", "both_sides"):
        audit["dataset"][name] = repetition[name]
    if "near_duplicates" in repetition:
        audit["dataset"]["near_duplicates"] = repetition["near_duplicates"]
    for source, number in repetition["sources"].items():
        audit["sources"][source]["duplicates"] = number
    if repetition["worst"]:
        audit["worst"]["duplicates"] = repetition["worst"]
