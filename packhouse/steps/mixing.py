"""Mix weighted sources: how often each row is trained, by `weight` and `max_records`.

A row is taken, repeated or left out with all its records, see `packhouse.records.rows`. Each choice
is a pure function of the row's key and the source's seed, so it does not depend on order, shards or
other sources, and appended rows change nothing for those before (but that they may push rows over
`max_records` out). A row that is taken twice makes each of its sequences twice; all have one group
key, so they are on one side. Costs 100 ns a record.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Int32s
from packhouse.packing import Admitted
from packhouse.packing.overlength import REASONS
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.lists import one_chunk
from packhouse.records.rows import number_rows
from packhouse.sources.files import source_name
from packhouse.splitting import mixed_keys

_KEPT = REASONS.index("kept")


def times_of(keys: pa.Array, config: SourceConfig) -> Int32s:
    """Return how often each row of a source is trained.

    Args:
        keys: `row_keys` of all rows of the source of which a record could be packed, in order.
        config: `weight`, `max_records` and `mix_seed` are read.

    Example:
        >>> keys = pa.array([f"{n:016x}0000" for n in range(1000)])
        >>> times = times_of(keys, SourceConfig(path="", weight=2.25))
        >>> sorted(set(times.tolist())), 2200 < times.sum() < 2300
        ([2, 3], np.True_)
        >>> int(times_of(keys, SourceConfig(path="", max_records=10)).sum())
        10
    """
    # Weight 2.25: twice each, and three times those whose key is in the lowest quarter of 64 bits.
    whole, part = divmod(config.weight, 1.0)
    times = np.full(len(keys), int(whole), np.int32)
    if part:
        times += mixed_keys(keys, 2 * config.mix_seed + 1) < np.uint64(int(part * 2**64))
    if config.max_records is not None and config.max_records < len(times):
        order = np.argsort(mixed_keys(keys, 2 * config.mix_seed), kind="stable")
        times[order[config.max_records :]] = 0
    return times


def row_keys(shard: pa.Table, validated: pa.Table, *, is_stripped: bool) -> pa.Array:
    """Return the key of each record's row: 20 hex digits, the same for all records of a row.

    The key is the id of the conversation as it was validated, so the same rows are taken whatever
    `format.turns` and windows make of them. Rendered whole, a record has this very id, with two
    exceptions, where the id of a row's only record is the key: conversations that share a line of
    the file (questions of a SQuAD article), and `reasoning: strip`, which names conversations after
    what is left. So among rows that had reasoning, `strip` with `turns: alone` takes others than
    `strip` with `turns: whole`.

    Args:
        shard: with `record_id`, `row` and `group_key`.
        validated: the conversations of the shard, with `record_id` and `row`.
        is_stripped: reasoning was taken out.
    """
    number = number_rows(shard)
    num_records = np.bincount(number)[number]
    lines, first, num_conversations = np.unique(
        validated["row"].to_numpy(), return_index=True, return_counts=True
    )
    place = np.searchsorted(lines, shard["row"].to_numpy())
    is_of_line = (num_records > 1) | ((num_conversations[place] == 1) & (not is_stripped))
    before = one_chunk(validated["record_id"]).take(pa.array(first[place]))
    return pc.if_else(pa.array(is_of_line), before, one_chunk(shard["record_id"]))


def mix(
    admitted: Sequence[Admitted],
    shards: Sequence[pa.Table],
    validated: Sequence[pa.Table],
    names: Sequence[str],
    recipe: Recipe,
) -> tuple[list[Admitted], list[Int32s]]:
    """Take the rows that their sources' settings choose; the records of others are `sampled_out`.

    A row counts once if any of its records could be packed: of a row with one record over `seq_len`
    the others are taken or left out together.

    Args:
        admitted: what of each shard would be packed.
        shards: schema `tables.TOKENIZED`, looked at only where a source asks for it.
        validated: the conversations of each shard, likewise.
        names: of each shard's source.
        recipe: `sources` and `format.reasoning` are read.

    Returns:
        What of each shard is packed, and how often each record of each shard is (0: not).
    """
    times = [(each.reasons == _KEPT).astype(np.int32) for each in admitted]
    is_stripped = recipe.format.reasoning == "strip"
    for config in recipe.sources:
        if config.weight == 1 and config.max_records is None:
            continue
        own = [number for number, name in enumerate(names) if name == source_name(config)]
        keys, rows = [], []
        for number in own:
            shard, kept = shards[number], admitted[number].rows
            # Records 0 1 3 of rows 0 0 2 2 are kept: first records 0 3, and rows 0 0 1.
            _, first, row = np.unique(
                number_rows(shard)[kept], return_index=True, return_inverse=True
            )
            every = row_keys(shard, validated[number], is_stripped=is_stripped)
            keys.append(every.take(pa.array(kept[first])))
            rows.append(row)
        chosen = times_of(pa.chunked_array(keys, pa.string()).combine_chunks(), config)
        ends = np.cumsum([len(each) for each in keys])[:-1]
        for number, row, part in zip(own, rows, np.split(chosen, ends), strict=False):
            times[number][admitted[number].rows] = part[row]
    taken = [
        each.without(own == 0, "sampled_out") for each, own in zip(admitted, times, strict=True)
    ]
    return taken, times


def source_counts(
    admitted: Sequence[Admitted], times: Sequence[Int32s], names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """For each source: records, how many of them are dropped, by reason, and packed; tokens.

    Example:
        >>> each = Admitted(rows=np.array([0, 2], np.int32), lengths=np.array([5, 3], np.int32),
        ...     reasons=np.array([0, 1, 0], np.uint8), num_tokens=np.array([5, 9, 3], np.int32))
        >>> source_counts([each], [np.array([2, 0, 1], np.int32)], ["a"])["a"]
        {'records': 3, 'packed': 2, 'repeated': 1, 'tokens': 13, 'over_seq_len': 1}
    """
    counts: dict[str, dict[str, int]] = {}
    for each, often, name in zip(admitted, times, names, strict=True):
        line = counts.setdefault(name, {"records": 0, "packed": 0, "repeated": 0, "tokens": 0})
        line["records"] += len(each.reasons)
        line["packed"] += len(each.rows)
        line["repeated"] += int((often[each.rows] - 1).sum())
        line["tokens"] += int((each.lengths.astype(np.int64) * often[each.rows]).sum())
        found = np.bincount(each.reasons, minlength=len(REASONS))
        for code, reason in enumerate(REASONS):
            if code != _KEPT and found[code]:
                line[reason] = line.get(reason, 0) + int(found[code])
    return dict(sorted(counts.items()))
