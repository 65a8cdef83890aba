"""Tokens laid on text, against looking at them one by one; small blocks so that borders are met."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.tokenize import encoders
from packhouse.tokenize import offsets as spans
from packhouse.tokenize.encoders import TokenTexts
from packhouse.tokenize.offsets import EncodedRows, Spans, train_ranges

# Some short and some long, and none at all.
VOCABULARY = [b"", b" ", b"ab", *(bytes(range(97, 97 + n)) for n in (7, 8, 9, 15, 16, 17, 24, 25))]
TABLE = TokenTexts.of(pa.array(VOCABULARY, pa.binary()))


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "_BLOCK", 5)
        patch.setattr(spans, "_BLOCK", 3)
        yield


@given(
    ids=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40),
    flips=st.sets(st.integers(0, 400), max_size=3),
    data=st.data(),
)
def test_differing_is_each_token_beside_its_place(ids, flips, data):
    filled = [number for number, index in enumerate(ids) if VOCABULARY[index]]
    cut = sorted(data.draw(st.sets(st.sampled_from(filled or [0]), max_size=4))) if filled else []
    said = [VOCABULARY[index][number in cut :] for number, index in enumerate(ids)]
    text = bytearray(b"".join(said))
    for flip in flips:
        if flip < len(text):
            text[flip] ^= 1
    places = np.cumsum([0, *map(len, said)])
    found = TABLE.differing(
        np.array(ids, np.int32),
        np.frombuffer(bytes(text), np.uint8),
        np.array(cut, np.int64),
    )
    own = [text[a:b] for a, b in pairwise(places)]
    assert found.tolist() == [n for n, each in enumerate(said) if own[n] != each]


@given(ids=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40))
def test_edges_are_sums_of_widths(ids):
    widths = [len(VOCABULARY[index]) for index in ids]
    assert TABLE.edges(np.array(ids, np.int32)).tolist() == np.cumsum([0, *widths]).tolist()


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=6),  # widths of the row's tokens
            st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3),
        ),
        max_size=12,
    )
)
def test_ranges_are_the_tokens_that_begin_inside(rows):
    begins, offsets, base, expected = [], [0], 0, []
    starts, ends, counts = [], [], [0]
    for row, (widths, wanted) in enumerate(rows):
        edges = np.cumsum([0, *widths])
        length = int(edges[-1])
        begins += (base + edges).tolist()[:-1]
        offsets.append(offsets[-1] + len(widths))
        for a, b in wanted:
            a, b = sorted((min(a, length), min(b, length)))
            starts.append(base + a)
            ends.append(base + b)
            inside = [n for n, edge in enumerate(edges[:-1].tolist()) if a <= edge < b]
            expected += [(row, inside[0], inside[-1] + 1)] if inside else []
        counts.append(len(starts))
        base += length
    found = np.array(begins, np.int64)
    behind = np.append(found[1:], base)[: len(found)]
    encoded = EncodedRows(
        text=np.zeros(base, np.uint8),
        bases=np.zeros(len(rows) + 1, np.int64),  # of no account here
        ids=np.zeros(len(found), np.int32),
        offsets=np.array(offsets),
        starts=found,
        ends=behind,
        is_exact=np.ones(len(rows), bool),
    )
    ranges = train_ranges(encoded, Spans(*(np.array(v, np.int64) for v in (starts, ends, counts))))
    numbers = np.repeat(np.arange(len(rows)), np.diff(ranges.offsets)).tolist()
    assert list(zip(numbers, ranges.starts.tolist(), ranges.ends.tolist(), strict=True)) == expected
