"""Rows and records: which records of a shard come from one row of a source.

Most rows make one record. `format.turns` and `pack.over_length: window` may split a conversation
into several, and a message tree makes one per path. `weight`, `max_records`, `eval_count` and
deduplication treat all of them as one row, so a mixture does not change with the template.
Conversations that only share a line of the file, such as the questions of a SQuAD article, have
prompts (so groups) of their own and are rows of their own.

Where a template rewrites history (`packhouse.render.turns`), a record has the beginning of its row;
a row that is too long for a pack gives windows of itself. `derive` makes such conversations, and
names each by the messages that it has.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.recipe.settings import is_chat
from packhouse.records.identity import group_keys, rename
from packhouse.records.lists import one_chunk
from packhouse.records.messages import FlatMessages
from packhouse.system.arrays import Float32s, Int64s, Objects


def number_rows(shard: pa.Table) -> Int64s:
    """Return the row of each record of a shard, numbered from 0, rising.

    Args:
        shard: with `row` and `group_key`; records of one row are next to each other.

    Example:
        >>> shard = pa.table({"row": [4, 4, 7, 8, 8], "group_key": ["a", "a", "a", "b", "c"]})
        >>> number_rows(shard).tolist()
        [0, 0, 1, 2, 3]
    """
    if not shard.num_rows:
        return np.zeros(0, np.int64)
    rows, groups = np.asarray(one_chunk(shard["row"])), one_chunk(shard["group_key"])
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    is_first[1:] |= np.asarray(pc.not_equal(groups[1:], groups[:-1]), np.bool_)
    return np.cumsum(is_first) - 1


def num_rows(shard: pa.Table) -> int:
    """Return how many rows the records of a shard come from."""
    numbers = number_rows(shard)
    return int(numbers[-1]) + 1 if len(numbers) else 0


def number_all_rows(shards: Sequence[Int64s]) -> Int64s:
    """Number the rows of all shards in one sequence.

    Example:
        >>> number_all_rows([np.array([0, 0, 1]), np.array([0, 1])]).tolist()
        [0, 0, 1, 2, 3]
    """
    first = np.cumsum([0, *(int(each[-1]) + 1 if len(each) else 0 for each in shards)])
    parts = [each + start for each, start in zip(shards, first, strict=False)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


class Extent(NamedTuple):
    """What of a row a record has, where that is not all of it."""

    num_messages: int
    """It has the first messages of the row."""
    trained: tuple[int, ...]
    """Numbers of the messages that it trains."""
    awaits_thought: bool = False
    """Its last prompt asks for reasoning, and only later messages of the row have some."""

    def without_first(self, count: int) -> "Extent":
        """The same, in numbers of a row that lacks the first `count` messages."""
        trained = tuple(number - count for number in self.trained)
        return Extent(self.num_messages - count, trained, self.awaits_thought)


def rewrites(config: FormatConfig) -> bool:
    """Return True if records may have other messages than the rows that they come from."""
    is_split = config.turns != "whole" and config.train_on != "all"
    return config.reasoning == "strip" or (is_split and is_chat(config.template))


def derive(
    table: pa.Table,
    config: FormatConfig,
    origin: Int64s,
    ranges: list[list[tuple[int, int]]],
    weights: Sequence[Float32s | None],
    awaits_thought: pa.Array | None = None,
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
        weights: of the messages of each; None: it is a row as it is, and keeps name and weights.
        awaits_thought: true or null for each, see `Extent`; None: no part does.
    """
    # Ranges [(0, 1), (3, 5)] and [(0, 1), (5, 7)]: messages 0 3 4 and 0 5 6, bounds [0 3 6].
    pieces = [np.arange(a, b) for parts in ranges for a, b in parts]
    counts = np.array([sum(b - a for a, b in parts) for parts in ranges], np.int64)
    places = np.concatenate([np.zeros(0, np.int64), *pieces])
    bounds = np.append(0, np.cumsum(counts))
    values = FlatMessages.of(table["messages"]).values.take(pa.array(places))
    taken = FlatMessages(values, bounds)
    given = taken["weight"].to_numpy(zero_copy_only=False).astype(np.float32)
    decided = taken.decide_weights(config)
    for start, end, wanted in zip(bounds, bounds[1:], weights, strict=False):
        if wanted is not None and not np.array_equal(decided[start:end], wanted):
            given[start:end] = wanted
    taken = taken.replace(weight=pa.array(given, pa.float32(), from_pandas=True))
    whole = table.take(pa.array(origin))
    parts = taken.put_into(whole)
    asked = group_keys(one_chunk(whole["messages"]), one_chunk(whole["record_id"]), "prompt")
    is_part = np.array([own is not None for own in weights], np.bool_)
    return rename(parts, is_part, asked, awaits_thought)


def take_records(table: pa.Table, rows: Int64s, extents: Objects, config: FormatConfig) -> pa.Table:
    """Return the conversations of records that have a part of their row.

    Args:
        table: schema VALIDATED.
        rows: number of each record's row.
        extents: what of it each record has (`Extent`); None: all.
        config: decides the weights that messages have of themselves.
    """
    flat = FlatMessages.of(table["messages"])
    weights = flat.decide_weights(config)
    ranges, own_weights, awaits = list[list[tuple[int, int]]](), list[Float32s | None](), []
    is_part = np.array([extent is not None for extent in extents], np.bool_)
    for row, extent in zip(rows[is_part].tolist(), extents[is_part].tolist(), strict=True):
        start = int(flat.offsets[row])
        ranges.append([(start, start + extent.num_messages)])
        own, trained = np.zeros(extent.num_messages, np.float32), list(extent.trained)
        own[trained] = weights[start:][trained]
        own_weights.append(own)
        awaits.append(extent.awaits_thought or None)
    is_awaiting = pa.array(awaits, pa.bool_())
    parts = derive(table, config, rows[is_part], ranges, own_weights, is_awaiting)
    whole = table.take(pa.array(rows[~is_part]))
    places = np.argsort(np.append(np.flatnonzero(~is_part), np.flatnonzero(is_part)))
    return pa.concat_tables([whole, parts]).unify_dictionaries().take(pa.array(places))


def replace_rows(
    part: pa.Table, rows: np.ndarray, windows: pa.Table, origin: np.ndarray
) -> pa.Table:
    """The part with some of its rows replaced by their windows, in order."""
    # Row 1 of 3 becomes two windows: places [0, 2, 1, 1] sort to [row 0, window, window, row 2].
    kept = np.setdiff1d(np.arange(part.num_rows), rows)
    places = np.concatenate([kept, rows[origin]])
    whole = pa.concat_tables([part.take(pa.array(kept)), windows]).unify_dictionaries()
    return whole.take(pa.array(np.argsort(places, kind="stable"))).combine_chunks()
