"""Plans: small literal answers, properties of every strategy, and real lengths."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.pack.fit_decreasing import (
    exact_completion,
)
from packhouse.pack.shuffle import keys_to_indices, permutation, shuffle_keys, splitmix64
from packhouse.pack.strategies import STRATEGIES, PackPlan, lower_bound, plan_packs
from packhouse.recipe.sections import Strategy

WHOLE = tuple(name for name in STRATEGIES if name != "concat")
LENGTHS = st.lists(st.integers(1, 64), max_size=200)
# Few distinct lengths, each many times, so that patterns repeat.
REPEATED = st.dictionaries(st.integers(1, 64), st.integers(1, 90), max_size=6).map(
    lambda counts: [length for length, count in counts.items() for _ in range(count)]
)


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [part.tolist() for part in np.split(plan.order, plan.pack_offsets[1:-1])]


def lengths_in_packs(plan: PackPlan, lengths: np.ndarray) -> list[list[int]]:
    return sorted(sorted(lengths[pack].tolist(), reverse=True) for pack in packs_of(plan))


def tokens_in_packs(plan: PackPlan, lengths: np.ndarray) -> list[int]:
    sizes = lengths[plan.order] if plan.starts is None else plan.ends - plan.starts
    return [int(part.sum()) for part in np.split(sizes, plan.pack_offsets[1:-1])]


def first_fit_by_hand(lengths: list[int], seq_len: int) -> list[list[int]]:
    packs = []
    for length in sorted(lengths, reverse=True):
        for pack in packs:
            if sum(pack) + length <= seq_len:
                pack.append(length)
                break
        else:
            packs.append([length])
    return packs


def first_fit_as_given(lengths: list[int], seq_len: int) -> list[list[int]]:
    packs = []
    for index, length in enumerate(lengths):
        for pack in packs:
            if sum(lengths[i] for i in pack) + length <= seq_len:
                pack.append(index)
                break
        else:
            packs.append([index])
    return packs


# -- goldens


def test_first_fit_needs_11_packs_and_best_fit_9_on_johnsons_example():
    # Johnson 1973: 51 + 26 + 23 six times and 27 + 27 + 23 + 23 three times fill 9 packs of 100.
    # Longest first joins 51 with 27 instead, which leaves 22, too little for any other.
    lengths = np.repeat([51, 27, 26, 23], [6, 6, 6, 12])

    first_fit = plan_packs(lengths, seq_len=100, strategy="first_fit")
    best_fit = plan_packs(lengths, seq_len=100, strategy="best_fit")

    assert lengths_in_packs(first_fit, lengths) == sorted(
        [[51, 27]] * 6 + [[26, 26, 26]] * 2 + [[23, 23, 23, 23]] * 3
    )
    assert lengths_in_packs(best_fit, lengths) == sorted(
        [[51, 26, 23]] * 6 + [[27, 27, 23, 23]] * 3
    )


def test_next_fit_never_looks_back():
    # All orders of six threes are the same: two fit into 8, a third does not.
    lengths = np.full(6, 3)

    plan = plan_packs(lengths, seq_len=8, strategy="next_fit")

    assert [len(pack) for pack in packs_of(plan)] == [2, 2, 2]


def test_none_keeps_one_sequence_a_row_in_the_order_given():
    plan = plan_packs(np.array([5, 3, 2]), seq_len=8, strategy="none", seed=3)

    assert packs_of(plan) == [[0], [1], [2]]
    assert plan.fill == 10 / 24


def test_order_of_packs_and_of_equal_lengths_is_pinned():
    # Published bytes depend on these numbers: they change only with packing.VERSION.
    lengths = np.array([4, 4, 4, 4, 8, 2, 6])

    assert plan_packs(lengths, 8, "best_fit", seed=0).order.tolist() == [2, 3, 1, 0, 6, 5, 4]
    assert plan_packs(lengths, 8, "next_fit", seed=0).order.tolist() == [5, 4, 2, 3, 1, 0, 6]


def test_a_recipe_can_name_every_strategy():
    assert set(get_args(Strategy)) == set(STRATEGIES)


# -- permutations


def test_splitmix64_gives_its_published_stream():
    # First outputs for seed 1234567 of the reference implementation (Vigna, splitmix64.c).
    gamma = 0x9E3779B97F4A7C15

    outputs = [splitmix64((1234567 + step * gamma) % 2**64) for step in range(3)]

    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(num=st.integers(0, 3000), seed=st.integers(-(2**70), 2**70))
def test_keys_are_distinct_and_give_their_indices_back(num, seed):
    keys = shuffle_keys(num, seed)

    assert len(np.unique(keys)) == num
    assert keys_to_indices(keys, seed).tolist() == list(range(num))


def test_a_permutation_is_pinned():
    assert permutation(8, seed=0).tolist() == [7, 5, 4, 2, 3, 1, 0, 6]


# -- properties


@pytest.mark.parametrize("strategy", WHOLE)
@settings(max_examples=40)
@given(lengths=LENGTHS | REPEATED, seed=st.integers(-5, 2**63))
def test_every_sequence_lands_in_exactly_one_pack_and_no_pack_overflows(strategy, lengths, seed):
    array = np.array(lengths, dtype=np.int32)

    plan = plan_packs(array, 64, strategy, seed)

    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert max(tokens_in_packs(plan, array), default=0) <= 64
    assert min(np.diff(plan.pack_offsets), default=1) >= 1
    assert plan.num_tokens == sum(lengths)
    assert plan.num_packs >= lower_bound(array, 64)


@given(lengths=st.lists(st.integers(1, 200), max_size=60), seq_len=st.integers(1, 64))
def test_concat_holds_every_token_exactly_once_in_full_packs(lengths, seq_len):
    array = np.array(lengths, dtype=np.int64)

    plan = plan_packs(array, seq_len, "concat")

    tokens = [
        (sequence, token)
        for sequence, start, end in zip(plan.order, plan.starts, plan.ends, strict=True)
        for token in range(start, end)
    ]
    assert sorted(tokens) == [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    assert all(size == seq_len for size in tokens_in_packs(plan, array)[:-1])
    assert plan.num_packs == -(-sum(lengths) // seq_len)


@given(lengths=LENGTHS | REPEATED)
def test_first_fit_is_first_fit_decreasing(lengths):
    plan = plan_packs(np.array(lengths, dtype=np.int64), 64, "first_fit")

    by_hand = first_fit_by_hand(lengths, 64)
    assert lengths_in_packs(plan, np.array(lengths)) == (sorted(by_hand) if lengths else [[]])


# -- without a seed


@given(lengths=LENGTHS)
def test_first_fit_shuffle_without_a_seed_is_first_fit_in_the_order_of_arrival(lengths):
    plan = plan_packs(np.array(lengths, dtype=np.int64), 64, "first_fit_shuffle", seed=None)

    assert (packs_of(plan) if lengths else []) == first_fit_as_given(lengths, 64)


@given(lengths=LENGTHS)
def test_next_fit_and_concat_without_a_seed_keep_the_order_of_arrival(lengths):
    lengths = np.array(lengths, dtype=np.int64)

    assert plan_packs(lengths, 64, "next_fit", None).order.tolist() == list(range(len(lengths)))
    pieces = plan_packs(lengths, 64, "concat", None).order.tolist()
    assert pieces == sorted(pieces)


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
@given(lengths=LENGTHS)
def test_decreasing_packs_without_a_seed_come_longest_first(strategy, lengths):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_packs(lengths, 64, strategy, None)

    seeded = plan_packs(lengths, 64, strategy, 0)
    assert lengths_in_packs(plan, lengths) == lengths_in_packs(seeded, lengths)
    packs = packs_of(plan) if len(lengths) else []
    ranks = [[(-int(lengths[i]), i) for i in pack] for pack in packs]
    assert all(rank == sorted(rank) for rank in ranks)
    assert [rank[0] for rank in ranks] == sorted(rank[0] for rank in ranks)


# -- refusals


def test_too_long_a_sequence_names_itself_and_the_limit():
    with pytest.raises(
        SequenceTooLongError, match=r"sequence 1 has 9,213 tokens, more than seq_len 8,"
    ):
        plan_packs(np.array([5, 9213]), seq_len=8192)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ContractError, match="sequence 2 has 0 tokens"):
        plan_packs(np.array([5, 3, 0]), seq_len=8, strategy="concat")


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"'worst_fit'. Known: best_fit, first_fit, first_fit_shuffle"
    ):
        plan_packs(np.array([5]), seq_len=8, strategy="worst_fit")


# -- real and realistic lengths


def alpaca_like(num: int, median: float, seed: int = 0) -> np.ndarray:
    """Lengths of a synthetic fine-tuning set: log-normal, and 42 tokens or more of template."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return np.clip(42 + rng.lognormal(np.log(median), 0.8, num), 43, 1100).astype(np.int32)


@pytest.mark.parametrize(("seq_len", "median"), [(2048, 140), (131072, 50)])
def test_realistic_lengths_take_at_most_one_pack_over_the_bound(seq_len, median):
    lengths = alpaca_like(52_002, median)

    plan = plan_packs(lengths, seq_len, "best_fit")

    assert plan.num_packs <= -(-int(lengths.sum()) // seq_len) + 1


def test_planning_does_not_grow_with_the_number_of_sequences():
    few, many = (np.bincount(np.tile(alpaca_like(5_000, 50), n)) for n in (1, 100))

    assert len(exact_completion(many, 2048).length) < 3 * len(exact_completion(few, 2048).length)
