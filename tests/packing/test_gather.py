"""Gathering equals a naive implementation, for any shards and batches."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.pack.gather_tokens import GatherTally, PackStatistics, gather, length_histogram
from packhouse.pack.pack_columns import (
    check_packed,
    expand_labels,
    expand_weights,
    published_schema,
    to_layout,
)
from packhouse.pack.strategies import STRATEGIES, PackPlan, plan_packs
from packhouse.records.arrays import WEIGHTS
from packhouse.records.table_schemas import PACKED, TOKENIZED


@st.composite
def records(draw):
    """Ids, disjoint ranges, and a weight for each range or none."""
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=4)))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
    weight = st.sampled_from([1.0, 0.5, 0.25, 2.0])
    weights = draw(st.lists(weight, min_size=len(ranges), max_size=len(ranges)))
    return ids, ranges, weights if draw(st.booleans()) else None


def naive(rows, plan: PackPlan, lengths, kept) -> list[dict]:
    packs = []
    for pack in range(plan.num_packs):
        out = {name: [] for name in ("input_ids", "weights", "seq_lengths", "record_ids")}
        for place in range(plan.pack_offsets[pack], plan.pack_offsets[pack + 1]):
            sequence = int(plan.order[place])
            start = 0 if plan.starts is None else int(plan.starts[place])
            end = int(lengths[sequence] if plan.ends is None else plan.ends[place])
            record = rows[kept[sequence]]
            weights = [0.0] * len(record["input_ids"])
            given = record["range_weights"] or [1.0] * len(record["trained_ranges"])
            for span, weight in zip(record["trained_ranges"], given, strict=True):
                weights[span["start"] : span["end"]] = [weight] * (span["end"] - span["start"])
            weights[start] = 0.0  # the first token of a sequence is never trained
            out["weights"] += weights[start:end]
            out["input_ids"] += record["input_ids"][start:end]
            out["seq_lengths"].append(end - start)
            out["record_ids"].append(record["record_id"])
        packs.append(out)
    return packs


def as_naive(table: pa.Table) -> list[dict]:
    rows = []
    for number in range(table.num_rows):
        (batch,) = table.slice(number, 1).combine_chunks().to_batches()
        (row,) = batch.to_pylist()
        kept = {name: row[name] for name in ("input_ids", "seq_lengths", "record_ids")}
        rows.append(kept | {"weights": expand_weights(batch).tolist()})
        assert ((expand_weights(batch) > 0) == (expand_labels(batch) != -100)).all()
        check_packed(batch, 12, 100, allow_untrained=True)
        for layout in ("labels", "compact"):
            out = to_layout(batch, published_schema(layout, with_weights=True))
            check_packed(out, 12, 100, layout, allow_untrained=True)
    return rows


def cut(table: pa.Table, places: list[int]) -> list[pa.Table]:
    edges = [0, *sorted(places), table.num_rows]
    return [table.slice(a, b - a) for a, b in pairwise(edges)]


def packed(shards, plan, lengths, rows=None, **options) -> pa.Table:
    return pa.Table.from_batches(gather(shards, plan, lengths, rows, **options), PACKED)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equal_to_a_naive_gather_for_any_shards_and_batches(tokenized, strategy, data):
    drawn = data.draw(st.lists(records(), max_size=12))
    table = tokenized([(ids, ranges) for ids, ranges, _ in drawn])
    place = TOKENIZED.get_field_index("range_weights")
    weights = pa.array([weights for *_, weights in drawn], WEIGHTS)
    table = table.set_column(place, TOKENIZED.field(place), weights)
    num = table.num_rows
    kept = sorted(data.draw(st.sets(st.integers(0, num - 1)))) if num else []
    full = table["num_tokens"].to_numpy()[kept]
    cuts = np.array([data.draw(st.integers(1, int(n))) for n in full], dtype=np.int32)
    lengths = full.astype(np.int32) if strategy == "concat" else cuts
    plan = plan_packs(lengths, 12, strategy, seed=1)
    shards = cut(table, data.draw(st.lists(st.integers(0, num), max_size=3)))
    batch_packs = data.draw(st.sampled_from([1, 3, 256]))

    result = packed(shards, plan, lengths, np.array(kept, dtype=np.int64), batch_packs=batch_packs)

    result.validate(full=True)
    assert as_naive(result) == naive(table.to_pylist(), plan, lengths, kept)


def test_tokens_masked_at_the_beginning_of_pieces_are_counted(tokenized):
    # Two records of 10 trained tokens in packs of 4: pieces 4 4 2 | 2 4 4, each loses its first.
    table = tokenized([([1] * 10, [(0, 10)]), ([2] * 10, [(0, 10)])])
    lengths = np.array([10, 10], dtype=np.int32)
    tally = GatherTally()

    result = packed([table], plan_packs(lengths, 4, "concat"), lengths, tally=tally)

    assert result["seq_lengths"].to_pylist() == [[4], [4], [2, 2], [4], [4]]
    assert (tally.num_sequences, tally.num_first_masked, tally.num_trained) == (6, 6, 14)


def test_a_label_is_carried_where_a_pack_is_one_record(tokenized):
    table = tokenized([([1, 2], []), ([3, 4], [])], labels=[1, 0])
    lengths = np.array([2, 2], dtype=np.int32)

    alone = packed([table], plan_packs(lengths, 4, "none"), lengths)
    together = packed([table], plan_packs(lengths, 4, "best_fit"), lengths)

    assert alone["label"].to_pylist() == [1, 0]
    assert together["label"].to_pylist() == [None]


def test_a_length_over_its_record_is_a_broken_invariant(tokenized):
    lengths = np.array([3], dtype=np.int32)
    with pytest.raises(AssertionError, match="exceeds its record"):
        packed([tokenized([([1, 2], [(0, 2)])])], plan_packs(lengths, 4), lengths)


def test_statistics_add_up(tokenized):
    table = tokenized([([1] * n, [(0, n)]) for n in (5, 3, 2, 6, 4)])
    lengths = table["num_tokens"].to_numpy().astype(np.int32)
    plan = plan_packs(lengths, 8)
    tally = GatherTally()
    packed([table], plan, lengths, tally=tally)

    statistics = PackStatistics.of(plan, lengths, tally).to_dict()

    assert statistics == {
        "seq_len": 8,
        "strategy": "best_fit",
        "num_sequences": 5,
        "num_packs": 3,
        "num_tokens": 20,
        "num_trained": 15,
        "num_first_masked": 5,
        "lower_bound": 3,
        "length_histogram": [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1)],
        "num_padding": 4,
        "fill": 0.833333,
    }


@given(lengths=st.lists(st.integers(1, 2**20), max_size=50))
def test_every_length_is_in_the_histogram_at_most_a_quarter_below_its_edge(lengths):
    histogram = length_histogram(np.array(lengths, dtype=np.int32))

    edges = [edge for edge, count in histogram for _ in range(count)]
    assert len(edges) == len(lengths)
    assert all(n <= edge < 1.25 * n + 1 for n, edge in zip(sorted(lengths), edges, strict=True))
