"""Seeded permutations: bijective, pinned, and fair enough."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.pack.shuffle import keys_to_indices, permutation, shuffle_keys, splitmix64


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


@pytest.mark.parametrize("num", [5])
def test_every_index_comes_first_about_as_often(num):
    seeds = 200 * num
    first = np.bincount([permutation(num, seed)[0] for seed in range(seeds)], minlength=num)

    # 200 expected each; 5 standard deviations are 71.
    assert abs(first - 200).max() < 71
