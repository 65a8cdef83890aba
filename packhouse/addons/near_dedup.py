"""Compute fingerprints of conversations, and find pairs that share most of their shingles.

Uses locality-sensitive hashing: each MinHash is cut into bands, and rows with an equal band are
candidates. Bands and candidates are those of datasketch's `MinHashLSH` (a test compares them).
Every candidate is then compared exactly by its shingles, so there are no false pairs. A pair at the
threshold becomes a candidate with a probability of 99%, and more similar pairs with a higher one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack.dedup import FACTOR, Words, hash_words, run_hashes, words_of
from packhouse.recipe import DedupConfig
from packhouse.records.arrays import (
    Bools,
    Float64s,
    Int64s,
    Uint32s,
    Uint64s,
    count_up,
    flat_list,
    list_array,
    one_chunk,
)
from packhouse.records.message_rules import ASSISTANT, SYSTEM, FlatMessages
from packhouse.system.plugins import import_extra

# If more than 32 rows share a band, each is compared only with the row before it and with the first
# 31, so the work stays linear in the number of such rows.
_MAX_LINKS = 32
_SEED = 1  # seed of the permutations; fixed, because it affects which rows are found
_BLOCK_ROWS = 4096  # rows processed at a time, to limit memory
_TEXTS = ("content", "context", "reasoning", "tool_calls")
_VERIFIED_SHINGLES = 2**22
"""Approximate number of shingles compared at once, to limit memory."""


def near_fingerprints(validated: pa.Table, config: DedupConfig) -> tuple[pa.Array, pa.Array]:
    """Return the shingles and the MinHash of every conversation of a shard.

    Args:
        validated: conversations, schema `table_schemas.VALIDATED`.
        config: dedup settings.

    Returns:
        Columns `shingles` and `minhash` of schema `FINGERPRINTS`.

    Raises:
        ConfigError: datasketch is not installed.
    """
    num_rows = validated.num_rows
    blocks = [
        _shingles(validated.slice(start, _BLOCK_ROWS), config)
        for start in range(0, num_rows, _BLOCK_ROWS)
    ]
    shingles = np.concatenate([np.zeros(0, np.uint32), *(block for block, _ in blocks)])
    counts = [np.zeros(0, np.int64), *(np.diff(bounds) for _, bounds in blocks)]
    offsets = np.append(0, np.cumsum(np.concatenate(counts)))
    width = config.near_permutations
    minhashes = np.empty((num_rows, width), np.uint32)
    # One MinHash for all rows: a new one draws its permutations again and takes 0.3 ms, `clear`
    # 4 us.
    sketch = _sketch(width)
    for row, (start, end) in enumerate(pairwise(offsets.tolist())):
        sketch.clear()
        sketch.update_batch(shingles[start:end].tolist())
        minhashes[row] = sketch.hashvalues
    return _columns(shingles, offsets, minhashes)


def _columns(shingles: Uint32s, offsets: Int64s, minhashes: Uint32s) -> tuple[pa.Array, pa.Array]:
    """Return lists of shingles, and of MinHashes [num_rows, num_permutations]."""
    num_rows, width = minhashes.shape
    return (
        list_array(pa.array(shingles), offsets, pa.uint32()),
        list_array(pa.array(minhashes.ravel()), np.arange(num_rows + 1) * width, pa.uint32()),
    )


def _shingles(validated: pa.Table, config: DedupConfig) -> tuple[Uint32s, Int64s]:
    """Return the sorted distinct shingles of each row in one array, and the offsets of rows."""
    flat = FlatMessages.of_table(validated)
    text_columns, row_parts, answer_parts = [], [], []
    for name in _TEXTS:
        has = flat.has(name) & (flat.roles != SYSTEM)
        if has.any():
            text_columns.append(flat.values.field(name).filter(pa.array(has)))
            row_parts.append(flat.rows[has])
            answer_parts.append(flat.roles[has] == ASSISTANT)
    texts = pa.chunked_array(text_columns, pa.string()).combine_chunks()
    rows = np.concatenate([np.zeros(0, np.int64), *row_parts])
    is_answer = np.concatenate([np.zeros(0, np.bool_), *answer_parts])
    words = words_of(texts)
    numbers, offsets = hash_words(words.values), words.offsets
    if config.near_unit == "characters":
        numbers, offsets = _characters(words)
    # Every run of words or characters that is within one text. Texts of 4 and 2 words, runs of 3:
    # starts 0, 1 and 4, lengths 3, 3 and 2.
    sizes, starts = np.diff(offsets), np.arange(offsets[-1])
    ends, is_first = np.repeat(offsets[1:], sizes), starts == np.repeat(offsets[:-1], sizes)
    starts = starts[(starts + config.near_ngram <= ends) | is_first]
    lengths = np.minimum(config.near_ngram, ends[starts] - starts)
    hashes = np.empty(len(starts), np.uint64)
    for length in np.unique(lengths).tolist():  # a text shorter than a run is one shorter run
        chosen = lengths == length
        hashes[chosen] = run_hashes(numbers, starts[chosen], length)
    text = np.searchsorted(offsets, starts, "right") - 1
    parts = [_keys(rows[text], hashes, is_answer[text])]
    # A text without any word, such as `:-)`, is one shingle.
    wordless = np.flatnonzero((sizes == 0) & (np.asarray(pc.binary_length(texts)) > 0))
    hashes = hash_words(texts.take(pa.array(wordless)))
    parts.append(_keys(rows[wordless], hashes, is_answer[wordless]))
    # So is a class label, which is the answer of its row.
    labels = one_chunk(validated["label"])
    labelled = np.flatnonzero(labels.is_valid().to_numpy(zero_copy_only=False))
    hashes = hash_words(pc.drop_null(labels).cast(pa.string()))
    parts.append(_keys(labelled, hashes, np.ones(len(labelled), np.bool_)))
    return _by_row(np.concatenate(parts), validated.num_rows)


def _by_row(keys: Uint64s, num_rows: int) -> tuple[Uint32s, Int64s]:
    """Return the sorted distinct shingles of each row in one array, and the offsets of rows."""
    # Row 2 with shingle 16 has key 2 * 2**32 + 16, so sorting groups keys by row, and row r starts
    # at the first key of at least r * 2**32.
    keys = np.unique(keys)
    bounds = np.searchsorted(keys, np.arange(num_rows + 1, dtype=np.uint64) << np.uint64(32))
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), bounds.astype(np.int64)


def _characters(words: Words) -> tuple[Uint64s, Int64s]:
    """Return the code points of each text's words, joined by spaces, and the offsets of texts."""
    lists = pa.ListArray.from_arrays(pa.array(words.offsets.astype(np.int32)), words.values)
    joined = pc.binary_join(lists, " ")
    points = np.frombuffer("".join(joined.to_pylist()).encode("utf-32-le"), "<u4")
    sizes = np.asarray(pc.utf8_length(joined)).astype(np.int64)
    return points.astype(np.uint64) + np.uint64(1), np.append(0, np.cumsum(sizes))


def _keys(rows: Int64s, hashes: Uint64s, is_answer: object) -> Uint64s:
    """Combine row and shingle into one number that sorts by row, then shingle."""
    mixed = (hashes ^ (hashes >> np.uint64(31))) >> np.uint64(32)
    shingle = (mixed & np.uint64(0xFFFFFFFE)) | np.asarray(is_answer).astype(np.uint64)
    return (rows.astype(np.uint64) << np.uint64(32)) | shingle


def _sketch(num_permutations: int) -> Any:
    """Return an empty MinHash that uses the given numbers as hashes."""
    datasketch = import_extra("datasketch", "dedup", "dedup.near")
    # The scheme is named, because stored hash values do not tell by which one they were made, and
    # those of two schemes never match.
    return datasketch.MinHash(num_permutations, seed=_SEED, hashfunc=int, scheme="affine32")


def merge_fingerprints(fingerprints: pa.Table, units: Int64s) -> pa.Table:
    """Merge the fingerprints of rows that belong to one unit (a split conversation).

    Args:
        fingerprints: fingerprints of a shard's rows, schema `FINGERPRINTS`.
        units: unit of each row, ascending from 0.

    Returns:
        The same columns except `normal_id`, with one row per unit.
    """
    num_units = int(units[-1]) + 1 if len(units) else 0
    if num_units == len(units):
        return fingerprints.select(["shingles", "minhash"])
    shingles, offsets = flat_list(fingerprints["shingles"])
    sizes = np.diff(offsets).astype(np.int64)
    # Rows with [3 2] shingles, both of unit 0: the unit of each shingle is [0 0 0 0 0].
    of_unit = np.repeat(units, sizes).astype(np.uint64)
    union = _by_row((of_unit << np.uint64(32)) | shingles.astype(np.uint64), num_units)
    hashes, _ = flat_list(fingerprints["minhash"])
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    # The MinHash of a union is the element-wise minimum.
    least = np.minimum.reduceat(hashes.reshape(len(units), -1), starts)
    return pa.table([*_columns(*union, least)], names=["shingles", "minhash"])


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


def find_near(
    fingerprints: Sequence[pa.Table], rows: Sequence[Int64s], threshold: float
) -> tuple[Int64s, Float64s, Float64s]:
    """Find the pairs of similar rows.

    Args:
        fingerprints: one table per shard, schema `FINGERPRINTS`.
        rows: rows of each shard to compare, numbered from 0 across all shards.
        threshold: minimum share of common shingles.

    Returns:
        Earlier and later row of each pair, by the numbers of the compared rows, shape
        [num_pairs, 2], in order of the later row. Jaccard similarity of each pair: shingles in both
        divided by shingles in either, at least `threshold`; and that of the assistant's text only,
        1 if neither row has any.
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
    pairs = np.stack([first[near], second[near]], axis=1)
    return pairs, similarity[near], answers[near]


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
