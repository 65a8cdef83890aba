"""Loss weights of trained ranges, from records through packs to published columns."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.errors import ContractError
from packhouse.pack.gather_tokens import gather
from packhouse.pack.pack_columns import (
    check_packed,
    expand_labels,
    expand_weights,
    published_schema,
    to_layout,
)
from packhouse.pack.strategies import STRATEGIES, plan_packs
from packhouse.records.arrays import WEIGHTS
from packhouse.records.table_schemas import PACKED, TOKENIZED

WEIGHT = st.sampled_from([1.0, 0.5, 0.25, 2.0])


@st.composite
def weighted(draw):
    """Ids, disjoint ranges, and a weight for each range or none."""
    ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=4)))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
    weights = draw(st.lists(WEIGHT, min_size=len(ranges), max_size=len(ranges)))
    return ids, ranges, weights if draw(st.booleans()) else None


def with_weights(table: pa.Table, weights) -> pa.Table:
    place = table.schema.get_field_index("range_weights")
    return table.set_column(place, TOKENIZED.field(place), pa.array(weights, WEIGHTS))


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(records=st.lists(weighted(), min_size=1, max_size=10), cut=st.integers(0, 10))
def test_every_token_keeps_the_weight_of_its_range(tokenized, strategy, records, cut):
    table = with_weights(
        tokenized([(ids, ranges) for ids, ranges, _ in records]), [w for *_, w in records]
    )
    shards = [table.slice(0, cut), table.slice(cut)]
    lengths = np.array([len(ids) for ids, *_ in records], np.int32)
    plan = plan_packs(lengths, 8, strategy)

    packs = pa.Table.from_batches(gather(shards, plan, lengths, batch_packs=1), PACKED)

    got = np.concatenate([expand_weights(batch) for batch in packs.to_batches()])
    due = []
    for place, sequence in enumerate(plan.order.tolist()):
        ids, ranges, weights = records[sequence]
        each = np.zeros(len(ids), np.float32)
        for (start, end), weight in zip(ranges, weights or [1.0] * len(ranges), strict=True):
            each[start:end] = weight
        start = 0 if plan.starts is None else plan.starts[place]
        end = len(ids) if plan.ends is None else plan.ends[place]
        piece = each[start:end].copy()
        piece[0] = 0  # a sequence's first token is never trained
        due += piece.tolist()
    assert got.tolist() == due
    for batch in packs.to_batches():
        assert ((expand_weights(batch) > 0) == (expand_labels(batch) != -100)).all()
        check_packed(batch, 8, 10, allow_untrained=True)
        for layout in ("labels", "compact"):
            out = to_layout(batch, published_schema(layout, with_weights=True))
            check_packed(out, 8, 10, layout, allow_untrained=True)


def test_data_without_fractional_weights_has_the_schema_it_always_had():
    assert published_schema("labels").names == ["input_ids", "labels", "seq_lengths", "record_ids"]
    schema = published_schema("labels", with_weights=True)
    assert schema.names[-1] == "loss_weights"
    assert schema.field("loss_weights").type.value_type == pa.float32()


ROW = {
    "input_ids": [7, 8, 9],
    "labels": [-100, 8, 9],
    "seq_lengths": [3],
    "record_ids": ["a"],
    "loss_weights": [0.0, 0.5, 1.0],
}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([0.0, 0.5], r"loss_weights are 2, but it has 3 tokens"),
        ([0.5, 0.5, 1.0], r"loss_weights\[0\] = 0.5 is above 0 for an untrained token"),
        (
            [0.0, 0.0, 1.0],
            r"loss_weights\[1\] = 0.0 is above 0 for an untrained token, or 0",
        ),
        ([0.0, -0.5, 1.0], r"loss_weights\[1\] = -0.5 is not a weight"),
        ([0.0, float("nan"), 1.0], r"loss_weights\[1\] = nan is not a weight"),
        ([0.0, float("inf"), 1.0], r"loss_weights\[1\] = inf is not a weight"),
    ],
)
def test_a_wrong_weight_is_found_with_its_place(weights, said):
    schema = published_schema("labels", with_weights=True)
    check_packed(pa.Table.from_pylist([ROW], schema), 5, 10, "labels")

    row = ROW | {"loss_weights": weights}
    with pytest.raises(ContractError, match=said):
        check_packed(pa.Table.from_pylist([row], schema), 5, 10, "labels")


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.0], [float("nan")], [-1.0]])
def test_a_wrong_weight_of_a_range_is_found(weights):
    pack = {
        "input_ids": [7, 8, 9],
        "trained_ranges": [{"start": 1, "end": 3}],
        "range_weights": weights,
        "seq_lengths": [3],
        "record_ids": ["a"],
        "label": None,
    }
    with pytest.raises(ContractError, match="range_weights"):
        check_packed(pa.Table.from_pylist([pack], PACKED), 5, 10)
