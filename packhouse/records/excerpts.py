"""Conversations made of parts of others: one example per answer, or windows.

Templates of reasoning models rewrite history (Qwen3's drops earlier thinking), so a conversation
rendered once shows earlier answers behind other prompts than inference does. As examples of their
own, each behind the turns before it, they stand where the model will write them. Tokens grow with
the square of the number of answers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from packhouse.arrays import Bools, Float32s, Int64s
from packhouse.recipe import FormatConfig
from packhouse.recipe.rows import is_chat
from packhouse.records.conversations import decide_weights
from packhouse.records.identity import group_keys, rename
from packhouse.records.lists import list_items, one_chunk
from packhouse.records.messages import with_field
from packhouse.records.tables import CONVERSATION, VALIDATED


class Extent(NamedTuple):
    """What of a row a record has, where that is not all of it."""

    num_messages: int
    """It has the first messages of the row."""
    trained: tuple[int, ...]
    """Numbers of the messages that it trains."""

    def without_first(self, count: int) -> "Extent":
        """The same, in numbers of a row that lacks the first `count` messages."""
        trained = tuple(number - count for number in self.trained)
        return Extent(self.num_messages - count, trained)


def rewrites(config: FormatConfig) -> bool:
    """Return True if records may have other messages than the rows that they come from."""
    is_split = config.turns != "whole" and config.train_on != "all"
    return config.reasoning == "strip" or (is_split and is_chat(config.template))


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
    whole = table.take(pa.array(origin))
    place = table.schema.get_field_index("messages")
    parts = whole.set_column(place, VALIDATED.field("messages"), lists)
    asked = group_keys(one_chunk(whole["messages"]), one_chunk(whole["record_id"]), "prompt")
    return rename(parts, ~is_same, asked)


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
