"""Cuts of JSON arrays: proven by parsing where that works, and always those of the structure."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.read import json_arrays
from packhouse.read.json_arrays import ArrayFile, array_blocks, last_comma, split_elements

TRAPS = ['},{"a": 1', "}, {", '\\"},{', "x", "[", "]", '"', "\\", "caf\u00e9", ",", "\n"]
texts = st.lists(st.sampled_from(TRAPS), max_size=4).map("".join)
elements = st.one_of(st.dictionaries(texts, texts, max_size=2), st.integers(0, 9), st.lists(texts))
arrays = st.lists(elements, min_size=1, max_size=30)
styles = st.sampled_from([(",", ":"), (", ", ": "), (",\n ", ": ")])
sizes = st.sampled_from([1, 10, 60, 2**20])


@pytest.fixture(autouse=True)
def block_bytes(monkeypatch):
    """Sets the size of blocks."""
    return lambda size: set_block_bytes(monkeypatch, size)


def set_block_bytes(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(json_arrays, "BLOCK_BYTES", size)
    patch.setattr(json_arrays, "COUNT_BLOCK_BYTES", size)


def by_structure(data: bytes, limit: int) -> tuple[int, int] | None:
    commas = [int(comma) for comma in split_elements(data).commas if comma <= limit]
    return (commas[-1], len(commas)) if commas else None


@given(
    values=arrays,
    style=styles,
    share=st.floats(0, 1),
    tail=st.sampled_from(["", "]", "] x", '}, {"a": 1}']),
    harm=st.none()
    | st.tuples(st.floats(0, 1), st.sampled_from([b"", b'"', b"{", b"]", b",", b",,"])),
    size=sizes,
)
def test_parsing_finds_the_comma_that_structure_finds(values, style, share, tail, harm, size):
    data = (json.dumps(values, separators=style)[1:-1] + tail).encode()
    if harm is not None:
        place = int(harm[0] * len(data))
        data = data[:place] + harm[1] + data[place + 1 :]
    limit = int(share * len(data))

    with pytest.MonkeyPatch.context() as patch:
        set_block_bytes(patch, size)
        assert last_comma(data, limit) == by_structure(data, limit)


@given(values=arrays, style=styles, size=sizes)
def test_blocks_hold_the_elements_of_the_whole(values, style, size):
    data = json.dumps(values, separators=style)[1:-1].encode()

    with pytest.MonkeyPatch.context() as patch:
        set_block_bytes(patch, size)
        found = list(array_blocks(data))

    assert [row for block in found for row in block.rows] == values
    assert b",".join(data[block.start : block.end] for block in found) == data
    assert all(json.loads(b"[%b]" % data[b.start : b.end]) == b.rows for b in found)


@pytest.mark.parametrize("text", ["plain", '},{"a": 1', "}\n,\n{"])
def test_objects_are_cut_by_parsing_and_counted(text, block_bytes, monkeypatch):
    rows = [{"text": f"{text} {number}"} for number in range(200)]
    data = json.dumps(rows)[1:-1].encode()
    expected = by_structure(data, 1500)
    block_bytes(500)
    monkeypatch.setattr(json_arrays, "_FIRST_BYTES", 500)
    looked_at = []
    monkeypatch.setattr(
        "packhouse.read.json_arrays.split_elements",
        lambda data: looked_at.append(len(data)) or split_elements(data),
    )

    assert last_comma(data, 1500) == expected
    assert max(looked_at) <= 501  # the first bytes, and what is left behind the last block


def test_messages_in_rows_are_not_taken_for_rows(block_bytes, monkeypatch):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns * 3, "id": number} for number in range(100)]
    data = json.dumps(rows)[1:-1].encode()
    monkeypatch.setattr(json_arrays, "_FIRST_BYTES", 1000)
    block_bytes(2000)

    found = list(array_blocks(data))

    assert [row for block in found for row in block.rows] == rows
    assert len(found) > len(data) // 2000


@pytest.mark.parametrize("data", [b', {"a": 1}', b'{"a": 1},', b'{"a": 1}, , {"a": 2}', b","])
def test_an_element_left_out_is_no_json(data, block_bytes):
    block_bytes(1)

    with pytest.raises(orjson.JSONDecodeError):
        list(array_blocks(data))


def test_a_broken_element_is_cut_by_structure():
    data = b'{"a": 1}, {"a": nonsense}, {"a": 2}, {"a": 3}'
    (cut, *_) = ArrayFile("file", 30).cut([b"[" + data])

    assert (cut.start, cut.end, cut.num_rows) == (1, 26, 2)


def test_a_last_shard_of_the_size_of_another_is_counted_by_itself(read_bytes):
    rows = [{"text": "a" * 28}, {"text": "a" * 7}, {"text": "a" * 8}]
    data = b"[" + b",".join(json.dumps(row).encode() for row in rows) + b"]"

    source = read_bytes(data, "rows.json", max_shard_bytes=45)

    assert [s.byte_end - s.byte_start for s in source.shards] == [40, 40]
    assert source.validated["row"].to_pylist() == [0, 1, 2]
