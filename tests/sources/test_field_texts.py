"""JSON in the text of a field is read as strictly as a line of a file, at little cost."""

import json
from itertools import product

import orjson
from hypothesis import example, given, settings, strategies as st

from packhouse.read.chat_messages import BadRowError, parse_field
from packhouse.read.json_parsing import find_fault, hidden_fault, parse_pieces, parse_text
from packhouse.read.record_boundaries import LinesFile


def as_line(text):
    """Return the value, or reason and message, of the JSON as the only line of a file."""
    data = text.encode("utf-8", "surrogatepass").replace(b"\n", b" ").replace(b"\r", b" ")
    records = parse_pieces(data, LinesFile.lines(data), len(data) + 1)
    if records.failures:
        return None, tuple(records.failures[0][1:])
    return (
        (records.rows[0], None) if records.rows else (None, ("json", "not JSON: the text is empty"))
    )


def as_argument(text):
    """Return the value, or reason and message, of the same JSON as the arguments of a call."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return None, ("tool_calls", f"a call: not JSON ({error.msg})")
    bad = as_line(text)[1]
    return (value, None) if bad is None else (None, (bad[0], f"a call: {bad[1]}"))


NUMBERS = [
    "0",
    "-1",
    "1.5",
    "1e20",
    "1E+5",
    "1e400",
    "NaN",
    "Infinity",
    "01",
    "9223372036854775807",
]
NUMBERS += ["18446744073709551615", "18446744073709551616", "-9223372036854775809", "9" * 40]
STRINGS = ['"a"', '""', '"\\u0061"', '"\\u0000"', '"\\u003a"', '"\\ud800"', '"\\ud83d\\ude00"']
STRINGS += ['"a:b"', '"{["', '"\\\\u0000"', '"\\"', '"\x00"', '"\n"', '"\ud800"', '"\u2028"', "'a'"]
WORDS = ["true", "false", "null", "nul", "", " ", "\ufeff"]
KEYS = ['"a"', '"b"', '"\\u0061"', '"\\u003a"', '"k:"', '""']
NAMES = ["".join(letters) for letters in product("abcdefghij", repeat=3)] + ["k"]
PIECES = [*NUMBERS, *STRINGS, *WORDS, *KEYS, *"{}[]:,\n\r\t\v\f /"]

values = st.recursive(
    st.sampled_from(NUMBERS + STRINGS + WORDS),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)
texts = values | st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=20)


@settings(max_examples=300)
@given(texts)
@example("")
@example(" \n\t\x0b\x0c")
@example("[" * 32 + "]" * 32)
@example("[" * 33 + "]" * 33)
@example('{"a":' * 33 + "1" + "}" * 33)
@example("[" * 300 + "]" * 300)
@example("[" * 2000 + "]" * 2000)
@example('"' + "[" * 40 + '"')
@example(json.dumps(dict.fromkeys(NAMES[:1000])))
@example(json.dumps(dict.fromkeys(NAMES)))
@example(json.dumps([dict.fromkeys(NAMES)]))
@example('{"a": 12345678901234567890, "b": 1, "b": 2}')
@example('{"a": "1\n2"}')
@example('{"a": 1,')
def test_a_field_is_read_as_the_same_line_of_a_file(text):
    assert repr(parse_text(text)) == repr(as_line(text))

    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    else:
        assert hidden_fault(text.encode(), value) == find_fault(text.encode(), value)
    try:
        read = parse_field(text, "a call"), None
    except BadRowError as bad:
        read = None, (bad.reason, bad.detail)
    assert repr(read) == repr(as_argument(text))
