"""Shards read in blocks give the same result as the whole shard."""

import json

import orjson
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from packhouse.errors import PackhouseError
from packhouse.read import record_boundaries
from packhouse.read.record_boundaries import ArrayFile

TRAP = '"},{\\" [1], [2'  # ends nothing, because it is inside a string
ROWS = [
    {"instruction": f"Say }}, {{ {number}", "input": "x" * (number % 3), "output": TRAP}
    for number in range(24)
]
TALKS = [
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"{number}"}]}
    for number in range(24)
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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    good=st.sampled_from([ROWS, TALKS]),
    bad=st.lists(st.tuples(st.integers(0, 24), st.sampled_from(BAD)), max_size=3),
    name=st.sampled_from(["rows.json", "rows.jsonl"]),
    row_format=st.sampled_from(["auto", "alpaca"]),
    size=st.sampled_from([1, 300, 700]),
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


def blocks_of(data: bytes, size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_boundaries, "BLOCK_BYTES", size)
        return list(ArrayFile("file").blocks(data, 2**20))


def test_messages_in_rows_are_not_taken_for_rows():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns * 3, "id": number} for number in range(100)]
    data = json.dumps(rows)[1:-1].encode()

    found = blocks_of(data, 2000)

    assert [row for *_, records in found for row in records.rows] == rows
    assert len(found) > len(data) // 2000


@pytest.mark.parametrize("data", [b', {"a": 1}', b'{"a": 1},', b'{"a": 1}, , {"a": 2}', b","])
def test_an_element_left_out_is_no_json(data):
    found = [record for *_, record in blocks_of(data, 1)]

    whole = ArrayFile("file").parse(data, 2**20)
    assert sum(records.num_records for records in found) == whole.num_records
    assert [row for records in found for row in records.rows] == whole.rows
    reasons = [bad.reason for bad in whole.failures]
    assert [bad.reason for records in found for bad in records.failures] == reasons != []


def test_a_broken_element_is_cut_by_structure():
    data = b'{"a": 1}, {"a": nonsense}, {"a": 2}, {"a": 3}'
    (cut, *_) = ArrayFile("file", 30).cut([b"[" + data])

    assert (cut.byte_start, cut.byte_end, cut.num_rows) == (1, 26, 2)


def test_a_last_shard_of_the_size_of_another_is_counted_by_itself(read_bytes):
    rows = [{"text": "a" * 28}, {"text": "a" * 7}, {"text": "a" * 8}]
    data = b"[" + b",".join(json.dumps(row).encode() for row in rows) + b"]"

    source = read_bytes(data, "rows.json", max_shard_bytes=45)

    assert [s.byte_end - s.byte_start for s in source.shards] == [40, 40]
    assert source.validated["row"].to_pylist() == [0, 1, 2]
