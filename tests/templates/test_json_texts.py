"""JSON in bulk is what `json` reads and writes, text by text."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.templates.json_texts import json_texts, parse_texts
from packhouse.templates.provenance import JsonForm, encoder

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

    assert json_texts(items, form).to_pylist() == [encoder(form)(item) for item in items]


@given(items=OBJECTS)
def test_texts_are_parsed_as_json_parses_them(items):
    texts = [json.dumps(item) for item in items]

    assert repr(parse_texts(texts)) == repr([json.loads(text) for text in texts])


@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_every_character_is_written_as_json_writes_it(ensure_ascii):
    chars = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    form = JsonForm(ensure_ascii=ensure_ascii)

    written = json_texts([{char: char} for char in chars], form).to_pylist()

    assert written == [encoder(form)({char: char}) for char in chars]


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
