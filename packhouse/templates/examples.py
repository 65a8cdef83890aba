"""Conversations as they are rendered: thinking taken out, and each answer an example of its own.

Templates of reasoning models rewrite history (Qwen3's drops earlier thinking), so a conversation
rendered once shows earlier answers behind other prompts than inference does. As examples of their
own, each behind the turns before it, they stand where the model will write them. Tokens grow with
the square of the number of answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.identity import conversation_ids, group_keys
from packhouse.recipe import FormatConfig
from packhouse.tables import CONVERSATION, VALIDATED
from packhouse.templates.thinking import has_thinking, is_unclosed, without_thinking
from packhouse.templates.weighing import decide_weights

__all__ = ["Examples", "derive", "flat_messages", "make_examples", "rewrites", "with_field"]

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Examples:
    """Conversations to render."""

    table: pa.Table
    """Schema VALIDATED: one or more rows of each that came in, in its order."""
    num_added: int = 0
    """Rows beyond one for each that came in."""
    refused: dict[int, str] = field(default_factory=dict)
    """Reason code of each row that has an answer without a told end of its thinking, or one of
    which nothing but thinking was left to strip."""


def rewrites(config: FormatConfig) -> bool:
    """Whether `make_examples` may make other conversations of those it gets."""
    return config.reasoning == "strip" or config.one_example_per_turn


def make_examples(table: pa.Table, config: FormatConfig) -> Examples:
    """Apply `reasoning` and `one_example_per_turn` to conversations."""
    refused: dict[int, str] = {}
    if config.reasoning == "strip":
        table, refused = _stripped(table)
    elif config.reasoning == "train_last":
        refused = _unclosed(table)
    if not config.one_example_per_turn:
        return Examples(table, 0, refused)
    examples, origin = _per_turn(table, config)
    gone = np.flatnonzero(np.isin(origin, list(refused))).tolist() if refused else []
    own = {example: refused[int(origin[example])] for example in gone}
    return Examples(examples, examples.num_rows - table.num_rows, own)


def flat_messages(table: pa.Table) -> tuple[Ints, pa.StructArray]:
    """Where each conversation's messages begin, and all of them behind one another."""
    column = table.column("messages").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], CONVERSATION)
    starts = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(starts[0], starts[-1] - starts[0])
    return starts - starts[0], values


def with_field(messages: pa.StructArray, name: str, values: pa.Array) -> pa.StructArray:
    """Messages with one field replaced."""
    columns = [values if f.name == name else messages.field(f.name) for f in messages.type]
    return pa.StructArray.from_arrays(columns, fields=list(messages.type))


def _unclosed(table: pa.Table) -> dict[int, str]:
    """Rows with an answer, not weighed 0, whose thinking has no end."""
    starts, messages = flat_messages(table)
    at = np.flatnonzero(has_thinking(messages))
    given = pc.fill_null(messages.field("weight"), 1).to_numpy(zero_copy_only=False)[at]
    contents = messages.field("content").take(at).to_pylist()
    is_open = np.array([is_unclosed(content) for content in contents], np.bool_) & (given != 0)
    rows = np.searchsorted(starts, at[is_open], "right") - 1
    return dict.fromkeys(np.unique(rows).tolist(), "unclosed_thinking")


def _stripped(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Conversations without thinking, called by what is left of them; and those to refuse."""
    starts, messages = flat_messages(table)
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


def _renamed(table: pa.Table, rows: Ints) -> pa.Table:
    """Some rows called by their content anew, and their groups, where these are records."""
    changed = table.take(pa.array(rows))
    columns = {name: changed.column(name).combine_chunks() for name in VALIDATED.names}
    new = conversation_ids(columns["messages"], columns["tools"], columns["label"])
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


def _per_turn(table: pa.Table, config: FormatConfig) -> tuple[pa.Table, Ints]:
    """An example per trained answer, and the row that each comes from."""
    starts, messages = flat_messages(table)
    weights = decide_weights(messages, starts, config)
    is_answer = np.asarray(pc.equal(messages.field("role"), "assistant"), np.bool_)
    answers = np.flatnonzero(is_answer & (weights > 0))
    row_of = np.searchsorted(starts, answers, "right") - 1
    num = np.bincount(row_of, minlength=table.num_rows)
    is_whole = num == 0  # nothing to train: refused when it is rendered
    last = np.full(table.num_rows, -1, np.int64)
    last[row_of] = answers
    is_whole |= (num == 1) & (last == starts[1:] - 1)
    split = ~is_whole[row_of]
    origin = np.concatenate([np.flatnonzero(is_whole), row_of[split]])
    ends = np.concatenate([starts[1:][is_whole], answers[split] + 1])
    order = np.lexsort((ends, origin))
    origin, ends = origin[order], ends[order]

    others = np.searchsorted(starts, np.flatnonzero(~is_answer & (weights > 0)), "right") - 1
    is_same = is_whole[origin] & ~np.isin(
        origin, others
    )  # else a turn beside the answer is trained
    weights = np.where(is_answer, weights, np.float32(0))

    def own_weights(example: int) -> npt.NDArray[np.float32]:
        own = np.zeros(ends[example] - starts[origin[example]], np.float32)
        own[-1:] = weights[ends[example] - 1 : ends[example]]
        return own

    ranges = [[(starts[row], end)] for row, end in zip(origin.tolist(), ends.tolist(), strict=True)]
    return derive(table, config, origin, ranges, is_same, own_weights), origin


def derive(
    table: pa.Table,
    config: FormatConfig,
    origin: Ints,
    ranges: list[list[tuple[int, int]]],
    is_same: npt.NDArray[np.bool_],
    weights: Callable[[int], npt.NDArray[np.float32]],
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
    _, messages = flat_messages(table)
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
    new = conversation_ids(lists, columns["tools"], columns["label"])
    by_record = pc.equal(columns["group_key"], columns["record_id"])
    asked = group_keys(columns["messages"], new, "prompt")  # of the whole, so of all its parts
    regroup = pc.and_(by_record, pc.invert(same))
    columns["group_key"] = pc.if_else(regroup, asked, columns["group_key"])
    columns["record_id"] = pc.if_else(same, columns["record_id"], new)
    columns["messages"] = lists
    return pa.table([columns[name] for name in VALIDATED.names], schema=VALIDATED)
