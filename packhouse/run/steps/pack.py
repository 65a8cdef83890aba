"""pack: which tokens of which record become which training row; each side planned by itself.

Works on lengths alone, over all shards at once: a plan per group of shards would leave packs half
empty. No token is read here; `packhouse.run.steps.gather` brings them together, an output shard at
a time. Order follows (file, row) and the seed, never how rows lie in shards. Which records are
packed is decided in `selection.py`.

A record's side is a pure function of its group key, so no pack can mix the two, and the split step
only has to prove it. Memory: about 30 bytes a record while packs are planned (docs/performance.md).

The step writes 14 bytes a record: which shard holds each, which split it is in, where it was
packed. Names and keys stay in the shards, and `read_records` reads them next to these, a block of
rows at a time. So lineage of any number of records costs the memory of one block, and 12 bytes for
each record of a published file, whose places come from the plan.
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
from packhouse.pack import dedup, splitting
from packhouse.pack.dedup import DedupFacts
from packhouse.pack.gather import GatherTally, PackStatistics
from packhouse.pack.overlength import REASONS, apply_over_length, join_admitted
from packhouse.pack.plan import STRATEGIES, IndexArray, PackPlan, join_plans, plan_packs
from packhouse.read.files import source_name
from packhouse.recipe import MIXING, DedupConfig, PackConfig, Recipe, SplitConfig
from packhouse.recipe.audit import OnMatch
from packhouse.records.ledger import RowCounts
from packhouse.records.lists import flat_weights, one_chunk, read_ranges
from packhouse.records.tables import TOKENIZED, read_table, write_batches, write_table
from packhouse.registry import function_of_addon
from packhouse.run.cache import Receipt, Workspace
from packhouse.run.step import Job, Step, Work, execute
from packhouse.run.steps.format import FORMAT, FormatParameters, fingerprint_job
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

# Which shards there are, in order: key of the tokenize step, number of its first record, records.
PLACES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("num_records", pa.int64(), nullable=False),
    ]
)

OUTCOMES = pa.schema(
    [
        pa.field("split", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("outcome", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        # Of one copy, as far as it is packed; of a dropped record, before anything was cut.
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("times", pa.int32(), nullable=False),  # copies of it in packs; 0: dropped
        # What it was dropped for: id of a record, row of a benchmark.
        pa.field("repeats", pa.string()),
    ]
)

# Lineage, a row per record: its raw row, its side, and what became of it.
LINEAGE = pa.schema(
    [
        *(TOKENIZED.field(name) for name in ("record_id", "source", "row", "group_key")),
        *OUTCOMES,
    ]
)

# Lineage as it is published, with the place of the first copy in the packs: null for what is in
# none. So most questions to a version read no pack.
RECORDS = pa.schema(
    [
        *LINEAGE,
        pa.field("num_trained", pa.int32()),  # of this copy
        pa.field("total_weight", pa.float64()),  # loss weights of these tokens, added up
        TOKENIZED.field("label"),
        pa.field("pack", pa.int64()),  # number in its split
        pa.field("position", pa.int32()),  # of its first token in the pack
    ]
)
_TRAINED = ["trained_ranges", "range_weights", "label"]


class ShardIndex:
    """Where the records of a pack step lie."""

    def __init__(self, packed: Receipt[RowCounts], workspace: Workspace) -> None:
        table = read_table(packed.path("places.arrow"))
        self.keys = table["key"]
        self.bounds = np.append(table["first"].to_numpy(), packed.facts.rows_in)
        """Number of each shard's first record, and of all records."""
        self._workspace = workspace

    def shard(self, number: int) -> pa.Table:
        """Map the tokenized records of a shard."""
        receipt = TOKENIZE.peek(self.keys[number].as_py(), self._workspace)
        assert receipt is not None, f"pack was done before tokenize {self.keys[number]} was"
        return read_table(receipt.path("tokenized.arrow"))

    def between(self, first: int, last: int) -> Iterator[tuple[pa.Table, int, int]]:
        """Yield each shard that holds some of the records [first, last), and which of its rows."""
        # Bounds [0 500 900], records [450, 600): rows [450, 500) of shard 0, [0, 100) of shard 1.
        low = int(np.searchsorted(self.bounds, first, side="right")) - 1
        for number in range(max(low, 0), len(self.keys)):
            start, end = self.bounds[number : number + 2].tolist()
            if start >= last:
                return
            if end > start:
                yield self.shard(number), max(first - start, 0), min(last, end) - start


def read_records(
    packed: Receipt[RowCounts],
    workspace: Workspace,
    rows: tuple[int, int] | None = None,
    block: int = 2**18,
    columns: Sequence[str] = tuple(LINEAGE.names),
) -> Iterator[pa.RecordBatch]:
    """Yield lineage, schema `LINEAGE`, in batches of `block` rows whatever the shards are.

    Args:
        packed: receipt of the pack step.
        workspace: where its shards lie.
        rows: records [first, last); all by default.
        block: rows of a batch; the last one may be smaller.
        columns: which ones to read, in the order of the schema.
    """
    schema = pa.schema([LINEAGE.field(name) for name in columns])
    index = ShardIndex(packed, workspace)
    sources = pa.array(json.loads(packed.path("sources.json").read_bytes()), pa.string())
    outcomes = read_table(packed.path("outcomes.arrow"))
    first, last = rows or (0, packed.facts.rows_in)
    for start in range(first, last, block):
        end = min(start + block, last)
        read = dict(zip(OUTCOMES.names, outcomes.slice(start, end - start).columns, strict=True))
        if not set(columns) <= set(read):
            parts = [
                _named(shard.slice(low, high - low), sources, columns)
                for shard, low, high in index.between(start, end)
            ]
            named = pa.concat_tables(parts)
            read.update(zip(named.column_names, named.columns, strict=True))
        arrays = [one_chunk(read[name]) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _named(shard: pa.Table, sources: pa.Array, columns: Sequence[str]) -> pa.Table:
    """Those of the columns that shards have, with one dictionary of files for all of them."""
    named = {name: shard[name] for name in columns if name in shard.column_names}
    named.pop("num_tokens", None)  # before anything was cut; the outcome's counts
    if "source" in named:
        indices = pc.index_in(named["source"].cast(pa.string()), sources).combine_chunks()
        named["source"] = pa.DictionaryArray.from_arrays(indices, sources)
    return pa.table(named, schema=pa.schema([LINEAGE.field(name) for name in named]))


def read_placed(
    packed: "Receipt[PackFacts]", workspace: Workspace, rows: tuple[int, int], block: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records [first, last) as they are published, schema `RECORDS`, in such batches."""
    index, places = ShardIndex(packed, workspace), _Places(packed, rows)
    start = rows[0]
    for batch in read_records(packed, workspace, rows, block):
        stop = start + batch.num_rows
        parts = [
            shard.select(_TRAINED).slice(low, high - low)
            for shard, low, high in index.between(start, stop)
        ]
        made = places.columns(start - rows[0], pa.concat_tables(parts), batch)
        yield pa.RecordBatch.from_arrays([*batch.columns, *made], schema=RECORDS)
        start = stop


class _Places:
    """Where the first copy of each of the records [first, last) lies, by the plan of the packs."""

    def __init__(self, packed: "Receipt[PackFacts]", rows: tuple[int, int]) -> None:
        self._first, self._last = rows
        self.pack = np.full(self._last - self._first, -1, np.int64)
        self.position = np.zeros(len(self.pack), np.int32)
        self._cuts: list[Int64s] = []
        for side in packed.facts.sides:
            offsets = read_table(packed.path(f"{side}-offsets.arrow"))["offset"].to_numpy()
            sequences = read_table(packed.path(f"{side}-sequences.arrow"))
            self._add(offsets, sequences)
        # Record << 32 | token: first tokens of the pieces of a record that `concat` cut, but for
        # the first one. No token before them is in their pack, so none predicts them.
        self.cuts = np.unique(np.concatenate([np.zeros(0, np.int64), *self._cuts]))

    def _add(self, offsets: Int64s, sequences: pa.Table) -> None:
        number = tokens = 0  # sequences and tokens before the batch
        pack_start = 0  # tokens before the pack that goes on in the batch
        is_first = np.zeros(1, np.bool_)  # of the last head before it: a first copy
        head_record = np.full(1, -1, np.int64)
        for batch in sequences.to_batches():
            record, start, end = (column.to_numpy() for column in batch.columns)
            # Pack offsets [0 2 3], pieces of 3, 2 and 4 tokens: packs 0 0 1, positions 0 3 0.
            pack = np.searchsorted(offsets, np.arange(number, number + len(record)), "right") - 1
            before = tokens + np.concatenate([[0], np.cumsum(end - start, dtype=np.int64)])
            begins = offsets[pack] - number
            pack_starts = np.where(begins >= 0, before[np.maximum(begins, 0)], pack_start)
            own = (record >= self._first) & (record < self._last)
            heads = np.flatnonzero(start == 0)
            chosen = heads[own[heads]]
            _, at = np.unique(record[chosen], return_index=True)
            chosen = chosen[at]
            chosen = chosen[self.pack[record[chosen] - self._first] < 0]
            self.pack[record[chosen] - self._first] = pack[chosen]
            self.position[record[chosen] - self._first] = (before[:-1] - pack_starts)[chosen]
            # Pieces behind a head go on with its copy; packs may have been put in another order.
            firsts = np.zeros(len(record), np.bool_)
            firsts[chosen] = True
            is_first = np.concatenate([is_first[-1:], firsts[heads]])
            head_record = np.concatenate([head_record[-1:], record[heads]])
            head = np.searchsorted(heads, np.arange(len(record)), "right")
            goes_on = own & (start > 0) & (is_first[head] | (head_record[head] != record))
            cuts = (record[goes_on] - self._first) << 32 | start[goes_on]
            self._cuts.append(cuts.astype(np.int64))
            number, tokens, pack_start = number + len(record), before[-1], pack_starts[-1]

    def columns(self, start: int, shards: pa.Table, lineage: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns that `RECORDS` adds, of the rows of a batch, `start` being its first.

        Args:
            start: counted from the first of these records.
            shards: what the batch's records have of `_TRAINED`.
            lineage: the batch.
        """
        rows = slice(start, start + lineage.num_rows)
        is_missing = self.pack[rows] < 0
        ranges = read_ranges(shards["trained_ranges"])
        weights = flat_weights(shards["range_weights"], ranges.counts())
        weights = np.ones(len(ranges.starts), np.float32) if weights is None else weights
        row = ranges.row_of_each()
        # Of 8 tokens, ranges [0, 3) and [6, 9): tokens 1, 2, 6 and 7 are trained. The first one of
        # a pack's sequence never is.
        ends = np.minimum(ranges.ends, lineage["num_tokens"].to_numpy()[row])
        sizes = np.maximum(ends - np.maximum(ranges.starts, 1), 0)
        num_trained = np.bincount(row, sizes, lineage.num_rows).astype(np.int32)
        total = np.bincount(row, sizes * weights.astype(np.float64), lineage.num_rows)
        low, high = np.searchsorted(self.cuts, [start << 32, rows.stop << 32])
        cut_row, token = (self.cuts[low:high] >> 32) - start, self.cuts[low:high] & (2**32 - 1)
        at = np.searchsorted(row << 32 | ranges.starts, cut_row << 32 | token, "right") - 1
        is_trained = (at >= 0) & (row[at] == cut_row) & (token < ends[at]) if len(row) else at >= 0
        np.subtract.at(num_trained, cut_row[is_trained], 1)
        np.subtract.at(total, cut_row[is_trained], weights[at[is_trained]])
        return [
            pa.array(num_trained, mask=is_missing),
            pa.array(np.round(total, 4), mask=is_missing),
            one_chunk(shards["label"]),
            pa.array(self.pack[rows], mask=is_missing),
            pa.array(self.position[rows], mask=is_missing),
        ]


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
            **plugin_key("packing_strategies", self.pack.strategy, STRATEGIES),
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
