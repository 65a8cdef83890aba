"""From a validated table to a formatted one: what every template shares.

A template is an `Engine`: it renders what it can and refuses the rest, row by row, with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` whatever the table.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from packhouse.recipe import FormatConfig
from packhouse.records.tables import FORMATTED, QUARANTINED, VALIDATED, refused_rows
from packhouse.templates.conversations import Conversations
from packhouse.templates.examples import WindowRule, make_examples, split_to_windows
from packhouse.templates.results import Filled, Refusal, Texts

PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
TURN_FACTOR = 16  # about how much larger a part may become as examples of single turns


_OF_THINKING = {
    "only_thinking": "nothing of an answer is left without its thinking; see format.reasoning",
    "unclosed_thinking": "an answer has a `<think>` that nothing closes, so what was thought and "
    "what was said cannot be told apart; mend it, or give it the weight 0",
}


class Engine(Protocol):
    """One template, ready to render."""

    def render(self, conversations: Conversations) -> Texts:
        """Render every row or refuse it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The outcome of `Renderer.render`."""

    formatted: pa.Table
    """Schema FORMATTED, in the order of the input."""
    quarantined: pa.Table
    """Schema QUARANTINED, in the order of the input; the step puts in the bytes of the rows."""
    notes: dict[str, int]
    """Counts worth knowing that are no errors, such as `reasoning_not_rendered`."""
    examples: pa.Table
    """Schema VALIDATED: the conversations that were rendered (or refused), row by row; other than
    those that came in where thinking was stripped or rows were split."""
    added: dict[str, int]
    """Rows beyond one for each that came in, by reason: `turn_examples`, `windows`."""


class Renderer:
    """Renders conversations with one template; made by `make_renderer`.

    Output depends on the row alone: neither the table's size nor the other rows change it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        identity: str,
        config: FormatConfig,
        window: WindowRule | None = None,
    ) -> None:
        self.identity = identity
        self._engine = engine
        self._config = config
        self._window = window

    def render(self, table: pa.Table) -> Rendered:
        """Render a VALIDATED table.

        Returns:
            Formatted and quarantined rows; together as many as came in and were added.

        Raises:
            TemplateError: the template itself cannot be used or proven, whatever the row.
        """
        done = _Done()
        part_bytes = PART_BYTES // (TURN_FACTOR if self._config.one_example_per_turn else 1)
        for part in _parts(table, part_bytes):
            examples = make_examples(part, self._config)
            done.added["turn_examples"] += examples.num_added
            rows = examples.table
            if examples.refused:  # answers whose thinking leaves nothing, or does not end
                is_kept = np.ones(rows.num_rows, np.bool_)
                is_kept[list(examples.refused)] = False
                why = {
                    row: Refusal(code, _OF_THINKING[code]) for row, code in examples.refused.items()
                }
                done.quarantined.append(refused_rows(rows, why, "format"))
                done.examples.append(rows.filter(pa.array(~is_kept)))
                rows = rows.filter(pa.array(is_kept))
            self._render_part(rows, done)
        rendered = done.rendered()
        num_out = rendered.formatted.num_rows + rendered.quarantined.num_rows
        assert num_out == table.num_rows + sum(rendered.added.values())
        return rendered

    def _render_part(self, part: pa.Table, done: "_Done") -> None:
        texts = self._engine.render(Conversations.from_table(part, self._config))
        formatted = _formatted(part, texts.filled)
        if self._window is not None and formatted.num_rows:
            over = self._window.over(formatted)
            if over.any():
                rows = texts.filled.rows[over]
                windows, origin = self._windows(part.take(pa.array(rows)))
                done.added["windows"] += windows.num_rows - len(rows)
                done.notes["windowed_rows"] += len(rows)
                part = _replaced(part, rows, windows, origin)
                texts = self._engine.render(Conversations.from_table(part, self._config))
                formatted = _formatted(part, texts.filled)
        done.examples.append(part)
        done.formatted.append(formatted)
        done.quarantined.append(refused_rows(part, texts.refused, "format"))
        done.notes.update(texts.notes)

    def _windows(self, over: pa.Table) -> tuple[pa.Table, np.ndarray]:
        """Windows of conversations that are too long, and the row that each comes from."""

        def fits(talks: pa.Table) -> np.ndarray:
            assert self._window is not None
            texts = self._engine.render(Conversations.from_table(talks, self._config))
            fitting = np.zeros(talks.num_rows, np.bool_)
            formatted = _formatted(talks, texts.filled)
            fitting[texts.filled.rows] = ~self._window.over(formatted)
            return fitting

        return split_to_windows(over, self._config, fits)


@dataclass(slots=True)
class _Done:
    """Results of the parts so far."""

    formatted: list[pa.Table] = field(default_factory=list)
    quarantined: list[pa.Table] = field(default_factory=list)
    examples: list[pa.Table] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)

    def rendered(self) -> Rendered:
        return Rendered(
            formatted=pa.concat_tables([FORMATTED.empty_table(), *self.formatted]),
            quarantined=pa.concat_tables([QUARANTINED.empty_table(), *self.quarantined]),
            notes={name: count for name, count in sorted(self.notes.items()) if count},
            examples=pa.concat_tables([VALIDATED.empty_table(), *self.examples]),
            added={name: count for name, count in sorted(self.added.items()) if count},
        )


def _replaced(part: pa.Table, rows: np.ndarray, windows: pa.Table, origin: np.ndarray) -> pa.Table:
    """The part with some of its rows replaced by their windows, in order."""
    # Row 1 of 3 becomes two windows: places [0, 2, 1, 1] sort to [row 0, window, window, row 2].
    kept = np.setdiff1d(np.arange(part.num_rows), rows)
    places = np.concatenate([kept, rows[origin]])
    whole = pa.concat_tables([part.take(pa.array(kept)), windows]).unify_dictionaries()
    return whole.take(pa.array(np.argsort(places, kind="stable"))).combine_chunks()


def digest(*parts: str) -> str:
    """sha256 over texts, each preceded by its length, so that no two lists collide."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def _parts(table: pa.Table, part_bytes: int) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    by_size = -(-table.nbytes // part_bytes)
    by_rows = -(-table.num_rows // PART_ROWS)
    step = -(-table.num_rows // max(by_size, by_rows, 1))
    for start in range(0, table.num_rows, step):
        yield table.slice(start, step)


def _formatted(part: pa.Table, filled: Filled) -> pa.Table:
    kept = part if len(filled.rows) == part.num_rows else part.take(pa.array(filled.rows))
    own = {
        "text": filled.text,
        "content_spans": filled.content_spans,
        "trained_spans": filled.trained_spans,
        "span_weights": filled.span_weights,
    }
    columns = [own.get(name, None) for name in FORMATTED.names]
    return pa.table(
        [kept.column(n) if c is None else c for n, c in zip(FORMATTED.names, columns, strict=True)],
        schema=FORMATTED,
    )
