"""Which records are packed, how often, and which must stay together: mixing, then repeats.

Rows of sources are sampled first, so that a row which is not taken cannot displace an equal one
elsewhere; then repeats are dropped or joined, by the fingerprints made next to the format step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack import Admitted, IndexArray, dedup
from packhouse.pack.dedup import DedupFacts, deduplicate, facts_of
from packhouse.pack.overlength import REASONS
from packhouse.pack.splitting import join_equal, mixed_keys
from packhouse.read.files import source_name
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.lists import flat_list, one_chunk
from packhouse.records.rows import number_rows
from packhouse.records.tables import TOKENIZED, read_table
from packhouse.run.cache.steps import Receipt
from packhouse.run.steps.format import conversations
from packhouse.run.steps.shard_io import MappedTables, ShardCounts
from packhouse.run.steps.validate import ValidateFacts
from packhouse.system.arrays import Bools, Int32s, Int64s

# Mix weighted sources: how often each row is trained, by `weight` and `max_records`.
#
# A row is taken, repeated or left out with all its records, see `packhouse.records.rows`. Each
# choice is a pure function of the row's key and the source's seed, so it does not depend on order,
# shards or other sources, and appended rows change nothing for those before (but that they may
# push rows over `max_records` out). A row that is taken twice makes each of its sequences twice;
# all have one group key, so they are on one side. Costs 100 ns a record.


_KEPT = REASONS.index("kept")


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
    admitted: Sequence[Admitted],
    shards: Sequence[pa.Table],
    validated: Sequence[pa.Table],
    names: Sequence[str],
    recipe: Recipe,
) -> tuple[list[Admitted], list[Int32s]]:
    """Take the rows that their sources' settings choose; the records of others are `sampled_out`.

    A row counts once if any of its records could be packed: of a row with one record over `seq_len`
    the others are taken or left out together.

    Args:
        admitted: what of each shard would be packed.
        shards: schema `tables.TOKENIZED`, looked at only where a source asks for it.
        validated: the conversations of each shard, likewise.
        names: of each shard's source.
        recipe: `sources` and `format.reasoning` are read.

    Returns:
        What of each shard is packed, and how often each record of each shard is (0: not).
    """
    times = [(each.reasons == _KEPT).astype(np.int32) for each in admitted]
    is_stripped = recipe.format.reasoning == "strip"
    for config in recipe.sources:
        if config.weight == 1 and config.max_records is None:
            continue
        own = [number for number, name in enumerate(names) if name == source_name(config)]
        keys, rows = [], []
        for number in own:
            shard, kept = shards[number], admitted[number].rows
            # Records 0 1 3 of rows 0 0 2 2 are kept: first records 0 3, and rows 0 0 1.
            _, first, row = np.unique(
                number_rows(shard)[kept], return_index=True, return_inverse=True
            )
            every = row_keys(shard, validated[number], is_stripped=is_stripped)
            keys.append(every.take(pa.array(kept[first])))
            rows.append(row)
        chosen = times_of(pa.chunked_array(keys, pa.string()).combine_chunks(), config)
        ends = np.cumsum([len(each) for each in keys])[:-1]
        for number, row, part in zip(own, rows, np.split(chosen, ends), strict=False):
            times[number][admitted[number].rows] = part[row]
    taken = [
        each.without(own == 0, "sampled_out") for each, own in zip(admitted, times, strict=True)
    ]
    return taken, times


def source_counts(
    admitted: Sequence[Admitted], times: Sequence[Int32s], names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """For each source: records, how many of them are dropped, by reason, and packed; tokens.

    Example:
        >>> each = Admitted(rows=np.array([0, 2], np.int32), lengths=np.array([5, 3], np.int32),
        ...     reasons=np.array([0, 1, 0], np.uint8), num_tokens=np.array([5, 9, 3], np.int32))
        >>> source_counts([each], [np.array([2, 0, 1], np.int32)], ["a"])["a"]
        {'records': 3, 'packed': 2, 'repeated': 1, 'tokens': 13, 'over_seq_len': 1}
    """
    counts: dict[str, dict[str, int]] = {}
    for each, often, name in zip(admitted, times, names, strict=True):
        line = counts.setdefault(name, {"records": 0, "packed": 0, "repeated": 0, "tokens": 0})
        line["records"] += len(each.reasons)
        line["packed"] += len(each.rows)
        line["repeated"] += int((often[each.rows] - 1).sum())
        line["tokens"] += int((each.lengths.astype(np.int64) * often[each.rows]).sum())
        found = np.bincount(each.reasons, minlength=len(REASONS))
        for code, reason in enumerate(REASONS):
            if code != _KEPT and found[code]:
                line[reason] = line.get(reason, 0) + int(found[code])
    return dict(sorted(counts.items()))


ShardReceipts = tuple[Receipt[ValidateFacts], Receipt[ShardCounts]]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What of all shards is packed."""

    admitted: list[Admitted]
    times: list[Int32s]
    """How often each row of each shard is packed; 0: dropped."""
    sources: Mapping[str, Mapping[str, int]]
    """Counts by source."""
    group_keys: pa.Array | pa.ChunkedArray | None = None
    """Of all rows: what must stay on one side; None: their own keys say it."""
    repeats: pa.Array | None = None
    """Of all rows: id of the record that a row was dropped for; null: none."""
    near: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Pairs of near rows, see `dedup.policy.Pairs`."""
    dedup: DedupFacts | None = None
    """What repeats, with samples; None where nobody looked."""

    def groups_of(self, shards: Sequence[pa.Table]) -> pa.Array | pa.ChunkedArray:
        """Return what must stay on one side, of the rows of all shards."""
        return column_of(shards, "group_key") if self.group_keys is None else self.group_keys

    @property
    def added(self) -> dict[str, dict[str, int]]:
        """Rows and tokens that repeated records add, by reason."""
        rows = tokens = 0
        for each, times in zip(self.admitted, self.times, strict=True):
            extra = (times[each.rows] - 1).astype(np.int64)
            rows += int(extra.sum())
            tokens += int((extra * each.lengths).sum())
        return {"rows": {"repeated": rows}, "tokens": {"repeated": tokens}} if rows else {}

    def kept(self) -> tuple[IndexArray, Int32s]:
        """Rows that are packed, numbered through, each as often as it is; and their tokens.

        Rows 0 (twice) and 2 of a shard of 3, row 1 of the next one: [0 0 2 4].
        """
        often = [times[each.rows] for each, times in zip(self.admitted, self.times, strict=True)]
        total = sum(int(own.sum()) for own in often)
        num_records = sum(len(each.reasons) for each in self.admitted)
        rows: IndexArray = (
            np.empty(total, np.int32) if num_records < 2**31 else np.empty(total, int)
        )
        lengths = np.empty(total, np.int32)
        first = end = 0
        for each, own in zip(self.admitted, often, strict=True):
            start, end = end, end + int(own.sum())
            rows[start:end] = np.repeat(each.rows, own) + np.int64(first)
            lengths[start:end] = np.repeat(each.lengths, own)
            first += len(each.reasons)
        return rows, lengths

    def num_near_on_both_sides(self, is_eval: Bools) -> int:
        """Pairs of near rows, both packed, of which one is in train and one in eval."""
        times = np.concatenate([np.zeros(0, np.int32), *self.times])
        first, second = self.near.T
        is_packed = (times[first] > 0) & (times[second] > 0)
        return int(((is_eval[first] != is_eval[second]) & is_packed).sum())


def select(
    shards: Sequence[pa.Table],
    formatted: Sequence[ShardReceipts],
    admitted: Sequence[Admitted],
    recipe: Recipe,
    fingerprints: Sequence[Path],
) -> Selection:
    """Decide which records are packed, and how often.

    Args:
        shards: schema `tables.TOKENIZED`.
        formatted: receipts of the validate and format steps of the same shards.
        admitted: what of each shard can be packed.
        recipe: `sources`, `dedup` and `split.seed` are read.
        fingerprints: those of each shard's conversations; empty where the recipe needs none.
    """
    names = [receipt.facts.origin.source for receipt, _ in formatted]
    validated = MappedTables([receipt.path("validated.arrow") for receipt, _ in formatted])
    mixed, times = mix(admitted, shards, validated, names, recipe)
    groups: pa.Array | pa.ChunkedArray | None = None
    if any("examples.arrow" in receipt.files for _, receipt in formatted):
        ids = column_of(shards, "record_id")
        groups = join_equal(column_of(shards, "group_key"), ids, recipe.split.seed)
    if _may_be_of_one_text(formatted, recipe):
        groups = column_of(shards, "group_key") if groups is None else groups
        groups = join_equal(groups, _ids_of_tokens(shards), recipe.split.seed)
    if not dedup.needs_fingerprints(recipe.dedup):
        return Selection(mixed, times, source_counts(mixed, times, names), groups)
    prints = [
        _aligned(read_table(path), receipts, shard)
        for path, receipts, shard in zip(fingerprints, formatted, shards, strict=True)
    ]
    groups = column_of(shards, "group_key") if groups is None else groups
    is_split = any({"turns", "windows"} & set(each.facts.added) for _, each in formatted)
    units = [number_rows(shard) for shard in shards] if is_split else None
    deduplicated = deduplicate(prints, mixed, groups, recipe.dedup, recipe.split.seed, units)
    for own, each in zip(times, deduplicated.admitted, strict=True):
        own[each.reasons > 0] = 0
    records = pa.table({n: column_of(shards, n) for n in ("source", "row", "record_id")})
    repeated = pa.array(deduplicated.repeats_of, mask=deduplicated.repeats_of < 0)
    return Selection(
        deduplicated.admitted,
        times,
        source_counts(deduplicated.admitted, times, names),
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
