"""Any bytes give one of our errors, or put every record in exactly one table."""

import gzip
import json
import math
from itertools import pairwise

import orjson
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from packhouse.errors import PackhouseError
from packhouse.read.csv_files import record_ends
from packhouse.read.json_parsing import split_elements

ROWS = [
    {"instruction": 'a "b" [c]', "input": "", "output": "d\\e"},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    {
        "text": "x",
        "role": "prompter",
        "replies": [{"text": "y", "role": "assistant", "replies": []}],
    },
    {"text": "x", "label": 1},
    {"prompt": "x", "chosen": [{"role": "assistant", "content": "y"}]},
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "text"]), inner)
    ),
    max_leaves=8,
)
keys = ["instruction", "input", "output", "messages", "conversations", "text", "role", "replies"]
keys += ["label", "prompt", "chosen", "tools", "history", "system", "completion", "weight"]
rows = st.lists(st.dictionaries(st.sampled_from(keys), values, max_size=5) | values, max_size=6)
names = st.sampled_from(["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "rows"])
formats = st.sampled_from(
    ["auto", "alpaca", "chat", "messages", "sharegpt", "oasst", "classification", "preference"]
)


@st.composite
def mutated(draw):
    """A valid file with a few bytes changed, deleted or inserted."""
    chosen = draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=4))
    data = orjson.dumps(chosen) if draw(st.booleans()) else b"\n".join(map(orjson.dumps, chosen))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 6)))
        data = data[:start] + draw(st.binary(max_size=4)) + data[end:]
    return gzip.compress(data) if draw(st.booleans()) else data


quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_refuse(read_bytes, data, name, **config):
    """The fixture asserts that no record is lost; any error except ours fails the test."""
    try:
        return read_bytes(data, name, **config)
    except PackhouseError:
        return None


@quick
@given(data=mutated(), name=names, row_format=formats, size=st.sampled_from([1, 50, 2**20]))
def test_damaged_files_never_raise_anything_else(data, name, row_format, size, read_bytes):
    read_or_refuse(read_bytes, data, name, format=row_format, max_shard_bytes=size)


@quick
@given(rows=rows, row_format=formats)
def test_every_row_of_any_json_is_accounted_for(rows, row_format, read_bytes):
    data = json.dumps(rows, allow_nan=True).encode()

    source = read_or_refuse(read_bytes, data, "rows.json", format=row_format)

    if source is not None:
        extra = source.extra_paths
        assert source.validated.num_rows + source.quarantined.num_rows - extra == len(rows)


@given(st.lists(values.filter(lambda value: not _has_nan(value)), max_size=6), st.booleans())
def test_elements_are_split_where_the_parser_splits_them(elements, indented):
    data = json.dumps(elements, indent=2 if indented else None).encode()[1:]

    found = split_elements(data)

    assert found.end == len(data) - 1
    bounds = [-1, *found.commas.tolist(), found.end]
    pieces = [data[a + 1 : b] for a, b in pairwise(bounds)]
    assert [json.loads(piece) for piece in pieces if piece.strip()] == elements


def _has_nan(value):
    if isinstance(value, float):
        return not math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return any(map(_has_nan, inner))


@given(st.text(alphabet='",\na', max_size=40), st.integers(0, 40))
def test_ends_of_records_do_not_move_when_more_bytes_come(text, cut):
    data = text.encode()
    early = record_ends(data[:cut], ",").tolist()

    late = record_ends(data, ",").tolist()

    assert late[: len(early)] == early


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_blocks_do_not_change_how_elements_are_split(block, monkeypatch):
    data = json.dumps([ROWS, 'a\\"]', "\\", [[1, 2], "},{"], {"k": '\\\\"'}], indent=1).encode()[1:]
    whole = split_elements(data)

    monkeypatch.setattr("packhouse.read.json_parsing._SPLIT_BYTES", block)
    cut = split_elements(data)

    assert cut.commas.tolist() == whole.commas.tolist()
    assert cut.end == whole.end
