import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from packhouse import ClassificationCollator, PackedCollator, PaddedCollator
from packhouse.errors import ConfigError, ContractError, SequenceTooLongError

PACK = {
    "input_ids": [7, 8, 9, 5, 6],
    "labels": [-100, 8, 9, -100, 6],
    "seq_lengths": [3, 2],
    "record_ids": ["a", "b"],
}
EOS = 2


def test_packs_are_concatenated_with_positions_restarting_at_each_record():
    batch = PackedCollator()([PACK, {"input_ids": [4, 3], "seq_lengths": [2]}])

    assert batch["input_ids"].tolist() == [[7, 8, 9, 5, 6, 4, 3]]
    assert batch["labels"].tolist() == [[-100, 8, 9, -100, 6, -100, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 7]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert "attention_mask" not in batch


def test_whole_rows_are_one_record_each_without_their_padding():
    rows = [{"input_ids": [7, 8, EOS, EOS], "attention_mask": [1, 1, 1, 0]}, {"input_ids": [5]}]

    batch = PackedCollator(whole_rows=True)(rows)

    assert batch["input_ids"].tolist() == [[7, 8, EOS, 5]]
    assert batch["labels"].tolist() == [[-100, 8, EOS, -100]]


def test_a_packed_row_with_a_padding_mask_is_refused():
    with pytest.raises(ContractError, match="packed and padded"):
        PackedCollator()([PACK | {"attention_mask": [1, 1, 1, 1, 0]}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PACK | {"seq_lengths": [3, 3]}, "add up to 6"),
        (PACK | {"seq_lengths": [5, 0]}, "at least 1"),
        (PACK | {"labels": [1]}, "5 input_ids and 1 labels"),
        ({"ids": [1]}, "no input_ids; its columns are ids"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_their_numbers(row, message):
    with pytest.raises(ContractError, match=message):
        PackedCollator()([row])


def test_filling_up_is_a_record_of_its_own_that_is_not_trained():
    batch = PackedCollator(pad_to_multiple_of=4, pad_token_id=EOS, seq_idx=True)([PACK])

    assert batch["input_ids"].tolist() == [[7, 8, 9, 5, 6, EOS, EOS, EOS]]
    assert batch["labels"].tolist() == [[-100, 8, 9, -100, 6, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_shifted_targets_are_the_next_tokens():
    batch = PackedCollator(shift_labels=True)([PACK])

    assert batch["shift_labels"].tolist() == [[8, 9, -100, 6, -100]]


def test_weights_are_those_of_the_column_or_add_up_to_one_for_each_record():
    batch = PackedCollator(loss_weights="record")([PACK])
    assert batch["loss_weights"].tolist() == [[0, 0.5, 0.5, 0, 1]]

    row = PACK | {"loss_weights": [9.0, 0.25, 1.0, 9.0, 2.0]}
    batch = PackedCollator(loss_weights="column")([row])
    assert batch["loss_weights"].tolist() == [[0, 0.25, 1, 0, 2]]
    with pytest.raises(ContractError, match="requires rows with a loss_weights column"):
        PackedCollator(loss_weights="column")([PACK])
    for settings in ({"shift_labels": True}, {"loss_weights": "record"}):
        with pytest.raises(ConfigError, match="class labels have no shift_labels or loss_weights"):
            ClassificationCollator(pad_token_id=0, **settings)


RECORDS = [{"input_ids": [7, 8, EOS]}, {"input_ids": [5, EOS]}]


def test_padding_is_ignored_by_length_and_eos_stays_trained():
    batch = PaddedCollator(pad_token_id=EOS)(RECORDS)

    assert batch["input_ids"].tolist() == [[7, 8, EOS], [5, EOS, EOS]]
    assert batch["labels"].tolist() == [[-100, 8, EOS], [-100, EOS, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_left_padding_to_max_length():
    batch = PaddedCollator(pad_token_id=0, side="left", padding="max_length", max_length=4)(RECORDS)

    assert batch["input_ids"].tolist() == [[0, 7, 8, EOS], [0, 0, 5, EOS]]
    assert batch["labels"].tolist() == [[-100, -100, 8, EOS], [-100, -100, -100, EOS]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]


def test_prefix_tokens_shorten_the_window_and_count_for_the_multiple():
    collate = PaddedCollator(
        pad_token_id=0, padding="max_length", max_length=24, prefix_tokens=16, pad_to_multiple_of=8
    )
    assert collate(RECORDS)["input_ids"].shape == (2, 8)
    cut = PaddedCollator(pad_token_id=0, max_length=2, too_long="truncate")
    assert cut(RECORDS)["input_ids"].tolist() == [[7, 8], [5, EOS]]
    longest = PaddedCollator(pad_token_id=0, prefix_tokens=16, pad_to_multiple_of=8)
    assert longest(RECORDS)["input_ids"].shape == (2, 8)  # 16 + 3 -> 24

    with pytest.raises(
        SequenceTooLongError, match=r"row 0 has 9 tokens, over the window of 8 \(.*16"
    ):
        collate([{"input_ids": list(range(1, 10))}])


def test_a_pack_cannot_be_padded():
    with pytest.raises(ContractError, match="row 1 holds 2 records"):
        PaddedCollator(pad_token_id=0)([RECORDS[0], PACK])


def test_classification_batches_have_integer_classes():
    rows = [{"input_ids": [101, 7, 102], "label": 1}, {"input_ids": [101, 102], "label": 0}]
    batch = ClassificationCollator(pad_token_id=0)(rows)

    assert batch["labels"].tolist() == [1, 0]
    assert batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[101, 7, 102], [101, 102, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    with pytest.raises(ContractError, match="row 1 has no label"):
        ClassificationCollator(pad_token_id=0)([rows[0], {"input_ids": [1], "label": None}])


@pytest.mark.parametrize("label", [1.7, float("nan"), "1", [1]])
def test_classes_that_are_no_whole_numbers_are_refused_and_not_cut(label):
    with pytest.raises(ContractError, match=r"row 0 has a label of type .*one integer per row"):
        ClassificationCollator(pad_token_id=0)([{"input_ids": [1], "label": label}])
    for whole in (np.int32(3), torch.tensor(3)):
        batch = ClassificationCollator(pad_token_id=0)([{"input_ids": [1], "label": whole}])
        assert batch["labels"].tolist() == [3]


@given(
    records=st.lists(st.lists(st.integers(3, 90), min_size=1, max_size=9), min_size=1, max_size=9),
    kind=st.sampled_from([list, np.array, torch.tensor]),
)
def test_every_record_has_the_same_targets_packed_and_padded(records, kind):
    rows = [{"input_ids": kind(ids)} for ids in records]
    packed = PackedCollator(whole_rows=True, shift_labels=True)(rows)
    padded = PaddedCollator(pad_token_id=0, shift_labels=True)(rows)

    targets = [t for t in packed["shift_labels"][0].tolist() if t != -100]
    assert targets == [t for row in padded["shift_labels"].tolist() for t in row if t != -100]
    assert targets == [i for ids in records for i in ids[1:]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": "max_length"}, "max_length"),
        ({"max_length": 16, "prefix_tokens": 16}, "leaves no room after 16 prefix tokens"),
        ({"side": "centre"}, "side 'centre' is unknown"),
        ({"padding": "max"}, "padding 'max' is unknown"),
        ({"too_long": "cut"}, "too_long 'cut' is unknown"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
        ({"max_length": 100, "pad_to_multiple_of": 64}, "max_length 100 is not a multiple of"),
    ],
)
def test_settings_that_are_not_known_are_refused_when_given(settings, message):
    with pytest.raises(ConfigError, match=message):
        PaddedCollator(pad_token_id=0, **settings)
    with pytest.raises(ConfigError):
        ClassificationCollator(pad_token_id=0, **settings)


def test_weights_that_nobody_would_apply_are_refused_unless_that_is_meant():
    row = PACK | {"loss_weights": [0.0, 0.25, 1.0, 0.0, 2.0]}
    with pytest.raises(
        ContractError, match="row 1 has loss_weights, but the collator has no setting"
    ):
        PackedCollator()([PACK, row])
    assert "loss_weights" not in PackedCollator(loss_weights="ignore")([PACK, row])
