"""Cuts of JSON arrays: proven by parsing where that works, and always those of the structure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.sources.cutting import ArrayCutter, _by_parsing
from packhouse.sources.structure import split_elements

TRAPS = ['},{"a": 1', "}, {", '\\"},{', "x", "[", "]", '"', "\\", "caf\u00e9", ",", "\n"]
texts = st.lists(st.sampled_from(TRAPS), max_size=4).map("".join)
elements = st.one_of(st.dictionaries(texts, texts, max_size=2), st.integers(0, 9), st.lists(texts))
arrays = st.lists(elements, min_size=1, max_size=30)
styles = st.sampled_from([(",", ":"), (", ", ": "), (",\n ", ": ")])


def by_structure(data: bytes, limit: int) -> tuple[int, int] | None:
    commas = [int(comma) for comma in split_elements(data).commas if comma <= limit]
    return (commas[-1], len(commas)) if commas else None


@given(values=arrays, style=styles, share=st.floats(0, 1), tail=st.sampled_from(["", "]", "] x"]))
def test_parsing_finds_the_comma_that_structure_finds(values, style, share, tail):
    data = (json.dumps(values, separators=style)[1:-1] + tail).encode()

    found = _by_parsing(data, int(share * len(data)))

    assert found is None or found == by_structure(data, int(share * len(data)))


@pytest.mark.parametrize("text", ["plain", '},{"a": 1', "}\n,\n{"])
def test_objects_are_cut_by_parsing_and_counted(text):
    rows = [{"text": f"{text} {number}"} for number in range(200)]
    data = json.dumps(rows)[1:-1].encode()

    assert _by_parsing(data, 1500) == by_structure(data, 1500)
    assert _by_parsing(data, 1500) is not None


def test_a_broken_element_is_cut_by_structure():
    data = b'{"a": 1}, {"a": nonsense}, {"a": 2}, {"a": 3}'
    cutter = ArrayCutter("file", 30)

    assert _by_parsing(data, 30) is None
    assert cutter.boundary(data) == 25
    assert cutter.count(data[:25], is_last=False) == 2
