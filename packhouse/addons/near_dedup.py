"""Find pairs of near-duplicate conversations, which share most of their shingles.

Uses locality-sensitive hashing: each MinHash is cut into bands, and rows with an equal band are
candidates. Bands and candidates are those of datasketch's `MinHashLSH` (a test compares them).
Every candidate is then compared exactly by its shingles, so there are no false pairs. A pair at the
threshold becomes a candidate with a probability of 99%, and more similar pairs with a higher one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from packhouse.pack.dedup import FACTOR, Near
from packhouse.records.arrays import Bools, Float64s, Int64s, Uint32s, count_up, flat_list

# If more than 32 rows share a band, each is compared only with the row before it and with the first
# 31, so the work stays linear in the number of such rows.
_MAX_LINKS = 32
_VERIFIED_SHINGLES = 2**22
"""Approximate number of shingles compared at once, to limit memory."""


def bands_for(threshold: float, permutations: int) -> tuple[int, int]:
    """Return (bands, numbers per band): the longest bands that still find 99% at the threshold.

    Example:
        >>> bands_for(0.8, 128)
        (21, 6)
    """
    # At threshold 0.8, a band of 6 numbers is equal with probability 0.8 ** 6 = 0.26, and one of 21
    # bands with 1 - 0.74 ** 21 = 0.998. With 7 numbers there are 18 bands, and 0.986 is too low.
    for rows in range(permutations, 1, -1):
        bands = permutations // rows
        if bands >= 2 and 1 - (1 - threshold**rows) ** bands >= 0.99:
            return bands, rows
    return permutations, 1


def find_near(fingerprints: Sequence[pa.Table], rows: Sequence[Int64s], threshold: float) -> Near:
    """Find the pairs of similar rows.

    Args:
        fingerprints: one table per shard, schema `FINGERPRINTS`.
        rows: rows of each shard to compare, numbered from 0 across all shards.
        threshold: minimum share of common shingles.

    Returns:
        Pairs, by the numbers of the compared rows.
    """
    sets = _Sets.of(fingerprints, rows)
    candidates = _candidates(fingerprints, rows, threshold, sets.sizes)
    num_rows = max(1, len(sets.sizes))
    # Compared in parts, which limits memory.
    work = np.cumsum(sets.sizes[candidates // num_rows] + sets.sizes[candidates % num_rows])
    cuts = np.flatnonzero(np.diff(work // _VERIFIED_SHINGLES)) + 1
    chunks = np.split(candidates, cuts) if len(candidates) else []
    none = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    parts = [none, *(_compare(sets, pairs, num_rows) for pairs in chunks)]
    first, second, similarity, answers = map(np.concatenate, zip(*parts, strict=True))
    near = similarity >= threshold
    return Near(first[near], second[near], similarity[near], answers[near])


def _candidates(
    fingerprints: Sequence[pa.Table], rows: Sequence[Int64s], threshold: float, sizes: Int64s
) -> Int64s:
    """Return `second * num_rows + first` for each pair of rows with an equal band, sorted."""
    hashes = [
        (flat_list(table["minhash"])[0].reshape(table.num_rows, -1), chosen)
        for table, chosen in zip(fingerprints, rows, strict=True)
        if table.num_rows
    ]
    found = np.zeros(0, np.int64)
    permutations = max((each.shape[1] for each, _ in hashes), default=0)
    bands, width = bands_for(threshold, permutations) if permutations else (0, 0)
    # Each band is a sort, with 16 bytes per row. datasketch's tables of Python sets would take
    # about 320 bytes per row and band.
    for band in range(bands):
        part = slice(band * width, (band + 1) * width)
        values = np.concatenate([each[chosen, part] for each, chosen in hashes])
        found = np.union1d(found, _pairs_of_band(values, sizes > 0))
    return found


def _pairs_of_band(values: Uint32s, has_any: Bools) -> Int64s:
    """Return the pairs of rows whose numbers in this band are equal."""
    keys = np.zeros(len(values), np.uint64)
    for column in values.T:
        keys = (keys ^ (keys >> np.uint64(29))) * FACTOR + column.astype(np.uint64)
    # Stable, so that the rows with which a long run is compared are its first ones everywhere.
    order = np.argsort(keys, kind="stable")
    order = order[has_any[order]]  # rows without shingles match nothing
    same = keys[order][1:] == keys[order][:-1]
    # Place of each row among the rows with its key: keys 5 5 5 7 9 9 -> places 0 1 2 0 0 1.
    starts = np.flatnonzero(np.append(True, ~same))
    place = count_up(np.diff(np.append(starts, len(same) + 1)))
    # Four rows with the same key have places 0 1 2 3: distance 1 pairs 0-1, 1-2 and 2-3, distance 2
    # pairs 0-2 and 1-3, and distance 3 pairs 0-3.
    pairs = [np.zeros(0, np.int64)]
    for back in range(1, min(_MAX_LINKS, int(place.max(initial=0)) + 1)):
        later = np.flatnonzero((place >= back) & ((place < _MAX_LINKS) | (back == 1)))
        pairs.append(_pair(order[later - back], order[later], len(values)))
    # Rows after the first 32 are paired with the row before (above) and with the first 31.
    long = np.flatnonzero(place >= _MAX_LINKS)
    start = long - place[long]
    for step in range(_MAX_LINKS - 1 if len(long) else 0):
        pairs.append(_pair(order[start + step], order[long], len(values)))
    return np.concatenate(pairs)


def _pair(one: Int64s, other: Int64s, num_rows: int) -> Int64s:
    return np.maximum(one, other) * num_rows + np.minimum(one, other)


@dataclass(frozen=True, slots=True, eq=False)
class _Sets:
    """Shingles of the compared rows, at their positions in the shards."""

    values: Sequence[Uint32s]
    shard: Int64s
    starts: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, fingerprints: Sequence[pa.Table], rows: Sequence[Int64s]) -> "_Sets":
        values = []
        shards, starts, sizes = ([np.zeros(0, np.int64)] for _ in range(3))
        for number, (table, chosen) in enumerate(zip(fingerprints, rows, strict=True)):
            shingles, offsets = flat_list(table["shingles"])
            values.append(shingles)
            shards.append(np.full(len(chosen), number))
            starts.append(offsets[:-1].astype(np.int64)[chosen])
            sizes.append(np.diff(offsets).astype(np.int64)[chosen])
        return cls(values, *(np.concatenate(each) for each in (shards, starts, sizes)))

    def take(self, rows: Int64s) -> Uint32s:
        """Return the shingles of the rows, concatenated."""
        sizes = self.sizes[rows]
        taken = np.empty(int(sizes.sum()), np.uint32)
        places = np.repeat(self.starts[rows], sizes) + count_up(sizes)
        shard = np.repeat(self.shard[rows], sizes)
        for number in np.unique(self.shard[rows]).tolist():
            own = shard == number
            taken[own] = self.values[number][places[own]]
        return taken


def _compare(
    sets: _Sets, candidates: Int64s, num_rows: int
) -> tuple[Int64s, Int64s, Float64s, Float64s]:
    """Return the share of common shingles of each pair, overall and within assistant text."""
    first, second = candidates % num_rows, candidates // num_rows
    sides = []
    for rows in (first, second):
        # The pair's number in the upper 32 bits keeps the shingles of different pairs apart.
        pair = np.repeat(np.arange(len(rows), dtype=np.uint64), sets.sizes[rows])
        sides.append((pair << np.uint64(32)) | sets.take(rows))
    # Shingles [2 4 6] and [4 6 8] of a pair sort to [2 4 4 6 6 8]: 2 are common and 6 - 2 distinct,
    # so the similarity is 2 / 4.
    both = np.sort(np.concatenate(sides), kind="stable")
    common = both[:-1][both[1:] == both[:-1]]
    shares = []
    # The lowest bit of a shingle is set if it comes from assistant text.
    for only_answers in (False, True):
        total, shared = (
            np.bincount(
                (keys[(keys & np.uint64(1)) == 1] if only_answers else keys) >> np.uint64(32),
                minlength=len(candidates),
            )
            for keys in (both, common)
        )
        shares.append(np.where(total, shared / np.maximum(total - shared, 1), 1.0))
    return first, second, shares[0], shares[1]
