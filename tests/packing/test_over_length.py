"""The over-length policy: records that are dropped, cut or refused, all of them counted."""

import numpy as np
import pytest

from packhouse.errors import SequenceTooLongError
from packhouse.pack.overlength import REASONS, apply_over_length
from packhouse.recipe import PackConfig

TWO_TURNS = (list(range(10)), [(2, 4), (6, 9)])  # prompt, answer, prompt, answer, a line end
SHORT = ([1, 2, 3], [(1, 3)])


def config(over_length: str, seq_len: int = 8, strategy: str = "best_fit") -> PackConfig:
    return PackConfig(seq_len=seq_len, over_length=over_length, strategy=strategy)


def test_drop_leaves_out_and_counts(tokenized):
    admitted = apply_over_length(tokenized([SHORT, TWO_TURNS, SHORT]), config("drop"))

    assert admitted.rows.tolist() == [0, 2]
    assert admitted.lengths.tolist() == [3, 3]
    assert (admitted.reasons != 0).tolist() == [False, True, False]
    assert [REASONS[code] for code in admitted.reasons] == ["kept", "over_seq_len", "kept"]
    assert admitted.counts() == {
        "rows": {"in": 3, "kept": 2, "over_seq_len": 1},
        "tokens": {"in": 16, "kept": 6, "truncated": 0, "over_seq_len": 10},
    }


@pytest.mark.parametrize(
    ("seq_len", "lengths"),
    [
        (8, [4]),  # after the last whole answer
        (9, [9]),  # an answer may end exactly at the limit
        (3, []),  # the first answer does not fit
        (10, [10]),  # the line end after the last trained range that fits is not cut off
    ],
)
def test_truncate_turns_cuts_after_the_last_whole_answer(tokenized, seq_len, lengths):
    admitted = apply_over_length(tokenized([TWO_TURNS]), config("truncate_turns", seq_len))

    assert admitted.lengths.tolist() == lengths
    counts = admitted.counts()
    assert counts["tokens"].get("truncated", 0) == (10 - sum(lengths) if lengths else 0)
    assert counts["rows"].get("first_turn_too_long", 0) == (not lengths)


def test_error_names_record_place_limit_and_remedy(tokenized):
    with pytest.raises(
        SequenceTooLongError,
        match=r"'rec1' has 10 tokens, more than seq_len 8 \(demo/demo.jsonl, row 1\)\. .*'drop'",
    ) as caught:
        apply_over_length(tokenized([SHORT, TWO_TURNS]), config("error"))
    assert (caught.value.row, caught.value.seq_len) == (1, 8)


def test_concat_knows_no_over_length(tokenized):
    admitted = apply_over_length(tokenized([TWO_TURNS]), config("error", strategy="concat"))

    assert admitted.lengths.tolist() == [10]


@pytest.mark.parametrize("ranges", [[], [(0, 1)]])
def test_a_record_that_would_train_nothing_is_dropped(tokenized, ranges):
    admitted = apply_over_length(tokenized([([1, 2, 3], ranges)]), config("drop"))

    assert admitted.counts()["rows"] == {"in": 1, "kept": 0, "nothing_trained": 1}


def test_a_record_with_a_label_needs_no_trained_token(tokenized):
    table = tokenized([([1, 2, 3], []), ([1, 2, 3], [])], labels=[1, None])

    assert apply_over_length(table, config("drop")).rows.tolist() == [0]


def test_slices_and_empty_shards_are_read_as_such(tokenized):
    table = tokenized([TWO_TURNS, SHORT, TWO_TURNS])

    assert apply_over_length(table.slice(1, 2), config("drop")).reasons.tolist() == [0, 1]
    assert apply_over_length(table.slice(0, 0), config("drop")).lengths.dtype == np.int32
