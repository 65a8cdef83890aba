"""Conversations as they are rendered: without thinking, one example per answer, or as windows.

Templates of reasoning models rewrite history (Qwen3's drops earlier thinking), so a conversation
rendered once shows earlier answers behind other prompts than inference does. As examples of their
own, each behind the turns before it, they stand where the model will write them. Tokens grow with
the square of the number of answers.

Conversations that are too long become windows of whole turns, the system prompt in each. A window
is a run of exchanges: a user turn and all up to the next. Windows are filled from the end, so that
the last answer has as much before it as fits. What is trained in the conversation is trained in one
window, and a window with nothing trained is left out; an exchange that does not fit even alone is a
window by itself, which pack drops and counts. Each window is a conversation that the template
renders, so no template is too odd; lengths are those of its real tokens. A long row is rendered and
tokenized some 2 log2(exchanges) times a window.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Bools, Float32s, Int64s
from packhouse.recipe import FormatConfig
from packhouse.recipe.rows import is_chat
from packhouse.records.identity import conversation_ids, group_keys
from packhouse.records.lists import list_items
from packhouse.records.tables import CONVERSATION, VALIDATED
from packhouse.templates.results import Extent
from packhouse.templates.thinking import has_thinking, is_unclosed, without_thinking
from packhouse.templates.weighing import ROLES, decide_weights

Window = tuple[int, int]
"""First and last exchange, both inclusive."""

_ASIDES = ("tools", "label", "arguments", "weight")  # what names a record beside its messages
_MARGIN = 8  # tokens that a tokenizer may add to those that stand for bytes


def rewrites(config: FormatConfig) -> bool:
    """Return True if records may have other messages than the rows that they come from."""
    is_split = config.turns != "whole" and config.train_on != "all"
    return config.reasoning == "strip" or (is_split and is_chat(config.template))


def strip_thinking(table: pa.Table, config: FormatConfig) -> tuple[pa.Table, dict[int, str]]:
    """Apply `reasoning` to conversations.

    Returns:
        The conversations, and the reason code of each row that has an answer whose thinking has no
        end, or one of which nothing but thinking was left to strip.
    """
    if config.reasoning == "strip":
        return _stripped(table)
    return table, _unclosed(table) if config.reasoning == "train_last" else {}


def with_field(messages: pa.StructArray, name: str, values: pa.Array) -> pa.StructArray:
    """Messages with one field replaced."""
    columns = [values if f.name == name else messages.field(f.name) for f in messages.type]
    return pa.StructArray.from_arrays(columns, fields=list(messages.type))


def _unclosed(table: pa.Table) -> dict[int, str]:
    """Rows with an answer, not weighed 0, whose thinking has no end."""
    messages, starts = list_items(table["messages"])
    at = np.flatnonzero(has_thinking(messages))
    given = pc.fill_null(messages.field("weight"), 1).to_numpy(zero_copy_only=False)[at]
    contents = messages.field("content").take(at).to_pylist()
    is_open = np.array([is_unclosed(content) for content in contents], np.bool_) & (given != 0)
    rows = np.searchsorted(starts, at[is_open], "right") - 1
    return dict.fromkeys(np.unique(rows).tolist(), "unclosed_thinking")


def _stripped(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Conversations without thinking, called by what is left of them; and those to refuse."""
    messages, starts = list_items(table["messages"])
    at = np.flatnonzero(has_thinking(messages))
    if not len(at):
        return table, {}
    contents = [without_thinking(text) for text in messages.field("content").take(at).to_pylist()]
    is_thinking = np.zeros(len(messages), np.bool_)
    is_thinking[at] = True
    mask = pa.array(is_thinking)
    content = pc.replace_with_mask(messages.field("content"), mask, pa.array(contents, pa.string()))
    silent = pc.is_null(messages.field("tool_calls")).to_numpy(zero_copy_only=False)[at]
    silent &= np.array([not text.strip() for text in contents])
    silent &= pc.fill_null(messages.field("weight"), 1).to_numpy(zero_copy_only=False)[at] != 0
    row_of = np.searchsorted(starts, at, "right") - 1
    refused = dict.fromkeys(np.unique(row_of[silent]).tolist(), "only_thinking") | _unclosed(table)
    messages = with_field(messages, "content", content)
    messages = with_field(messages, "reasoning", pa.nulls(len(messages), pa.string()))
    lists = pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), messages, type=CONVERSATION)
    place = table.schema.get_field_index("messages")
    stripped = table.set_column(place, VALIDATED.field("messages"), lists)
    return _renamed(stripped, np.unique(row_of)), refused


def _renamed(table: pa.Table, rows: Int64s) -> pa.Table:
    """Some rows called by their content anew, and their groups, where these are records."""
    changed = table.take(pa.array(rows))
    columns = {name: changed.column(name).combine_chunks() for name in VALIDATED.names}
    new = conversation_ids(columns["messages"], *(columns[name] for name in _ASIDES))
    by_record = pc.equal(columns["group_key"], columns["record_id"])
    keys = pc.if_else(by_record, new, columns["group_key"])
    mask = np.zeros(table.num_rows, np.bool_)
    mask[rows] = True
    for name, values in (("record_id", new), ("group_key", keys)):
        old = table.column(name).combine_chunks()
        place = table.schema.get_field_index(name)
        replaced = pc.replace_with_mask(old, pa.array(mask), values)
        table = table.set_column(place, VALIDATED.field(name), replaced)
    return table


def derive(
    table: pa.Table,
    config: FormatConfig,
    origin: Int64s,
    ranges: list[list[tuple[int, int]]],
    is_same: Bools,
    weights: Callable[[int], Float32s],
) -> pa.Table:
    """Conversations made of parts of others.

    A part is called by its content, and by its weights where `config` would decide others; so equal
    examples have equal names, whole rows among them. It keeps source and row, and its group; where
    groups are records (a group is called like its record), the group becomes the first question of
    the whole, so that all parts, and equal beginnings of other records, are on one side.

    Args:
        table: schema VALIDATED.
        config: decides the weights that messages have of themselves.
        origin: row of each new conversation.
        ranges: ranges of the table's messages that each consists of.
        is_same: conversations that are rows as they are; they keep their name and weights.
        weights: of a new conversation's messages, by its number.
    """
    messages, _ = list_items(table["messages"])
    # Ranges [(0, 1), (3, 5)] and [(0, 1), (5, 7)]: messages 0 3 4 and 0 5 6, bounds [0 3 6].
    pieces = [np.arange(a, b) for parts in ranges for a, b in parts]
    counts = np.array([sum(b - a for a, b in parts) for parts in ranges], np.int64)
    taken = messages.take(pa.array(np.concatenate(pieces) if pieces else np.zeros(0, np.int64)))
    given = taken.field("weight").to_numpy(zero_copy_only=False).astype(np.float32)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    decided = decide_weights(taken, bounds, config)
    for example in np.flatnonzero(~is_same).tolist():
        own = slice(bounds[example], bounds[example + 1])
        wanted = weights(example)
        if not np.array_equal(decided[own], wanted):
            given[own] = wanted
    taken = with_field(taken, "weight", pa.array(given, pa.float32(), from_pandas=True))
    lists = pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), taken, type=CONVERSATION)
    rows = table.take(pa.array(origin))
    columns = {name: rows.column(name).combine_chunks() for name in VALIDATED.names}
    same = pa.array(is_same)
    new = conversation_ids(lists, *(columns[name] for name in _ASIDES))
    by_record = pc.equal(columns["group_key"], columns["record_id"])
    asked = group_keys(columns["messages"], new, "prompt")  # of the whole, so of all its parts
    regroup = pc.and_(by_record, pc.invert(same))
    columns["group_key"] = pc.if_else(regroup, asked, columns["group_key"])
    columns["record_id"] = pc.if_else(same, columns["record_id"], new)
    columns["messages"] = lists
    return pa.table([columns[name] for name in VALIDATED.names], schema=VALIDATED)


def take_records(
    table: pa.Table, rows: Int64s, extents: Sequence[Extent | None], config: FormatConfig
) -> pa.Table:
    """Return the conversations of records that have a part of their row.

    Args:
        table: schema VALIDATED.
        rows: number of each record's row.
        extents: what of it each record has; None: all.
        config: decides the weights that messages have of themselves.
    """
    messages, starts = list_items(table["messages"])
    weights = decide_weights(messages, starts, config)
    ends = [
        int(starts[row + 1] if extent is None else starts[row] + extent.num_messages)
        for row, extent in zip(rows.tolist(), extents, strict=True)
    ]

    def own_weights(number: int) -> Float32s:
        start, extent = int(starts[rows[number]]), extents[number]
        assert extent is not None
        own = np.zeros(ends[number] - start, np.float32)
        trained = list(extent.trained)
        own[trained] = weights[start : ends[number]][trained]
        return own

    ranges = [[(int(starts[row]), end)] for row, end in zip(rows.tolist(), ends, strict=True)]
    is_same = np.array([extent is None for extent in extents], np.bool_)
    return derive(table, config, rows, ranges, is_same, own_weights)


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What fits."""

    seq_len: int
    """Tokens that a window may have."""
    measure: Callable[[pa.Table], Int64s]
    """FORMATTED table -> tokens of each row; -1 where it has no tokens (it is quarantined)."""

    def over(self, formatted: pa.Table) -> Bools:
        """Which rendered rows are too long. Most are shorter in bytes already, and not measured.

        A token stands for a byte or more, so a text of 1,500 bytes has at most 1,508 tokens with
        those that the tokenizer adds: it fits into 2,048 without being tokenized.
        """
        num_bytes = pc.binary_length(formatted.column("text")).to_numpy()
        over = num_bytes + _MARGIN > self.seq_len
        if over.any():
            over[over] = self.measure(formatted.filter(pa.array(over))) > self.seq_len
        return np.asarray(over)


def split_to_windows(
    table: pa.Table,
    config: FormatConfig,
    fits: Callable[[pa.Table], Bools],
) -> tuple[pa.Table, Int64s]:
    """Split conversations, all of them over-long.

    Args:
        table: schema VALIDATED.
        config: what is trained.
        fits: VALIDATED table -> which of its conversations fit.

    Returns:
        The windows (schema VALIDATED), and the row of `table` that each comes from, rising.
    """
    talks = _Talks(table, config)
    plans = [_plan(talks.num_exchanges(row)) for row in range(table.num_rows)]
    done: list[list[Window]] = [[] for _ in plans]
    asked = {row: next(plan) for row, plan in enumerate(plans)}
    while asked:
        rows = sorted(asked)
        answers = fits(talks.windows(rows, [asked[row] for row in rows]))
        for row, answer in zip(rows, answers.tolist(), strict=True):
            try:
                asked[row] = plans[row].send(answer)
            except StopIteration as stop:
                del asked[row]
                done[row] = stop.value
    chosen = [(row, w) for row, windows in enumerate(done) for w in windows if talks.trains(row, w)]
    origin = np.array([row for row, _ in chosen], np.int64)
    return talks.windows(origin.tolist(), [window for _, window in chosen]), origin


def _plan(num_exchanges: int) -> Generator[Window, bool, list[Window]]:
    """Ask whether windows fit, and return the ones that cover all exchanges.

    Example:
        >>> plan, answer = _plan(5), None  # windows of up to two exchanges fit
        >>> try:
        ...     while True:
        ...         first, last = plan.send(answer)
        ...         answer = last - first < 2
        ... except StopIteration as stop:
        ...     stop.value
        [(0, 0), (1, 2), (3, 4)]
    """
    windows: list[Window] = []
    last = num_exchanges - 1
    while last >= 0:
        good, bad, step = last, -1, 1
        if (yield last, last):
            while good > 0 and bad < 0:  # gallop, then halve
                first = max(0, good - step)
                if (yield first, last):
                    good, step = first, 2 * step
                else:
                    bad = first
            while good - bad > 1 and bad >= 0:
                middle = (good + bad) // 2
                if (yield middle, last):
                    good = middle
                else:
                    bad = middle
        windows.append((good, last))
        last = good - 1
    return windows[::-1]


class _Talks:
    """Conversations as a head (the system turn) and exchanges."""

    def __init__(self, table: pa.Table, config: FormatConfig) -> None:
        self._table, self._config = table, config
        messages, self._starts = list_items(table["messages"])
        self._weights = decide_weights(messages, self._starts, config)
        roles = messages.field("role").to_pylist()
        self._edges = [self._edges_of(roles, row) for row in range(table.num_rows)]

    def _edges_of(self, roles: list[str], row: int) -> list[int]:
        """Where each exchange begins, and the end of the last."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        first = start + (roles[start] == ROLES[0])
        # Several user turns in a row begin one exchange: their answer is to all of them.
        begins = [
            at for at in range(first + 1, end) if roles[at] == "user" and roles[at - 1] != "user"
        ]
        return [first, *begins, end]

    def num_exchanges(self, row: int) -> int:
        return len(self._edges[row]) - 1

    def _ranges(self, row: int, window: Window) -> list[tuple[int, int]]:
        edges = self._edges[row]
        head = (int(self._starts[row]), edges[0])
        return [head, (edges[window[0]], edges[window[1] + 1])]

    def trains(self, row: int, window: Window) -> bool:
        """Return True if anything in the window's own exchanges is trained."""
        start, end = self._ranges(row, window)[1]
        return bool((self._weights[start:end] > 0).any())

    def windows(self, rows: list[int], windows: list[Window]) -> pa.Table:
        """Windows as conversations; the system turn is trained in the first one alone."""
        ranges = [self._ranges(row, w) for row, w in zip(rows, windows, strict=True)]

        def weights(number: int) -> Float32s:
            own = [self._weights[start:end].copy() for start, end in ranges[number]]
            if windows[number][0] > 0:
                own[0][:] = 0
            return np.concatenate(own)

        whole = [w == (0, self.num_exchanges(r) - 1) for r, w in zip(rows, windows, strict=True)]
        origin, is_same = np.array(rows, np.int64), np.array(whole, np.bool_)
        return derive(self._table, self._config, origin, ranges, is_same, weights)
