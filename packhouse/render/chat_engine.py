r"""Render conversations with a Jinja chat template, of the tokenizer or the user, shape by shape.

Text is byte-equal to `apply_chat_template(messages, tools=tools, tokenize=False)`. The template
gets the same input as from transformers: dicts with the keys that the row has. A context is part of
its turn: content + "\n" + context. Arguments of tool calls are parsed, and reasoning is passed as
`reasoning_content`. BOS is left to the template.

The first row of a shape is rendered by Jinja, which shows how the template writes it; the others
are filled in bulk, with or without tool calls. A row with a rare shape is rendered by itself, which
takes about twice as long as in transformers. The result is the same either way: for each new
compiled template, one more row is rendered by Jinja and compared.
"""

import json
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.records.arrays import Bools, Int64s, weights_column
from packhouse.records.conversation_shapes import DEFAULTS, Conversations, has_thinking
from packhouse.records.message_rules import ASSISTANT, num_bytes
from packhouse.render.compiled_shapes import (
    CompiledRow,
    FieldColumns,
    Filling,
    compile_row,
    new_numbers,
)
from packhouse.render.rendered_texts import (
    TEXTS,
    Filled,
    Refusal,
    RefusedError,
    Texts,
    concat_filled,
    span_lists,
)
from packhouse.render.row_renderer import RenderedRecord, RowRenderer
from packhouse.render.template_arguments import parse_template_arguments
from packhouse.render.template_probes import IN_TAGS
from packhouse.render.trained_answers import MAX_PROVEN
from packhouse.system.worker import at
from packhouse.tokenize.encoders import TokenLimit

MIN_SHAPE_ROWS = 4  # compiling and checking a shape renders two rows, so fewer do not pay off
MAX_COMPILED = 4  # attempts to compile a shape before its other rows are rendered one by one
MAX_SHAPES = 2**12  # shapes remembered between parts


# With shapes, 50,000 chats with tools take 4.6 times less CPU than `apply_chat_template` and the
# tokenizer. Below 35 rows of plain chats (200 with reasoning and tools) Jinja alone is faster, by
# at most 0.06 s.
class ChatEngine:
    """Renders conversations with one Jinja template."""

    def __init__(
        self, rows: RowRenderer, config: FormatConfig, limit: TokenLimit | None = None
    ) -> None:
        self._rows, self._config, self._limit = rows, config, limit
        self._numbers = new_numbers()
        self._compiled: dict[bytes, list[CompiledRow]] = {}  # by shape
        self._compiles = True
        self._is_checked = False

    @property
    def stop_tokens(self) -> Mapping[str, str]:
        """Tokens that end answers, with their sources; empty before the first rows."""
        is_known = self._is_checked and self._config.train_on != "all"
        return self._rows.facts.stop_sources if is_known else {}

    def render(self, conversations: Conversations) -> Texts:
        """Render shape by shape if possible, other rows one by one."""
        self._check(conversations)
        is_long = np.zeros(len(conversations.row), np.bool_)
        if self._limit:  # long rows with many answers, whose history templates may rewrite
            messages = conversations.messages
            size = num_bytes(messages.content) + num_bytes(messages.reasoning)
            is_answer = (messages.roles == ASSISTANT) & (conversations.weights > 0)
            is_long = messages.sums(size) > self._limit.max_tokens
            is_long &= messages.sums(is_answer) > MAX_PROVEN
            if self._config.turns == "joined" and is_long.any():  # only reasoning is left out
                is_long &= messages.sums(has_thinking(messages)) > 0
        filled, notes = concat_filled([]), Counter[str]()
        if self._compiles:
            filled, notes, samples = self._fill(conversations, is_long)
            # If the compiler is wrong about a sample, Jinja renders all rows.
            by_jinja = render_rows(self._rows, conversations, samples).filled
            taken = filled.take(np.flatnonzero(np.isin(filled.rows, samples)))
            if not (
                np.array_equal(taken.rows, by_jinja.rows)
                and np.array_equal(taken.extents, by_jinja.extents)
                and taken.texts.equals(by_jinja.texts)
            ):
                self._compiles = False
                return self.render(conversations)
        # Long rows are rendered alone, because records over the limit are only counted.
        alone = np.ones(len(conversations.row), np.bool_)
        alone[filled.rows] = False
        limits = dict.fromkeys(np.flatnonzero(is_long).tolist(), self._limit)
        texts = render_rows(self._rows, conversations, np.flatnonzero(alone), limits)
        texts.filled = concat_filled([some for some in (filled, texts.filled) if len(some.rows)])
        texts.notes.update(notes)
        # Rows with an argument that the template never looks up: {"enable_thinkin": true}
        arguments = Counter(conversations.arguments.drop_null().to_pylist())
        known = self._rows.template.names | {*DEFAULTS}
        unread = (n for text, n in arguments.items() if not known.issuperset(json.loads(text)))
        texts.notes["arguments_not_read"] += sum(unread)
        return texts

    def _check(self, conversations: Conversations) -> None:
        """Refuse a template that cannot be used, before any row.

        Raises:
            TemplateError: it cannot be used, or rows have reasoning and it never writes any.
        """
        if not self._is_checked:
            self._rows.check()
            self._is_checked = True
        config = self._config
        is_whole = config.turns == "whole" or config.train_on == "all"
        if is_whole or config.thought_end is not None or self._rows.facts.writes_thoughts:
            return
        messages = conversations.messages
        is_lost = (num_bytes(messages.reasoning) > 0) & (conversations.weights > 0)
        if is_lost.any():
            first = messages.rows[[np.argmax(is_lost)]]
            name, *_ = next(conversations.messages_of(first))
            # If every prompt opens a thought, an answer without one is refused, so `strip` does not
            # help. If no prompt opens one, format.thought_end would close a thought that never
            # began.
            strip = "set format.reasoning: strip to leave reasoning out"
            other = (
                "set format.thought_end to the text that goes between reasoning and answer "
                r'(DeepSeek R1: "\n</think>\n\n")'
                if self._rows.facts.can_open_thought
                else IN_TAGS
            )
            advice = other if self._rows.facts.needs_thought else f"{strip}, or {other}"
            raise TemplateError(
                f"{self._rows.template.where} never writes reasoning, but "
                f"{name} has some, so the model would learn to answer "
                f"without it. {advice[0].upper()}{advice[1:]}{self._rows.argument_advice}"
            )

    def _fill(
        self, conversations: Conversations, is_alone: Bools
    ) -> tuple[Filled, Counter[str], Int64s]:
        """Fill rows shape by shape, except those to be rendered alone and those of rare shapes.

        Returns:
            The filled rows, their counts, and a row of each new compiled template, ascending.
        """
        messages = conversations.messages
        columns = FieldColumns(conversations, self._numbers, form=lambda: self._rows.form)
        filling, notes = Filling(conversations, columns), Counter[str]()
        samples: list[int] = []
        is_odd = messages.has("part_weights")  # parts with weights: spans begin inside texts
        if self._config.reasoning == "train_last":  # the text of reasoning decides spans
            is_odd |= has_thinking(messages)
        for shape, rows in columns.shapes((messages.sums(is_odd) == 0) & ~is_alone):
            if len(rows) < MIN_SHAPE_ROWS:
                continue
            known, tries = self._compiled.setdefault(shape, []), 0
            untried = [*known]
            # If rows fit no known template, a new one is compiled from each of the first ones. Of
            # 100 rows, 60 answer the template's questions like the first: they are filled, and the
            # first of the other 40 is compiled.
            while len(rows):
                if untried:
                    compiled: CompiledRow | None = untried.pop(0)
                elif len(rows) >= MIN_SHAPE_ROWS and tries < min(MAX_COMPILED, len(rows)):
                    row = int(rows[tries])
                    compiled = self._compile(conversations, row)
                    tries += 1
                else:
                    break
                if compiled is None:
                    continue
                fitting = compiled.fits(rows, columns, self._rows.control_texts)
                taken = rows[fitting]
                if not len(taken):
                    continue
                for record in compiled.records:
                    filling.add(record, taken)
                notes.update({name: n * len(taken) for name, n in compiled.notes.items()})
                rows = rows[~fitting]
                if tries:
                    known.append(compiled)
                    samples += taken[taken != row][-1:].tolist()
                    tries = 0
        if max(len(self._compiled), len(self._numbers)) > MAX_SHAPES:
            self._numbers, self._compiled = new_numbers(), {}
        return filling.filled(), notes, np.array(sorted(samples), np.int64)

    def _compile(self, conversations: Conversations, row: int) -> CompiledRow | None:
        """Compile the template for the shape of this row; None if that is not possible."""
        name, raw, given = next(conversations.messages_of(np.array([row])))
        at(name)
        try:
            return compile_row(self._rows.render(raw, parse_template_arguments(*given)))
        except RefusedError:
            return None


def render_rows(
    renderer: RowRenderer,
    conversations: Conversations,
    rows: Int64s,
    limits: Mapping[int, TokenLimit | None] = {},
) -> Texts:
    """Render rows one by one with Jinja; `limits` are those of long rows."""
    if not len(rows):
        return Texts(concat_filled([]), {})
    kept: list[int] = []
    records: list[RenderedRecord] = []
    refused: dict[int, Refusal] = {}
    notes: Counter[str] = Counter()
    for row, each in zip(rows.tolist(), conversations.messages_of(rows), strict=True):
        name, raw, given = each
        at(name)
        try:
            done = renderer.render(raw, parse_template_arguments(*given), limits.get(row))
        except RefusedError as error:
            refused[row] = error.refusal
            continue
        notes.update(done.notes)
        kept += [row] * len(done.records)
        records += done.records
    trained = [record.trained for record in records]
    weights = np.array([span.weight for spans in trained for span in spans], np.float32)
    columns = [
        pa.array([record.rendering.text for record in records], pa.string()),
        _lists([each.content for each in records]),
        _lists([[span[:2] for span in spans] for spans in trained]),
        weights_column(weights, np.array([len(spans) for spans in trained], np.int64)),
    ]
    extents = np.fromiter((record.extent for record in records), np.object_)
    filled = Filled(np.array(kept, np.int64), extents, pa.table(columns, schema=TEXTS))
    return Texts(filled, refused, notes)


def _lists(rows: list[list[tuple[int, int]]]) -> pa.Array:
    flat = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return span_lists(flat[:, 0], flat[:, 1], counts)
