"""Apply the recipe's policies to repeated conversations: keep, drop, or keep on one side.

Dropping is by the first that stays: a row is dropped if it equals or is near a row before it that
is kept, so every dropped row has one that stands for it, and no chain of small steps takes away a
row unlike all that is left. Near rows are dropped only if what the assistant wrote is at least half
as near: a long text asked about twice is two examples. Such pairs, and all of `same_side`, share a
side: the groups of alike rows are joined, see `splitting.join_groups`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.pack import Admitted
from packhouse.pack.overlength import REASONS
from packhouse.pack.splitting import join_groups
from packhouse.recipe import DedupConfig
from packhouse.records.lists import flat_list, list_array, string_bytes
from packhouse.records.rows import number_all_rows
from packhouse.registry import function_of_addon
from packhouse.system.arrays import Float64s, Int64s


def merged(fingerprints: pa.Table, units: Int64s) -> pa.Table:
    """Fingerprints of whole units: all shingles of their rows, and the MinHash of those.

    Args:
        fingerprints: schema `FINGERPRINTS`, of a shard's rows.
        units: the unit of each row, rising from 0.

    Returns:
        The same columns but for `normal_id`, a row for each unit.
    """
    num_units = int(units[-1]) + 1 if len(units) else 0
    if num_units == len(units):
        return fingerprints.select(["shingles", "minhash"])
    shingles, offsets = flat_list(fingerprints["shingles"])
    sizes = np.diff(offsets).astype(np.int64)
    # Rows with [3 2] shingles, both of unit 0: the unit of each shingle is [0 0 0 0 0].
    of_unit = np.repeat(units, sizes).astype(np.uint64)
    own = shingles[offsets[0] : offsets[-1]].astype(np.uint64)
    keys = np.unique((of_unit << np.uint64(32)) | own)
    bounds = np.searchsorted(keys, np.arange(num_units + 1, dtype=np.uint64) << np.uint64(32))
    union = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    hashes, bands = flat_list(fingerprints["minhash"])
    width = int(bands[1] - bands[0])
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    # The MinHash of a union has the lesser of each two numbers.
    least = np.minimum.reduceat(hashes[bands[0] : bands[-1]].reshape(-1, width), starts)
    columns = {
        "shingles": list_array(pa.array(union), bounds.astype(np.int64), pa.uint32()),
        "minhash": list_array(
            pa.array(least.ravel()), np.arange(num_units + 1) * width, pa.uint32()
        ),
    }
    return pa.table(columns)


def spread(pairs: Int64s, leaders: Int64s, rows: Int64s) -> Int64s:
    """Pairs of leaders as pairs of the first one's leader with every row that the second leads.

    Args:
        pairs: shape [num_pairs, 2]; each second one occurs once.
        leaders: leader of each of `rows`.
        rows: numbers of rows.

    Example:
        >>> spread(np.array([[0, 3]]), np.array([0, 0, 3, 3]), np.array([0, 1, 3, 4])).tolist()
        [[0, 3], [0, 4]]
    """
    order = np.argsort(pairs[:, 1], kind="stable")
    sought = pairs[order, 1]
    place = np.minimum(np.searchsorted(sought, leaders), max(0, len(sought) - 1))
    is_led = sought[place] == leaders if len(sought) else np.zeros(len(leaders), np.bool_)
    return np.stack([pairs[order[place[is_led]], 0], rows[is_led]], axis=1).astype(np.int64)


_DIGITS = 20  # of a normal id
_KEPT, _DUPLICATE = REASONS.index("kept"), REASONS.index("duplicate")
_NEAR = REASONS.index("near_duplicate")
_NUM_SAMPLES = 10
_ANSWERS = 0.5  # of the threshold, for what the assistant wrote

Pairs = Int64s
"""Rows of all shards, numbered through, shape [num_pairs, 2]: the earlier row, the later one."""


@dataclass(frozen=True, slots=True, eq=False)
class Near:
    """Pairs of rows that are alike, in order of `second`, then `first`."""

    first: Int64s
    """The earlier row of each pair."""
    second: Int64s
    similarity: Float64s
    """Shingles in both by shingles in either, at least the threshold."""
    answers: Float64s
    """The same of what the assistant wrote; 1 where it wrote nothing in both."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Which rows repeat which; both lists in order of the later row."""

    equal: Pairs
    """Each row that equals an earlier one, with the first of them."""
    near: Pairs
    """Rows, none equal to an earlier one, that are near one another; of split conversations, the
    rows that stand for them."""
    led: Pairs
    """Each row looked at, with the one that stands for its conversation: itself, if not split."""
    similarity: Float64s
    answers: Float64s
    """Similarity of what the assistant wrote."""


@dataclass(frozen=True, slots=True, eq=False)
class Deduplicated:
    """What is left, and what was found."""

    admitted: Admitted
    group_keys: pa.Array | pa.ChunkedArray
    """Of every row of every shard: what must stay on one side."""
    repeats_of: Int64s
    """For every row the kept row that it was dropped for, numbered through all shards; -1: none."""
    found: Found


def deduplicate(
    fingerprints: Sequence[pa.Table],
    admitted: Admitted,
    group_keys: pa.Array | pa.ChunkedArray,
    config: DedupConfig,
    split_seed: int,
    units: Sequence[Int64s] | None = None,
) -> Deduplicated:
    """Drop or join what repeats.

    Args:
        fingerprints: schema `FINGERPRINTS`, a row for each row of each shard.
        admitted: what would be packed; other rows are not looked at.
        group_keys: of all rows.
        config: the policies.
        split_seed: of `split`; decides which key stands for joined groups.
        units: of each shard, where conversations were split, see `dedup.units`.
    """
    found = _find(fingerprints, admitted.rows.astype(np.int64), config, units)
    repeats_of = np.full(sum(table.num_rows for table in fingerprints), -1, np.int64)
    reasons = np.full(len(repeats_of), _KEPT, np.uint8)
    if config.near == "drop":
        alike = found.answers >= config.near_threshold * _ANSWERS
        dropped = spread(_drop_in_order(found.near[alike]), *found.led.T)
        repeats_of[dropped[:, 1]], reasons[dropped[:, 1]] = dropped[:, 0], _NEAR
    if "drop" in (config.exact, config.near):
        first, later = found.equal.T
        # Row 4 equals row 2, which went because it is near row 1: row 1 stands for both.
        stays = np.where(repeats_of[first] < 0, first, repeats_of[first])
        repeats_of[later], reasons[later] = stays, _DUPLICATE
    if config.exact == "same_side" or config.near in ("drop", "same_side"):
        is_led = np.isin(found.led[:, 0], found.near) & (found.led[:, 0] != found.led[:, 1])
        near = config.near in ("drop", "same_side")
        joined = [found.near, found.led[is_led]] if near else []
        pairs = np.concatenate([found.equal, *joined])
        group_keys = join_groups(group_keys, pairs, split_seed)
    admitted = admitted.without(reasons == _NEAR, "near_duplicate")
    admitted = admitted.without(reasons == _DUPLICATE, "duplicate")
    return Deduplicated(admitted, group_keys, repeats_of, found)


def _find(
    fingerprints: Sequence[pa.Table],
    rows: Int64s,
    config: DedupConfig,
    units: Sequence[Int64s] | None,
) -> Found:
    bases = np.cumsum([0, *(table.num_rows for table in fingerprints)])
    ids = np.concatenate([_NO_KEYS, *(_normal_ids(table) for table in fingerprints)])
    # Rows 0 to 3 named a b a a: first [0 1 0 0], so rows 2 and 3 equal row 0.
    first = rows[first_of_each(ids[rows])]
    is_first = first == rows
    equal = np.stack([first, rows], axis=1)[~is_first]
    looked_at = leaders = rows[is_first]
    near = Near(_NONE, _NONE, np.zeros(0), np.zeros(0))
    if config.near != "ignore":
        if units is not None:
            leaders = looked_at[first_of_each(number_all_rows(units)[looked_at])]
        near = _find_near(fingerprints, bases, leaders[leaders == looked_at], config, units)
    pairs = np.stack([near.first, near.second], axis=1)
    led = np.stack([leaders, looked_at], axis=1)
    return Found(equal, pairs, led, near.similarity, near.answers)


def _find_near(
    fingerprints: Sequence[pa.Table],
    bases: Int64s,
    leaders: Int64s,
    config: DedupConfig,
    units: Sequence[Int64s] | None,
) -> Near:
    """Near ones of some rows (or of the units that they stand for), numbered through all shards."""
    shards = np.searchsorted(bases, leaders, "right") - 1
    by_shard = [leaders[shards == n] - bases[n] for n in range(len(fingerprints))]
    if units is not None:
        fingerprints = [merged(t, own) for t, own in zip(fingerprints, units, strict=True)]
        by_shard = [own[rows] for own, rows in zip(units, by_shard, strict=True)]
    near: Near = function_of_addon("find_near")(fingerprints, by_shard, config.near_threshold)
    return replace(near, first=leaders[near.first], second=leaders[near.second])


_NONE = np.zeros(0, np.int64)
_NO_KEYS = np.zeros(0, f"S{_DIGITS}")


def _normal_ids(table: pa.Table) -> np.ndarray:
    values, offsets = string_bytes(table["normal_id"])
    return np.ascontiguousarray(values[offsets[0] : offsets[-1]]).view(f"S{_DIGITS}")


def first_of_each(values: np.ndarray) -> Int64s:
    """Index of the first of equal values, for each.

    Example:
        >>> first_of_each(np.array([7, 5, 7, 5, 8])).tolist()
        [0, 1, 0, 1, 4]
    """
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], np.int64)


def _drop_in_order(pairs: Pairs) -> Pairs:
    """The pairs (kept, dropped), one for each row that is near an earlier kept one.

    Rows 0-1 and 1-2 near: 1 goes for 0, and 2 stays, since 1 is not there to stand for it.
    """
    kept_for: dict[int, int] = {}
    for first, second in pairs.tolist():
        if first not in kept_for and second not in kept_for:
            kept_for[second] = first
    dropped = [(kept, row) for row, kept in kept_for.items()]
    return np.array(dropped, np.int64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """Rows that repeat an earlier one."""

    rows: int
    dropped: int
    samples: list[dict[str, Any]]
    """Some of them, as plain JSON: which row repeats which, and how nearly."""
    on_both_sides: int | None = None
    """Pairs of near rows of which one is in train and one in eval; None: not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupFacts:
    """What was found, for report and manifest."""

    policy: dict[str, object]
    """The `dedup` section of the recipe, as plain JSON."""
    equal: Repeats
    near: Repeats

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON, without what was not counted."""
        facts = asdict(self)
        for kind in ("equal", "near"):
            facts[kind] = {name: value for name, value in facts[kind].items() if value is not None}
        return facts


def facts_of(deduplicated: Deduplicated, records: pa.Table, config: DedupConfig) -> DedupFacts:
    """Say what was found.

    Args:
        deduplicated: the result of `deduplicate`.
        records: `source`, `row`, `record_id` of all rows.
        config: the policies.
    """

    def repeats(pairs: Pairs, shares: Float64s) -> Repeats:
        return Repeats(
            rows=len(pairs),
            dropped=int((deduplicated.repeats_of[pairs[:, 1]] >= 0).sum()),
            samples=_samples(deduplicated, records, pairs[:_NUM_SAMPLES], shares),
        )

    found = deduplicated.found
    _, place = np.unique(found.near[:, 1], return_index=True)
    return DedupFacts(
        policy=config.model_dump(mode="json"),
        equal=repeats(found.equal, np.ones(len(found.equal))),
        near=repeats(found.near[place], found.similarity[place]),
    )


def _samples(
    deduplicated: Deduplicated, records: pa.Table, pairs: Pairs, shares: Float64s
) -> list[dict[str, object]]:
    first, later = records.take(pairs[:, 0]).to_pylist(), records.take(pairs[:, 1]).to_pylist()
    return [
        {
            **row,
            "repeats": earlier,
            "similarity": round(float(share), 4),
            "is_dropped": bool(deduplicated.repeats_of[number] >= 0),
        }
        for row, earlier, share, number in zip(
            later, first, shares.tolist(), pairs[:, 1].tolist(), strict=False
        )
    ]
