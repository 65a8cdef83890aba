"""pack: which tokens of which record become which training row; each side planned by itself.

Works on lengths alone, over all shards at once: a plan per group of shards would leave packs half
empty. No token is read here; `packhouse.run.steps.gather` brings them together, an output shard at
a time. Order follows (file, row) and the seed, never how rows lie in shards. Which records are
packed is decided in `selection.py`.

A record's side is a pure function of its group key, so no pack can mix the two, and the split step
only has to prove it. Memory: about 30 bytes a record while packs are planned (docs/performance.md).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse import pack
from packhouse.pack import (
    GatherTally,
    IndexArray,
    PackPlan,
    PackStatistics,
    apply_over_length,
    dedup,
    join_plans,
    plan_packs,
    splitting,
)
from packhouse.pack.dedup import DedupFacts
from packhouse.pack.overlength import REASONS, join_admitted
from packhouse.read.files import source_name
from packhouse.recipe import MIXING, DedupConfig, PackConfig, Recipe, SplitConfig
from packhouse.recipe.audit import OnMatch
from packhouse.records.ledger import RowCounts
from packhouse.records.tables import write_batches, write_table
from packhouse.registry import function_of_addon
from packhouse.run.cache import Receipt
from packhouse.run.step import Job, Step, Work, execute
from packhouse.run.steps.format import FORMAT, FormatParameters, fingerprint_job
from packhouse.run.steps.records import OUTCOMES, PLACES
from packhouse.run.steps.selection import (
    MappedTables,
    Selection,
    SplitCounts,
    column_of,
    is_for_eval,
    select,
    split_counts,
)
from packhouse.run.steps.tokenize import TOKENIZE, TokenizeFacts, TokenizeParameters
from packhouse.run.steps.validate import VALIDATE, ValidateParameters
from packhouse.system.arrays import Bools, Int32s, Int64s
from packhouse.system.plugins import plugin_key

Side = Literal["train", "eval"]
SIDES: tuple[Side, ...] = ("train", "eval")

# What lies in the packs of a side, one behind another: tokens [start, end) of a record, which is
# numbered through all shards. A pack's own are those between two of `OFFSETS`.
SEQUENCES = pa.schema(
    [
        pa.field("record", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
OFFSETS = pa.schema([pa.field("offset", pa.int64(), nullable=False)])

_CONTAMINATED = REASONS.index("contaminated")
_BLOCK = 2**20  # sequences written at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PackParameters:
    """Which records are packed, how, and on which side."""

    mix: Mapping[str, object]
    """As `mix_of` says."""
    pack: PackConfig
    dedup: DedupConfig
    split: SplitConfig
    benchmarks: Mapping[str, object]
    """As `benchmarks_of` says, where `audit.on_match` is not `stop`; else empty."""
    on_match: OnMatch

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key: all settings."""
        matches: dict[str, object] = {}
        if self.benchmarks:
            search = function_of_addon("BENCHMARKS").version
            matches = {"on_match": self.on_match, "search": search, **self.benchmarks}
        return {
            **matches,
            "mix": self.mix,
            "pack": self.pack.model_dump(mode="json"),
            **plugin_key("packing_strategies", self.pack.strategy, pack.STRATEGIES),
            "dedup": self.dedup.model_dump(mode="json"),
            **dedup.near_libraries(self.dedup),
            "split": self.split.model_dump(mode="json"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSide:
    """The packs of one side, before their tokens are brought together."""

    num_packs: int
    num_tokens: int
    statistics: PackStatistics
    """As planned; what gather counts is 0."""
    with_label: bool
    """True if a record has a class."""
    with_weights: bool
    """True if a record of any side has a loss weight other than 0 and 1."""
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`packs` and `tokens` of each source, in order, where sources have packs of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFacts(RowCounts):
    """The plan of all packs."""

    sides: Mapping[Side, PlannedSide]
    sources: Mapping[str, Mapping[str, int]]
    """Records and tokens by source; see `mixing.source_counts`."""
    dedup: DedupFacts | None = None
    """None where the recipe does not look for repeats."""
    split: SplitCounts | None = None
    """None where nothing goes to eval."""
    vocab_size: int
    allow_untrained: bool
    """True if a pack may have nothing to train: of `concat`, or with a class."""


def mix_of(recipe: Recipe) -> dict[str, object]:
    """Return what sources say of which of their records are packed: {"chats.weight": 2.0}."""
    return {
        f"{source_name(source)}.{name}": value
        for source in recipe.sources
        for name, value in source.model_dump(
            mode="json", include=set(MIXING), exclude_defaults=True
        ).items()
    }


def job(
    recipe: Recipe,
    validate: Sequence[Job[ValidateParameters]],
    format_: Sequence[Job[FormatParameters]],
    tokenize: Sequence[Job[TokenizeParameters]],
    benchmarks: Mapping[str, object],
) -> Job[PackParameters]:
    """Return the job that plans all packs."""
    return PACK.job(
        PackParameters(
            mix=mix_of(recipe),
            pack=recipe.pack,
            dedup=recipe.dedup,
            split=recipe.split,
            benchmarks={} if recipe.audit.on_match == "stop" else benchmarks,
            on_match=recipe.audit.on_match,
        ),
        inputs=[job.ref for job in tokenize],
        also_reads=[job.ref for job in (*validate, *format_)],
    )


def compute(work: Work[PackParameters], folder: Path) -> PackFacts:
    """Write the plan of each side, what happened to each record, and which shard holds it.

    Records 0 to 4 of [5, 3, 2, 6, 9] tokens, seq_len 8, record 2 for eval: record 4 is dropped,
    train plans [5, 3, 6] -> packs [[0, 1], [3]] of records, eval plans [2] -> [[2]].

    Raises:
        SequenceTooLongError: a record is over `seq_len` and the policy is `error`.
    """
    parameters = work.parameters
    # Shard by shard: which records can be packed, and how many of their tokens.
    receipts = work.inputs(TOKENIZE)
    shards = MappedTables([receipt.path("tokenized.arrow") for receipt in receipts])
    admitted = join_admitted([apply_over_length(shard, parameters.pack) for shard in shards])
    bounds = np.cumsum([0, *(shard.num_rows for shard in shards)])
    formatted = list(zip(work.inputs(VALIDATE), work.inputs(FORMAT), strict=True))
    matches: pa.Array | None = None
    if parameters.benchmarks:
        match_shards = function_of_addon("match_shards")
        matches = match_shards(work, parameters.benchmarks, work.inputs(VALIDATE), shards)
        if parameters.on_match == "drop":
            admitted = admitted.without(np.asarray(matches.is_valid(), np.bool_), "contaminated")
    # All shards together: which records are taken, how often, and which must share a side.
    fingerprints: list[Path] = []
    if dedup.needs_fingerprints(parameters.dedup):  # made beside format; what is gone, again
        jobs = [fingerprint_job(work.recipe, old.ref, new.ref) for old, new in formatted]
        described = [execute(job, work.recipe, work.workspace) for job in jobs]
        fingerprints = [receipt.path("fingerprints.arrow") for receipt in described]
    selection = select(shards, formatted, admitted, bounds, work.recipe, fingerprints)
    # The side of each record.
    names = [receipt.facts.origin.source for receipt in work.inputs(VALIDATE)]
    eval_only = {source_name(source) for source in work.recipe.sources if source.eval_only}
    only = np.repeat(np.array([name in eval_only for name in names], np.bool_), np.diff(bounds))
    is_eval = is_for_eval(shards, selection, parameters.split, only)
    if matches is not None and parameters.on_match == "same_side":
        keys = selection.groups_of(shards)  # all records of a group that holds a match go along
        matched = pc.unique(keys.filter(matches.is_valid()))
        is_eval |= np.asarray(pc.is_in(keys, value_set=matched), np.bool_)
    has_label = np.asarray(column_of(shards, "label").is_valid(), np.bool_)
    with_weights = any(s["range_weights"].null_count < s.num_rows for s in shards)
    _write_places(folder, receipts, shards, bounds)
    write_batches(folder / "outcomes.arrow", OUTCOMES, _outcomes(selection, is_eval, matches))
    counts, sources = _counts(selection), selection.sources
    found = selection.dedup
    if found is not None:
        on_both_sides = selection.num_near_on_both_sides(is_eval)
        found = replace(found, near=replace(found.near, on_both_sides=on_both_sides))
    is_split = bool(parameters.split.eval_fraction or parameters.split.eval_count or only.any())
    split = split_counts(shards, selection, is_eval, parameters.split, only) if is_split else None
    # The packs of each side by itself; arrays of a few bytes a record go as soon as they are used.
    rows, lengths = selection.kept()
    del admitted, selection
    is_eval = is_eval[rows]
    kept = {"eval": (rows[is_eval], lengths[is_eval]), "train": (rows[~is_eval], lengths[~is_eval])}
    del rows, lengths
    planned: dict[Side, PlannedSide] = {}
    for side in SIDES:
        own, lengths = kept.pop(side)
        with_label = parameters.pack.strategy == "none" and bool(has_label[own].any())
        plan, by_source = _plan(parameters, side, names, bounds, own, lengths)
        path = folder / f"{side}-sequences.arrow"
        write_batches(path, SEQUENCES, _sequences(plan, own, lengths))
        offsets = pa.table([pa.array(plan.pack_offsets)], schema=OFFSETS)
        write_table(folder / f"{side}-offsets.arrow", offsets)
        planned[side] = PlannedSide(
            num_packs=plan.num_packs,
            num_tokens=plan.num_tokens,
            statistics=PackStatistics.of(plan, lengths, GatherTally()),
            with_label=with_label,
            with_weights=with_weights,
            by_source=by_source,
        )
        del plan, own, lengths, offsets  # before the next side is planned
    return PackFacts(
        **counts,
        sides=planned,
        sources=sources,
        dedup=found,
        split=split,
        vocab_size=max(receipt.facts.tokenizer.vocab_size for receipt in receipts),
        allow_untrained=parameters.pack.strategy == "concat" or bool(has_label.any()),
    )


def _plan(
    parameters: PackParameters,
    side: str,
    names: Sequence[str],
    bounds: Int64s,
    rows: IndexArray,
    lengths: Int32s,
) -> tuple[PackPlan, dict[str, dict[str, int]]]:
    """Plan the packs of a side; with `eval_by_source`, those of each source one behind another."""
    config = parameters.pack
    plan = partial(
        plan_packs,
        seq_len=config.seq_len,
        strategy=config.strategy,
        seed=config.seed,
        multiple=config.pad_record_to_multiple_of,
        balance=config.balance,
    )
    if side == "train" or not parameters.split.eval_by_source or not len(rows):
        return plan(lengths), {}
    # Shards of sources a, a, b with 2, 2 and 3 rows: first rows [0 2 4 7], so row 3 is of a and
    # row 4 of b.
    sources = list(dict.fromkeys(names))
    number_of_shard = np.array([sources.index(name) for name in names])
    number = number_of_shard[np.searchsorted(bounds, rows, side="right") - 1]
    parts, counts = [], {}
    for each, source in enumerate(sources):
        own = np.flatnonzero(number == each)
        if len(own):
            planned = plan(lengths[own])
            parts.append((planned, own))
            counts[source] = {"packs": planned.num_packs, "tokens": planned.num_tokens}
    return join_plans(parts), counts


def _sequences(plan: PackPlan, rows: IndexArray, lengths: Int32s) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(plan.order), _BLOCK):
        block = slice(first, first + _BLOCK)
        order = plan.order[block]
        starts = np.zeros(len(order), np.int32) if plan.starts is None else plan.starts[block]
        ends = lengths[order] if plan.ends is None else plan.ends[block]
        columns = [
            pa.array(rows[order], pa.int64()),
            pa.array(starts, pa.int32()),
            pa.array(ends, pa.int32()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=SEQUENCES)


def _write_places(
    folder: Path,
    receipts: Sequence[Receipt[TokenizeFacts]],
    shards: Sequence[pa.Table],
    bounds: Int64s,
) -> None:
    """Write where records lie: the first one of each shard; and the names of all files."""
    keys = pa.array([receipt.key for receipt in receipts])
    columns = [keys, pa.array(bounds[:-1]), pa.array(np.diff(bounds))]
    write_table(folder / "places.arrow", pa.table(columns, schema=PLACES))
    files = {file for shard in shards for file in shard["source"].unique().to_pylist()}
    (folder / "sources.json").write_text(json.dumps(sorted(files)), encoding="utf-8")


def _outcomes(
    selection: Selection, is_eval: Bools, matches: pa.Array | None
) -> Iterator[pa.RecordBatch]:
    """Yield `OUTCOMES` of all records, a block at a time."""
    admitted, times = selection.admitted, selection.times
    num_tokens = admitted.num_tokens.copy()  # of a dropped record, before the policy
    num_tokens[admitted.rows] = admitted.lengths
    names = list(REASONS if matches is not None else REASONS[:_CONTAMINATED])
    for first in range(0, len(times), _BLOCK):
        rows = slice(first, first + _BLOCK)
        reasons = admitted.reasons[rows].astype(np.int8)
        repeats = pa.nulls(len(reasons), pa.string())
        if selection.repeats is not None:
            repeats = selection.repeats[rows]
        if matches is not None:
            repeats = pc.if_else(pa.array(reasons == _CONTAMINATED), matches[rows], repeats)
        columns = [
            pa.DictionaryArray.from_arrays(is_eval[rows].astype(np.int8), ["train", "eval"]),
            pa.DictionaryArray.from_arrays(reasons, names),
            pa.array(num_tokens[rows]),
            pa.array(times[rows]),
            repeats,
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTCOMES)


def _counts(selection: Selection) -> dict[str, Any]:
    """Fields of `RowCounts`."""
    admitted = selection.admitted
    counts = admitted.counts()
    rows, tokens = counts["rows"], counts["tokens"]
    extra = (selection.times[admitted.rows] - 1).astype(np.int64)
    repeated, repeated_tokens = int(extra.sum()), int((extra * admitted.lengths).sum())
    return {
        "rows_in": rows.pop("in"),
        "rows_out": rows.pop("kept") + repeated,
        "added": {"repeated": repeated} if repeated else {},
        "dropped": dict(sorted(rows.items())),
        "tokens_in": tokens.pop("in"),
        "tokens_out": tokens.pop("kept") + repeated_tokens,
        "tokens_added": {"repeated": repeated_tokens} if repeated else {},
        "tokens_dropped": {reason: n for reason, n in sorted(tokens.items()) if n},
    }


PACK = Step(
    name="pack",
    title="Plan the packs of the whole dataset: lengths in, places out.",
    version=f"1.{pack.VERSION}.{splitting.VERSION}.{dedup.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=PackFacts,
    compute=compute,
)
