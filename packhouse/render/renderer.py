"""Render a validated table to a formatted one, with any kind of template.

An engine renders the rows that its template supports and refuses each other row with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` for tables of any size.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from packhouse.recipe import FormatConfig
from packhouse.records.conversations import Conversations, strip_thinking
from packhouse.records.identity import replace_rows, rewrites, take_records
from packhouse.records.messages import FlatMessages
from packhouse.records.render_counts import split_bytes
from packhouse.records.tables import FORMATTED, QUARANTINED, VALIDATED, refused_rows
from packhouse.render.chat import ChatEngine
from packhouse.render.results import TEXTS, Filled, Texts
from packhouse.render.single_turn import SingleTurnEngine
from packhouse.render.windows import WindowRule, split_to_windows
from packhouse.system.arrays import Int64s

PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
TURN_FACTOR = 4  # about how much larger a part may become as records of single turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Result of `Renderer.render`."""

    formatted: pa.Table = field(default_factory=FORMATTED.empty_table)
    """Schema FORMATTED, in the order of the input."""
    quarantined: pa.Table = field(default_factory=QUARANTINED.empty_table)
    """Schema QUARANTINED; the step adds the bytes of the rows."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts that are not errors, such as `reasoning_not_rendered`."""
    examples: pa.Table = field(default_factory=VALIDATED.empty_table)
    """Schema VALIDATED: the conversations that were rendered or refused. They differ from the input
    if thinking was stripped or rows were split."""
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens that end answers, with their sources."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Number of rows in excess of the input, by reason: `turns`, `windows`."""


class Renderer:
    """Renders conversations with one template. Created by `make_renderer`.

    The output for a row does not depend on the table's size or on other rows.
    """

    def __init__(
        self,
        engine: ChatEngine | SingleTurnEngine,
        config: FormatConfig,
        window: WindowRule | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._window = window

    def render(self, table: pa.Table) -> Rendered:
        """Render a VALIDATED table.

        Returns:
            Formatted and quarantined rows; together as many as the input and the added rows.

        Raises:
            TemplateError: the template itself cannot be used or proven, for any row.
        """
        factor = TURN_FACTOR if rewrites(self._config) else 1
        num_parts = max(factor * table.nbytes // PART_BYTES, table.num_rows // PART_ROWS) + 1
        step = max(-(-table.num_rows // num_parts), 1)
        done = [Rendered()]
        for start in range(0, table.num_rows, step):
            done += self._render_part(table.slice(start, step))
        rendered = Rendered(
            formatted=pa.concat_tables(each.formatted for each in done),
            quarantined=pa.concat_tables(each.quarantined for each in done),
            examples=pa.concat_tables(each.examples for each in done),
            notes=_total(each.notes for each in done),
            added=_total(each.added for each in done),
            stop_tokens=self._engine.stop_tokens,
        )
        num_out = rendered.formatted.num_rows + rendered.quarantined.num_rows
        assert num_out == table.num_rows + sum(rendered.added.values())
        return rendered

    def _render_part(self, part: pa.Table) -> Iterator[Rendered]:
        part, faults = strip_thinking(part, self._config)
        whole = part
        if faults:  # answers that are only thinking, or whose thinking does not end
            is_bad = np.isin(np.arange(part.num_rows), list(faults))
            bad = refused_rows(part, faults, "format")
            yield Rendered(quarantined=bad, examples=part.filter(pa.array(is_bad)))
            part = part.filter(pa.array(~is_bad))
        added = Counter[str]()
        records, texts = self._records(part)
        over = self._over(records, texts)
        if len(over):
            windows, origin = self._windows(part.take(pa.array(over)))
            added["windows"] = windows.num_rows - len(over)
            part = replace_rows(part, over, windows, origin)
            records, texts = self._records(part)
        rows = texts.filled.rows
        formatted = _formatted(records, texts.filled)
        added["turns"] = int(np.count_nonzero(np.diff(rows) == 0))  # rows are ascending
        notes = texts.notes + Counter(windowed_rows=len(over))
        if added["turns"] and self._window is None:
            notes.update(split_bytes(whole, formatted))
        examples, refused = records, np.array(sorted(texts.refused), np.int64)
        if len(refused):
            order = np.argsort(np.concatenate([rows, refused]), kind="stable")
            bad = part.take(pa.array(refused))
            examples = pa.concat_tables([records, bad]).unify_dictionaries().take(pa.array(order))
        yield Rendered(
            formatted=formatted,
            quarantined=refused_rows(part, texts.refused, "format"),
            examples=examples,
            notes=notes,
            added=added,
        )

    def _over(self, records: pa.Table, texts: Texts) -> Int64s:
        """Return the rows with a record that is too long."""
        rows = texts.filled.rows
        if self._window is None or not len(rows):
            return rows[:0]
        return np.unique(rows[self._window.over(_formatted(records, texts.filled))])

    def _records(self, part: pa.Table) -> tuple[pa.Table, Texts]:
        """Return the conversation and the text of each record."""
        conversations = Conversations.from_table(part, self._config)
        texts = self._engine.render(conversations)
        filled = texts.filled
        if filled.extents.any():
            # Extents count the recipe's system turn, which is not a message of the row.
            own = FlatMessages.of(part["messages"])
            added = conversations.messages.counts - own.counts
            each = zip(filled.extents, added[filled.rows].tolist(), strict=True)
            extents = np.fromiter((own and own.without_first(n) for own, n in each), np.object_)
            return take_records(part, filled.rows, extents, self._config), texts
        is_same = len(filled.rows) == part.num_rows
        return (part if is_same else part.take(pa.array(filled.rows))), texts

    def _windows(self, over: pa.Table) -> tuple[pa.Table, np.ndarray]:
        """Return the windows of over-long conversations, and the row that each comes from."""

        def fits(talks: pa.Table) -> np.ndarray:
            records, texts = self._records(talks)
            fitting = np.setdiff1d(texts.filled.rows, self._over(records, texts))
            return np.isin(np.arange(talks.num_rows), fitting)

        return split_to_windows(over, self._config, fits)


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter[str]()).items()))


def _formatted(records: pa.Table, filled: Filled) -> pa.Table:
    columns = [
        filled.texts[name] if name in TEXTS.names else records[name] for name in FORMATTED.names
    ]
    return pa.table(columns, schema=FORMATTED)
