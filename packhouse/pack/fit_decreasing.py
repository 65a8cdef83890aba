"""Plan packs from the histogram of lengths, so that the cost does not depend on the row count.

A plan is a list of *patterns*. A pattern says how many sequences of each length go into a pack, and
for how many packs. `strategies.py` then decides which sequence of a length goes where.

There are three planners, all of which place the longest sequences first:

- `exact_completion` fills a pack with the longest remaining lengths. Once a few lengths can fill
  the rest, it completes the pack exactly with one, two or three remaining lengths. Remaining
  lengths are a bitmap (bit `n` is set if length `n` remains); lengths that sum to `r` are found by
  ANDing it with its mirror image, 2,048 lengths at a time from the middle. A pattern repeats as
  often as the counts allow (histogram packing, Krell et al. 2021, arXiv:2107.02027).
- `best_fit_decreasing` is the classical algorithm, with equal packs kept as groups.
- `first_fit_decreasing` makes one vectorized pass over the open packs per distinct length.

Cost: the first two make O(distinct lengths) patterns at a few microseconds per step, for any number
of sequences; the third takes O(distinct lengths x packs) at 0.2 ns.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from packhouse.records.arrays import Bools, Int64s

# Lengths to try as the first of a triple. With 1, a million packs take a few more; above 4 there is
# no gain.
_TRIPLE_TRIES = 4

# A single bitmap of lengths up to 131,072 has 16 KB, and each step would touch all of it. With
# chunks, plans over evenly spread lengths take half the time.
_CHUNK_BITS = 2048  # in most datasets, most lengths are in the first chunk


@dataclass(frozen=True, slots=True)
class Patterns:
    """Groups of equal packs; row i puts `per_pack[i]` sequences of `length[i]` into each pack.

    Rows of a pattern are adjacent and have the same `first_pack` and `num_packs`.
    """

    first_pack: Int64s
    num_packs: Int64s
    length: Int64s
    per_pack: Int64s

    @property
    def total_packs(self) -> int:
        """Number of packs of all patterns."""
        return int((self.first_pack + self.num_packs).max(initial=0))


def exact_completion(counts: Int64s, seq_len: int) -> Patterns:
    """Fill packs longest first, and complete each exactly if one to three lengths can.

    Among possible completions, the most equal lengths are used. That saves the shortest and longest
    ones, so later packs have more choice (100 times Alpaca at 2,048: 0 packs over the lower bound,
    instead of 5 with the most unequal lengths).

    Args:
        counts: number of sequences of each length, shape [max length + 1], `counts[0] == 0`.
        seq_len: pack size in tokens, at least `len(counts) - 1`.

    Returns:
        Patterns that use every sequence in `counts`; no pack has more than `seq_len` tokens.

    Example:
        >>> counts = np.bincount([5, 3, 2, 6, 4, 4])
        >>> patterns = exact_completion(counts, seq_len=8)
        >>> list(zip(patterns.first_pack.tolist(), patterns.length.tolist()))
        [(0, 6), (0, 2), (1, 5), (1, 3), (2, 4)]
    """
    shelf = _Shelf(counts)
    rows: list[tuple[int, int, int, int]] = []
    num_packs = 0
    while shelf.num:
        pattern: dict[int, int] = {}
        space, repeats = seq_len, 1
        while length := shelf.longest(space):
            # Always start with the longest: it would be hardest to place later.
            # Completing empty packs exactly took 588 more packs on uniform lengths.
            chosen = _choose(shelf, space, length) if pattern else {length: 1}
            for each, times in chosen.items():
                pattern[each] = pattern.get(each, 0) + times
                shelf.take(each, times)
                space -= each * times
        # Repeat the same pack as often as the counts allow.
        again = min(shelf.counts[length] // times for length, times in pattern.items())
        if again:
            repeats += again
            for length, times in pattern.items():
                shelf.take(length, times * again)
        rows += [(num_packs, repeats, length, times) for length, times in pattern.items()]
        num_packs += repeats
    return _as_patterns(rows)


class _Bitmap:
    """A set of positive numbers as a chunked bitmap, so that each operation touches few chunks."""

    __slots__ = ("chunks", "filled")

    def __init__(self, is_member: Bools) -> None:
        packed = np.packbits(is_member, bitorder="little").tobytes()
        size = _CHUNK_BITS // 8
        pieces = [packed[at : at + size] for at in range(0, len(packed) + size, size)]
        self.chunks = [int.from_bytes(piece, "little") for piece in pieces]
        self.filled = sum(1 << number for number, chunk in enumerate(self.chunks) if chunk)

    def add(self, member: int) -> None:
        number = member // _CHUNK_BITS
        self.chunks[number] |= 1 << (member % _CHUNK_BITS)
        self.filled |= 1 << number

    def remove(self, member: int) -> None:
        number = member // _CHUNK_BITS
        self.chunks[number] ^= 1 << (member % _CHUNK_BITS)
        if not self.chunks[number]:
            self.filled ^= 1 << number

    def least(self, at_least: int) -> int:
        """Return the smallest member of at least `at_least`, or 0.

        Of {3, 5000}, at least 4: the first chunk has no such bit. Chunk 2 is the next non-empty
        one, and its lowest bit, 904, is 2 * 2,048 + 904 = 5,000.
        """
        number, bit = divmod(at_least, _CHUNK_BITS)
        if number >= len(self.chunks):
            return 0
        bits = self.chunks[number] >> bit
        if bits:
            return at_least + (bits & -bits).bit_length() - 1
        behind = self.filled >> (number + 1)
        if not behind:
            return 0
        number += (behind & -behind).bit_length()
        bits = self.chunks[number]
        return number * _CHUNK_BITS + (bits & -bits).bit_length() - 1

    def most(self, at_most: int) -> int:
        """Return the largest member of at most `at_most`, or 0."""
        number, bit = divmod(at_most, _CHUNK_BITS)
        bits = self.chunks[number] & ((2 << bit) - 1)
        if not bits:
            before = self.filled & ((1 << number) - 1)
            if not before:
                return 0
            number = before.bit_length() - 1
            bits = self.chunks[number]
        return number * _CHUNK_BITS + bits.bit_length() - 1

    def window(self, start: int) -> int:
        """Return one chunk of bits from `start` on."""
        number, bit = divmod(start, _CHUNK_BITS)
        if number + 1 >= len(self.chunks):  # the last chunk is empty
            return 0
        return self.chunks[number] >> bit | self.chunks[number + 1] << (_CHUNK_BITS - bit)


class _Shelf:
    """Remaining sequences by length, with the set of remaining lengths and its mirror image."""

    __slots__ = ("counts", "left", "mirror", "num", "top")

    def __init__(self, counts: Int64s) -> None:
        self.counts: list[int] = counts.tolist()
        self.top = len(self.counts) - 1
        self.num = int((counts > 0).sum())
        self.left = _Bitmap(counts > 0)
        self.mirror = _Bitmap(counts[::-1] > 0)  # has top - n if length n remains

    def take(self, length: int, times: int) -> None:
        self.counts[length] -= times
        if not self.counts[length]:
            self.num -= 1
            self.left.remove(length)
            self.mirror.remove(self.top - length)

    def longest(self, space: int) -> int:
        """Return the longest remaining length that fits, or 0."""
        return self.left.most(min(space, self.top))

    def shortest(self, at_least: int = 1) -> int:
        """Return the shortest remaining length of at least `at_least` tokens, or 0."""
        return self.left.least(at_least)

    def pair(self, total: int) -> tuple[int, int] | None:
        """Return the two most equal remaining lengths that sum to `total`, the longer first."""
        longer = -(-total // 2)
        if 2 * longer == total and longer <= self.top and self.counts[longer] == 1:
            longer += 1  # two equal halves need two sequences, but only one remains
        shift = self.top - total
        while longer <= self.top and longer < total:
            # Lengths [2 3 5 6], top 6, total 8: n pairs with 8 - n, which the mirror has at bit
            # 6 - (8 - n) = n - 2. From 4 on, 5 and 6 are in both, so (5, 3) is the most equal pair.
            both = self.left.window(longer) & self.mirror.window(longer + shift)
            if both:
                longer += (both & -both).bit_length() - 1
                return longer, total - longer
            longer += _CHUNK_BITS
        return None

    def triple(self, total: int) -> tuple[int, int, int] | None:
        """Return three remaining lengths of about equal size that sum to `total`."""
        longest_first = total - 2 * self.shortest()
        # From a third of the total on: trying the longest first left 176 packs over the lower bound
        # at 5.2 million rows, instead of 16.
        first = -(-total // 3) - 1
        for _ in range(_TRIPLE_TRIES):
            first = self.shortest(first + 1)
            if not first or first > longest_first:
                return None
            rest = self.pair(total - first)
            if rest and self.counts[first] >= 1 + (rest[0] == first) + (rest[1] == first):
                return first, *rest
        return None


def _choose(shelf: _Shelf, space: int, longest: int) -> dict[int, int]:
    """Choose sequences for `space`: an exact completion if close, else a run of `longest`."""
    if longest == space:
        return {longest: 1}
    # Space 2,048, longest 52, shortest 42: 40 sequences are needed, and 40 x 52 is 32 too many, so
    # at least 4 of the 40 must be shorter ones.
    num = -(-space // longest)
    deficit = num * longest - space
    shortest = shelf.shortest()
    if not deficit or shortest == longest:
        return {longest: min(shelf.counts[longest], space // longest)}
    # Three places stay free for `pair` or `triple`, which can fill them exactly.
    num_short = max(3, -(-deficit // (longest - shortest)))
    if num > num_short:
        return {longest: min(shelf.counts[longest], num - num_short)}
    if num > 3 and num * shortest <= space:
        return {shortest: min(shelf.counts[shortest], num - 3)}
    chosen = shelf.pair(space) or shelf.triple(space)
    if chosen is None:
        return {longest: 1}
    return {each: chosen.count(each) for each in chosen}


def best_fit_decreasing(counts: Int64s, seq_len: int) -> Patterns:
    """Put each sequence, longest first, into the fullest pack that has room for it.

    Arguments and result are those of `exact_completion`. Sequences of equal length fill a pack
    until no more fit, so packs with equal content are handled as one group.

    Example:
        >>> patterns = best_fit_decreasing(np.bincount([5, 3, 2, 6, 4, 4]), seq_len=8)
        >>> list(zip(patterns.first_pack.tolist(), patterns.length.tolist()))
        [(0, 4), (1, 5), (1, 3), (2, 6), (2, 2)]
    """
    groups = _Groups(seq_len)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            space, size, content = groups.tightest(length) or (seq_len, left, None)
            times = min(space // length, left)
            filled = min(size, left // times)
            groups.add(space - times * length, filled, (length, times, content))
            if content is not None and filled < size:
                # Both parts of the group share `content`, so that dividing it copies nothing.
                groups.add(space, size - filled, content)
            left -= filled * times
    return groups.patterns()


# Content of a pack as a linked list, newest first: (length, count, earlier content).
_Content: TypeAlias = "tuple[int, int, _Content] | None"


class _Groups:
    """Groups of packs with equal content, by the space left in them."""

    def __init__(self, seq_len: int) -> None:
        self.spaces = _Bitmap(np.zeros(seq_len + 1, np.bool_))  # spaces that some group has
        self.by_space: dict[int, list[tuple[int, _Content]]] = {}

    def add(self, space: int, size: int, content: _Content) -> None:
        self.by_space.setdefault(space, []).append((size, content))
        self.spaces.add(space)

    def tightest(self, length: int) -> tuple[int, int, _Content] | None:
        """Remove and return the group with the least space that still fits `length`."""
        space = self.spaces.least(length)
        if not space:
            return None
        size, content = self.by_space[space].pop()
        if not self.by_space[space]:
            self.spaces.remove(space)
        return space, size, content

    def patterns(self) -> Patterns:
        rows: list[tuple[int, int, int, int]] = []
        num_packs = 0
        for space in sorted(self.by_space):
            for size, content in self.by_space[space]:
                contents = []
                while content is not None:
                    length, times, content = content
                    contents.append((num_packs, size, length, times))
                rows += reversed(contents)
                num_packs += size
        return _as_patterns(rows)


def first_fit_decreasing(counts: Int64s, seq_len: int) -> Patterns:
    """Put each sequence, longest first, into the first pack that has room for it.

    Arguments and result are those of `exact_completion`. All sequences of equal length are placed
    at once: packs from left to right take as many as fit, until none remain.

    Example:
        >>> patterns = first_fit_decreasing(np.bincount([5, 3, 2, 6, 4, 4]), seq_len=8)
        >>> list(zip(patterns.first_pack.tolist(), patterns.length.tolist()))
        [(0, 6), (0, 2), (1, 5), (1, 3), (2, 4)]

    Source: Johnson 1973; at most 11/9 OPT + 6/9 packs, Dosa 2007.
    """
    space = np.empty(0, dtype=np.int32)  # space of each pack; only the first `opened` are open
    opened = 0
    placed: list[tuple[Int64s, Int64s, Int64s]] = []  # packs, lengths, counts
    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        packs = np.flatnonzero(space[:opened] >= length)
        room = np.cumsum(space[packs] // length)
        found = int(room[-1]) if len(room) else 0
        if found < count:
            more = -(-(count - found) // (seq_len // length))
            if opened + more > len(space):
                grown = np.empty(max(opened + more, 2 * len(space)), dtype=np.int32)
                grown[:opened] = space[:opened]
                space = grown
            space[opened : opened + more] = seq_len
            packs = np.concatenate([packs, np.arange(opened, opened + more)])
            room = np.cumsum(space[packs] // length)
            opened += more
        # Length 3, packs with 8, 2 and 7 tokens left: packs [0 2] have room for [2 2], running sum
        # [2 4]. Of 3 sequences, 2 go into pack 0 and 1 into pack 2.
        last = int(np.searchsorted(room, count))
        times = np.diff(np.minimum(room[: last + 1], count), prepend=0)  # [2 1]
        packs = packs[: last + 1]
        space[packs] -= (times * length).astype(np.int32)
        placed.append((packs, np.full(len(packs), length), times))
    if not placed:
        return _as_patterns([])
    pack, lengths, times = (np.concatenate(columns) for columns in zip(*placed, strict=True))
    by_pack = np.argsort(pack, kind="stable")
    ones = np.ones(len(pack), dtype=np.int64)
    return Patterns(pack[by_pack], ones, lengths[by_pack], times[by_pack])


def _as_patterns(rows: list[tuple[int, int, int, int]]) -> Patterns:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Patterns(columns[0], columns[1], columns[2], columns[3])
