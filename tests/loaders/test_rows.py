import pytest

from packhouse.errors import ContractError
from packhouse.loaders import PackedCollator
from packhouse.loaders.rows import read_row

IDS = [1, 2, 3, 4, 0, 0]


@pytest.mark.parametrize(
    "marks",
    [
        {"position_ids": [0, 1, 0, 1, 0, 1], "attention_mask": [1, 1, 1, 1, 0, 0]},
        {"position_ids": [0, 1, 0, 1, 2, 3], "attention_mask": [1, 1, 1, 1, 0, 0]},
        {"attention_mask": [1, 1, 2, 2, 0, 0]},
        {"attention_mask": [1, 1, 2, 2, 0, 0], "position_ids": [0, 1, 0, 1, 0, 0]},
        {"attention_mask": [1, 1, 1, 1, 0, 0], "seq_lengths": [2, 2]},
    ],
)
def test_packed_and_padded_rows_keep_their_boundaries(marks):
    batch = PackedCollator()([{"input_ids": IDS, **marks}])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4]
    assert batch["labels"].tolist() == [[-100, 2, -100, 4]]


def test_a_mask_of_record_numbers_without_padding_is_boundaries():
    row = read_row({"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 2, 2]}, whole_rows=True)

    assert row.seq_lengths.tolist() == [2, 2]


@pytest.mark.parametrize(
    "marks",
    [
        {"seq_lengths": [6], "position_ids": [0, 1, 2, 0, 1, 2]},
        {"seq_lengths": [3, 3], "position_ids": [0, 1, 2, 3, 4, 5]},
        {"seq_lengths": [6], "attention_mask": [1, 1, 1, 2, 2, 2]},
        {"position_ids": [0, 1, 2, 3, 4, 5], "attention_mask": [1, 1, 1, 2, 2, 2]},
    ],
)
def test_columns_that_disagree_where_records_end_are_refused(marks):
    with pytest.raises(ContractError, match="disagree where records end"):
        read_row({"input_ids": IDS, **marks})


def test_padding_alone_says_nothing_of_boundaries():
    padded = {"input_ids": IDS, "attention_mask": [1, 1, 1, 1, 0, 0]}
    with pytest.raises(ContractError, match="does not say where its records end"):
        read_row(padded)
    assert read_row(padded, whole_rows=True).seq_lengths.tolist() == [4]
    with pytest.raises(ContractError, match="padding between its tokens"):
        read_row({"input_ids": IDS, "attention_mask": [1, 1, 0, 1, 1, 0]}, whole_rows=True)
    with pytest.raises(ContractError, match="6 input_ids and 2 position_ids"):
        read_row({"input_ids": IDS, "position_ids": [0, 1]})
