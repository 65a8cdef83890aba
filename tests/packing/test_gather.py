"""Gathering equals a naive implementation, for any shards and batches."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.pack.gather_tokens import GatherTally, PackStatistics, gather, length_histogram
from packhouse.pack.strategies import STRATEGIES, PackPlan, plan_packs
from packhouse.records.table_schemas import PACKED


@st.composite
def records(draw):
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=4)))
    return ids, list(zip(cuts[::2], cuts[1::2], strict=False))


def naive(rows, plan: PackPlan, lengths, kept) -> list[dict]:
    packs = []
    for pack in range(plan.num_packs):
        out = {"input_ids": [], "trained_ranges": [], "seq_lengths": [], "record_ids": []}
        for place in range(plan.pack_offsets[pack], plan.pack_offsets[pack + 1]):
            sequence = int(plan.order[place])
            start = 0 if plan.starts is None else int(plan.starts[place])
            end = int(lengths[sequence] if plan.ends is None else plan.ends[place])
            record = rows[kept[sequence]]
            ranges = [(r["start"], r["end"]) for r in record["trained_ranges"]]
            trained = [any(a <= token < b for a, b in ranges) for token in range(start, end)]
            trained[0] = False
            base = len(out["input_ids"])
            out["trained_ranges"] += [base + token for token, is_in in enumerate(trained) if is_in]
            out["input_ids"] += record["input_ids"][start:end]
            out["seq_lengths"].append(end - start)
            out["record_ids"].append(record["record_id"])
        packs.append(out)
    return packs


def as_naive(table: pa.Table) -> list[dict]:
    rows = table.drop_columns(["label", "range_weights"]).to_pylist()
    for row in rows:
        spans = row["trained_ranges"]
        row["trained_ranges"] = [t for s in spans for t in range(s["start"], s["end"])]
    return rows


def cut(table: pa.Table, places: list[int]) -> list[pa.Table]:
    edges = [0, *sorted(places), table.num_rows]
    return [table.slice(a, b - a) for a, b in pairwise(edges)]


def packed(shards, plan, lengths, rows=None, **options) -> pa.Table:
    return pa.Table.from_batches(gather(shards, plan, lengths, rows, **options), PACKED)


def test_two_records_in_one_pack(tokenized):
    table = tokenized([([7, 8, 9], [(1, 3)]), ([5, 6], [(0, 2)])])
    tally = GatherTally()

    batch = packed(
        [table], plan_packs(np.array([3, 2]), 8), np.array([3, 2], np.int32), tally=tally
    )

    assert batch.drop_columns(["label", "range_weights"]).to_pylist() == [
        {
            "input_ids": [7, 8, 9, 5, 6],
            "trained_ranges": [{"start": 1, "end": 3}, {"start": 4, "end": 5}],
            "seq_lengths": [3, 2],
            "record_ids": ["rec0", "rec1"],
        }
    ]
    assert batch["label"].to_pylist() == [None]
    assert tally == GatherTally(
        num_packs=1, num_tokens=5, num_sequences=2, num_trained=3, num_first_masked=1
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equal_to_a_naive_gather_for_any_shards_and_batches(tokenized, strategy, data):
    table = tokenized(data.draw(st.lists(records(), max_size=12)))
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
