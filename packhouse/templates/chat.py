r"""Chat templates: the tokenizer's own Jinja, or the user's, filled shape by shape.

Text is byte-equal to `apply_chat_template(messages, tools=tools, tokenize=False)`. What the
template gets is what transformers would give it: dicts with the keys that the row has. A context
is part of its turn: content + "\n" + context. Arguments of tool calls are parsed, reasoning is
`reasoning_content`. BOS is the template's business.

Rows that share a shape are filled by Arrow kernels (1 us a row, 30 to 80 times faster than
`apply_chat_template`; 45 us with tool calls). All others are rendered twice by Jinja, which costs
about twice what transformers takes. A row comes out the same either way.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.recipe import FormatConfig
from packhouse.span_weights import weights_column
from packhouse.templates.conversations import Conversations
from packhouse.templates.groups import Group, groups, parse_tools
from packhouse.templates.leaves import replace_ids, replace_leaves
from packhouse.templates.marks import MARKINGS
from packhouse.templates.renderer import Refusal, RefusedError, Texts
from packhouse.templates.rows import RenderedRow, RowRenderer
from packhouse.templates.segments import Filled, concat_filled, fill, span_lists
from packhouse.templates.shapes import CompiledShape, make_program
from packhouse.templates.thinking import has_thinking
from packhouse.templates.tracing import Check, Trace, is_traceable

__all__ = ["ChatEngine"]

MIN_SHAPE_ROWS = 8  # compiling a shape costs about as much as rendering this many rows
MAX_WAYS = 4  # rows of a shape to learn from before the rest is rendered one by one


class ChatEngine:
    """Renders conversations with one Jinja template."""

    def __init__(self, rows: RowRenderer, config: FormatConfig) -> None:
        self._rows = rows
        self._config = config
        self._compiled: dict[Hashable, list[CompiledShape]] = {}

    def render(self, conversations: Conversations) -> Texts:
        """Render shape by shape what can be, and all else row by row."""
        _ = self._rows.rules  # a template that cannot be used is refused before any row
        alone = np.ones(conversations.num_rows, dtype=bool)
        parts, notes = [], Counter[str]()
        if is_traceable(self._rows.template.ast):
            by_shape = self._by_shape(conversations)
            for group in groups(conversations, MIN_SHAPE_ROWS, by_shape, self._rows.chat):
                for part in self._fill_group(group, notes):
                    parts.append(part)
                    alone[part.rows] = False
        texts = self._render_rows(conversations, np.flatnonzero(alone))
        texts.filled = concat_filled([*parts, texts.filled])
        texts.notes.update(notes)
        return texts

    def _by_shape(self, conversations: Conversations) -> np.ndarray:
        """Rows whose shape may decide their spans; for others, texts or prompts do."""
        by_shape = np.full(conversations.num_rows, not self._config.one_example_per_turn)
        if MARKINGS[0] not in self._rows.markings:  # calls are taken to pieces
            by_shape &= conversations.is_plain
        if self._config.reasoning == "train_last":
            thinks = np.append(0, np.cumsum(has_thinking(conversations.values)))
            by_shape &= thinks[conversations.starts[1:]] == thinks[conversations.starts[:-1]]
        return by_shape

    def _fill_group(self, group: Group, notes: Counter[str]) -> Iterator[Filled]:
        """Fill the rows that known ways through the template fit; then learn further ways."""
        known = self._compiled.setdefault(group.key, [])
        untried, tries, rows = list(known), 0, group.rows
        while len(rows) >= MIN_SHAPE_ROWS and (untried or tries < MAX_WAYS):
            if untried:
                way = untried.pop(0)
                num_samples = 1
            else:
                tries, num_samples = tries + 1, 4
                learnt = self._compile(group, int(rows[tries - 1]))
                if learnt is None:
                    continue
                known.append(learnt)
                way = learnt
            fitting = way.fits(rows, group.column)
            if not fitting.any():
                continue
            some = rows[fitting]
            filled = fill(way.program, some, group.slots_of(some), group.weight_of(some))
            if not self._agrees(group, filled, num_samples):
                known.remove(way)
                return
            notes["reasoning_not_rendered"] += way.num_unwritten * len(filled.rows)
            yield filled
            rows, tries = rows[~fitting], 0

    def _compile(self, group: Group, row: int) -> CompiledShape | None:
        """The way that one row takes through the template; None where it is not a simple one."""
        raw, messages, tools = group.example(row)
        unwritten = Counter[str]()
        try:
            marked, marker = self._rows.marked(messages, tools, MARKINGS[:1])
            self._rows.check_nothing_lost(messages, tools, marked, marker.leaves, unwritten)
            trained = self._rows.trained(raw, marked, marker)
            trace = Trace()
            traced, traced_tools = replace_leaves(messages, tools, trace.leaf)
            replace_ids(traced, trace.untouchable)
            text = self._rows.template.render(traced, traced_tools, is_traced=True)
        except RefusedError:
            return None
        found = {occurrence.leaf for occurrence in marked.occurrences}
        all_tools = {n for n, leaf in enumerate(marker.leaves) if leaf.kind == "tools"} <= found
        if trace.is_opaque or text.encode() != marked.text or not all_tools:
            return None
        filled = Check("filled", None, True)
        checks = {n: frozenset(asked) for n, asked in enumerate(trace.checks) if asked}
        if group.needs_filled:
            checks = {n: frozenset({*trace.checks[n], filled}) for n in range(len(trace.checks))}
        program = make_program(marked.text, marked.occurrences, trained)
        return CompiledShape(program, checks, unwritten["reasoning_not_rendered"])

    def _agrees(self, group: Group, filled: Filled, num_samples: int) -> bool:
        """Whether some rows, rendered by Jinja, come out as they were filled."""
        last = len(filled.rows) - 1
        for at in sorted({last * sample // num_samples for sample in range(1, num_samples + 1)}):
            raw, messages, tools = group.example(int(filled.rows[at]))
            try:
                row = self._rows.render(raw, messages, tools, Counter())
            except RefusedError:
                return False
            weights = filled.span_weights[at].as_py() or [1] * len(row.trained)
            if (
                filled.text[at].as_buffer().to_pybytes() != row.text
                or _pairs(filled.content_spans[at]) != row.content
                or _pairs(filled.trained_spans[at]) != [span[:2] for span in row.trained]
                or weights != _weights(row, raw)
            ):
                return False
        return True

    def _render_rows(self, conversations: Conversations, rows: np.ndarray) -> Texts:
        kept: list[int] = []
        rendered: list[RenderedRow] = []
        weights: list[float] = []
        refused: dict[int, Refusal] = {}
        notes: Counter[str] = Counter()
        for row, (raw, tools_text) in zip(
            rows.tolist(), conversations.messages_of(rows), strict=True
        ):
            noted = Counter[str]()
            try:
                rendered.append(
                    self._rows.render(raw, self._rows.chat(raw), parse_tools(tools_text), noted)
                )
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


def _weights(row: RenderedRow, raw: list[dict[str, Any]]) -> list[float]:
    """Weight of each trained span; `raw` are the messages."""
    return [1.0 if s.message < 0 else raw[s.message]["weight"] for s in row.trained]


def _pairs(spans: pa.Scalar) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in spans.as_py()]


def _lists(rows: list[list[tuple[int, int]]]) -> pa.Array:
    flat = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return span_lists(flat[:, 0], flat[:, 1], counts)
