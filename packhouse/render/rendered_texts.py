"""Results of rendering: texts with their spans as columns, and rows that were refused."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from packhouse.records.arrays import Int64s, Objects, ranges_array
from packhouse.records.table_schemas import FORMATTED

SPANS = FORMATTED.field("content_spans").type
_COLUMNS = ("text", "content_spans", "trained_spans", "span_weights")
TEXTS = pa.schema([FORMATTED.field(name) for name in _COLUMNS])
"""Schema of what rendering adds to rows."""


class Refusal(NamedTuple):
    """Why a row cannot be rendered: a code for machines, a sentence for people."""

    reason: str
    detail: str


class RefusedError(Exception):
    """Raised and caught inside this package when one row is refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def shown(text: bytes) -> str:
    """Return a piece of a text for a message; it may begin and end within a character."""
    return repr(text.decode(errors="ignore"))


class Trained(NamedTuple):
    """A trained span in bytes of the text."""

    start: int
    end: int
    message: int
    """Message whose weight it has, any of them if messages were merged; -1 for the row's weight."""
    weight: float = 1.0
    """Set if the row is rendered by itself."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Records: index of each one's row (ascending), with texts and spans in the same order."""

    rows: Int64s
    extents: Objects
    """Part of its row that each record has (`Extent`); None for all of it."""
    texts: pa.Table
    """Schema TEXTS."""

    def take(self, places: Int64s) -> "Filled":
        """Return the records at these places."""
        return Filled(self.rows[places], self.extents[places], self.texts.take(pa.array(places)))


@dataclass(slots=True)
class Texts:
    """Result of an engine for a part: rendered rows (ascending), refused rows, counts."""

    filled: Filled
    refused: dict[int, Refusal]
    notes: Counter[str] = field(default_factory=Counter)


def span_lists(begins: Int64s, ends: Int64s, counts: Int64s) -> pa.Array:
    """Return lists of spans, `counts[i]` of them for row i, leaving out empty spans.

    Example:
        >>> spans = np.array([[0, 4], [4, 4], [2, 5]])  # two of row 0, one of row 1
        >>> span_lists(spans[:, 0], spans[:, 1], np.array([2, 1])).to_pylist()
        [[{'start': 0, 'end': 4}], [{'start': 2, 'end': 5}]]
    """
    kept = ends > begins
    if not kept.all():
        total = np.append(0, np.cumsum(kept))
        counts = np.diff(total[np.append(0, np.cumsum(counts))])
        begins, ends = begins[kept], ends[kept]
    return ranges_array(begins.astype(np.int32), ends.astype(np.int32), counts)


def concat_filled(parts: Sequence[Filled]) -> Filled:
    """Concatenate parts in the order of row indices."""
    if not parts:
        return Filled(np.zeros(0, np.int64), np.zeros(0, np.object_), TEXTS.empty_table())
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    extents = np.concatenate([part.extents for part in parts])
    texts = pa.concat_tables([part.texts for part in parts]).combine_chunks()
    return Filled(rows, extents, texts).take(np.argsort(rows, kind="stable"))
