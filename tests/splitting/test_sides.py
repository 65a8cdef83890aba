"""Splits are a function of key and seed: stable when rows are moved or added, provably disjoint."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from packhouse.errors import ContractError
from packhouse.pack.train_eval_split import LeakCheck, goes_to_eval
from packhouse.recipe import SplitConfig

KEYS = st.lists(st.integers(0, 30), max_size=80).map(
    lambda numbers: [key_of(number) for number in numbers]
)


def key_of(number: int) -> str:
    """A key as hashing gives it: 80 bits, all of them in use."""
    return f"{(number + 1) * 0x9E3779B97F4A7C15F39D % 2**80:020x}"


def is_eval(keys, **config) -> list[bool]:
    return goes_to_eval(pa.array(keys, pa.string()), SplitConfig(**config)).tolist()


def test_the_assignment_is_pinned():
    # The choice of evaluation records depends on this; it changes only with splitting.VERSION.
    keys = [key_of(number) for number in range(12)]

    sides_of = {seed: is_eval(keys, eval_fraction=0.5, seed=seed) for seed in (0, 1)}
    as_digits = {seed: "".join("01"[side] for side in sides_of[seed]) for seed in sides_of}
    assert as_digits[0] == "101110010111"
    assert as_digits[1] == "110111111111"


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_the_fraction_is_met_over_many_groups(fraction):
    share = np.mean(is_eval([key_of(n) for n in range(20_000)], eval_fraction=fraction))

    # Five standard deviations.
    assert abs(share - fraction) < 5 * np.sqrt(fraction * (1 - fraction) / 20_000)


def test_a_larger_fraction_only_adds_to_eval():
    keys = [key_of(n) for n in range(1000)]

    smaller, larger = (np.array(is_eval(keys, eval_fraction=f)) for f in (0.1, 0.2))
    assert (smaller <= larger).all()
    assert larger.sum() > smaller.sum()


def test_no_split_is_asked_for():
    assert is_eval([key_of(1)] * 3) == [False] * 3
    assert is_eval([key_of(1)] * 3, eval_count=0) == [False] * 3


@given(keys=KEYS, seed=st.integers(-5, 2**64))
def test_a_side_is_a_function_of_the_key(keys, seed):
    together = is_eval(keys, eval_fraction=0.4, seed=seed)
    alone = [is_eval([key], eval_fraction=0.4, seed=seed)[0] for key in keys]

    assert together == alone


@given(keys=KEYS, count=st.integers(0, 100), seed=st.integers(0, 9))
def test_eval_count_takes_whole_groups_until_there_are_enough(keys, count, seed):
    chosen = is_eval(keys, eval_count=count, seed=seed)

    in_eval = [key for key, side in zip(keys, chosen, strict=True) if side]
    assert not set(in_eval) & {key for key, side in zip(keys, chosen, strict=True) if not side}
    assert len(in_eval) >= min(count, len(keys))
    # Without any one of its groups, there would be too few.
    if in_eval and count:
        assert min(len(in_eval) - in_eval.count(key) for key in in_eval) < count


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=60),
    count=st.integers(0, 80),
    seed=st.integers(0, 9),
)
def test_eval_count_counts_a_row_once_however_many_records_it_has(rows, count, seed):
    config = SplitConfig(eval_count=count, seed=seed)
    keys = [key_of(number) for number, num_records in rows for _ in range(num_records)]
    first = [place == 0 for _, num_records in rows for place in range(num_records)]

    chosen = goes_to_eval(pa.array(keys, pa.string()), config, np.array(first, np.bool_))
    of_rows = is_eval([key_of(number) for number, _ in rows], eval_count=count, seed=seed)
    assert chosen[np.array(first, np.bool_)].tolist() == of_rows
    in_eval = {key for key, side in zip(keys, chosen, strict=True) if side}
    assert not in_eval & {key for key, side in zip(keys, chosen, strict=True) if not side}


@given(keys=KEYS, more=KEYS, count=st.integers(0, 60), seed=st.integers(0, 9))
def test_appending_never_moves_a_record_from_train_to_eval(keys, more, count, seed):
    before = is_eval(keys, eval_count=count, seed=seed)
    after = is_eval(keys + more, eval_count=count, seed=seed)[: len(keys)]

    assert all(was or not now for was, now in zip(before, after, strict=True))


@given(keys=KEYS, data=st.data())
def test_order_does_not_matter(keys, data):
    order = data.draw(st.permutations(range(len(keys))))

    in_order = is_eval(keys, eval_count=9)
    assert is_eval([keys[i] for i in order], eval_count=9) == [in_order[i] for i in order]


def prove_disjoint(train, evaluation, what="group_key"):
    check = LeakCheck(what)
    for chunk in evaluation:
        check.add_eval(chunk)
    for chunk in train:
        check.check_train(chunk)
    check.finish()


def test_disjoint_sides_are_proven():
    keys = [key_of(number) for number in range(100)]

    prove_disjoint([pa.array(keys[:40]), pa.array(keys[40:60])], [pa.array(keys[60:])])
    prove_disjoint([pa.array(keys)], [])
    prove_disjoint([], [pa.array(keys)])


@pytest.mark.parametrize("shared", [0, 42, 98])
def test_one_shared_key_is_found_wherever_it_is(shared):
    keys = [key_of(number) for number in range(100)]
    train = [pa.array(keys[:50]), pa.array([*keys[50:99], keys[shared]])]

    with pytest.raises(ContractError, match=f"record_id that is also in eval.*{keys[shared]}"):
        prove_disjoint(train, [pa.array([key_of(1000), keys[shared]])], "record_id")


def test_keys_that_differ_in_the_last_digit_alone_are_different():
    prove_disjoint([pa.array(["0" * 20])], [pa.array(["0" * 19 + "1", "00" * 9 + "10"])])
    with pytest.raises(ContractError, match="'00000000000000000000'"):
        prove_disjoint([pa.array(["0" * 20])], [pa.array(["0" * 20])])
