r"""Chat templates: the tokenizer's own Jinja, or the user's, filled shape by shape.

Text is byte-equal to `apply_chat_template(messages, tools=tools, tokenize=False)`. What the
template gets is what transformers would give it: dicts with the keys that the row has. A context
is part of its turn: content + "\n" + context. Arguments of tool calls are parsed, reasoning is
`reasoning_content`. BOS is the template's business.

The first row of a shape goes through Jinja and shows the way that rows of its kind take; the others
are filled in bulk, with tool calls or without. A row whose shape no other row has is rendered
alone, which costs about twice what transformers takes. A row comes out the same either way.
"""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.confine import at
from packhouse.recipe import FormatConfig
from packhouse.span_weights import weights_column
from packhouse.templates.chat_messages import parse_tools
from packhouse.templates.columns import Column
from packhouse.templates.conversations import Conversations
from packhouse.templates.filling import Filling
from packhouse.templates.leaf_texts import Layout, LeafTexts, layout_of
from packhouse.templates.losses import HAS_TAGS, LostError
from packhouse.templates.marks import Marked
from packhouse.templates.renderer import Refusal, RefusedError, Texts
from packhouse.templates.rows import RenderedRow, RowRenderer
from packhouse.templates.segments import Filled, concat_filled, span_lists
from packhouse.templates.shapes import Way, make_refusal, make_way
from packhouse.templates.sights import Sight, UnseenError
from packhouse.templates.thinking import has_thinking
from packhouse.templates.tool_tables import Registry
from packhouse.templates.tracing import TracedText

__all__ = ["ChatEngine"]

MIN_SHAPE_ROWS = 2  # a shape of one row is rendered, and done
MAX_WAYS = 4  # rows of a shape to learn from in vain before the rest is rendered one by one
MAX_SHAPES = 2**12  # that are remembered from one part to the next
MIN_PROVEN_ROWS = 16  # rows of a way that are worth a proof of its own
NUM_PROVEN = 8  # ways of each part that are proven, however few their rows

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class _Known:
    """Shapes seen so far, and the ways that each takes through the template."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.ways: dict[bytes, list[Way]] = {}


class ChatEngine:
    """Renders conversations with one Jinja template."""

    def __init__(self, rows: RowRenderer, config: FormatConfig) -> None:
        self._rows = rows
        self._config = config
        self._known = _Known()
        self._is_proven = True

    def render(self, conversations: Conversations) -> Texts:
        """Render shape by shape what can be, and all else row by row."""
        _ = self._rows.rules  # a template that cannot be used is refused before any row
        notes = Counter[str]()
        filled, refused = concat_filled([]), dict[int, Refusal]()
        if self._can_fill():
            filled, refused = self._fill(conversations, notes)
        alone = np.ones(conversations.num_rows, np.bool_)
        alone[filled.rows] = False
        alone[list(refused)] = False
        texts = self._render_rows(conversations, np.flatnonzero(alone))
        texts.filled = concat_filled([some for some in (filled, texts.filled) if len(some.rows)])
        texts.refused |= refused
        texts.notes.update(notes)
        return texts

    def _can_fill(self) -> bool:
        return self._is_proven and self._rows.sights.can_trace

    def _fill(
        self, conversations: Conversations, notes: Counter[str]
    ) -> tuple[Filled, dict[int, Refusal]]:
        """Fill, or refuse, the rows whose shape others have, too; the rest is left."""
        known = self._known
        part = _Part(self._rows, conversations, known.registry)
        learnt: list[Ints] = []
        for shape, rows in part.texts.shapes(self._by_shape(conversations)):
            if len(rows) >= MIN_SHAPE_ROWS:
                ways = known.ways.setdefault(shape, [])
                learnt += self._fill_shape(part, ways, rows, notes)
        if len(known.ways) > MAX_SHAPES:
            self._known = _Known()
        filled = part.filling.filled()
        if self._proves(part, filled, learnt):
            return filled, part.refused
        self._is_proven = False  # never seen: then the template goes through Jinja row by row
        notes.clear()
        return concat_filled([]), {}

    def _by_shape(self, conversations: Conversations) -> Bools:
        """Rows whose shape may decide their spans; for others, texts do."""
        by_shape = np.ones(conversations.num_rows, np.bool_)
        if self._config.reasoning == "train_last":
            thinks = np.append(0, np.cumsum(has_thinking(conversations.values)))
            by_shape &= thinks[conversations.starts[1:]] == thinks[conversations.starts[:-1]]
        return by_shape

    def _fill_shape(
        self, part: "_Part", known: list[Way], rows: Ints, notes: Counter[str]
    ) -> list[Ints]:
        """Fill what known ways through the template fit, and learn further ways from the rest.

        Returns:
            Rows of each way that was learnt.
        """
        learnt = []
        rows, tries = part.quiet(rows), 0
        for way in known:
            if len(rows):
                rows = self._fill_way(part, way, rows, notes)[1]
        while len(rows) >= MIN_SHAPE_ROWS and tries < MAX_WAYS:
            tries += 1
            found = part.way_of(int(rows[tries - 1]))
            if found is None:
                if len(rows) <= tries:
                    break
                continue
            taken, others = self._fill_way(part, found, rows, notes)
            if len(taken):
                known.append(found)
                learnt.append(taken)
                rows, tries = others, 0
        return learnt

    def _fill_way(
        self, part: "_Part", way: Way, rows: Ints, notes: Counter[str]
    ) -> tuple[Ints, Ints]:
        """Fill (or refuse) the rows that fit; returns them and the others."""
        fitting = way.fits(rows, part.texts, part.noisy)
        taken = rows[fitting]
        if way.loss is not None:
            part.refused |= part.texts.refusals(way.loss, taken)
        elif len(taken):
            part.filling.add(way, taken)
            notes["reasoning_not_rendered"] += way.num_unwritten * len(taken)
        return taken, rows[~fitting]

    def _proves(self, part: "_Part", filled: Filled, learnt: list[Ints]) -> bool:
        """Whether rows of new ways come out of Jinja, by marks, as they were filled.

        Rows that were refused: whether Jinja alone leads to the same words.
        """
        for number, rows in enumerate(learnt):
            last, num_samples = len(rows) - 1, 1 if len(rows) < 64 else 4
            if number >= NUM_PROVEN and len(rows) < MIN_PROVEN_ROWS:
                continue
            samples = {last * sample // num_samples for sample in range(1, num_samples + 1)}
            if not all(self._agrees(part, filled, int(rows[at])) for at in sorted(samples)):
                return False
        return True

    def _agrees(self, part: "_Part", filled: Filled, number: int) -> bool:
        raw, messages, tools = part.example(number)
        if number in part.refused:
            try:
                self._rows.render(raw, messages, tools, Counter())
            except RefusedError as error:
                return error.refusal == part.refused[number]
            return False
        at = int(np.searchsorted(filled.rows, number))
        try:
            row = self._rows.render_by_marks(raw, messages, tools, Counter())
        except RefusedError:
            return False
        weights = filled.span_weights[at].as_py() or [1] * len(row.trained)
        return (
            filled.text[at].as_buffer().to_pybytes() == row.text
            and _pairs(filled.content_spans[at]) == row.content
            and _pairs(filled.trained_spans[at]) == [span[:2] for span in row.trained]
            and weights == _weights(row, raw)
        )

    def _render_rows(self, conversations: Conversations, rows: Ints) -> Texts:
        kept: list[int] = []
        rendered: list[RenderedRow] = []
        weights: list[float] = []
        refused: dict[int, Refusal] = {}
        notes: Counter[str] = Counter()
        chat = self._rows.sights.chat
        for row, (raw, tools_text) in zip(
            rows.tolist(), conversations.messages_of(rows), strict=True
        ):
            noted = Counter[str]()
            at(conversations.name_of(row))
            try:
                rendered.append(self._rows.render(raw, chat(raw), parse_tools(tools_text), noted))
            except RefusedError as error:
                refused[row] = error.refusal
                continue
            notes.update(noted)
            kept.append(row)
            weights += _weights(rendered[-1], raw)
        filled = Filled(
            np.array(kept, dtype=np.int64),
            pa.array([row.text for row in rendered], pa.string()),
            _lists([row.content for row in rendered]),
            _lists([[span[:2] for span in row.trained] for row in rendered]),
            weights_column(
                np.array(weights, np.float32),
                np.array([len(row.trained) for row in rendered], np.int64),
            ),
        )
        return Texts(filled, refused, notes)


class _Part:
    """A part that is being filled."""

    def __init__(self, rows: RowRenderer, conversations: Conversations, registry: Registry) -> None:
        self._rows, self._all = rows, conversations
        sights = rows.sights
        self._is_apart = sights.takes_calls_apart
        self.texts = LeafTexts(
            conversations,
            registry,
            makes_ids=sights.needs_call_ids,
            opens_tools=self._is_apart,
        )
        self.filling = Filling(conversations, self.texts)
        self.refused: dict[int, Refusal] = {}

    def noisy(self, column: Column) -> Bools:
        """Which texts of a column hold a control token."""
        return column.noisy(self._rows.control_texts)

    def example(self, row: int) -> tuple[Any, Any, list[Any] | None]:
        """Canonical messages, messages as the template gets them, and tools."""
        at(self._all.name_of(row))
        raw, tools = next(self._all.messages_of(np.array([row])))
        return raw, self._rows.sights.chat(raw), parse_tools(tools)

    def quiet(self, rows: Ints) -> Ints:
        """Rows of a shape that may be filled: where calls are taken apart, those without noise."""
        if not len(rows) or not self._is_apart:
            return rows
        _, messages, tools = self.example(int(rows[0]))
        if tools is None and not any("tool_calls" in message for message in messages):
            return rows
        return rows[self.texts.quiet(layout_of(messages, tools), rows, self.noisy)]

    def way_of(self, row: int) -> Way | None:
        """The way that one row takes through the template; None where it is not a simple one."""
        raw, messages, tools = self.example(row)
        sights = self._rows.sights
        traced = sights.by_trace(messages, tools)
        sight = traced or sights.by_both(messages, tools)
        if sight is None or not raw:
            return None
        unwritten = Counter[str]()
        layout = layout_of(messages, tools)
        try:
            marked, trained = self._rows.shown(raw, sight, unwritten)
        except LostError as error:
            return None if traced is None else _refusing_way(traced, layout, error)
        except (RefusedError, UnseenError):
            return None
        is_as_rendered = marked is sight.marked and not self._rows.rewrites
        trace = sight.asked if is_as_rendered else sight.trace
        if trace is None or not marked.parts or not _writes_tools(marked, layout):
            return None
        return make_way(layout, marked, trained, trace, unwritten["reasoning_not_rendered"])


def _refusing_way(sight: Sight, layout: Layout, error: LostError) -> Way | None:
    """The way of a row that was refused; None where the words may be others for other rows."""
    if error.loss is None or sight.trace is None or not _writes_tools(sight.marked, layout):
        return None  # whether tools that are not written matter, depends on their texts
    content = sight.messages[error.loss.message]["content"]
    return make_refusal(layout, error.loss, HAS_TAGS in content, sight.trace)


def _writes_tools(marked: Marked, layout: Layout) -> bool:
    """Whether each tool definition is written: whole, or at least its name."""
    holes = {part.hole.leaf for part in marked.parts if isinstance(part, TracedText) and part.hole}
    tools = [number for number, place in layout.items() if place.kind == "tool"]
    return all(
        holes & {number, ("tool", number, "function"), ("function", number, "name")}
        for number in tools
    )


def _weights(row: RenderedRow, raw: list[dict[str, Any]]) -> list[float]:
    """Weight of each trained span; `raw` are the messages."""
    return [1.0 if s.message < 0 else raw[s.message]["weight"] for s in row.trained]


def _pairs(spans: pa.Scalar) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in spans.as_py()]


def _lists(rows: list[list[tuple[int, int]]]) -> pa.Array:
    flat = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return span_lists(flat[:, 0], flat[:, 1], counts)
