"""Hold the tokens of many rows in flat arrays, and check what needs only their ids.

Two audits use `Tokens`: that of a shard, which also knows the texts (`PlacedTokens`), and that of
data from other tools (`packhouse.addons.audit_any`), which has only ids and masks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from packhouse.records.arrays import Bools, Int64s, TokenColumns, one_chunk
from packhouse.records.preference_pairs import split_sides
from packhouse.records.table_schemas import read_table
from packhouse.tokenize.encoders import Pipeline, TokenizerSnapshot
from packhouse.tokenize.offsets import (
    EncodedRows,
    Spans,
    flat_texts,
    locate_by_widths,
    train_ranges,
)

NUM_WORST = 5
"""Number of rows listed for each finding."""


def worst_first(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a row with a `value`: the highest value first, then by place."""
    # By id last, because the records of one row have the same place.
    value, *place = (row[name] for name in ("value", "source", "row", "record_id"))
    return -value, *place


class Side(NamedTuple):
    """Tables of the same rows; for pairs, those of one side."""

    conversations: pa.Table
    """Schema VALIDATED; may include conversations that were rejected by the template."""
    formatted: pa.Table
    tokenized: pa.Table
    """May lack rows of `formatted`, which the tokenize step rejected."""


def read_sides(
    conversations: Path, formatted: Path, tokenized: Path, rejected: tuple[Path, Path] | None
) -> list[Side]:
    """Read the tables of a shard: one side, or two for pairs.

    Args:
        conversations: rendered conversations: `examples.arrow` or `validated.arrow`.
        formatted: their texts.
        tokenized: their tokens.
        rejected: for pairs, conversations and texts of the rejected sides.
    """
    tokens = read_table(tokenized)
    chosen, other = (tokens, None) if rejected is None else split_sides(tokens)
    sides = [Side(read_table(conversations), read_table(formatted), chosen)]
    if rejected is not None:
        sides.append(Side(read_table(rejected[0]), read_table(rejected[1]), other))
    return sides


Ids: TypeAlias = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Tokens and trained ranges of all rows, without their texts."""

    ids: Ids
    offsets: Int64s
    """Start of each row and the end of the last, shape [num_rows + 1]."""
    range_starts: Int64s
    range_ends: Int64s
    pipeline: Pipeline

    @cached_property
    def range_rows(self) -> Int64s:
        """Row number of each trained range."""
        return self.row_of(self.range_starts)

    @cached_property
    def control(self) -> Int64s:
        """Places of control tokens."""
        return np.flatnonzero(self.pipeline.is_control.take(self.ids))

    def row_of(self, places: Int64s) -> Int64s:
        """Return the row of the token at each place."""
        return np.searchsorted(self.offsets, places, "right") - 1

    def per_row(self, rows: Int64s) -> Int64s:
        """Count how often each row occurs in `rows`."""
        return np.bincount(rows, minlength=len(self.offsets) - 1)

    def are_content(self, first: Int64s, last: Int64s) -> Bools:
        """Return a mask of the token ranges [first, last] that are known to contain content."""
        return np.zeros(len(first), np.bool_)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedTokens(Tokens):
    """Tokens with their byte positions in the texts, and the positions of contents."""

    texts: EncodedRows
    """Texts of all rows, and the positions of their tokens."""
    is_misplaced: Bools
    """Mask of rows whose trained ranges differ from the tokens that begin in trained spans."""
    contents: Spans
    content: "Intervals"
    """The same spans, sorted and without overlaps."""

    @classmethod
    def of(
        cls, formatted: pa.Table, tokenized: pa.Table, pipeline: Pipeline, *, compares: bool = True
    ) -> "PlacedTokens":
        """Find the position of each token in its row's text; for `compares`, `locate_by_widths`."""
        ids, narrow, ranges = TokenColumns.of(tokenized)
        offsets: Int64s = narrow.astype(np.int64)
        texts = flat_texts(formatted["text"])
        placed = locate_by_widths(*texts, ids, offsets, pipeline, compares=compares)
        rows = ranges.rows
        spans = Spans.of(one_chunk(formatted["content_spans"]), placed.bases)
        # Ranges that differ from those due, in number or in place.
        due = train_ranges(placed, Spans.of(one_chunk(formatted["trained_spans"]), placed.bases))
        num_ranges, num_due = ranges.counts, np.diff(due.offsets)
        is_misplaced = num_ranges != num_due
        own, others = np.repeat(~is_misplaced, num_ranges), np.repeat(~is_misplaced, num_due)
        is_other = ranges.starts[own] != due.starts[others]
        is_other |= ranges.ends[own] != due.ends[others]
        is_misplaced[rows[own][is_other]] = True
        return cls(
            ids=ids,
            offsets=offsets,
            range_starts=ranges.starts + offsets[rows],
            range_ends=ranges.ends + offsets[rows],
            pipeline=pipeline,
            texts=placed,
            # In other rows positions are unknown, so a difference means nothing.
            is_misplaced=is_misplaced & placed.is_exact,
            contents=spans,
            content=Intervals.of(spans.starts, spans.ends),
        )

    @property
    def is_exact(self) -> Bools:
        """Mask of rows whose tokens decode to exactly their text; others have no positions."""
        return self.texts.is_exact

    def holds_content(self, first: Int64s, last: Int64s) -> Bools:
        """Return a mask of the token ranges [first, last] whose bytes overlap content."""
        return np.asarray(self.content.within(self.texts.starts[first], self.texts.ends[last]) > 0)

    @override
    def are_content(self, first: Int64s, last: Int64s) -> Bools:
        return self.holds_content(first, last) & self.is_exact[self.row_of(first)]

    def text_of(self, row: int) -> bytes:
        """Return the text of a row."""
        return self.texts.text[slice(*self.texts.bases[row : row + 2])].tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Disjoint half-open byte ranges in ascending order."""

    starts: Int64s
    ends: Int64s
    before: Int64s
    """Total bytes of the ranges before each one."""

    @classmethod
    def of(cls, starts: Int64s, ends: Int64s) -> "Intervals":
        """Sort ranges and remove overlaps."""
        # [2, 8) and [5, 10) become [2, 8) and [8, 10).
        if (starts[1:] < ends[:-1]).any():  # a template may write contents twice, or out of order
            order = np.argsort(starts, kind="stable")
            ends = np.maximum.accumulate(ends[order])
            starts = np.maximum(starts[order], np.append(0, ends[:-1]))
            ends = np.maximum(starts, ends)
        return cls(starts, ends, np.append(0, np.cumsum(ends - starts)))

    def within(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Return how many bytes of each [start, end) are inside the ranges.

        Example:
            >>> held = Intervals.of(np.array([2, 10]), np.array([5, 20]))
            >>> held.within(np.array([0, 4, 5]), np.array([3, 12, 10])).tolist()
            [1, 3, 0]
        """
        return self._up_to(ends) - self._up_to(starts)

    def _up_to(self, place: Int64s) -> Int64s:
        if not len(self.starts):
            return np.zeros(len(place), np.int64)
        index = np.searchsorted(self.starts, place, "right") - 1
        at = np.maximum(index, 0)
        inside = np.clip(place - self.starts[at], 0, self.ends[at] - self.starts[at])
        return np.where(index < 0, 0, self.before[at] + inside)


@lru_cache(maxsize=4)
def blank_tokens(pipeline: Pipeline) -> Bools:
    """Return a mask of ids that decode to white space only, shape [vocab_size]."""
    if pipeline.token_bytes is None:
        return np.zeros(len(pipeline.is_control), np.bool_)
    is_blank = np.array([not text.strip() for text in pipeline.token_bytes.to_pylist()], np.bool_)
    return is_blank & ~pipeline.is_control


def bos_and_unknown(tokens: Tokens, snapshot: TokenizerSnapshot) -> dict[str, Int64s]:
    """Return for each row: 1 if a BOS is doubled, 1 if BOS is missing, and the unknown tokens."""
    num_rows = len(tokens.offsets) - 1
    named = snapshot.special_tokens
    bos_text = named.get("bos_token") or named.get("cls_token") or ""
    bos = snapshot.added_tokens.get(bos_text, -1)
    eos = snapshot.added_tokens.get(named.get("eos_token") or named.get("sep_token") or "", -1)
    double = missing = unknown = np.zeros(num_rows, np.int64)
    if bos >= 0:
        places = tokens.control[tokens.ids[tokens.control] == bos]
        rows = tokens.row_of(places)
        is_first = places == tokens.offsets[rows]
        # A template may write BOS before every turn (as ChatML's), so only a BOS directly after
        # another one is a fault: [BOS, BOS, a, BOS, b] has one.
        is_double = ~is_first & (tokens.ids[places - 1] == bos)
        is_double &= ~tokens.are_content(places, places)
        # If BOS is also EOS, it ends turns; only a second one at the start of a row is doubled.
        if bos == eos:
            is_double &= places == tokens.offsets[rows] + 1
        double = np.minimum(tokens.per_row(rows[is_double]), 1)
        # In rows that are not exact, positions are unknown, so compare counts with the text.
        if isinstance(tokens, PlacedTokens):
            for row in np.unique(rows[~tokens.is_exact[rows]]).tolist():
                num_written = max(tokens.text_of(row).count(bos_text.encode()), 1)
                double[row] |= np.count_nonzero(rows == row) > num_written
        if snapshot.adds_bos:
            missing = 1 - tokens.per_row(rows[is_first])
    unk = tokens.pipeline.unk_id
    if unk is not None and unk not in (bos, eos):
        unknown = tokens.per_row(tokens.row_of(np.flatnonzero(tokens.ids == unk)))
    return {"double_bos": double, "missing_bos": missing, "unknown_tokens": unknown}


def double_ends(tokens: PlacedTokens, end_ids: Ids) -> Int64s:
    """Return 1 for each row with the same end token twice in a row, outside of content."""
    ends = tokens.control[np.isin(tokens.ids[tokens.control], end_ids)]
    first, second = ends[:-1], ends[1:]
    rows = tokens.row_of(second)
    is_double = (second == first + 1) & (tokens.ids[first] == tokens.ids[second])
    is_double &= tokens.row_of(first) == rows
    is_double &= ~tokens.are_content(first, second)
    # In rows that are not exact, positions are unknown: allow as many pairs as the contents of the
    # text have.
    names = {token.id: token.text for token in tokens.pipeline.added}
    left: dict[tuple[int, bytes], int] = {}
    for number in np.flatnonzero(is_double & ~tokens.is_exact[rows]).tolist():
        row, pair = int(rows[number]), names[int(tokens.ids[first[number]])].encode() * 2
        if (row, pair) not in left:
            found = re.finditer(b"(?=" + re.escape(pair) + b")", tokens.text_of(row))
            places = np.array([match.start() for match in found], np.int64)
            places += tokens.texts.bases[row]
            in_content = tokens.content.within(places, places + len(pair)) > 0
            left[row, pair] = int(in_content.sum())
        left[row, pair] -= 1
        is_double[number] = left[row, pair] < 0
    return np.minimum(tokens.per_row(rows[is_double]), 1)
