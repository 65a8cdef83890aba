"""pack: select records, decide the split of each, and plan which tokens go into which pack.

1. Mix: a source's `weight` and `max_records` decide how often each row is trained.
2. Deduplicate, by the fingerprints made with the format step. Sources are mixed first, so that a
   row that is sampled out cannot displace an equal row elsewhere.
3. Split: a record goes to eval by the hash of its group, or because its source is for eval only. A
   group is never divided: if a source is for eval only, records of other sources with the same
   prompt go to eval too, because otherwise the model would be evaluated on an answer that it was
   trained on.
4. Plan the packs of each split from lengths alone, over all shards at once: planning groups of
   shards separately would leave more packs half empty. The order depends on (file, row) and the
   seed, never on shard boundaries.

No tokens are read here: `gather_tokens.py` collects them later, one file of the output at a time.
Records are numbered across all shards: `bounds` holds the number of each shard's first record, and
at its end the number of all records. The step writes 14 bytes per record: its shard, its split and
its place in the packs. Memory: about 30 bytes per record while packs are planned
(docs/performance.md).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse import pack
from packhouse.pack import dedup, train_eval_split
from packhouse.pack.dedup import DedupFacts, deduplicate, facts_of
from packhouse.pack.gather_tokens import GatherTally, PackStatistics
from packhouse.pack.overlength import REASONS, Admitted, apply_over_length, join_admitted
from packhouse.pack.strategies import STRATEGIES, IndexArray, PackPlan, join_plans, plan_packs
from packhouse.pack.train_eval_split import goes_to_eval, join_equal, mixed_keys
from packhouse.read.source_files import source_name
from packhouse.recipe import MIXING, DedupConfig, PackConfig, Recipe, SourceConfig, SplitConfig
from packhouse.recipe.audit_section import OnMatch
from packhouse.records.arrays import Bools, Int32s, Int64s, flat_list, one_chunk
from packhouse.records.ledger import RowCounts
from packhouse.records.record_ids import number_all_rows, number_rows
from packhouse.records.table_schemas import (
    OUTCOMES,
    TOKENIZED,
    read_table,
    write_batches,
    write_table,
)
from packhouse.registry import function_of_addon
from packhouse.run.step import Job, JobContext, Step
from packhouse.run.steps.format import FINGERPRINTS, FORMAT, FormatParameters, conversations
from packhouse.run.steps.tokenize import TOKENIZE, TokenizeParameters
from packhouse.run.steps.validate import VALIDATE, ValidateParameters
from packhouse.system.plugins import plugin_key

_field = partial(pa.field, nullable=False)
# The shards in order: key of the tokenize step, number of the first record, number of records.
PLACES = pa.schema(
    [_field("key", pa.string()), _field("first", pa.int64()), _field("num_records", pa.int64())]
)

Side = Literal["train", "eval"]
SIDES: tuple[Side, ...] = ("train", "eval")

# The sequences in the packs of a side, in order: tokens [start, end) of a record, numbered across
# all shards. `OFFSETS` holds the first sequence of each pack.
SEQUENCES = pa.schema(
    [_field("record", pa.int64()), _field("start", pa.int32()), _field("end", pa.int32())]
)
OFFSETS = pa.schema([_field("offset", pa.int64())])

_KEPT, _CONTAMINATED = REASONS.index("kept"), REASONS.index("contaminated")
# Sequences or records per written batch.
_BLOCK = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class PackParameters:
    """Settings that decide which records are packed, how, and on which side."""

    mix: Mapping[str, object]
    """Result of `mix_of`."""
    pack: PackConfig
    dedup: DedupConfig
    split: SplitConfig
    benchmarks: Mapping[str, object]
    """Result of `benchmarks_of`; empty if `audit.on_match` is `stop`."""
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
    """The packs of one side, before their tokens are gathered."""

    num_packs: int
    num_tokens: int
    statistics: PackStatistics
    """Statistics of the plan; the fields that gather counts are 0."""
    with_label: bool
    """True if a record has a class label."""
    with_weights: bool
    """True if a record of any side has a loss weight other than 0 and 1."""
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`packs` and `tokens` of each source, in order, if each source has its own packs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """Rows requested for eval and rows in eval; a row counts once however many records it has."""

    rows: int
    """Rows in train and eval together."""
    eval: int
    asked: int
    joined: int
    """Rows whose group was merged with another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFacts(RowCounts):
    """The plan of all packs."""

    sides: Mapping[Side, PlannedSide]
    sources: Mapping[str, Mapping[str, int]]
    """Records and tokens by source; see `source_counts`."""
    dedup: DedupFacts | None = None
    """None if the recipe does not deduplicate."""
    split: SplitCounts | None = None
    """None if nothing goes to eval."""
    vocab_size: int
    allow_untrained: bool
    """True if a pack may have no trained token: with `concat`, or with class labels."""


def mix_of(recipe: Recipe) -> dict[str, object]:
    """Return the sampling settings of all sources: {"chats.weight": 2.0}."""
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
    side_jobs = [other for job in format_ for other in job.side_jobs]
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
        also_reads=[job.ref for job in (*validate, *format_, *side_jobs)],
    )


@dataclass(slots=True, eq=False)
class Selection:
    """The records of all shards, and which of them are packed."""

    shards: Sequence[pa.Table]
    """Schema `table_schemas.TOKENIZED`."""
    bounds: Int64s
    names: list[str]
    """Source of each shard."""
    admitted: Admitted
    times: Int32s
    """How often each record is packed; 0: dropped."""
    matches: pa.Array | None
    """For every record, the row of a benchmark that it matches, else null."""
    group_keys: pa.Array | pa.ChunkedArray | None = None
    """Group key of every record; records of a group share a split. None: unchanged from the
    shards."""
    repeats: pa.Array | None = None
    """For every record, the id of the record that it duplicates if it was dropped, else null."""
    near: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Pairs of near-duplicate records, shape [num_pairs, 2]."""
    dedup: DedupFacts | None = None
    """Duplicates found, with samples; None if the recipe does not deduplicate."""

    @property
    def groups(self) -> pa.Array | pa.ChunkedArray:
        """Group key of every record of all shards."""
        return self.column("group_key") if self.group_keys is None else self.group_keys

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all shards without loading it: its data stays mapped."""
        chunks = [chunk for shard in self.shards for chunk in shard[name].chunks]
        table = pa.chunked_array(chunks, TOKENIZED.field(name).type)
        return table.unify_dictionaries() if name == "source" else table


def compute(work: JobContext[PackParameters], folder: Path) -> PackFacts:
    """Write the plan of each side, the outcome of each record, and the shard that holds it.

    Records 0 to 4 have [5, 3, 2, 6, 9] tokens, seq_len is 8 and record 2 is for eval. Record 4 is
    dropped, train plans [5, 3, 6] -> packs of records [[0, 1], [3]], eval plans [2] -> [[2]].

    Raises:
        SequenceTooLongError: a record is over `seq_len` and `pack.over_length` is `error`.
    """
    parameters, receipts = work.parameters, work.inputs(TOKENIZE)
    selection = _select(work)
    is_eval, split = _divide(selection, work.recipe)
    bounds, names, shards = selection.bounds, selection.names, selection.shards
    places = [[receipt.key for receipt in receipts], bounds[:-1], np.diff(bounds)]
    write_table(folder / "places.arrow", pa.table(list(map(pa.array, places)), schema=PLACES))
    files = {file for shard in shards for file in shard["source"].unique().to_pylist()}
    (folder / "sources.json").write_text(json.dumps(sorted(files)), encoding="utf-8")
    write_batches(folder / "outcomes.arrow", OUTCOMES, _outcomes(selection, is_eval))
    has_label = np.asarray(selection.column("label").is_valid(), np.bool_)
    with_weights = any(s["range_weights"].null_count < s.num_rows for s in shards)
    counts, found = _counts(selection), selection.dedup
    if found is not None:
        first, second = selection.near.T
        is_packed = (selection.times[first] > 0) & (selection.times[second] > 0)
        apart = int(((is_eval[first] != is_eval[second]) & is_packed).sum())
        found = replace(found, near=replace(found.near, on_both_sides=apart))
    sources = source_counts(selection.admitted, selection.times, bounds, names)
    # Records 0 (packed twice), 2 and 4 -> [0 0 2 4]. Free arrays as soon as possible: at a few
    # bytes per record they dominate memory in large datasets.
    often = selection.times[selection.admitted.rows]
    rows = selection.admitted.rows.repeat(often)
    lengths = selection.admitted.lengths.repeat(often)
    del selection, often
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
        del plan, own, lengths, offsets  # free memory before planning the next side
    return PackFacts(
        **counts,
        sides=planned,
        sources=sources,
        dedup=found,
        split=split,
        vocab_size=max(receipt.facts.tokenizer.vocab_size for receipt in receipts),
        allow_untrained=parameters.pack.strategy == "concat" or bool(has_label.any()),
    )


def _select(work: JobContext[PackParameters]) -> Selection:
    """Decide which records are packed, how often, and which must share a side."""
    parameters, recipe, seed = work.parameters, work.recipe, work.recipe.split.seed
    validated, formatted = work.inputs(VALIDATE), work.inputs(FORMAT)
    # Lengths come from the mapped tables: 5 million of them take longer to read from JSON receipts.
    shards = MappedTables([each.path("tokenized.arrow") for each in work.inputs(TOKENIZE)])
    admitted = join_admitted([apply_over_length(shard, parameters.pack) for shard in shards])
    bounds = np.cumsum([0, *(shard.num_rows for shard in shards)])
    matches: pa.Array | None = None
    if parameters.benchmarks:
        matches = function_of_addon("match_shards")(work, shards)
        if parameters.on_match == "drop":
            admitted = admitted.without(np.asarray(matches.is_valid(), np.bool_), "contaminated")
    names = [receipt.facts.origin.source for receipt in validated]
    rows = MappedTables([receipt.path("validated.arrow") for receipt in validated])
    admitted, times = mix(admitted, bounds, shards, rows, names, recipe)
    selection = Selection(shards, bounds, names, admitted, times, matches)

    # Conversations with different first questions may have equal windows. The split step refuses a
    # record that is on both sides.
    if any("examples.arrow" in receipt.files for receipt in formatted):
        ids = selection.column("record_id")
        selection.group_keys = join_equal(selection.groups, ids, seed)
    # Different records may render to the same text if reasoning is left out. With `group_by:
    # prompt` they share a group anyway.
    is_left_out = any(each.facts.notes.get("reasoning_not_rendered") for each in formatted)
    has_eval = any(source.eval_only for source in recipe.sources)
    has_eval = has_eval or recipe.split.eval_fraction > 0 or bool(recipe.split.eval_count)
    # Otherwise such a text could be trained on one side and evaluated on the other.
    if is_left_out and has_eval and recipe.split.group_by == "record":
        selection.group_keys = join_equal(selection.groups, _ids_of_tokens(shards), seed)

    if dedup.needs_fingerprints(parameters.dedup):
        prints = []
        printed = work.inputs(FINGERPRINTS)
        for old, new, made, shard in zip(validated, formatted, printed, shards, strict=True):
            # Fingerprints are those of the conversations; some gave no record.
            ids, before = (one_chunk(t["record_id"]) for t in (shard, conversations(old, new)))
            table = read_table(made.path("fingerprints.arrow"))
            if not len(ids):
                table = table.slice(0, 0)
            elif not before.equals(ids):
                table = table.take(pc.index_in(ids, value_set=before)).combine_chunks()
            prints.append(table)
        is_split = any({"turns", "windows"} & set(each.facts.added) for each in formatted)
        units = [number_rows(shard) for shard in shards] if is_split else None
        result = deduplicate(prints, admitted, selection.groups, recipe.dedup, seed, units)
        times[result.admitted.reasons != _KEPT] = 0
        records = pa.table({n: selection.column(n) for n in ("source", "row", "record_id")})
        repeated = pa.array(result.repeats_of, mask=result.repeats_of < 0)
        selection.admitted, selection.group_keys = result.admitted, result.group_keys
        selection.repeats = one_chunk(records["record_id"]).take(repeated)
        selection.near = result.found.near
        selection.dedup = facts_of(result, records, recipe.dedup)
    return selection


def _ids_of_tokens(shards: Sequence[pa.Table]) -> pa.ChunkedArray:
    """Return an id for each record that depends only on its tokens."""
    chunks = []
    for shard in shards:
        values, offsets = flat_list(shard["input_ids"])
        tokens = np.ascontiguousarray(values).view(np.uint8)
        width = values.itemsize
        names = [  # 80 bits, like the ids of records
            sha256(tokens[width * start : width * end].data).hexdigest()[:20]
            for start, end in pairwise(offsets.tolist())
        ]
        chunks.append(pa.array(names, pa.string()))
    return pa.chunked_array(chunks, pa.string())


class MappedTables(Sequence[pa.Table]):
    """Sequence of tables that maps each file only when it is accessed, for any number of shards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        return read_table(self._paths[index])


# Mix weighted sources: `weight` and `max_records` decide how often each row is trained. This comes
# after tokenize, so that another weight costs only a plan and a gather: on Alpaca, 3.9 s of CPU
# instead of 10.7 s.
#
# A row is taken, repeated or left out with all its records (see `packhouse.records.record_ids`).
# Each choice is a pure function of the row's key and the source's seed, so it does not depend on
# order, shards or other sources. Appended rows do not change the choice for earlier ones, except
# that they may push rows out over `max_records`. If a row is taken twice, each of its sequences is
# packed twice; all share one group key and so one split. Costs 100 ns per record.


def times_of(keys: pa.Array, config: SourceConfig) -> Int32s:
    """Return how often each row of a source is trained.

    Args:
        keys: `row_keys` of all rows of the source with a record that could be packed, in order.
        config: settings of the source; reads `weight`, `max_records` and `mix_seed`.

    Example:
        >>> keys = pa.array([f"{n:016x}0000" for n in range(1000)])
        >>> times = times_of(keys, SourceConfig(path="", weight=2.25))
        >>> sorted(set(times.tolist())), 2200 < times.sum() < 2300
        ([2, 3], np.True_)
        >>> int(times_of(keys, SourceConfig(path="", max_records=10)).sum())
        10
    """
    # Weight 2.25: every row twice, and rows whose hash is in the lowest quarter of 64 bits a third
    # time.
    whole, part = divmod(config.weight, 1.0)
    times = np.full(len(keys), int(whole), np.int32)
    if part:
        # Another stream than that of `max_records`, or the rows that are kept would be those taken
        # once more.
        times += mixed_keys(keys, 2 * config.mix_seed + 1) < np.uint64(int(part * 2**64))
    if config.max_records is not None and config.max_records < len(times):
        # By hash instead of by place, so that appended rows replace few of those taken before.
        order = np.argsort(mixed_keys(keys, 2 * config.mix_seed), kind="stable")
        times[order[config.max_records :]] = 0
    return times


def row_keys(shard: pa.Table, validated: pa.Table, *, is_stripped: bool) -> pa.Array:
    """Return the key of each record's row: 20 hex digits, the same for all records of a row.

    The key is the id of the validated conversation, so `format.turns` and windows do not change
    which rows are taken. A record that is rendered whole has the same id. There are two exceptions,
    where the key is the id of the row's only record: conversations that share a line of the file
    (questions of a SQuAD article), and `reasoning: strip`, which derives ids from the remaining
    text. So for rows with reasoning, `strip` with `turns: alone` takes different rows than `strip`
    with `turns: whole`.

    Args:
        shard: records, with `record_id`, `row` and `group_key`.
        validated: validated conversations of the shard, with `record_id` and `row`.
        is_stripped: True if reasoning was removed.
    """
    # A row gets its conversation's id if it made several records, or if it is the only conversation
    # on its line and was not stripped. Otherwise it keeps its record's id.
    number = number_rows(shard)
    num_records = np.bincount(number)[number]
    lines, first, num_conversations = np.unique(
        validated["row"].to_numpy(), return_index=True, return_counts=True
    )
    place = np.searchsorted(lines, shard["row"].to_numpy())
    is_of_line = (num_records > 1) | ((num_conversations[place] == 1) & (not is_stripped))
    before = one_chunk(validated["record_id"]).take(pa.array(first[place]))
    return pc.if_else(pa.array(is_of_line), before, one_chunk(shard["record_id"]))


def mix(
    admitted: Admitted,
    bounds: Int64s,
    shards: Sequence[pa.Table],
    validated: Sequence[pa.Table],
    names: Sequence[str],
    recipe: Recipe,
) -> tuple[Admitted, Int32s]:
    """Sample rows by their sources' settings; records of other rows become `sampled_out`.

    A row counts once if any of its records can be packed. If one of its records is over `seq_len`,
    the remaining ones are still taken or left out together.

    Args:
        admitted: records that can be packed.
        bounds: number of each shard's first record.
        shards: schema `table_schemas.TOKENIZED`; read only if a source is sampled.
        validated: validated conversations of each shard; read only if a source is sampled.
        names: source name of each shard.
        recipe: recipe; reads `sources` and `format.reasoning`.

    Returns:
        Records to pack, and how often each record is packed (0: not at all).
    """
    times = (admitted.reasons == _KEPT).astype(np.int32)
    is_stripped = recipe.format.reasoning == "strip"
    for config in recipe.sources:
        if config.weight == 1 and config.max_records is None:
            continue
        keys, records, rows = [], [], []
        num_rows = 0
        for number in (n for n, name in enumerate(names) if name == source_name(config)):
            shard, own = shards[number], admitted.between(*bounds[number : number + 2])
            # Records 0 1 3 of rows 0 0 2 2 are kept: first records 0 3, and rows 0 0 1.
            kept = own - bounds[number]
            _, first, row = np.unique(
                number_rows(shard)[kept], return_index=True, return_inverse=True
            )
            every = row_keys(shard, validated[number], is_stripped=is_stripped)
            keys.append(every.take(pa.array(kept[first])))
            records.append(own)
            rows.append(row + num_rows)
            num_rows += len(first)
        if keys:
            chosen = times_of(pa.concat_arrays(keys), config)
            times[np.concatenate(records)] = chosen[np.concatenate(rows)]
    return admitted.without(times == 0, "sampled_out"), times


def source_counts(
    admitted: Admitted, times: Int32s, bounds: Int64s, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Count records, packed and dropped records (by reason) and tokens of each source.

    Example:
        >>> each = Admitted(rows=np.array([0, 2], np.int32), lengths=np.array([5, 3], np.int32),
        ...     reasons=np.array([0, 1, 0], np.uint8), num_tokens=np.array([5, 9, 3], np.int32))
        >>> source_counts(each, np.array([2, 0, 1], np.int32), np.array([0, 3]), ["a"])["a"]
        {'records': 3, 'packed': 2, 'repeated': 1, 'tokens': 13, 'over_seq_len': 1}
    """
    counts: dict[str, Counter[str]] = {}
    for name, (start, end) in zip(names, pairwise(bounds.tolist()), strict=True):
        low, high = np.searchsorted(admitted.rows, (start, end))
        often = times[admitted.rows[low:high]].astype(np.int64)
        found = np.bincount(admitted.reasons[start:end], minlength=len(REASONS)).tolist()
        dropped = zip(REASONS[1:], found[1:], strict=True)
        counts.setdefault(name, Counter()).update(
            records=end - start,
            packed=len(often),
            repeated=int(often.sum()) - len(often),
            tokens=int((admitted.lengths[low:high] * often).sum()),
            **{reason: number for reason, number in dropped if number},
        )
    return {name: dict(line) for name, line in sorted(counts.items())}


def _divide(selection: Selection, recipe: Recipe) -> tuple[Bools, SplitCounts | None]:
    """Return a mask of the records that go to eval, and counts of rows if any can.

    Every group with a record of an eval-only source goes to eval as a whole, and so does the group
    of a record that was kept instead of a duplicate of such a source. The recipe's `split` divides
    the rest. An eval count needs all keys at once; a fraction works one shard at a time.
    """
    config, shards = recipe.split, selection.shards
    eval_only = {source_name(source) for source in recipe.sources if source.eval_only}
    is_only = np.array([name in eval_only for name in selection.names], np.bool_)
    only = np.repeat(is_only, np.diff(selection.bounds))
    is_split = bool(config.eval_fraction or config.eval_count or only.any())
    row = number_all_rows(list(map(number_rows, shards))) if is_split else np.zeros(0, np.int64)
    is_first = np.diff(row, prepend=-1) > 0 if config.eval_count else None
    if only.any():
        held = only
        if selection.repeats is not None:
            ids = selection.column("record_id")
            held = only | np.asarray(pc.is_in(ids, selection.repeats.filter(pa.array(only))))
        # Groups a b a c, record 0 from an eval-only source: all of a goes to eval (records 0 and
        # 2), while b and c are divided by their hash.
        keys = pc.unique(selection.groups.filter(pa.array(held)))
        is_eval = np.array(pc.is_in(selection.groups, value_set=keys), np.bool_)
        others = None if is_first is None else is_first[~is_eval]
        rest = selection.groups.filter(pa.array(~is_eval))
        is_eval[~is_eval] = goes_to_eval(rest, config, others)
    elif selection.group_keys is not None or config.eval_count:
        is_eval = goes_to_eval(selection.groups, config, is_first)
    else:
        parts = [goes_to_eval(shard["group_key"], config) for shard in shards]
        is_eval = np.concatenate([np.zeros(0, np.bool_), *parts])
    if selection.matches is not None and recipe.audit.on_match == "same_side":
        # A match moves all records of its group to eval.
        matched = pc.unique(selection.groups.filter(selection.matches.is_valid()))
        is_eval |= np.asarray(pc.is_in(selection.groups, value_set=matched), np.bool_)
    if not is_split:
        return is_eval, None

    is_packed = selection.times > 0
    is_joined = np.zeros(len(is_packed), np.bool_)
    if selection.group_keys is not None:
        is_joined[:] = pc.not_equal(selection.column("group_key"), selection.group_keys)
    num_rows, num_eval, num_only, num_joined = (
        len(np.unique(row[mask & is_packed])) for mask in (is_packed, is_eval, only, is_joined)
    )
    asked = config.eval_count
    if asked is None:
        asked = round(config.eval_fraction * (num_rows - num_only))
    asked += num_only
    return is_eval, SplitCounts(rows=num_rows, eval=num_eval, asked=asked, joined=num_joined)


def _plan(
    parameters: PackParameters,
    side: str,
    names: Sequence[str],
    bounds: Int64s,
    rows: IndexArray,
    lengths: Int32s,
) -> tuple[PackPlan, dict[str, dict[str, int]]]:
    """Plan the packs of a side; with `eval_by_source`, plan each source separately, in order."""
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
    # Three shards of sources a, a, b with 2, 2 and 3 rows: bounds [0 2 4 7], so row 3 belongs to a
    # and row 4 to b.
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
        columns = map(pa.array, (rows[order], starts, ends), SEQUENCES.types)
        yield pa.RecordBatch.from_arrays(list(columns), schema=SEQUENCES)


def _outcomes(selection: Selection, is_eval: Bools) -> Iterator[pa.RecordBatch]:
    """Yield `OUTCOMES` of all records in blocks."""
    admitted, times, matches = selection.admitted, selection.times, selection.matches
    num_tokens = admitted.num_tokens.copy()  # dropped records keep their full length
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
    """Return the fields of `RowCounts`."""
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
    title="Plan the packs of the whole dataset.",
    version=f"1.{pack.VERSION}.{train_eval_split.VERSION}.{dedup.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=PackFacts,
    compute=compute,
)
