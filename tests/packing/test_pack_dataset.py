"""`pack_dataset`: TRL's strategies by name, and the cost of each."""

import warnings
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given, settings, strategies as st

from packhouse import PackedCollator, PackTally, pack_dataset
from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.load import known_packs

ROWS = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7]}, {"input_ids": []}]
CUTS = pytest.mark.filterwarnings("ignore:.* cuts records")


def packed(rows, *args, **settings):
    return pack_dataset(rows, *args, **settings).to_dict()


# -- nothing is cut unless asked for


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit", "first_fit_shuffle", "next_fit"])
def test_a_row_over_the_length_is_refused_and_named(strategy):
    with pytest.raises(SequenceTooLongError, match="row 0 has 5 tokens, more than seq_length 4"):
        pack_dataset(ROWS, 4, strategy)


def test_dropped_rows_and_empty_ones_are_counted():
    tally = PackTally()

    assert packed(ROWS, 4, over_length="drop", tally=tally) == {
        "input_ids": [[6, 7]],
        "seq_lengths": [[2]],
    }
    assert tally == PackTally(
        num_rows=3, num_tokens=7, num_empty=1, num_dropped=1, num_lost_tokens=5
    )


# -- cuts made by TRL's names are reported and counted


def test_nothing_is_warned_of_where_nothing_is_cut():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # If torch and a trainer are imported, packs give a warning, which has its own test.
        warnings.filterwarnings("ignore", message="each row contains several")
        assert packed(ROWS, 5, "bfd") == packed(ROWS, 5)
        assert packed(ROWS, 7, "wrapped") == {"input_ids": [[1, 2, 3, 4, 5, 6, 7]]}


def test_bfd_loses_the_end_of_a_row_and_reports_it():
    tally = PackTally()
    with pytest.warns(UserWarning, match="bfd cuts records.* 1 cut into 1 piece, 1 token lost"):
        assert packed(ROWS, 4, "bfd", tally=tally)["input_ids"] == [[1, 2, 3, 4], [6, 7]]
    assert (tally.num_cut, tally.num_pieces, tally.num_lost_tokens) == (1, 1, 1)


def test_bfd_split_keeps_every_token_in_pieces_and_reports_it():
    tally = PackTally()
    with pytest.warns(UserWarning, match="bfd_split cuts records.* 1 cut into 2 pieces, 0 tokens"):
        assert packed(ROWS, 4, "bfd_split", tally=tally) == {
            "input_ids": [[1, 2, 3, 4], [6, 7, 5]],
            "seq_lengths": [[4], [2, 1]],
        }
    assert (tally.num_cut, tally.num_pieces, tally.num_lost_tokens) == (1, 2, 0)


@CUTS
def test_wrapped_has_no_bounds_and_a_collator_refuses_it_while_concat_has_them():
    wrapped = packed(ROWS, 4, "wrapped")
    assert wrapped == {"input_ids": [[1, 2, 3, 4], [5, 6, 7]]}
    with pytest.raises(ContractError, match="has no record boundaries"):
        PackedCollator()([{"input_ids": wrapped["input_ids"][0]}])
    assert packed(ROWS, 4, "concat") == wrapped | {"seq_lengths": [[4], [1, 2]]}


@CUTS
@pytest.mark.parametrize("strategy", ["best_fit", "bfd_split", "concat", "wrapped"])
def test_the_first_token_of_every_piece_has_no_label(strategy):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    made = packed(rows, 3 if strategy == "best_fit" else 2, strategy)

    ids, labels = (list(chain(*made[name])) for name in ("input_ids", "labels"))
    starts = {5, 8} if strategy == "best_fit" else {5, 7, 8}
    if strategy in ("concat", "wrapped"):
        starts = {5, 7, 8, 9}  # 5 6 | 7, 8 | 9
    assert {i for i, label in zip(ids, labels, strict=True) if label == -100} == starts


# -- properties


@CUTS
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    strategy=st.sampled_from(["bfd", "bfd_split", "wrapped", "concat", "drop"]),
    seed=st.sampled_from([None, 0]),
)
@settings(deadline=None, max_examples=40)
def test_every_token_is_in_a_pack_or_counted_as_lost(lengths, strategy, seed):
    ends = np.cumsum([0, *lengths])
    rows = pa.table({"input_ids": [list(range(a, b)) for a, b in pairwise(ends)]})
    rows = rows.cast(pa.schema([("input_ids", pa.list_(pa.int64()))]))
    tally = PackTally()
    if strategy == "drop":
        made = packed(rows, 16, over_length="drop", seed=seed, tally=tally)
    else:
        made = packed(rows, 16, strategy, seed=seed, tally=tally)

    tokens = list(chain(*made["input_ids"]))
    assert len(tokens) == len(set(tokens)) == tally.num_tokens - tally.num_lost_tokens
    assert max(map(len, made["input_ids"]), default=0) <= 16
    assert tally.num_rows == len(lengths)
    assert tally.num_empty == lengths.count(0)
    if "seq_lengths" in made:
        for ids, sizes in zip(made["input_ids"], made["seq_lengths"], strict=True):
            assert sum(sizes) == len(ids)
            steps = np.diff(ids)
            inner = np.delete(steps, np.cumsum(sizes)[:-1] - 1)
            assert (inner == 1).all()  # a piece is a contiguous part of one row
    if strategy in ("bfd_split", "wrapped", "concat"):
        assert sorted(tokens) == list(range(ends[-1]))
    if strategy == "drop":
        assert tally.num_cut == 0


# -- inputs and outputs


def test_large_lists_and_sliced_tables_are_packed_as_others_are():
    rows = pa.table({"input_ids": [[9, 9], [1, 2, 3], [4, 5]], "mask": [[0, 0], [1, 1, 1], [2, 2]]})
    large = rows.cast(pa.schema([(name, pa.large_list(pa.int64())) for name in rows.schema.names]))
    expected = {"input_ids": [[1, 2, 3, 4, 5]], "mask": [[1, 1, 1, 2, 2]], "seq_lengths": [[3, 2]]}

    assert packed(rows.slice(1), 5) == packed(large.slice(1), 5) == expected
    assert packed(Dataset(rows).select([2, 1]), 5) == expected


def test_a_generator_of_arrays_and_a_dict_of_splits_are_packed():
    rows = ({"input_ids": np.arange(n), "labels": np.arange(n)} for n in (3, 2))
    splits = DatasetDict(train=Dataset.from_list(ROWS[:2]), test=Dataset.from_list(ROWS[1:]))

    assert packed(rows, 5)["labels"] == [[-100, 1, 2, -100, 1]]
    made = pack_dataset(splits, 7)
    assert {name: part["seq_lengths"][:] for name, part in made.items()} == {
        "train": [[5, 2]],
        "test": [[2]],
    }


@CUTS
def test_an_iterable_dataset_is_packed_batch_by_batch_and_counted_while_it_is_read():
    rows = Dataset.from_list(ROWS * 2).to_iterable_dataset()
    tally = PackTally()
    made = pack_dataset(rows, 4, "bfd_split", {"batch_size": 3}, tally=tally)

    assert isinstance(made, IterableDataset)
    assert tally.num_rows == 0
    assert [row["seq_lengths"] for row in made] == [[4], [2, 1]] * 2
    assert (tally.num_rows, tally.num_empty, tally.num_cut, tally.num_pieces) == (6, 2, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS, 4, "worst"), ConfigError, "unknown strategy 'worst'; known: best_fit, .*, bfd"),
        ((ROWS, 0), ConfigError, "seq_length must be positive, got 0"),
        (("rows", 4), ConfigError, "a str is not an iterable of rows"),
        (([{"input_ids": [1], "text": "a"}], 4), ContractError, "column 'text' holds"),
        (([{"input_ids": [1], "labels": [1, 2]}], 4), ContractError, "row 0 has 2 values in"),
        (([{"input_ids": [1]}, {"input_ids": None}], 4), ContractError, "row 1 has no list"),
        (([], 4), ContractError, "there are no rows to pack. Check the dataset"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        pack_dataset(*arguments)


def test_a_strategy_with_a_cutting_rule_takes_no_other_policy():
    with pytest.raises(ConfigError, match="cannot be used with strategy 'bfd'"):
        pack_dataset(ROWS, 4, "bfd", over_length="drop")
    with pytest.raises(ConfigError, match="over_length 'cut' is unknown"):
        pack_dataset(ROWS, 4, over_length="cut")


def test_packs_for_a_trainer_that_would_drop_their_boundaries_are_warned_of(monkeypatch):
    for name in ("GUARDS", "_WARNED"):  # none from other tests
        monkeypatch.setattr(known_packs, name, set())
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]})
    with pytest.warns(UserWarning, match=r"^each row contains several .* use PackedCollator or"):
        pack_dataset(rows, 8)
