"""Render a validated table to a formatted one, with any kind of template.

An engine renders the rows that its template supports and refuses each other row with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` for tables of any size.

Conversations that are too long for a pack can be split into windows that fit. A window is a run of
exchanges (a user turn and all up to the next) after the system prompt, which each window repeats.
Windows are filled from the end, so that the last answer has as much context as fits. Each trained
message is trained in exactly one window, and a window with nothing trained is left out. An exchange
that does not fit even by itself becomes a window, which pack drops and counts. The template renders
each window as a conversation, so this works with any template, and lengths are counted in real
tokens. A long row is rendered and tokenized about 2 log2(exchanges) times per window.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.records.conversations import Conversations, strip_thinking
from packhouse.records.identity import derive, replace_rows, rewrites, take_records
from packhouse.records.messages import FlatMessages
from packhouse.records.tables import FORMATTED, QUARANTINED, VALIDATED, refused_rows, with_column
from packhouse.render.chat import ChatEngine
from packhouse.render.results import TEXTS, Texts
from packhouse.render.single_turn import SingleTurnEngine
from packhouse.system.arrays import Bools, Float32s, Int64s
from packhouse.tokenize import TokenizerSnapshot, tokenize_table

# Memory is a few times this for tables of any size.
PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
TURN_FACTOR = 4  # about how much larger a part may become as records of single turns

Window = tuple[int, int, int]
"""Row, and its first and last exchange, both inclusive."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Decides which conversations fit in one window."""

    seq_len: int
    """Maximum number of tokens in a window."""
    snapshot: TokenizerSnapshot
    config: TokenizeConfig
    cut_at_spans: bool
    """See `tokenize_table`."""
    cache: Path | None = None
    """Folder of tokenizer snapshots."""

    def num_tokens(self, formatted: pa.Table) -> Int64s:
        """Return the number of tokens in each row of a FORMATTED table; -1 if it is refused."""
        # Several records may share a row, so number them: refused ones are missing below.
        numbers = pa.array(np.arange(formatted.num_rows))
        numbered = with_column(formatted, "row", numbers)
        tokenized = tokenize_table(
            numbered, self.snapshot, self.config, self.cache, cut_at_spans=self.cut_at_spans
        ).tokenized
        lengths = np.full(formatted.num_rows, -1, np.int64)
        lengths[tokenized["row"].to_numpy()] = tokenized["num_tokens"].to_numpy()
        return lengths

    def over(self, formatted: pa.Table) -> Bools:
        """Return which rendered rows are too long."""
        # Most fit by their bytes and are not tokenized. A token covers at least one byte, and a
        # tokenizer adds fewer than 8: a text of 1,500 bytes has at most 1,508 and fits into 2,048.
        num_bytes = pc.binary_length(formatted.column("text")).to_numpy()
        over = num_bytes + 8 > self.seq_len
        if over.any():
            over[over] = self.num_tokens(formatted.filter(pa.array(over))) > self.seq_len
        return np.asarray(over)


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
        added, over = Counter[str](), np.zeros(0, np.int64)
        records, formatted, texts = self._records(part)
        if self._window is not None:
            over = np.unique(texts.filled.rows[self._window.over(formatted)])
            if len(over):
                windows, origin = self._windows(part.take(pa.array(over)), self._window)
                added["windows"] = windows.num_rows - len(over)
                part = replace_rows(part, over, windows, origin)
                records, formatted, texts = self._records(part)
        rows = texts.filled.rows
        added["turns"] = int(np.count_nonzero(np.diff(rows) == 0))  # rows are ascending
        notes = texts.notes + Counter(windowed_rows=len(over))
        if added["turns"] and self._window is None:
            notes["repeated_bytes"] += _repeated_bytes(whole, formatted)
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

    def _records(self, part: pa.Table) -> tuple[pa.Table, pa.Table, Texts]:
        """Return the conversation and the formatted row of each record, and the engine's result."""
        conversations = Conversations.from_table(part, self._config)
        texts = self._engine.render(conversations)
        filled, records = texts.filled, part
        if filled.extents.any():
            # Extents count the recipe's system turn, which is not a message of the row.
            own = FlatMessages.of(part["messages"])
            added = conversations.messages.counts - own.counts
            each = zip(filled.extents, added[filled.rows].tolist(), strict=True)
            extents = np.fromiter((own and own.without_first(n) for own, n in each), np.object_)
            records = take_records(part, filled.rows, extents, self._config)
        elif len(filled.rows) < part.num_rows:
            records = part.take(pa.array(filled.rows))
        columns = [
            filled.texts[name] if name in TEXTS.names else records[name] for name in FORMATTED.names
        ]
        return records, pa.table(columns, schema=FORMATTED), texts

    def _windows(self, table: pa.Table, rule: WindowRule) -> tuple[pa.Table, Int64s]:
        """Split over-long conversations into windows.

        Returns:
            The windows (schema VALIDATED), and the row of `table` that each comes from, ascending.
        """
        flat = FlatMessages.of(table["messages"])
        starts, weights, roles = (
            flat.offsets,
            flat.decide_weights(self._config),
            flat["role"].to_pylist(),
        )
        edges: list[list[int]] = []  # of each row: start of each exchange, and end of the last
        for start, end in pairwise(starts.tolist()):
            first = start + (roles[start] == "system")
            # Several user turns in a row begin one exchange, because the answer is to all of them.
            begins = (
                at
                for at in range(first + 1, end)
                if roles[at] == "user" and roles[at - 1] != "user"
            )
            edges.append([first, *begins, end])

        def cut(windows: Sequence[Window]) -> pa.Table:
            """Return windows as conversations; only a row's first one trains the system turn."""
            ranges, own_weights = list[list[tuple[int, int]]](), list[Float32s | None]()
            for row, first, last in windows:
                head = int(starts[row]), edges[row][0]
                body = edges[row][first], edges[row][last + 1]
                own = [weights[slice(*head)] * (first == 0), weights[slice(*body)]]
                is_whole = body == (edges[row][0], edges[row][-1])
                ranges.append([head, body])
                own_weights.append(None if is_whole else np.concatenate(own))
            rows = np.array([row for row, _, _ in windows], np.int64)
            return derive(table, self._config, rows, ranges, own_weights)

        def fit(windows: Sequence[Window]) -> list[bool]:
            """Return which windows can be rendered and are short enough."""
            _, formatted, texts = self._records(cut(windows))
            rows = texts.filled.rows
            fitting = np.setdiff1d(rows, rows[rule.over(formatted)])
            return [bool(fits) for fits in np.isin(np.arange(len(windows)), fitting)]

        windows = [
            (row, first, last)
            for row, first, last in _fill_windows([len(own) - 1 for own in edges], fit)
            if (weights[edges[row][first] : edges[row][last + 1]] > 0).any()
        ]
        return cut(windows), np.array([row for row, _, _ in windows], np.int64)


def _repeated_bytes(part: pa.Table, formatted: pa.Table) -> int:
    """Return the bytes of the records of split rows, without the longest record of each row."""
    texts = pa.table({"row": formatted["row"], "size": pc.binary_length(formatted["text"])})
    sizes = texts.group_by("row").aggregate([("size", "sum"), ("size", "max")])
    # Paths of a message tree share a row; those rows are not counted.
    rows, counts = np.unique(part["row"].to_numpy(), return_counts=True)
    is_alone = np.isin(sizes["row"].to_numpy(), rows[counts == 1])
    repeated = sizes["size_sum"].to_numpy() - sizes["size_max"].to_numpy()
    return int(repeated[is_alone].sum())


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter[str]()).items()))


def _fill_windows(
    num_exchanges: Sequence[int], fit: Callable[[Sequence[Window]], list[bool]]
) -> list[Window]:
    """Return the windows that cover all exchanges of each row, filled from the end of the row.

    Args:
        num_exchanges: number of exchanges of each row.
        fit: says which windows fit. It is asked about one window of every unfinished row at a time.

    Example:
        >>> _fill_windows([5, 1], lambda windows: [last - first < 2 for _, first, last in windows])
        [(0, 0, 0), (0, 1, 2), (0, 3, 4), (1, 0, 0)]
    """
    windows: list[Window] = []
    # Of each row: last exchange of the window, the lowest first one that fits so far, the highest
    # that does not, and the number of exchanges to add next.
    last = np.array(num_exchanges, np.int64) - 1
    good, bad, step = last.copy(), np.full(len(last), -1), np.zeros(len(last), np.int64)
    while len(rows := np.flatnonzero(last >= 0)):
        # Gallop, starting with the last exchange by itself, then halve.
        first = np.where(bad < 0, np.maximum(good - step, 0), (good + bad) // 2)
        asked = [(row, int(first[row]), int(last[row])) for row in rows.tolist()]
        for (row, begin, end), fits in zip(asked, fit(asked), strict=True):
            if fits:
                good[row], step[row] = begin, max(2 * step[row], 1)
            else:
                bad[row] = begin
            if good[row] - bad[row] <= 1:
                windows.append((row, int(good[row]), end))
                last[row] = good[row] = good[row] - 1
                bad[row], step[row] = -1, 0
    return sorted(windows)
