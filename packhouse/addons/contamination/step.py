"""Step `benchmarks`: find conversations that share a run of words with a benchmark.

It runs next to the format step, shard by shard, if a recipe names benchmarks. Depending on
`audit.on_match`, pack drops the matches or moves them to eval; the audit counts them.
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
    """Return the identity of a recipe's benchmarks.

    Matches are published, so benchmarks are part of the version id; limits are not.
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
    """The benchmarks to search."""

    benchmarks: Mapping[str, object]
    """Result of `benchmarks_of`."""

    def to_json(self) -> dict[str, object]:
        """Return what determines the matches."""
        return dict(self.benchmarks)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkFacts:
    """Matches in a shard."""

    found: dict[str, object]
    """Counts and worst rows as plain JSON; see `match_benchmarks`."""


def benchmark_job(
    benchmarks: Mapping[str, object], validated: Ref, label: str = "", size: int = 0
) -> Job[BenchmarkParameters]:
    """Return the job that searches a shard for benchmarks."""
    parameters = BenchmarkParameters(benchmarks=benchmarks)
    return BENCHMARKS.job(parameters, [validated], label=f"benchmarks in {label}", size=size)


def compute(work: Work[BenchmarkParameters], folder: Path) -> BenchmarkFacts:
    """Write `matches.arrow`: the rows that share a run of words with a benchmark."""
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
    """Read the benchmarks once for all jobs of this process.

    Args:
        recipe: gives the paths of the benchmarks.
        benchmarks: result of `benchmarks_of`; they are read again if it differs.
    """
    key = canonical_json(benchmarks["benchmarks"])
    found = _last_read.get(key)
    if found is None:
        found = read_benchmarks(recipe.audit.benchmarks, recipe.audit.benchmark_ngram)
        # Keep one set only: benchmarks can be large.
        _last_read.clear()
        _last_read[key] = found
    return found


def match_shards(
    work: Work[Any],
    benchmarks: Mapping[str, object],
    validated: Sequence[Receipt[Any]],
    shards: Sequence[pa.Table],
) -> pa.Array:
    """Return which records of some shards match a benchmark; missing results are computed.

    All records of a matching row match: its windows, and examples of its turns.

    Returns:
        The benchmark row of each record, or null.
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
    """Combine the matches in all shards that the publish job reads."""
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
