"""Conversations as Arrow columns: how they are built, and when they are sound.

A conversation is a list of MESSAGE structs (see `packhouse.records.tables`). All of a shard's
messages lie flat behind one another, so rules are a few numpy passes over role codes. No Python
object is made per message; 52,002 Alpaca rows take about 0.02 s. What conversations are called is
in `packhouse.records.identity`.

Roles are a closed set. What a file calls `human`, `gpt` or `observation` is renamed by the reader;
a role that is none of the four makes the conversation bad, it is never dropped or rendered.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Bools, Bytes, Int64s
from packhouse.reasons import TurnOrder
from packhouse.records.lists import list_items
from packhouse.records.tables import CONVERSATION, MESSAGE

VERSION = 2
"""Of these rules and of `identity`; part of cache keys. Raise it when an output changes."""

Answers = Literal["required", "label", "text", "tokens"]
"""What a conversation's answer is: an assistant's turn, a class label, all of a text, or the tokens
that are trained."""

ROLES = ("system", "user", "assistant", "tool")
"""The closed set of roles."""

TEXT_FIELDS = ("content", "context", "reasoning", "tool_calls", "tool_call_id", "name")
"""Fields of a message that hold text."""

REASONS = {
    "empty_conversation": "it holds no message",
    "unknown_role": "message {at} has a role outside system, user, assistant, tool",
    "system_not_first": "message {at} is a system turn but not the first message",
    "starts_with_assistant": "message {at}, the first turn, is an assistant's",
    "tool_result_without_call": "message {at} is a tool result, but no tool call precedes it",
    "consecutive_user": "message {at} is a user turn right after a user turn",
    "consecutive_assistant": "message {at} is an assistant turn right after an assistant turn",
    "call_without_result": "message {at} follows a tool call that has no result",
    "nothing_trained": "no token of the record is trained",
    "no_assistant": "no message is an assistant's, so there is nothing to train",
    "ends_on_user": "the last message is a user turn; set allow_ends_on_user to keep such rows",
    "ends_on_tool": "the last message is a tool result, so the answer to it is missing",
    "empty_prompt": "the prompt (message {at}) is empty: a user turn without text",
    "empty_answer": "the answer (message {at}) is empty: no text, reasoning or tool call",
    "control": "message {at} holds the NUL character",
    "too_many_chars": "message {at} is longer than max_chars",
}
"""Reason code -> sentence; `{at}` is the 0-based number of the message. First that applies wins."""

_SYSTEM, USER, ASSISTANT, _TOOL, UNKNOWN = range(5)
_CODES = list(REASONS)


def assemble(columns: dict[str, pa.Array], counts: Int64s) -> pa.Array:
    """Join flat message columns to conversations of `counts` messages each.

    Args:
        columns: fields of MESSAGE by name, of equal length; absent fields become null.
        counts: messages per conversation, shape [num_conversations]; sums to the columns' length.

    Returns:
        Array of type `tables.CONVERSATION`.
    """
    num_messages = int(counts.sum())
    arrays = [
        columns[f.name] if f.name in columns else pa.nulls(num_messages, f.type) for f in MESSAGE
    ]
    if num_messages == 0:
        arrays = [pa.array([], f.type) for f in MESSAGE]
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    values = pa.StructArray.from_arrays(arrays, fields=list(MESSAGE))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=CONVERSATION)


def with_field(messages: pa.StructArray, name: str, values: pa.Array) -> pa.StructArray:
    """Messages with one field replaced."""
    columns = [values if f.name == name else messages.field(f.name) for f in messages.type]
    return pa.StructArray.from_arrays(columns, fields=list(messages.type))


@dataclass(frozen=True, slots=True)
class FlatMessages:
    """A chunk-free view of conversations: flat fields and int offsets that start at 0."""

    offsets: Int64s
    fields: dict[str, pa.Array]

    @classmethod
    def of(cls, messages: pa.Array) -> "FlatMessages":
        """View an array of `list<MESSAGE>`."""
        values, offsets = list_items(messages)
        fields = dict(zip(values.type.names, values.flatten(), strict=True))
        return cls(offsets=offsets, fields=fields)

    @property
    def starts(self) -> Int64s:
        """First message of each conversation."""
        return self.offsets[:-1]

    @property
    def counts(self) -> Int64s:
        """Messages of each conversation."""
        return np.diff(self.offsets)

    def role_codes(self) -> npt.NDArray[np.int8]:
        """Role of each message as its place in `ROLES`, or `UNKNOWN`."""
        found = pc.index_in(self.fields["role"], value_set=pa.array(ROLES))
        return np.asarray(pc.fill_null(found, UNKNOWN)).astype(np.int8)

    def is_blank(self, name: str) -> Bools:
        """Return, for each message, if a text field is null or only white space."""
        column = self.fields[name]
        sizes = np.asarray(pc.fill_null(pc.binary_length(column), 0))
        blank: Bools = sizes == 0
        # Text that starts with a visible ASCII character is not blank: look at the rest only.
        unsure = np.flatnonzero(~blank & ~_starts_visibly(column, sizes))
        if len(unsure):
            texts = column.take(pa.array(unsure)).to_pylist()
            blank[unsure] = [not text.strip() for text in texts]
        return blank


def _starts_visibly(column: pa.Array, sizes: Int64s) -> Bools:
    offsets, data = string_buffers(column)
    visible = np.zeros(len(column), np.bool_)
    full = np.flatnonzero(sizes > 0)
    first = data[offsets[full]]
    visible[full] = (first > 0x20) & (first < 0x7F)
    return visible


def role_violations(
    messages: pa.Array,
    *,
    allow_ends_on_user: bool = False,
    refused_orders: Collection[TurnOrder] = (),
    answers: Answers = "required",
    max_chars: int | None = None,
) -> dict[int, tuple[str, str]]:
    """Find conversations that break a rule or hold nothing to train.

    An assistant turn with tool calls is followed by tool results or ends the conversation. Other
    orders are the template's business, but for those in `refused_orders`. Texts of white space
    only count as empty. An empty assistant turn of weight 0 is allowed: it is never trained.

    Args:
        messages: conversations, array of `list<MESSAGE>`.
        allow_ends_on_user: keep conversations whose last turn is a user's.
        refused_orders: reason codes of orders that are bad.
        answers: `label`: the answer is a class label, so no assistant turn is due; `text`: the
            rows are plain text in one assistant turn, so no user turn is due; `tokens`: the turns
            are runs of tokens, in any order, and one must be trained.
        max_chars: characters a message may have.

    Returns:
        Index of each bad conversation -> (reason code of `REASONS`, sentence), in rising order.

    Example:
        >>> messages = [{"role": "user", "content": text} for text in ("Hi", "Hi?")]
        >>> role_violations(pa.array([messages], CONVERSATION), refused_orders=["consecutive_user"])
        {0: ('consecutive_user', 'message 1 is a user turn right after a user turn')}
    """
    flat = FlatMessages.of(messages)
    codes = flat.role_codes()
    worst = _Worst(flat.offsets)
    worst.add_rows("empty_conversation", flat.counts == 0)
    if answers == "tokens":
        worst.add_rows("nothing_trained", ~_has_answer(flat, codes))
        return worst.report()
    _check_order(worst, flat, codes, answers, refused_orders)
    if answers == "required":
        _check_ends(worst, flat, codes, allow_ends_on_user)
    _check_texts(worst, flat, codes, max_chars)
    return worst.report()


class _Worst:
    """Per conversation, the first reason (in the order of REASONS) and the first message of it."""

    def __init__(self, offsets: Int64s) -> None:
        self.offsets = offsets
        self.reason = np.full(len(offsets) - 1, len(_CODES), np.int64)
        self.at = np.zeros(len(offsets) - 1, np.int64)

    def add_rows(self, reason: str, bad: Bools) -> None:
        self._add(reason, np.flatnonzero(bad), None)

    def add_messages(self, reason: str, bad: Bools) -> None:
        # Bad messages [1 2 5] of conversations at [0 3 6]: rows [0 0 1], the first of each [1 5].
        places = np.flatnonzero(bad)
        if not len(places):
            return
        rows = np.searchsorted(self.offsets, places, side="right") - 1
        rows, first = np.unique(rows, return_index=True)
        self._add(reason, rows, places[first])

    def _add(self, reason: str, rows: Int64s, places: Int64s | None) -> None:
        code = _CODES.index(reason)
        earlier = self.reason[rows] > code
        rows = rows[earlier]
        self.reason[rows] = code
        if places is not None:
            self.at[rows] = places[earlier] - self.offsets[rows]

    def report(self) -> dict[int, tuple[str, str]]:
        bad = np.flatnonzero(self.reason < len(_CODES)).tolist()
        found = ((row, _CODES[self.reason[row]], self.at[row]) for row in bad)
        return {row: (reason, REASONS[reason].format(at=at)) for row, reason, at in found}


def _check_order(
    worst: _Worst,
    flat: FlatMessages,
    codes: npt.NDArray[np.int8],
    answers: Answers,
    refused_orders: Collection[TurnOrder],
) -> None:
    is_first = np.zeros(len(codes) + 1, np.bool_)
    is_first[flat.offsets[:-1]] = True
    is_first = is_first[:-1]
    # Role of the message before: system user | user -> -1 system | -1; -1: there is none.
    before = np.where(is_first, -1, np.roll(codes, 1))
    calls = np.asarray(flat.fields["tool_calls"].is_valid(), np.bool_)
    call_before = ~is_first & np.roll(calls, 1)
    opens = (before == -1) | (before == _SYSTEM)
    worst.add_messages("unknown_role", codes == UNKNOWN)
    orders: dict[TurnOrder, Bools] = {
        "system_not_first": (codes == _SYSTEM) & ~is_first,
        "starts_with_assistant": (codes == ASSISTANT) & opens & (answers != "text"),
        "consecutive_user": (codes == USER) & (before == USER),
        "consecutive_assistant": (codes == ASSISTANT) & (before == ASSISTANT),
    }
    for order in refused_orders:
        worst.add_messages(order, orders[order])
    follows = ((before == ASSISTANT) & call_before) | (before == _TOOL)
    worst.add_messages("tool_result_without_call", (codes == _TOOL) & ~follows)
    worst.add_messages("call_without_result", (codes != _TOOL) & call_before)


def _check_ends(
    worst: _Worst, flat: FlatMessages, codes: npt.NDArray[np.int8], allow_ends_on_user: bool
) -> None:
    worst.add_rows("no_assistant", ~_has_answer(flat, codes))
    last = np.full(len(flat.counts), -1, np.int8)
    full = flat.counts > 0
    last[full] = codes[flat.offsets[1:][full] - 1]
    if not allow_ends_on_user:
        worst.add_rows("ends_on_user", last == USER)
    worst.add_rows("ends_on_tool", last == _TOOL)


def _has_answer(flat: FlatMessages, codes: npt.NDArray[np.int8]) -> Bools:
    answers = np.concatenate([[0], np.cumsum(codes == ASSISTANT)])
    return np.asarray(np.diff(answers[flat.offsets]) > 0)


def _check_texts(
    worst: _Worst, flat: FlatMessages, codes: npt.NDArray[np.int8], max_chars: int | None
) -> None:
    blank = flat.is_blank("content")
    if blank.any():
        worst.add_messages("empty_prompt", blank & (codes == USER) & flat.is_blank("context"))
        untrained = np.asarray(pc.fill_null(flat.fields["weight"], 1.0)) == 0
        silent = flat.is_blank("tool_calls") & flat.is_blank("reasoning") & ~untrained
        worst.add_messages("empty_answer", blank & (codes == ASSISTANT) & silent)
    for column in map(flat.fields.__getitem__, TEXT_FIELDS):
        if column.null_count == len(column):
            continue
        worst.add_messages("control", _with_nul(column))
        if max_chars is not None:
            num_bytes = np.asarray(pc.fill_null(pc.binary_length(column), 0))
            longer: Bools = num_bytes > max_chars  # bytes are at least as many as characters
            for place in np.flatnonzero(longer).tolist():
                longer[place] = len(column[place].as_py()) > max_chars
            worst.add_messages("too_many_chars", longer)


def _with_nul(column: pa.Array) -> Bools:
    offsets, data = string_buffers(column)
    found = np.zeros(len(column), np.bool_)
    start = int(offsets[0])
    places = np.flatnonzero(data[start : int(offsets[-1])] == 0) + start
    found[np.searchsorted(offsets, places, side="right") - 1] = True
    return found


def string_buffers(column: pa.Array) -> tuple[Int64s, Bytes]:
    """Offsets and bytes of a string or binary array; null slots are empty or point anywhere."""
    _, offsets, data = column.buffers()
    if len(column) == 0:
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return bounds.astype(np.int64), raw
