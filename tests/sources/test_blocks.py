"""Shards read in blocks give the same result as the whole shard."""

import json

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhouse.errors import PackhouseError
from packhouse.read import record_boundaries
from packhouse.read.record_boundaries import ArrayFile

ROWS = [
    {"instruction": f"Say }}, {{ {number}", "input": "x" * (number % 3), "output": "[1], [2]"}
    for number in range(40)
]
TALKS = [
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"{number}"}]}
    for number in range(40)
]
BAD = [
    b'{"instruction": "a", "output": "b", "output": "c"}',
    b'{"instruction": "a\\u0000", "output": "b"}',
    b'{"instruction": 12345678901234567890123, "output": "b"}',
    b'{"instruction": "a"}',
    b'{"instruction": "", "output": "b", "extra": 1}',
    b'{"instruction": "' + b"a" * 600 + b'", "output": "b"}',
    b'{"instruction": "a" "output": "b"}',
    b'{"instruction": "a, "output": "b"}',
    b'{"instruction": "a", "output": ["b"}',
    b'{"instruction": "\xff", "output": "b"}',
    b'{"text": "of another shape"}',
    b"7",
    b"",
]


def join(pieces: list[bytes], name: str) -> bytes:
    return b"[" + b",\n".join(pieces) + b"]" if name == "rows.json" else b"\n".join(pieces)


def read_in_blocks(read_bytes, size, data, name, **config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_boundaries, "BLOCK_BYTES", size)
        try:
            source = read_bytes(data, name, rules={"max_row_bytes": 500}, **config)
        except PackhouseError as error:
            return str(error)
    shards = [shard.identity() for shard in source.shards]
    tables = source.validated.to_pydict(), source.quarantined.to_pydict()
    return shards, *tables, source.notes, source.extra_paths, source.extra_fields


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    good=st.sampled_from([ROWS, TALKS]),
    bad=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(BAD)), max_size=3),
    name=st.sampled_from(["rows.json", "rows.jsonl"]),
    row_format=st.sampled_from(["auto", "alpaca"]),
    size=st.sampled_from([1, 100, 700]),
    shard=st.sampled_from([1500, 2**20]),
)
def test_blocks_give_the_same_rows_as_the_whole_shard(
    good, bad, name, row_format, size, shard, read_bytes
):
    pieces = [orjson.dumps(row) for row in good]
    for place, piece in bad:
        pieces.insert(place, piece)
    data = join(pieces, name)
    config = {"format": row_format, "max_shard_bytes": shard}

    by_blocks = read_in_blocks(read_bytes, size, data, name, **config)
    at_once = read_in_blocks(read_bytes, 2**20, data, name, **config)

    assert by_blocks == at_once


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_sound_shard_is_never_parsed_as_a_whole(name, read_bytes, monkeypatch):
    monkeypatch.setattr(ArrayFile, "parse", None)
    monkeypatch.setattr(record_boundaries, "BLOCK_BYTES", 500)
    data = join([json.dumps(row).encode() for row in ROWS], name)

    assert read_bytes(data, name).validated.num_rows == len(ROWS)


def test_rows_with_colons_after_escapes_are_checked(read_bytes):
    row = rb'{"instruction": "a\u003ab", "input": "1", "input": "2", "output": "b"}'
    good = rb'{"instruction": "a\u003ab", "output": "\u0041\\u0000"}'

    source = read_bytes(row + b"\n" + good)

    assert source.reasons == ["duplicate_key"]
    assert source.texts == [[("user", "a:b"), ("assistant", "A\\u0000")]]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_malformed_row_makes_no_other_row_suspect(name, read_bytes, monkeypatch):
    monkeypatch.setattr("packhouse.read.json_parsing.hidden_fault", None)
    data = join([*map(orjson.dumps, ROWS), b'{"instruction": "a", "output": }'], name)

    assert read_bytes(data, name).reasons == ["json"]
