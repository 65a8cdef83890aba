"""Select which records are packed, how often, and in which split: mix, deduplicate, then split.

Sources are sampled first, so that a row that is sampled out cannot displace an equal row elsewhere.
Then duplicates are dropped or joined, by the fingerprints made with the format step. A record goes
to eval by the hash of its group, or because its source is for eval only. A group is never divided:
if a source is for eval only, records of other sources with the same prompt go to eval too, because
otherwise the model would be evaluated on an answer that it was trained on.

Records are numbered across all shards. `bounds` holds the number of each shard's first record, and
at its end the number of all records.
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
    """Sequence of tables that maps each file only when it is accessed, for any number of shards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        return read_table(self._paths[index])


# Mix weighted sources: `weight` and `max_records` decide how often each row is trained.
#
# A row is taken, repeated or left out with all its records (see `packhouse.records.identity`). Each
# choice is a pure function of the row's key and the source's seed, so it does not depend on order,
# shards or other sources. Appended rows do not change the choice for earlier ones, except that they
# may push rows out over `max_records`. If a row is taken twice, each of its sequences is packed
# twice; all share one group key and so one split. Costs 100 ns per record.


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
        times += mixed_keys(keys, 2 * config.mix_seed + 1) < np.uint64(int(part * 2**64))
    if config.max_records is not None and config.max_records < len(times):
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
        shards: schema `tables.TOKENIZED`; read only if a source is sampled.
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
    """Records of all shards that are packed."""

    admitted: Admitted
    times: Int32s
    """How often each record is packed; 0: dropped."""
    sources: Mapping[str, Mapping[str, int]]
    """Counts by source."""
    group_keys: pa.Array | pa.ChunkedArray | None = None
    """Group key of every record; records of a group share a split. None: unchanged from the
    shards."""
    repeats: pa.Array | None = None
    """For every record, the id of the record that it duplicates if it was dropped, else null."""
    near: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Pairs of near-duplicate records, shape [num_pairs, 2]."""
    dedup: DedupFacts | None = None
    """Duplicates found, with samples; None if the recipe does not deduplicate."""

    def groups_of(self, shards: Sequence[pa.Table]) -> pa.Array | pa.ChunkedArray:
        """Return the group key of every record of all shards."""
        return column_of(shards, "group_key") if self.group_keys is None else self.group_keys

    def kept(self) -> tuple[IndexArray, Int32s]:
        """Return the packed records, repeated as often as they are packed, and their tokens.

        Records 0 (twice), 2 and 4 -> [0 0 2 4].
        """
        often = self.times[self.admitted.rows]
        return self.admitted.rows.repeat(often), self.admitted.lengths.repeat(often)

    def num_near_on_both_sides(self, is_eval: Bools) -> int:
        """Count pairs of packed near-duplicates with one record in train and one in eval."""
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
        admitted: records that can be packed.
        bounds: number of each shard's first record.
        recipe: recipe; reads `sources`, `dedup` and `split.seed`.
        fingerprints: fingerprint files of the shards; empty if the recipe does not deduplicate.
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
    """Return True if different records may render to the same text, because reasoning is left out.

    With `group_by: prompt` such records share a group anyway, so only `record` needs the check.
    """
    is_left_out = any(each.facts.notes.get("reasoning_not_rendered") for _, each in formatted)
    has_eval = any(source.eval_only for source in recipe.sources)
    is_split = has_eval or recipe.split.eval_fraction > 0 or bool(recipe.split.eval_count)
    return is_left_out and is_split and recipe.split.group_by == "record"


def _ids_of_tokens(shards: Sequence[pa.Table]) -> pa.ChunkedArray:
    """Return an id for each record that depends only on its tokens."""
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
    """Return the fingerprints of the remaining records, in their order."""
    record_ids = one_chunk(shard["record_id"])
    before = one_chunk(conversations(*receipts)["record_id"])
    if before.equals(record_ids):
        return table
    if not len(record_ids):
        return table.slice(0, 0)
    return table.take(pc.index_in(record_ids, value_set=before)).combine_chunks()


def column_of(shards: Sequence[pa.Table], name: str) -> pa.ChunkedArray:
    """Return a column of all shards without loading it; the data stays mapped from the files."""
    chunks = [chunk for shard in shards for chunk in shard[name].chunks]
    table = pa.chunked_array(chunks, TOKENIZED.field(name).type)
    return table.unify_dictionaries() if name == "source" else table


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """Rows requested for eval and rows in eval; a row counts once however many records it has."""

    rows: int
    """Rows in train and eval together."""
    eval: int
    asked: int
    joined: int
    """Rows whose group was merged with another one."""


def is_for_eval(
    shards: Sequence[pa.Table],
    selection: Selection,
    config: SplitConfig,
    only: Bools,
) -> Bools:
    """Return a mask of the records that go to eval.

    Every group with a record in `only` goes to eval as a whole, and so does the group of a record
    that was kept instead of a duplicate in `only`. `config` divides the rest. An eval count needs
    all keys at once; a fraction works one shard at a time.
    """
    is_first = None
    if config.eval_count:
        is_first = np.diff(number_all_rows(list(map(number_rows, shards))), prepend=-1) > 0
    if only.any():
        if selection.repeats is not None:
            ids = column_of(shards, "record_id")
            only = only | np.asarray(pc.is_in(ids, selection.repeats.filter(pa.array(only))))
        # Groups a b a c, record 0 from an eval-only source: all of a goes to eval (records 0 and
        # 2), while b and c are divided by their hash.
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
    """Count rows in train and eval, and rows requested for eval."""
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
