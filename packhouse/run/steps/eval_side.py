"""Which records are for evaluation: by hash of their group, or because their source is.

A group is on one side whole: where a source is for evaluation only, records of other sources with
the same prompt go with it, or a trained answer would be evaluated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack.splitting import goes_to_eval
from packhouse.read.files import source_name
from packhouse.recipe import Recipe, SplitConfig
from packhouse.records.rows import number_all_rows, number_rows
from packhouse.run.steps.selection import Selection, column_of
from packhouse.system.arrays import Bools


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """Rows that were asked for eval, and are there; each counted once, whatever its records."""

    rows: int
    """Of both sides."""
    eval: int
    asked: int
    joined: int
    """Rows whose group was joined to that of others."""


def from_eval_only_sources(
    recipe: Recipe, names: Sequence[str], shards: Sequence[pa.Table]
) -> Bools:
    """Which records are of sources that are for evaluation only."""
    only = {source_name(source) for source in recipe.sources if source.eval_only}
    is_only = np.array([name in only for name in names], dtype=np.bool_)
    return np.repeat(is_only, [shard.num_rows for shard in shards])


def is_for_eval(
    shards: Sequence[pa.Table],
    selection: Selection,
    config: SplitConfig,
    only: Bools,
) -> Bools:
    """Which records are for evaluation; a count needs all keys at once, a share does not.

    The groups of `only` are, whole, and those of rows that stay for an equal one of `only`;
    `config` divides the others.
    """
    is_first = None
    if config.eval_count:
        is_first = np.diff(number_all_rows(list(map(number_rows, shards))), prepend=-1) > 0
    if only.any():
        if selection.repeats is not None:
            ids = column_of(shards, "record_id")
            only = only | np.asarray(pc.is_in(ids, selection.repeats.filter(pa.array(only))))
        # Groups a b a c, record 0 of a source for evaluation: a is held, so records 0 and 2 are in
        # eval; b and c go by their hash.
        keys = selection.groups_of(shards)
        held = pc.unique(keys.filter(pa.array(only)))
        is_eval = pc.is_in(keys, value_set=held).to_numpy(zero_copy_only=False).copy()
        others = is_first[~is_eval] if is_first is not None else None
        is_eval[~is_eval] = goes_to_eval(keys.filter(pa.array(~is_eval)), config, others)
        return np.asarray(is_eval, dtype=np.bool_)
    if selection.group_keys is not None or config.eval_count:
        return goes_to_eval(selection.groups_of(shards), config, is_first)
    parts = [goes_to_eval(shard["group_key"], config) for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def split_counts(
    shards: Sequence[pa.Table],
    selection: Selection,
    is_eval: Bools,
    config: SplitConfig,
    only: Bools,
) -> SplitCounts:
    """Count what the sides hold, and what was asked for."""
    is_packed = np.concatenate([np.zeros(0, np.int32), *selection.times]) > 0
    row = number_all_rows(list(map(number_rows, shards)))

    def num_rows(mask: Bools) -> int:
        return len(np.unique(row[mask & is_packed]))

    num_packed = num_rows(is_packed)
    joined = np.zeros(len(is_packed), np.bool_)
    if selection.group_keys is not None:
        own = column_of(shards, "group_key")
        joined = pc.not_equal(own, selection.group_keys).to_numpy(zero_copy_only=False)
    count, num_only = config.eval_count, num_rows(only)
    if count is None:
        count = round(config.eval_fraction * (num_packed - num_only))
    return SplitCounts(
        rows=num_packed,
        eval=num_rows(is_eval),
        asked=num_only + count,
        joined=num_rows(joined),
    )
