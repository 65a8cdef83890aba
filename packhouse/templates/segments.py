"""Fill a template's segments for all rows of a shape at once, with their spans.

A `Program` is what a template does to a shape: constants and slots in rendering order. Text is one
Arrow join, spans are sums of byte lengths; there is no Python per row. 52,000 Alpaca rows take
about 0.05 s, where `str.format` and `len(text.encode())` per row take 0.2 s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.span_weights import weights_column
from packhouse.tables import FORMATTED, WEIGHTS

__all__ = ["Filled", "Program", "Slot", "concat_filled", "fill"]

SPANS = FORMATTED.field("content_spans").type


class Slot(NamedTuple):
    """Where a row's own text goes: text `number` of the row (a message, or a leaf of a chat)."""

    number: int
    field: str = "content"
    """Single-turn templates: `content` or `context` of the message, or `label`."""


@dataclass(frozen=True, slots=True)
class Program:
    """Constants and slots in rendering order, and which of them are trained.

    Example:
        >>> Program(("Q: ", Slot(0), " A:", Slot(1), "</s>"), trained=((3, 5, 1),)).trained
        ((3, 5, 1),)
    """

    items: tuple[str | Slot, ...]
    trained: tuple[tuple[int, int, int], ...]
    """Half-open ranges of items, ascending, and the message whose weight each has (-1: it is 1)."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Rendered rows: numbers of the rows, and their text and spans in the same order."""

    rows: np.ndarray
    text: pa.Array
    content_spans: pa.Array
    trained_spans: pa.Array
    span_weights: pa.Array


def fill(
    program: Program,
    rows: np.ndarray,
    column: Callable[[Slot], pa.Array],
    weight: Callable[[int], np.ndarray],
) -> Filled:
    """Render `rows`, all of the program's shape.

    Spans are in bytes of the text, ascending and non-empty: a slot without text has none.

    Args:
        program: of the shape.
        rows: row numbers.
        column: slot -> its text in each of the rows.
        weight: message -> its weight in each of the rows.
    """
    pieces = [item if isinstance(item, str) else column(item) for item in program.items]
    edges = np.zeros((len(rows), len(pieces) + 1), dtype=np.int64)
    for number, piece in enumerate(pieces):
        size = len(piece.encode()) if isinstance(piece, str) else pc.binary_length(piece).to_numpy()
        edges[:, number + 1] = edges[:, number] + size
    text = _join(pieces, len(rows))
    slots = [(n, n + 1) for n, item in enumerate(program.items) if isinstance(item, Slot)]
    spans = [(begin, end) for begin, end, _ in program.trained]
    messages = [message for _, _, message in program.trained]
    return Filled(
        rows,
        text,
        _spans(edges, slots),
        _spans(edges, spans),
        _weights(edges, spans, messages, weight),
    )


def _join(pieces: Sequence[str | pa.Array], num_rows: int) -> pa.Array:
    if all(isinstance(piece, str) for piece in pieces):
        return pa.array(["".join(map(str, pieces))] * num_rows, pa.string())
    return pc.binary_join_element_wise(
        *(pa.scalar(piece) if isinstance(piece, str) else piece for piece in pieces), ""
    )


def _spans(edges: np.ndarray, ranges: Sequence[tuple[int, int]]) -> pa.Array:
    begins = edges[:, [begin for begin, _ in ranges]]
    ends = edges[:, [end for _, end in ranges]]
    return span_lists(begins.ravel(), ends.ravel(), np.full(len(edges), len(ranges)))


def _weights(
    edges: np.ndarray,
    ranges: Sequence[tuple[int, int]],
    messages: Sequence[int],
    weight: Callable[[int], np.ndarray],
) -> pa.Array:
    """Weights of the spans that are not empty."""
    weights = np.ones((len(edges), len(ranges)), np.float32)
    for number, message in enumerate(messages):
        if message >= 0:
            weights[:, number] = weight(message)
    if (weights == 1).all():
        return pa.nulls(len(edges), WEIGHTS)
    kept = np.stack([edges[:, end] > edges[:, begin] for begin, end in ranges], axis=1)
    return weights_column(weights[kept], kept.sum(axis=1))


def span_lists(begins: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> pa.Array:
    """Lists of spans, `counts[i]` for row i, the empty spans left out."""
    kept = ends > begins
    if not kept.all():
        total = np.concatenate([[0], np.cumsum(kept)])
        bounds = np.concatenate([[0], np.cumsum(counts)])
        counts = total[bounds[1:]] - total[bounds[:-1]]
        begins, ends = begins[kept], ends[kept]
    spans = pa.StructArray.from_arrays(
        [pa.array(begins.astype(np.int32)), pa.array(ends.astype(np.int32))],
        fields=list(SPANS.value_type),
    )
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), spans, type=SPANS)


def concat_filled(parts: Sequence[Filled]) -> Filled:
    """Put parts together, in the order of row numbers."""
    if not parts:
        return Filled(
            np.zeros(0, dtype=np.int64),
            pa.array([], pa.string()),
            pa.array([], SPANS),
            pa.array([], SPANS),
            pa.array([], WEIGHTS),
        )
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    order = pa.array(np.argsort(rows, kind="stable"))
    return Filled(
        np.sort(rows),
        pa.concat_arrays([part.text for part in parts]).take(order),
        pa.concat_arrays([part.content_spans for part in parts]).take(order),
        pa.concat_arrays([part.trained_spans for part in parts]).take(order),
        pa.concat_arrays([part.span_weights for part in parts]).take(order),
    )
