"""From a validated table to a formatted one: what every template shares.

A template is an `Engine`: it renders what it can and refuses the rest, row by row, with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` whatever the table.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.records.conversations import Conversations
from packhouse.records.excerpts import rewrites, take_records
from packhouse.records.lists import list_items
from packhouse.records.tables import FORMATTED, QUARANTINED, VALIDATED, refused_rows
from packhouse.records.thinking import strip_thinking
from packhouse.templates.results import Filled, Texts
from packhouse.templates.windows import WindowRule, split_to_windows

PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
TURN_FACTOR = 4  # about how much larger a part may become as records of single turns


class Engine(Protocol):
    """One template, ready to render."""

    @property
    def stop_tokens(self) -> Mapping[str, str]:
        """Tokens that end answers, and where each is from; empty if the template decides."""
        ...

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
    stop_tokens: Mapping[str, str]
    """Tokens that end answers, and where each is from."""
    added: dict[str, int]
    """Rows beyond one for each that came in, by reason: `turns`, `windows`."""


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
        part_bytes = PART_BYTES // (TURN_FACTOR if rewrites(self._config) else 1)
        for part in _parts(table, part_bytes):
            num_turns = done.added["turns"]
            rows, refused = strip_thinking(part, self._config)
            if refused:  # answers whose thinking leaves nothing, or does not end
                is_kept = np.ones(rows.num_rows, np.bool_)
                is_kept[list(refused)] = False
                done.quarantined.append(refused_rows(rows, refused, "format"))
                done.examples.append(rows.filter(pa.array(~is_kept)))
                rows = rows.filter(pa.array(is_kept))
            self._render_part(rows, done)
            if done.added["turns"] > num_turns and self._window is None:
                done.notes.update(_split_bytes(part, done.formatted[-1]))
        rendered = done.rendered(self._engine.stop_tokens)
        num_out = rendered.formatted.num_rows + rendered.quarantined.num_rows
        assert num_out == table.num_rows + sum(rendered.added.values())
        return rendered

    def _render_part(self, part: pa.Table, done: "_Done") -> None:
        records, texts = self._records(part)
        if self._window is not None and texts.filled.rows.size:
            over = self._window.over(_formatted(records, texts.filled))
            if over.any():
                rows = np.unique(texts.filled.rows[over])
                windows, origin = self._windows(part.take(pa.array(rows)))
                done.added["windows"] += windows.num_rows - len(rows)
                done.notes["windowed_rows"] += len(rows)
                part = _replaced(part, rows, windows, origin)
                records, texts = self._records(part)
        if (num_added := len(texts.filled.rows) - len(np.unique(texts.filled.rows))) > 0:
            done.added["turns"] += num_added
        refused = np.array(sorted(texts.refused), np.int64)
        places = np.concatenate([texts.filled.rows, refused])
        whole = pa.concat_tables([records, part.take(pa.array(refused))]).unify_dictionaries()
        done.examples.append(whole.take(pa.array(np.argsort(places, kind="stable"))))
        done.formatted.append(_formatted(records, texts.filled))
        done.quarantined.append(refused_rows(part, texts.refused, "format"))
        done.notes.update(texts.notes)

    def _records(self, part: pa.Table) -> tuple[pa.Table, Texts]:
        """Conversation and text of each record."""
        conversations = Conversations.from_table(part, self._config)
        texts = self._engine.render(conversations)
        filled = texts.filled
        if any(extent is not None for extent in filled.extents):
            # The recipe's system turn, which counts in the extents, is no message of the row.
            _, starts = list_items(part["messages"])
            added = np.diff(conversations.starts) - np.diff(starts)
            extents = [
                extent and extent.without_first(count)
                for extent, count in zip(filled.extents, added[filled.rows].tolist(), strict=True)
            ]
            return take_records(part, filled.rows, extents, self._config), texts
        is_same = len(filled.rows) == part.num_rows
        return (part if is_same else part.take(pa.array(filled.rows))), texts

    def _windows(self, over: pa.Table) -> tuple[pa.Table, np.ndarray]:
        """Windows of conversations that are too long, and the row that each comes from."""

        def fits(talks: pa.Table) -> np.ndarray:
            assert self._window is not None
            records, texts = self._records(talks)
            rows = texts.filled.rows
            fitting = np.zeros(talks.num_rows, np.bool_)
            fitting[rows] = True
            fitting[rows[self._window.over(_formatted(records, texts.filled))]] = False
            return fitting

        return split_to_windows(over, self._config, fits)


def _split_bytes(part: pa.Table, formatted: pa.Table) -> dict[str, int]:
    """Bytes of the records of rows that were split, and of one rendering for each such row.

    The record of a row's last answer holds the conversation up to there, so it stands for that
    rendering. Message trees, whose paths share a row, are left out.
    """
    lines, num_conversations = np.unique(part["row"].to_numpy(), return_counts=True)
    is_alone = np.isin(formatted["row"].to_numpy(), lines[num_conversations == 1])
    records = formatted.filter(pa.array(is_alone))
    rows, row, counts = np.unique(
        records["row"].to_numpy(), return_inverse=True, return_counts=True
    )
    sizes = np.asarray(pc.binary_length(records["text"]), np.int64)
    longest = np.zeros(len(rows), np.int64)
    np.maximum.at(longest, row, sizes)
    is_split = counts > 1
    return {
        "split_bytes": int(sizes[is_split[row]].sum()),
        "whole_bytes": int(longest[is_split].sum()),
    }


@dataclass(slots=True)
class _Done:
    """Results of the parts so far."""

    formatted: list[pa.Table] = field(default_factory=list)
    quarantined: list[pa.Table] = field(default_factory=list)
    examples: list[pa.Table] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)

    def rendered(self, stop_tokens: Mapping[str, str]) -> Rendered:
        return Rendered(
            stop_tokens=stop_tokens,
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


def _formatted(records: pa.Table, filled: Filled) -> pa.Table:
    own = {
        "text": filled.text,
        "content_spans": filled.content_spans,
        "trained_spans": filled.trained_spans,
        "span_weights": filled.span_weights,
    }
    columns = [own.get(name, None) for name in FORMATTED.names]
    return pa.table(
        [
            records.column(name) if column is None else column
            for name, column in zip(FORMATTED.names, columns, strict=True)
        ],
        schema=FORMATTED,
    )
