"""Which records are packed, how often, and on which side: mixing, then repeats, then eval.

Rows of sources are sampled first, so that a row which is not taken cannot displace an equal one
elsewhere; then repeats are dropped or joined, by the fingerprints made next to the format step.
A record is for evaluation by hash of its group, or because its source is. A group is on one side
whole: where a source is for evaluation only, records of other sources with the same prompt go with
it, or a trained answer would be evaluated.

Records are numbered through all shards; `bounds` has the number of each shard's first record, and
of all records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack import dedup
from packhouse.pack.dedup import DedupFacts, deduplicate, facts_of
from packhouse.pack.overlength import REASONS, Admitted
from packhouse.pack.plan import IndexArray
from packhouse.pack.splitting import goes_to_eval, join_equal, mixed_keys
from packhouse.read.files import source_name
from packhouse.recipe import Recipe, SourceConfig, SplitConfig
from packhouse.records.identity import number_all_rows, number_rows
from packhouse.records.lists import flat_list, one_chunk
from packhouse.records.tables import TOKENIZED, read_table
from packhouse.run.cache import Receipt
from packhouse.run.steps.format import conversations
from packhouse.run.steps.validate import ShardCounts, ValidateFacts
from packhouse.system.arrays import Bools, Int32s, Int64s

_KEPT = REASONS.index("kept")


class MappedTables(Sequence[pa.Table]):
    """Tables of files, mapped when they are looked at: no number of shards is too large."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        return read_table(self._paths[index])


# Mix weighted sources: how often each row is trained, by `weight` and `max_records`.
#
# A row is taken, repeated or left out with all its records, see `packhouse.records.identity`. Each
# choice is a pure function of the row's key and the source's seed, so it does not depend on order,
# shards or other sources, and appended rows change nothing for those before (but that they may
# push rows over `max_records` out). A row that is taken twice makes each of its sequences twice;
# all have one group key, so they are on one side. Costs 100 ns a record.


def times_of(keys: pa.Array, config: SourceConfig) -> Int32s:
    """Return how often each row of a source is trained.

    Args:
        keys: `row_keys` of all rows of the source of which a record could be packed, in order.
        config: `weight`, `max_records` and `mix_seed` are read.

    Example:
        >>> keys = pa.array([f"{n:016x}0000" for n in range(1000)])
        >>> times = times_of(keys, SourceConfig(path="", weight=2.25))
        >>> sorted(set(times.tolist())), 2200 < times.sum() < 2300
        ([2, 3], np.True_)
        >>> int(times_of(keys, SourceConfig(path="", max_records=10)).sum())
        10
    """
    # Weight 2.25: twice each, and three times those whose key is in the lowest quarter of 64 bits.
    whole, part = divmod(config.weight, 1.0)
    times = np.full(len(keys), int(whole), np.int32)
    if part:
        times += mixed_keys(keys, 2 * config.mix_seed + 1) < np.uint64(int(part * 2**64))
    if config.max_records is not None and config.max_records < len(times):
        order = np.argsort(mixed_keys(keys, 2 * config.mix_seed), kind="stable")
        times[order[config.max_records :]] = 0
    return times


def row_keys(shard: pa.Table, validated: pa.Table, *, is_stripped: bool) -> pa.Array:
    """Return the key of each record's row: 20 hex digits, the same for all records of a row.

    The key is the id of the conversation as it was validated, so the same rows are taken whatever
    `format.turns` and windows make of them. Rendered whole, a record has this very id, with two
    exceptions, where the id of a row's only record is the key: conversations that share a line of
    the file (questions of a SQuAD article), and `reasoning: strip`, which names conversations after
    what is left. So among rows that had reasoning, `strip` with `turns: alone` takes others than
    `strip` with `turns: whole`.

    Args:
        shard: with `record_id`, `row` and `group_key`.
        validated: the conversations of the shard, with `record_id` and `row`.
        is_stripped: reasoning was taken out.
    """
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
    """Take the rows that their sources' settings choose; the records of others are `sampled_out`.

    A row counts once if any of its records could be packed: of a row with one record over `seq_len`
    the others are taken or left out together.

    Args:
        admitted: what would be packed.
        bounds: number of each shard's first record.
        shards: schema `tables.TOKENIZED`, looked at only where a source asks for it.
        validated: the conversations of each shard, likewise.
        names: of each shard's source.
        recipe: `sources` and `format.reasoning` are read.

    Returns:
        What is packed, and how often each record is (0: not).
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
    """For each source: records, how many of them are dropped, by reason, and packed; tokens.

    Example:
        >>> each = Admitted(rows=np.array([0, 2], np.int32), lengths=np.array([5, 3], np.int32),
        ...     reasons=np.array([0, 1, 0], np.uint8), num_tokens=np.array([5, 9, 3], np.int32))
        >>> source_counts(each, np.array([2, 0, 1], np.int32), np.array([0, 3]), ["a"])["a"]
        {'records': 3, 'packed': 2, 'repeated': 1, 'tokens': 13, 'over_seq_len': 1}
    """
    counts: dict[str, dict[str, int]] = {}
    for name, (start, end) in zip(names, pairwise(bounds.tolist()), strict=True):
        low, high = np.searchsorted(admitted.rows, (start, end))
        often = times[admitted.rows[low:high]].astype(np.int64)
        line = counts.setdefault(name, {"records": 0, "packed": 0, "repeated": 0, "tokens": 0})
        line["records"] += end - start
        line["packed"] += len(often)
        line["repeated"] += int(often.sum()) - len(often)
        line["tokens"] += int((admitted.lengths[low:high] * often).sum())
        found = np.bincount(admitted.reasons[start:end], minlength=len(REASONS))
        for reason, number in zip(REASONS[1:], found[1:].tolist(), strict=True):
            if number:
                line[reason] = line.get(reason, 0) + number
    return dict(sorted(counts.items()))


ShardReceipts = tuple[Receipt[ValidateFacts], Receipt[ShardCounts]]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What of all shards is packed."""

    admitted: Admitted
    times: Int32s
    """How often each record is packed; 0: dropped."""
    sources: Mapping[str, Mapping[str, int]]
    """Counts by source."""
    group_keys: pa.Array | pa.ChunkedArray | None = None
    """Of all records: what must stay on one side; None: their own keys say it."""
    repeats: pa.Array | None = None
    """Of all records: id of the record that one was dropped for; null: none."""
    near: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Pairs of near records, see `dedup.policy.Pairs`."""
    dedup: DedupFacts | None = None
    """What repeats, with samples; None where nobody looked."""

    def groups_of(self, shards: Sequence[pa.Table]) -> pa.Array | pa.ChunkedArray:
        """Return what must stay on one side, of the records of all shards."""
        return column_of(shards, "group_key") if self.group_keys is None else self.group_keys

    def kept(self) -> tuple[IndexArray, Int32s]:
        """Records that are packed, each as often as it is; and their tokens.

        Records 0 (twice), 2 and 4: [0 0 2 4].
        """
        often = self.times[self.admitted.rows]
        return self.admitted.rows.repeat(often), self.admitted.lengths.repeat(often)

    def num_near_on_both_sides(self, is_eval: Bools) -> int:
        """Pairs of near records, both packed, of which one is in train and one in eval."""
        first, second = self.near.T
        is_packed = (self.times[first] > 0) & (self.times[second] > 0)
        return int(((is_eval[first] != is_eval[second]) & is_packed).sum())


def select(
    shards: Sequence[pa.Table],
    formatted: Sequence[ShardReceipts],
    admitted: Admitted,
    bounds: Int64s,
    recipe: Recipe,
    fingerprints: Sequence[Path],
) -> Selection:
    """Decide which records are packed, and how often.

    Args:
        shards: schema `tables.TOKENIZED`.
        formatted: receipts of the validate and format steps of the same shards.
        admitted: what can be packed.
        bounds: number of each shard's first record.
        recipe: `sources`, `dedup` and `split.seed` are read.
        fingerprints: those of each shard's conversations; empty where the recipe needs none.
    """
    names = [receipt.facts.origin.source for receipt, _ in formatted]
    validated = MappedTables([receipt.path("validated.arrow") for receipt, _ in formatted])
    mixed, times = mix(admitted, bounds, shards, validated, names, recipe)
    groups: pa.Array | pa.ChunkedArray | None = None
    if any("examples.arrow" in receipt.files for _, receipt in formatted):
        ids = column_of(shards, "record_id")
        groups = join_equal(column_of(shards, "group_key"), ids, recipe.split.seed)
    if _may_be_of_one_text(formatted, recipe):
        groups = column_of(shards, "group_key") if groups is None else groups
        groups = join_equal(groups, _ids_of_tokens(shards), recipe.split.seed)
    if not dedup.needs_fingerprints(recipe.dedup):
        return Selection(mixed, times, source_counts(mixed, times, bounds, names), groups)
    prints = [
        _aligned(read_table(path), receipts, shard)
        for path, receipts, shard in zip(fingerprints, formatted, shards, strict=True)
    ]
    groups = column_of(shards, "group_key") if groups is None else groups
    is_split = any({"turns", "windows"} & set(each.facts.added) for _, each in formatted)
    units = [number_rows(shard) for shard in shards] if is_split else None
    deduplicated = deduplicate(prints, mixed, groups, recipe.dedup, recipe.split.seed, units)
    times[deduplicated.admitted.reasons != _KEPT] = 0
    records = pa.table({n: column_of(shards, n) for n in ("source", "row", "record_id")})
    repeated = pa.array(deduplicated.repeats_of, mask=deduplicated.repeats_of < 0)
    return Selection(
        deduplicated.admitted,
        times,
        source_counts(deduplicated.admitted, times, bounds, names),
        deduplicated.group_keys,
        one_chunk(records["record_id"]).take(repeated),
        deduplicated.found.near,
        facts_of(deduplicated, records, recipe.dedup),
    )


def _may_be_of_one_text(formatted: Sequence[ShardReceipts], recipe: Recipe) -> bool:
    """Return True if different records may be one to the model: templates leave thinking out.

    Records of one prompt are together anyhow, so this matters only where groups are records.
    """
    is_left_out = any(each.facts.notes.get("reasoning_not_rendered") for _, each in formatted)
    has_eval = any(source.eval_only for source in recipe.sources)
    is_split = has_eval or recipe.split.eval_fraction > 0 or bool(recipe.split.eval_count)
    return is_left_out and is_split and recipe.split.group_by == "record"


def _ids_of_tokens(shards: Sequence[pa.Table]) -> pa.ChunkedArray:
    """A name for each record that equal tokens share."""
    chunks = []
    for shard in shards:
        values, offsets = flat_list(shard["input_ids"])
        tokens = np.ascontiguousarray(values).view(np.uint8)
        width = values.itemsize
        names = [
            sha256(tokens[width * start : width * end].data).hexdigest()[:20]
            for start, end in pairwise(offsets.tolist())
        ]
        chunks.append(pa.array(names, pa.string()))
    return pa.chunked_array(chunks, pa.string())


def _aligned(table: pa.Table, receipts: ShardReceipts, shard: pa.Table) -> pa.Table:
    """The fingerprints of the records that are still there, in their order."""
    record_ids = one_chunk(shard["record_id"])
    before = one_chunk(conversations(*receipts)["record_id"])
    if before.equals(record_ids):
        return table
    if not len(record_ids):
        return table.slice(0, 0)
    return table.take(pc.index_in(record_ids, value_set=before)).combine_chunks()


def column_of(shards: Sequence[pa.Table], name: str) -> pa.ChunkedArray:
    """Return a column of all shards, which stays in their files until it is read."""
    chunks = [chunk for shard in shards for chunk in shard[name].chunks]
    table = pa.chunked_array(chunks, TOKENIZED.field(name).type)
    return table.unify_dictionaries() if name == "source" else table


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """Rows that were asked for eval, and are there; each counted once, whatever its records."""

    rows: int
    """Of both sides."""
    eval: int
    asked: int
    joined: int
    """Rows whose group was joined to that of others."""


def is_for_eval(
    shards: Sequence[pa.Table],
    selection: Selection,
    config: SplitConfig,
    only: Bools,
) -> Bools:
    """Which records are for evaluation; a count needs all keys at once, a share does not.

    The groups of `only` are, whole, and those of rows that stay for an equal one of `only`;
    `config` divides the others.
    """
    is_first = None
    if config.eval_count:
        is_first = np.diff(number_all_rows(list(map(number_rows, shards))), prepend=-1) > 0
    if only.any():
        if selection.repeats is not None:
            ids = column_of(shards, "record_id")
            only = only | np.asarray(pc.is_in(ids, selection.repeats.filter(pa.array(only))))
        # Groups a b a c, record 0 of a source for evaluation: a is held, so records 0 and 2 are in
        # eval; b and c go by their hash.
        keys = selection.groups_of(shards)
        held = pc.unique(keys.filter(pa.array(only)))
        is_eval = pc.is_in(keys, value_set=held).to_numpy(zero_copy_only=False).copy()
        others = is_first[~is_eval] if is_first is not None else None
        is_eval[~is_eval] = goes_to_eval(keys.filter(pa.array(~is_eval)), config, others)
        return np.asarray(is_eval, dtype=np.bool_)
    if selection.group_keys is not None or config.eval_count:
        return goes_to_eval(selection.groups_of(shards), config, is_first)
    parts = [goes_to_eval(shard["group_key"], config) for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def split_counts(
    shards: Sequence[pa.Table],
    selection: Selection,
    is_eval: Bools,
    config: SplitConfig,
    only: Bools,
) -> SplitCounts:
    """Count what the sides hold, and what was asked for."""
    is_packed = selection.times > 0
    row = number_all_rows(list(map(number_rows, shards)))

    def num_rows(mask: Bools) -> int:
        return len(np.unique(row[mask & is_packed]))

    num_packed = num_rows(is_packed)
    joined = np.zeros(len(is_packed), np.bool_)
    if selection.group_keys is not None:
        own = column_of(shards, "group_key")
        joined = pc.not_equal(own, selection.group_keys).to_numpy(zero_copy_only=False)
    count, num_only = config.eval_count, num_rows(only)
    if count is None:
        count = round(config.eval_fraction * (num_packed - num_only))
    return SplitCounts(
        rows=num_packed,
        eval=num_rows(is_eval),
        asked=num_only + count,
        joined=num_rows(joined),
    )
