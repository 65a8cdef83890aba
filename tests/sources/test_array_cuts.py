"""JSON arrays are cut into shards and parsing blocks only between elements."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.read import record_boundaries
from packhouse.read.record_boundaries import ArrayFile

TRAPS = ['},{"a": 1', "}, {", '\\"},{', "x", "[", "]", '"', "\\", "caf\u00e9", ",", "\n"]
texts = st.lists(st.sampled_from(TRAPS), max_size=4).map("".join)
elements = st.one_of(st.dictionaries(texts, texts, max_size=2), st.integers(0, 9), st.lists(texts))
arrays = st.lists(elements, min_size=1, max_size=30)
styles = st.sampled_from([(",", ":"), (", ", ": "), (",\n ", ": ")])
sizes = st.sampled_from([1, 10, 60, 2**20])


def blocks_of(data: bytes, size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_boundaries, "BLOCK_BYTES", size)
        return list(ArrayFile("file").blocks(data, 2**20))


@settings(max_examples=40)
@given(values=arrays, style=styles, size=sizes)
def test_blocks_hold_the_elements_of_the_whole(values, style, size):
    data = json.dumps(values, separators=style)[1:-1].encode()

    found = blocks_of(data, size)

    assert [row for *_, records in found for row in records.rows] == values
    assert b",".join(data[start:end] for start, end, _ in found) == data
    for start, end, records in found:
        pieces = [data[start:end][first:last] for first, last in records.spans]
        assert list(map(json.loads, pieces)) == records.rows


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
