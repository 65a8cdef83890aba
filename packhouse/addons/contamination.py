"""Find rows that share a run of words with a benchmark.

Searches everything in a conversation: contents, contexts, reasoning, and the names and arguments of
tool calls. Two texts match if n consecutive words (see `packhouse.pack.dedup`) are equal. GPT-3
used 13 words, which rarely match by chance. Paraphrases are not found.

Cost: about 2 s for 52,000 Alpaca rows against the GSM8K test set, and 8 bytes of memory per
benchmark word.

If a recipe names benchmarks, each shard is matched next to its format job. Pack then drops the
matching rows or moves them to eval, depending on `audit.on_match`, and the audit counts them.

Source: Brown et al. 2020, Language Models are Few-Shot Learners, appendix C.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse import auditing
from packhouse.auditing.token_checks import NUM_WORST, worst_first
from packhouse.errors import ConfigError
from packhouse.pack.dedup import Hashes, Words, run_hashes, words_of
from packhouse.read import read_shard, scan_source
from packhouse.recipe import MIXING, Recipe, SourceConfig, ValidateConfig
from packhouse.records.arrays import Int64s, one_chunk
from packhouse.records.message_rules import FlatMessages
from packhouse.records.preference_pairs import REJECTED, both_sides
from packhouse.records.table_schemas import read_table, write_table
from packhouse.render.template_arguments import parsed_arguments
from packhouse.run.moved_shards import Move, moved_places
from packhouse.run.step import Job, JobContext, Ref, Step
from packhouse.run.steps.validate import VALIDATE
from packhouse.system.fingerprint import canonical_json
from packhouse.system.wording import counted

MATCHES = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),  # row in the file of the shard
        pa.field("benchmark", pa.string(), nullable=False),  # file and row: `exam/exam.jsonl row 3`
    ]
)

# Benchmarks often have questions without answers.
_LENIENT = ValidateConfig(allow_ends_on_user=True)


@dataclass(frozen=True, slots=True, eq=False)
class Benchmarks:
    """All runs of `ngram` words in some benchmarks."""

    ngram: int
    vocabulary: pa.Array
    hashes: Hashes
    """Distinct hashes of runs, sorted."""
    owners: Int64s
    """For each run, the number of the first benchmark row that contains it."""
    places: pa.Table
    """`source` and `row` of each benchmark row."""
    num_short: int
    """Texts with fewer than `ngram` words, which cannot be matched."""
    num_unread: int
    """Rows that could not be read."""


def read_benchmarks(sources: Sequence[SourceConfig], ngram: int) -> Benchmarks:
    """Read benchmark files in any format that sources can have.

    Args:
        sources: sources as in a recipe; contents, contexts, reasoning and tool calls of all
            messages are used.
        ngram: number of words per run.

    Raises:
        SourceError: a file cannot be read.
        ConfigError: no row can be read, or no text has `ngram` words.
    """
    tables, num_unread = [], 0
    for source in sources:
        for shard in scan_source(source):
            rows = read_shard(shard, source, _LENIENT, "record")
            tables.append(rows.validated)
            num_unread += rows.quarantined.num_rows
    table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    texts = _Texts.of(table)
    vocabulary = texts.words.values.unique()
    hashes, places = texts.runs(vocabulary, ngram)
    if not len(hashes):
        names = ", ".join(source.path for source in sources)
        raise ConfigError(
            f"audit.benchmarks ({names}): found no text of at least {ngram} words in "
            f"{counted(table.num_rows, 'row')} ({num_unread:,} more could not be read). Set "
            "`format` and `fields`, or lower audit.benchmark_ngram."
        )
    unique, first = np.unique(hashes, return_index=True)
    return Benchmarks(
        ngram=ngram,
        vocabulary=vocabulary,
        hashes=unique,
        owners=texts.row_of(places[first]),
        places=table.select(["source", "row"]),
        num_short=int((np.diff(texts.words.offsets) < ngram).sum()),
        num_unread=num_unread,
    )


def match_benchmarks(
    validated: pa.Table, benchmarks: Benchmarks
) -> tuple[dict[str, object], pa.Table]:
    """Find the rows of a shard that share a run of words with a benchmark.

    Returns:
        Counts, and the matching rows (schema `MATCHES`). Counts: `rows`, all rows compared;
        `contaminated`, rows that share a run, and `by_benchmark`, the same by benchmark file;
        `worst`, the rows that share the most runs (`value`), with the `benchmark` row and the words
        of the first shared run.
    """
    texts = _Texts.of(validated)
    hashes, places = texts.runs(benchmarks.vocabulary, benchmarks.ngram)
    index = np.minimum(np.searchsorted(benchmarks.hashes, hashes), len(benchmarks.hashes) - 1)
    is_shared = benchmarks.hashes[index] == hashes
    places, owners = places[is_shared], benchmarks.owners[index[is_shared]]
    rows = texts.row_of(places)
    touched, first, counts = np.unique(rows, return_index=True, return_counts=True)
    held = benchmarks.places.take(pa.array(owners[first]))
    sources = held["source"].to_pylist()
    names = [f"{s} row {n:,}" for s, n in zip(sources, held["row"].to_pylist(), strict=True)]
    order = np.argsort(-counts, kind="stable")[:NUM_WORST]
    columns = validated.select(["source", "row", "record_id"])
    worst = columns.take(pa.array(touched[order])).to_pylist()
    for row, i in zip(worst, order.tolist(), strict=True):
        words = texts.words.run(int(places[first[i]]), benchmarks.ngram)
        row |= {"value": int(counts[i]), "benchmark": names[i], "words": words}
    found = {
        "rows": validated.num_rows,
        "contaminated": len(touched),
        "by_benchmark": dict(sorted(Counter(sources).items())),
        "worst": worst,
    }
    matched = one_chunk(validated["row"]).take(pa.array(touched))
    return found, pa.table([matched, pa.array(names, pa.string())], schema=MATCHES)


def combine_contamination(shards: Sequence[Mapping[str, Any]], found: Benchmarks) -> dict[str, Any]:
    """Combine the results of all shards."""
    by_benchmark = Counter[str]()
    for shard in shards:
        by_benchmark.update(shard["by_benchmark"])
    worst = [row for shard in shards for row in shard["worst"]]
    worst.sort(key=worst_first)
    return {
        "rows": sum(shard["rows"] for shard in shards),
        "contaminated": sum(shard["contaminated"] for shard in shards),
        "by_benchmark": dict(sorted(by_benchmark.items())),
        "ngram": found.ngram,
        "benchmark_rows": found.places.num_rows,
        "benchmark_short_texts": found.num_short,
        "benchmark_unread_rows": found.num_unread,
        "worst": worst[:NUM_WORST],
    }


_TEXTS = ("content", "context", "reasoning")


def _words_of_calls(calls: str) -> str:
    r"""Return function names, argument names and values of tool calls, without JSON syntax.

    Example:
        >>> _words_of_calls('[{"function": {"name": "add", "arguments": {"n": [1, {"of": 2}]}}}]')
        'add n 1 of 2'
        >>> _words_of_calls('[{"function": {"name": "add", "arguments": "{\\"n\\":1}"}}]')
        'add n 1'
    """
    found_words: list[str] = []
    for call in json.loads(calls):
        function = call.get("function", call)
        found_words.append(str(function.get("name", "")))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parsed_arguments(arguments) or arguments
        found_words += _words_in(arguments)
    return " ".join(found_words)


def _words_in(value: object) -> Iterator[str]:
    """Yield names and values of an object, values of a list, or the value itself."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _words_in(item)
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_words_in, value))
    elif value is not None:
        yield str(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Texts:
    """Words of all texts in a table, and the row of each text."""

    words: Words
    rows: Int64s

    @classmethod
    def of(cls, validated: pa.Table) -> "_Texts":
        flat = FlatMessages.of_table(validated)
        texts = [flat.values.field(name).drop_null() for name in _TEXTS]
        rows = [flat.rows[flat.has(name)] for name in (*_TEXTS, "tool_calls")]
        found_words = map(_words_of_calls, flat.tool_calls.drop_null().to_pylist())
        texts.append(pa.array(found_words, pa.string()))
        return cls(words_of(pa.concat_arrays(texts)), np.concatenate(rows))

    def row_of(self, places: Int64s) -> Int64s:
        return self.rows[self.words.text_of(places)]

    def runs(self, vocabulary: pa.Array, ngram: int) -> tuple[Hashes, Int64s]:
        """Return hash and first word of each run of `ngram` known words within one text.

        For words 1 2 3 4 of a text and ngram 3: runs 1 2 3 and 2 3 4, at 0 and 1.
        """
        words = self.words
        # Numbers of the words in the benchmarks' vocabulary; -1 for all others, so that a run with
        # any other word is skipped at once.
        ids = pc.fill_null(pc.index_in(words.values, value_set=vocabulary), -1).to_numpy()
        num_runs = max(0, len(ids) - ngram + 1)
        ends = np.repeat(words.offsets[1:], np.diff(words.offsets))[:num_runs]
        unknown = np.append(0, np.cumsum(ids < 0))
        starts = np.arange(num_runs)
        # The running count of unknown words is equal at both ends of a run of known words.
        starts = starts[(starts + ngram <= ends) & (unknown[ngram:] == unknown[:num_runs])]
        # From 1, because `run_hashes` gives the same hash with and without a leading 0.
        return run_hashes((ids + 1).astype(np.uint64), starts, ngram), starts


def benchmarks_of(recipe: Recipe) -> dict[str, object]:
    """Return the identity of a recipe's benchmarks.

    Matches are published, so benchmarks are part of the version id; limits are not.
    """
    sources, ngram = recipe.audit.benchmarks, recipe.audit.benchmark_ngram
    shards = [shard.identity() for source in sources for shard in scan_source(source)]
    read = [each.model_dump(mode="json", exclude={"path", *MIXING}) for each in sources]
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
    benchmarks: Mapping[str, object], validated: Ref, label: str, size: int
) -> Job[BenchmarkParameters]:
    """Return the job that searches a shard for benchmarks."""
    parameters = BenchmarkParameters(benchmarks=benchmarks)
    return BENCHMARKS.job(parameters, [validated], label=f"benchmarks in {label}", size=size)


def compute(work: JobContext[BenchmarkParameters], folder: Path) -> BenchmarkFacts:
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
    if key not in _last_read:
        found = read_benchmarks(recipe.audit.benchmarks, recipe.audit.benchmark_ngram)
        # Keep one set only: benchmarks can be large.
        _last_read.clear()
        _last_read[key] = found
    return _last_read[key]


def match_shards(work: JobContext[Any], shards: Sequence[pa.Table]) -> pa.Array:
    """Return which records of some shards match a benchmark.

    All records of a matching row match: its windows, and examples of its turns.

    Returns:
        The benchmark row of each record, or null.
    """
    named = [pa.nulls(0, pa.string())]
    for receipt, shard in zip(work.inputs(BENCHMARKS), shards, strict=True):
        matches = read_table(receipt.path("matches.arrow"))
        index = pc.index_in(one_chunk(shard["row"]), value_set=one_chunk(matches["row"]))
        named.append(one_chunk(matches["benchmark"]).take(index))
    return pa.concat_arrays(named)


def contamination_of(work: JobContext[Any]) -> dict[str, Any]:
    """Combine the matches in all shards that the publish job reads."""
    matched = [receipt.facts.found for receipt in work.inputs(BENCHMARKS)]
    benchmarks = load_benchmarks(work.recipe, work.parameters.benchmarks)
    found = combine_contamination(matched, benchmarks)
    return found | {"on_match": work.recipe.audit.on_match}


def _moved(facts: BenchmarkFacts, move: Move) -> BenchmarkFacts:
    return BenchmarkFacts(found=moved_places(facts.found, move.rows))


BENCHMARKS = Step(
    name="benchmarks",
    title="Conversations in, those that share words with a benchmark out.",
    version=f"1.{auditing.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=BenchmarkFacts,
    compute=compute,
    move=_moved,
)
