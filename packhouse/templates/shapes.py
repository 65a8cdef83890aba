"""One way through a chat template: what it writes for a shape of conversation, and when.

One row of the shape, rendered by trace, shows where its texts land and what the template asks of
them. Every row that answers the same is written by the same constants (see filling.py), 20 to 80
times faster than Jinja; rows that answer otherwise show the next way or are rendered one by one.
A way may end in a refusal: then all rows that go it are refused, each with its own words.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from packhouse.templates.columns import Column
from packhouse.templates.leaf_texts import Layout, LeafTexts, Place
from packhouse.templates.losses import HAS_TAGS, Loss
from packhouse.templates.marks import Marked
from packhouse.templates.questions import Check
from packhouse.templates.tracing import Hole, Trace, TracedText
from packhouse.templates.trained import Trained

__all__ = ["Way", "make_refusal", "make_way"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Way:
    """What a template writes for a shape, and the answers of texts that lead there."""

    layout: Layout
    items: tuple[str | Hole, ...]
    """Constants and holes in rendering order."""
    content: tuple[int, ...]
    """Numbers of the items that are contents, as far as they are written whole."""
    strings: tuple[int, ...]
    """Numbers of the items whose strings are contents."""
    trained: tuple[Trained, ...]
    """Half-open ranges of items."""
    checks: tuple[tuple[Hashable, Check], ...]
    differing: tuple[tuple[Hashable, Hashable], ...]
    """Pairs of leaves that must not be equal."""
    num_unwritten: int
    """Thoughts that the template leaves out."""
    loss: Loss | None = None
    """What the template leaves out of these rows: they are refused."""

    def place(self, leaf: Hashable) -> Place:
        """What a leaf is; for an item of a tool definition: that definition."""
        is_item = isinstance(leaf, tuple) and leaf[0] != "id"
        return self.layout[leaf[1] if is_item and isinstance(leaf, tuple) else leaf]

    def fits(self, rows: Ints, texts: LeafTexts, noisy: Callable[[Column], Bools]) -> Bools:
        """Which rows go this way; those that write control-token text in an id do not."""
        fitting = np.ones(len(rows), np.bool_)
        for leaf, check in self.checks:
            place = self.place(leaf)
            agrees = texts.column(place, Hole(leaf)).agrees(check)
            fitting &= agrees[texts.rows_of(place, rows)]
        for pair in self.differing:
            places = [(self.place(leaf), Hole(leaf)) for leaf in pair]
            one, other = (
                texts.column(place, hole).texts.take(texts.rows_of(place, rows))
                for place, hole in places
            )
            fitting &= pc.not_equal(one, other).to_numpy(zero_copy_only=False)
        for item in self.items:
            if isinstance(item, Hole) and isinstance(item.leaf, tuple) and item.leaf[0] == "id":
                place = self.place(item.leaf)
                fitting &= ~noisy(texts.column(place, item))[texts.rows_of(place, rows)]
        return fitting


def make_way(
    layout: Layout, marked: Marked, trained: list[Trained], trace: Trace, num_unwritten: int
) -> Way | None:
    """The way that a traced row took; None where a span begins or ends inside of a text."""
    places = _places(marked.parts)
    whole = {(o.start, o.end) for o in marked.occurrences}
    edges = {0, *(end for _, end, _ in places), *(start for start, _, _ in places)}
    edges.update(edge for span in trained for edge in span[:2])
    cuts = sorted(edges | {len(marked.text)})
    holes = {start: (end, hole) for start, end, hole in places if end > start}
    if any(start < cut < end for start, end, _ in places for cut in _between(cuts, start, end)):
        return None
    items: list[str | Hole] = []
    content, strings = [], []
    for begin, end in pairwise(cuts):
        if begin not in holes:
            items.append(marked.text[begin:end].decode())
            continue
        hole = holes[begin][1]
        kind = _kind(layout, hole)
        if (begin, end) in whole:
            content.append(len(items))
        elif kind in ("function", "call_arguments"):
            strings.append(len(items))
        items.append(hole)
    number = {cut: at for at, cut in enumerate(cuts)}
    ranges = tuple(Trained(number[a], number[b], message) for a, b, message in trained)
    checks, differing = _asked(trace)
    return Way(
        layout,
        tuple(items),
        tuple(content),
        tuple(strings),
        ranges,
        checks,
        differing,
        num_unwritten,
    )


def make_refusal(layout: Layout, loss: Loss, has_tags: bool, trace: Trace) -> Way:
    """The way of a traced row that was refused for a lost content.

    What is lost follows from what the template writes, so from the shape and the answers; the
    advice from whether the content has tags of thinking.
    """
    lost = Place("content", loss.message)
    leaf = next(leaf for leaf, place in layout.items() if place == lost)
    checks, differing = _asked(trace)
    tags = Check("contains", HAS_TAGS, has_tags)
    return Way(layout, (), (), (), (), (*checks, (leaf, tags)), differing, 0, loss)


def _asked(
    trace: Trace,
) -> tuple[tuple[tuple[Hashable, Check], ...], tuple[tuple[Hashable, Hashable], ...]]:
    """Questions and answers, and pairs that differ; sorted."""
    checks = [(leaf, check) for leaf, asked in trace.checks.items() for check in asked]
    return tuple(sorted(checks, key=repr)), tuple(sorted(trace.differing, key=repr))


def _places(parts: Sequence[str]) -> list[tuple[int, int, Hole]]:
    """Start, end and hole of each traced text, in bytes."""
    found = []
    at = 0
    for part in parts:
        end = at + len(str.encode(part))
        if isinstance(part, TracedText) and part.hole is not None:
            found.append((at, end, part.hole))
        at = end
    return found


def _between(cuts: list[int], start: int, end: int) -> list[int]:
    return cuts[int(np.searchsorted(cuts, start, "right")) : int(np.searchsorted(cuts, end))]


def _kind(layout: Layout, hole: Hole) -> str:
    place = layout.get(hole.leaf)
    return place.kind if place is not None else ""
