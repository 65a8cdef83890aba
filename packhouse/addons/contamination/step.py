"""benchmarks: conversations -> those that share a run of words with a benchmark.

It is done beside the format step, shard by shard, where a recipe names benchmarks. Pack leaves out
what it found, or sends it to eval, where `audit.on_match` says so; the audit counts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from packhouse import auditing
from packhouse.addons.contamination.matching import (
    Benchmarks,
    combine_contamination,
    match_benchmarks,
    read_benchmarks,
)
from packhouse.read import scan_source
from packhouse.recipe import MIXING, Recipe
from packhouse.records.lists import one_chunk
from packhouse.records.pairs import REJECTED, both_sides
from packhouse.records.tables import read_table, write_table
from packhouse.run.cache import Receipt
from packhouse.run.step import Job, Ref, Step, Work, execute
from packhouse.run.steps.validate import VALIDATE
from packhouse.system.fingerprint import canonical_json


def benchmarks_of(recipe: Recipe) -> dict[str, object]:
    """Return what names the benchmarks of a recipe that has some.

    What is found of benchmarks is published, so they decide the version; limits do not.
    """
    shards = [shard.identity() for s in recipe.audit.benchmarks for shard in scan_source(s)]
    read = [
        source.model_dump(mode="json", exclude={"path", *MIXING})
        for source in recipe.audit.benchmarks
    ]
    ngram = recipe.audit.benchmark_ngram
    return {"benchmarks": {"ngram": ngram, "shards": shards, "read": read}}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkParameters:
    """What is looked for."""

    benchmarks: Mapping[str, object]
    """As `benchmarks_of` says."""

    def to_json(self) -> dict[str, object]:
        """Return what decides the findings."""
        return dict(self.benchmarks)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkFacts:
    """What was found in a shard."""

    found: dict[str, object]
    """Counts and worst rows, as plain JSON; see `match_benchmarks`."""


def benchmark_job(
    benchmarks: Mapping[str, object], validated: Ref, label: str = "", size: int = 0
) -> Job[BenchmarkParameters]:
    """Return the job that looks for benchmarks in a shard."""
    parameters = BenchmarkParameters(benchmarks=benchmarks)
    return BENCHMARKS.job(parameters, [validated], label=f"benchmarks in {label}", size=size)


def compute(work: Work[BenchmarkParameters], folder: Path) -> BenchmarkFacts:
    """Write `matches.arrow`, the rows that share a run of words with a benchmark."""
    receipt = work.input(VALIDATE)
    validated = read_table(receipt.path("validated.arrow"))
    if REJECTED in receipt.files:
        validated = both_sides(validated, read_table(receipt.path(REJECTED)))
    found, matches = match_benchmarks(
        validated, load_benchmarks(work.recipe, work.parameters.benchmarks)
    )
    write_table(folder / "matches.arrow", matches)
    return BenchmarkFacts(found=found)


_last_read: dict[bytes, Benchmarks] = {}


def load_benchmarks(recipe: Recipe, benchmarks: Mapping[str, object]) -> Benchmarks:
    """Read the benchmarks once for all jobs that a process does, one after another.

    Args:
        recipe: says where they lie.
        benchmarks: as `benchmarks_of` says: where it says something else, they are read anew.
    """
    key = canonical_json(benchmarks["benchmarks"])
    found = _last_read.get(key)
    if found is None:
        found = read_benchmarks(recipe.audit.benchmarks, recipe.audit.benchmark_ngram)
        _last_read.clear()
        _last_read[key] = found
    return found


def match_shards(
    work: Work[Any],
    benchmarks: Mapping[str, object],
    validated: Sequence[Receipt[Any]],
    shards: Sequence[pa.Table],
) -> pa.Array:
    """Look up which records of some shards match a benchmark; whatever is gone is made again.

    All records of a row that matches do: windows of it, and examples of its turns.

    Returns:
        For all records the benchmark's row, or null.
    """
    named = [pa.nulls(0, pa.string())]
    for before, shard in zip(validated, shards, strict=True):
        job = benchmark_job(benchmarks, (VALIDATE.name, before.key))
        receipt = execute(job, work.recipe, work.workspace)
        matches = read_table(receipt.path("matches.arrow"))
        index = pc.index_in(one_chunk(shard["row"]), value_set=one_chunk(matches["row"]))
        named.append(one_chunk(matches["benchmark"]).take(index))
    return pa.concat_arrays(named)


def contamination_of(work: Work[Any]) -> dict[str, Any]:
    """Add up what was found in all shards that the publish job reads."""
    matched = [receipt.facts.found for receipt in work.inputs(BENCHMARKS)]
    benchmarks = load_benchmarks(work.recipe, work.parameters.benchmarks)
    found = combine_contamination(matched, benchmarks)
    return found | {"on_match": work.recipe.audit.on_match}


BENCHMARKS = Step(
    name="benchmarks",
    title="Conversations in, those that share words with a benchmark out.",
    version=f"1.{auditing.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=BenchmarkFacts,
    compute=compute,
)
