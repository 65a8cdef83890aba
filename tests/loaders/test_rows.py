import pyarrow as pa
import pytest

from packhouse import PackedCollator, PackedDataset, PaddedCollator
from packhouse.addons.packs_in_memory import pack_dataset
from packhouse.errors import ContractError
from packhouse.load.dataset import ArrowRows, open_rows, read_row

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
    with pytest.raises(ContractError, match="give different record lengths"):
        read_row({"input_ids": IDS, **marks})


def test_padding_alone_does_not_mark_boundaries():
    padded = {"input_ids": IDS, "attention_mask": [1, 1, 1, 1, 0, 0]}
    with pytest.raises(ContractError, match="has no record boundaries"):
        read_row(padded)
    assert read_row(padded, whole_rows=True).seq_lengths.tolist() == [4]
    with pytest.raises(ContractError, match="padding between its tokens"):
        read_row({"input_ids": IDS, "attention_mask": [1, 1, 0, 1, 1, 0]}, whole_rows=True)
    with pytest.raises(ContractError, match="6 input_ids and 2 position_ids"):
        read_row({"input_ids": IDS, "position_ids": [0, 1]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1.5, 2.0]}, "input_ids of type float64 instead of integers"),
        ({"input_ids": [1, None]}, r"input_ids of type \w+ instead of integers"),
        ({"input_ids": [1, 2], "labels": [1.0, 2.0]}, r"labels of type \w+ instead of integers"),
        ({"input_ids": [1, 2], "seq_lengths": [2.0]}, r"seq_lengths of type \w+ instead"),
        ({"input_ids": [[1, 2]]}, r"input_ids of shape \(1, 2\). Pass one flat list"),
        ({"input_ids": ["a", "b"]}, "input_ids of type <U1 instead of integers"),
        ({"input_ids": [1, 2], "loss_weights": [1.0]}, "2 input_ids and 1 loss_weights"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, -1.0]}, "negative or not finite"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, float("nan")]}, "negative or not finite"),
    ],
)
def test_values_other_than_integers_are_refused_and_not_rounded(row, message):
    with pytest.raises(ContractError, match=message):
        read_row(row, whole_rows=True)


def test_empty_rows_are_refused_in_batches():
    for collate in (PackedCollator(whole_rows=True), PaddedCollator(pad_token_id=0)):
        with pytest.raises(ContractError, match="row 1 has no tokens"):
            collate([{"input_ids": [1, 2]}, {"input_ids": []}])
        with pytest.raises(ContractError, match="row 0 has no tokens"):
            collate([{"input_ids": [5, 5], "attention_mask": [0, 0]}])


def test_weights_of_trained_ranges_become_weights_of_tokens():
    row = {
        "input_ids": [7, 8, 9, 5, 6],
        "trained_ranges": [{"start": 1, "end": 3}, {"start": 4, "end": 5}],
        "seq_lengths": [3, 2],
    }
    assert read_row(row).loss_weights is None
    weighted = read_row(row | {"range_weights": [0.5, 2.0]})
    assert weighted.loss_weights.tolist() == [0, 0.5, 0.5, 0, 2.0]
    assert read_row(row | {"range_weights": None}).loss_weights.tolist() == [0, 1, 1, 0, 1]


def packs(**columns):
    plain = {
        "input_ids": [[7, 8, 9, 5, 6], [4, 3]],
        "labels": [[-100, 8, 9, -100, 6], [-100, 3]],
        "seq_lengths": [[3, 2], [2]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1]],
    }
    return pa.table({name: v for name, v in (plain | columns).items() if v is not None})


def test_sound_packs_are_checked_once_and_others_row_by_row():
    for table in (packs(), packs(position_ids=None)):
        rows = ArrowRows(table)
        assert rows[1].labels.tolist() == [-100, 3]
        assert rows._cells[0][1]  # valid
    sliced = ArrowRows(pa.concat_tables([packs(), packs()]).slice(1, 2))
    assert [row.seq_lengths.tolist() for row in sliced] == [[2], [3, 2]]

    first_trained = ArrowRows(packs(labels=[[7, 8, 9, 5, 6], [4, 3]]))
    assert first_trained[0].labels.tolist() == [-100, 8, 9, -100, 6]
    for wrong, message in (
        ({"seq_lengths": [[3, 3], [2]]}, "disagree|add up|different record lengths"),
        ({"position_ids": [[0, 1, 2, 3, 4], [0, 1]]}, "different record lengths"),
        ({"labels": [[-100, 8], [-100, 3]]}, "5 input_ids and 2 labels"),
        ({"labels": [[-100.0, 8.0, 9.0, -100.0, 6.0], [-100.0, 3.0]]}, "instead of integers"),
        ({"labels": [None, [-100, 3]]}, "column 'labels' has nulls"),
        (
            {
                "input_ids": [[], [4, 3]],
                "labels": [[], [-100, 3]],
                "seq_lengths": [[], [2]],
                "position_ids": None,
            },
            "row 0 has no token",
        ),
        ({"labels": [[-100, None, 9, -100, 6], [-100, 3]]}, "column 'labels' has nulls"),
    ):
        with pytest.raises(ContractError, match=message):
            ArrowRows(packs(**wrong))[0]


def test_labels_that_are_shifted_already_are_refused():
    shifted = [{"input_ids": [5, 6, 7, 2], "labels": [6, 7, 2, -100], "seq_lengths": [4]}]
    with pytest.raises(ContractError, match="labels are already shifted"):
        PackedDataset(shifted)
    with pytest.raises(ContractError, match="labels are already shifted"):
        PackedDataset([{k: v for k, v in shifted[0].items() if k != "seq_lengths"}], seq_len=8)
    same = [{"input_ids": [5, 5, 5, 5], "labels": [-100, 5, 5, 5], "seq_lengths": [4]}]
    assert len(PackedDataset(same)) == 1
    assert len(PackedDataset([{"input_ids": [5], "seq_lengths": [1]}])) == 1


@pytest.mark.parametrize(
    "name", ["completion_mask", "assistant_masks", "assistant_mask", "loss_mask"]
)
def test_masks_of_other_tools_keep_prompts_untrained(name):
    """TRL's rows have no labels. All of their tokens were once trained, prompts included."""
    rows = [
        {"input_ids": [7, 8, 9], name: [0, 0, 1]},
        {"input_ids": [5, 6, 4], name: [0, 1, 0]},
    ]
    packs = pack_dataset(rows, 6)
    for given in (packs, [packs[0]], packs.data.table):
        assert open_rows(given)[0].labels.tolist() == [-100, -100, 9, -100, 6, -100]
    assert PackedDataset(rows, seq_len=3)[1]["labels"].tolist() in (
        [-100, -100, 9],
        [-100, 6, -100],
    )
    row = {"input_ids": [7, 8, 9], "labels": [-100, 8, 9], name: [True, False, True]}
    assert read_row(row, whole_rows=True).labels.tolist() == [-100, -100, 9]
    with pytest.raises(ContractError, match="instead of integers"):
        read_row(row | {name: [0, 0.5, 1]}, whole_rows=True)


def test_rows_without_weights_next_to_weighted_rows_weigh_1():
    """A pack of both once lost the weights, so tokens of weight 0 were trained."""
    rows = [{"input_ids": [7, 8, 9], "loss_weights": [0, 0, 0.5]}, {"input_ids": [5, 6]}]
    pack = PackedDataset(rows, seq_len=5)[0]

    weights = dict(zip(pack["input_ids"].tolist(), pack["loss_weights"].tolist(), strict=True))
    assert weights == {7: 0, 8: 0, 9: 0.5, 5: 1, 6: 1}
