"""Loss weights of trained ranges, from records through packs to published columns."""

import pyarrow as pa
import pytest

from packhouse.errors import ContractError
from packhouse.pack.pack_columns import (
    check_packed,
    published_schema,
)
from packhouse.records.table_schemas import PACKED


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
        ([0.0, 0.0, 1.0], r"loss_weights\[1\] = 0.0 is above 0 for an untrained token, or 0"),
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
