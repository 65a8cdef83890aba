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

from packhouse import dedup
from packhouse.arrays import Bools, Int32s, Int64s
from packhouse.cache.steps import Receipt
from packhouse.dedup import DedupFacts, deduplicate, facts_of
from packhouse.packing import Admitted, IndexArray
from packhouse.recipe import Recipe
from packhouse.records.lists import flat_list, one_chunk
from packhouse.records.rows import number_rows
from packhouse.records.tables import TOKENIZED, read_table
from packhouse.splitting import join_equal
from packhouse.steps.format import conversations
from packhouse.steps.mixing import mix, source_counts
from packhouse.steps.shard_io import MappedTables, ShardCounts
from packhouse.steps.validate import ValidateFacts

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
