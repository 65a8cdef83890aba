r"""Chat templates: the tokenizer's own Jinja, or the user's, filled shape by shape.

Text is byte-equal to `apply_chat_template(messages, tools=tools, tokenize=False)`. What the
template gets is what transformers would give it: dicts with the keys that the row has. A context
is part of its turn: content + "\n" + context. Arguments of tool calls are parsed, reasoning is
`reasoning_content`. BOS is the template's business.

The first row of a shape goes through Jinja and shows what the template does with its kind; the
others are filled in bulk, with tool calls or without. A row whose shape no other row has is
rendered alone, which costs about twice what transformers takes. A row comes out the same either
way: of what is new, some rows go through Jinja as well, as a proof.
"""

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.arrays import Int64s
from packhouse.recipe import FormatConfig
from packhouse.records.span_weights import weights_column
from packhouse.runtime.confined import at
from packhouse.templates.chat_messages import Given, parse_given
from packhouse.templates.compiled import (
    CompiledTemplate,
    Filling,
    compile_refusal,
    compile_row,
)
from packhouse.templates.conversations import DEFAULTS, Conversations
from packhouse.templates.field_columns import FieldColumns, Numbers
from packhouse.templates.losses import LostError
from packhouse.templates.results import (
    Filled,
    Refusal,
    RefusedError,
    Texts,
    concat_filled,
    span_lists,
)
from packhouse.templates.rows import RenderedRow, RowRenderer
from packhouse.templates.thinking import has_thinking

MIN_SHAPE_ROWS = 2  # a shape of one row is rendered, and done
MAX_COMPILED = 4  # rows of a shape to learn from in vain before the rest is rendered one by one
MAX_SHAPES = 2**12  # that are remembered from one part to the next
MIN_PROVEN_ROWS = 16  # rows of a compiled template that are worth a proof of its own
NUM_PROVEN = 8  # compiled templates of each part that are proven, however few their rows


class _Known:
    """Shapes seen so far, and what the template does with each."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.compiled: dict[bytes, list[CompiledTemplate]] = {}


class ChatEngine:
    """Renders conversations with one Jinja template."""

    def __init__(self, rows: RowRenderer, config: FormatConfig) -> None:
        self._rows = rows
        self._config = config
        self._known = _Known()
        self._is_proven = True

    def render(self, conversations: Conversations) -> Texts:
        """Render shape by shape what can be, and all else row by row."""
        self._rows.rules({})  # a template that cannot be used is refused before any row
        part = _Part(self._rows, self._config, conversations, self._known)
        if self._is_proven:
            part.fill()
            if max(len(self._known.compiled), len(self._known.numbers)) > MAX_SHAPES:
                self._known = _Known()
        filled = part.filling.filled()
        if not part.is_proven(filled):  # never seen: then each row goes through Jinja
            self._is_proven = False
            part = _Part(self._rows, self._config, conversations, self._known)
            filled = part.filling.filled()
        alone = np.ones(conversations.num_rows, np.bool_)
        alone[filled.rows] = False
        alone[list(part.refused)] = False
        texts = self._render_rows(conversations, np.flatnonzero(alone))
        texts.filled = concat_filled([some for some in (filled, texts.filled) if len(some.rows)])
        texts.refused |= part.refused
        texts.notes.update(part.notes)
        # Rows with an argument that the template never looks up: {"enable_thinkin": true}
        arguments = Counter(conversations.arguments.drop_null().to_pylist())
        known = self._rows.template.names | {*DEFAULTS}
        texts.notes["arguments_not_read"] += sum(
            n for text, n in arguments.items() if not known.issuperset(json.loads(text))
        )
        return texts

    def _render_rows(self, conversations: Conversations, rows: Int64s) -> Texts:
        kept: list[int] = []
        rendered: list[RenderedRow] = []
        refused: dict[int, Refusal] = {}
        notes: Counter[str] = Counter()
        pairs = zip(rows.tolist(), conversations.messages_of(rows), strict=True)
        for row, (raw, given) in pairs:
            at(conversations.name_of(row))
            try:
                done = self._rows.render(raw, self._rows.chat(raw), parse_given(*given))
            except RefusedError as error:
                refused[row] = error.refusal
                continue
            notes["reasoning_not_rendered"] += done.num_unwritten
            kept.append(row)
            rendered.append(done)
        filled = Filled(
            np.array(kept, dtype=np.int64),
            pa.array([row.rendering.text for row in rendered], pa.string()),
            _lists([row.content for row in rendered]),
            _lists([[span[:2] for span in row.trained] for row in rendered]),
            weights_column(
                np.array([s.weight for row in rendered for s in row.trained], np.float32),
                np.array([len(row.trained) for row in rendered], np.int64),
            ),
        )
        return Texts(filled, refused, notes)


class _Part:
    """A part that is being filled: rows whose shape others have, too; the rest is left."""

    def __init__(
        self, rows: RowRenderer, config: FormatConfig, conversations: Conversations, known: _Known
    ) -> None:
        self._rows, self._config, self._all, self._known = rows, config, conversations, known
        self._columns = FieldColumns(conversations, known.numbers, form=lambda: rows.form)
        self._learnt: list[Int64s] = []
        """Rows of each compiled template that is new."""
        self.filling = Filling(conversations, self._columns)
        self.refused: dict[int, Refusal] = {}
        self.notes: Counter[str] = Counter()

    def fill(self) -> None:
        """Fill, or refuse, rows shape by shape."""
        by_shape = np.ones(self._all.num_rows, np.bool_)
        if self._config.reasoning == "train_last":  # texts of thoughts decide spans
            # Messages [0 0 1 | 0 0] think, rows start at [0 3 5]: counts [0 0 0 1 1 1] at the
            # starts are [0 1 1], so row 0 has one more than before it, and row 1 none.
            thinks = np.append(0, np.cumsum(has_thinking(self._all.values)))
            by_shape = np.diff(thinks[self._all.starts]) == 0
        parts = self._all.values.field("part_weights")
        if parts.null_count < len(parts):  # spans begin inside of texts
            weighed = np.append(0, np.cumsum(parts.is_valid().to_numpy(zero_copy_only=False)))
            by_shape &= np.diff(weighed[self._all.starts]) == 0
        for shape, rows in self._columns.shapes(by_shape):
            if len(rows) >= MIN_SHAPE_ROWS:
                self._fill_shape(self._known.compiled.setdefault(shape, []), rows)

    def _fill_shape(self, known: list[CompiledTemplate], rows: Int64s) -> None:
        """Fill what known compiled templates fit, and learn further ones from the rest."""
        tries = 0
        for compiled in known:
            if len(rows):
                rows = self._fill_fitting(compiled, rows)[1]
        while len(rows) >= MIN_SHAPE_ROWS and tries < min(MAX_COMPILED, len(rows)):
            tries += 1
            found = self._compile(int(rows[tries - 1]))
            if found is None:
                continue
            taken, others = self._fill_fitting(found, rows)
            if len(taken):
                known.append(found)
                self._learnt.append(taken)
                rows, tries = others, 0

    def _fill_fitting(self, compiled: CompiledTemplate, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Fill (or refuse) the rows that fit; returns them and the others."""
        fitting = compiled.fits(rows, self._columns, self._rows.control_texts)
        taken, loss = rows[fitting], compiled.loss
        if loss is not None:
            path = ("content", loss.message)
            texts = self._columns.column(path).texts
            contents = texts.take(pa.array(self._columns.rows_of(path, taken))).to_pylist()
            for row, content in zip(taken.tolist(), contents, strict=True):
                self.refused[row] = loss.of(content).refusal
        elif len(taken):
            self.filling.add(compiled, taken)
            self.notes["reasoning_not_rendered"] += compiled.num_unwritten * len(taken)
        return taken, rows[~fitting]

    def _compile(self, row: int) -> CompiledTemplate | None:
        """What the template does with rows like this one; None where only Jinja can tell."""
        raw, messages, given = self._example(row)
        try:
            done = self._rows.render(raw, messages, given)
        except LostError as error:
            if error.loss is None or error.asked is None:
                return None  # the words may be others for other rows
            content = messages[error.loss.message]["content"]
            return compile_refusal(error.loss, content, error.asked)
        except RefusedError:
            return None
        return compile_row(done)

    def _example(self, row: int) -> tuple[Any, Any, Given]:
        """Canonical messages, messages as the template gets them, tools and arguments."""
        at(self._all.name_of(row))
        raw, given = next(self._all.messages_of(np.array([row])))
        return raw, self._rows.chat(raw), parse_given(*given)

    def is_proven(self, filled: Filled) -> bool:
        """Return True if rows of new compiled templates come out of Jinja as they were filled.

        Rows that were refused: if Jinja alone leads to the same words.
        """
        for number, rows in enumerate(self._learnt):
            last, num_samples = len(rows) - 1, 1 if len(rows) < 64 else 4
            if number >= NUM_PROVEN and len(rows) < MIN_PROVEN_ROWS:
                continue
            # The first row is the one that the template was compiled from. Of 100 rows: 24, 49, 74
            # and 99.
            samples = {last * sample // num_samples for sample in range(1, num_samples + 1)}
            if not all(self._agrees(filled, int(rows[sample])) for sample in sorted(samples)):
                return False
        return True

    def _agrees(self, filled: Filled, row: int) -> bool:
        raw, messages, given = self._example(row)
        try:
            done = self._rows.render(raw, messages, given)
        except RefusedError as error:
            return error.refusal == self.refused.get(row)
        if row in self.refused:
            return False
        place = int(np.searchsorted(filled.rows, row))
        weights = filled.span_weights[place].as_py() or [1] * len(done.trained)
        return (
            filled.text[place].as_buffer().to_pybytes() == done.rendering.text
            and _pairs(filled.content_spans[place]) == done.content
            and _pairs(filled.trained_spans[place]) == [span[:2] for span in done.trained]
            and weights == [span.weight for span in done.trained]
        )


def _pairs(spans: pa.Scalar) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in spans.as_py()]


def _lists(rows: list[list[tuple[int, int]]]) -> pa.Array:
    flat = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return span_lists(flat[:, 0], flat[:, 1], counts)
