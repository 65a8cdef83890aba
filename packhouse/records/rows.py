"""Rows and records: which records of a shard come from one row of a source.

Most rows make one record. `format.turns` and `pack.over_length: window` may split a conversation
into several, and a message tree makes one per path. `weight`, `max_records`, `eval_count` and
deduplication treat all of them as one row, so a mixture does not change with the template.
Conversations that only share a line of the file, such as the questions of a SQuAD article, have
prompts (so groups) of their own and are rows of their own.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.lists import one_chunk
from packhouse.system.arrays import Int64s


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
