"""Mix weighted sources: how often each record is trained, by `weight` and `max_records`.

Each choice is a pure function of the record's id and the source's seed, so it does not depend on
order, shards or other sources, and appended rows change nothing for those before (but that they
may push rows over `max_records` out). A record that is taken twice makes two sequences; both have
its group key, so they are on one side. Costs 50 ns a record.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from packhouse.arrays import Int32s
from packhouse.packing import Admitted
from packhouse.packing.overlength import REASONS
from packhouse.recipe import SourceConfig
from packhouse.records.lists import one_chunk
from packhouse.splitting import mixed_keys

_KEPT = REASONS.index("kept")


def times_of(record_ids: pa.Array, config: SourceConfig) -> Int32s:
    """How often each record of a source is trained.

    Args:
        record_ids: 20 hex digits each, of all records of the source that could be packed, in order.
        config: `weight`, `max_records` and `mix_seed` are read.

    Example:
        >>> ids = pa.array([f"{n:016x}0000" for n in range(1000)])
        >>> times = times_of(ids, SourceConfig(path="", weight=2.25))
        >>> sorted(set(times.tolist())), 2200 < times.sum() < 2300
        ([2, 3], np.True_)
        >>> int(times_of(ids, SourceConfig(path="", max_records=10)).sum())
        10
    """
    # Weight 2.25: twice each, and three times those whose key is in the lowest quarter of 64 bits.
    whole, part = divmod(config.weight, 1.0)
    times = np.full(len(record_ids), int(whole), np.int32)
    if part:
        times += mixed_keys(record_ids, 2 * config.mix_seed + 1) < np.uint64(int(part * 2**64))
    if config.max_records is not None and config.max_records < len(times):
        order = np.argsort(mixed_keys(record_ids, 2 * config.mix_seed), kind="stable")
        times[order[config.max_records :]] = 0
    return times


def mix(
    admitted: Sequence[Admitted],
    shards: Sequence[pa.Table],
    names: Sequence[str],
    sources: Mapping[str, SourceConfig],
) -> tuple[list[Admitted], list[Int32s]]:
    """Take the records that their sources' settings choose; the others are `sampled_out`.

    Args:
        admitted: what of each shard would be packed.
        shards: tables with a column `record_id`, looked at only where a source asks for it.
        names: of each shard's source.
        sources: settings by name.

    Returns:
        What of each shard is packed, and how often each row of each shard is (0: not).
    """
    times = [(each.reasons == _KEPT).astype(np.int32) for each in admitted]
    for name, config in sources.items():
        if config.weight == 1 and config.max_records is None:
            continue
        own = [number for number, source in enumerate(names) if source == name]
        ids = [
            one_chunk(shards[number]["record_id"]).take(pa.array(admitted[number].rows))
            for number in own
        ]
        chosen = times_of(pa.chunked_array(ids, pa.string()).combine_chunks(), config)
        ends = np.cumsum([len(each) for each in ids])[:-1]
        for number, part in zip(own, np.split(chosen, ends), strict=False):
            times[number][admitted[number].rows] = part
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
