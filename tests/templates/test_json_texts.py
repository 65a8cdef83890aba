"""JSON in bulk is what `json` reads and writes, text by text."""

import json
import math
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.templates.json_strings import (
    function_strings,
    strings_in,
    strings_of,
    written_strings,
)
from packhouse.templates.json_texts import json_texts, parse_texts
from packhouse.templates.leaves import JsonForm
from packhouse.templates.questions import AnyOf

PIECES = ('"', "\\", ",", ":", "null", "0000", "1e5", "\x7f", "\x00", "\n", "\u2028", "\u00e9", "a")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
NUMBERS = st.floats() | st.integers(-(2**70), 2**70)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=5)


@pytest.mark.parametrize("ensure_ascii", [False, True])
@given(items=OBJECTS)
def test_objects_are_written_as_json_writes_them(ensure_ascii, items):
    form = JsonForm(ensure_ascii=ensure_ascii)

    assert json_texts(items, form).to_pylist() == [form.encoder().encode(item) for item in items]


@given(items=OBJECTS)
def test_texts_are_parsed_as_json_parses_them(items):
    texts = [json.dumps(item) for item in items]

    assert repr(parse_texts(texts)) == repr([json.loads(text) for text in texts])


@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_every_character_is_written_as_json_writes_it(ensure_ascii):
    chars = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    form = JsonForm(ensure_ascii=ensure_ascii)

    written = json_texts([{char: char} for char in chars], form).to_pylist()

    assert written == [form.encoder().encode({char: char}) for char in chars]


def test_floats_of_every_size_are_written_as_json_writes_them():
    edges = [math.nextafter(10.0**n, side) for n in range(-9, 23) for side in (0, 1e99)]
    powers = [10.0**n for n in range(-9, 23)]
    bits = np.random.default_rng(5).integers(0, 2**64, 20_000, np.uint64).tolist()
    floats = [struct.unpack("d", struct.pack("Q", n))[0] for n in bits]
    items = [{"x": value} for value in [*edges, *powers, *floats, -0.0, 0.0001, 0.00001, 1e15]]

    assert json_texts(items, JsonForm()).to_pylist() == [json.dumps(item) for item in items]


def test_what_orjson_cannot_write_is_written_by_json():
    items = [{"a": 2**70}, {"a": math.nan, "b": None}, {"a": None}]

    written = json_texts(items, JsonForm()).to_pylist()

    assert written == ['{"a": 1180591620717411303424}', '{"a": NaN, "b": null}', '{"a": null}']


@given(items=OBJECTS)
def test_strings_of_a_column_are_those_of_each_text(items):
    texts = json_texts(items, JsonForm())
    if len(texts):
        starts, begins, ends = strings_of(texts)
        spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
        found = [spans[starts[n] : starts[n + 1]] for n in range(len(items))]
        assert found == [strings_in(text.encode()) for text in texts.to_pylist()]


def test_strings_of_functions_are_the_name_and_those_of_the_arguments():
    given = {"q": 'a "b"', "n": ["", "c"]}
    functions = [
        {"name": "f", "arguments": given},
        {"arguments": given, "name": "f"},
        {"arguments": {}, "name": "f"},
        {"name": "f", "parameters": {}},
    ]
    texts = json_texts(functions, JsonForm())

    starts, begins, ends = written_strings(texts, functions)

    spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
    found = [spans[starts[n] : starts[n + 1]] for n in range(len(functions))]
    alone = zip(texts.to_pylist(), map(list, functions), strict=True)
    assert found == [function_strings(text.encode(), keys) or [] for text, keys in alone]
    assert [texts[0].as_py().encode()[a:b] for a, b in found[0]] == [
        *(b"f", b"q", b'a \\"b\\"', b"n", b"c"),
    ]


@given(
    literals=st.sets(st.text("<[a/\u00e9\0.|", min_size=1, max_size=4), max_size=5),
    texts=st.lists(st.text("<[a/\u00e9\0.|b", max_size=8), max_size=6),
    first=st.integers(0, 3),
)
def test_a_literal_is_found_within_texts_and_not_across(literals, texts, first):
    column = pa.array(texts, pa.string())[first:]

    found = AnyOf(literals).found_in(column).tolist()

    assert found == [any(own in text for own in literals) for text in texts[first:]]
