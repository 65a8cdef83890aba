"""Every known kind of bad input, by its number in the project's list, with the expected result.

A bad row is placed between two good ones, so each case also shows that its neighbours survive.
"""

import bz2
import gzip
import hashlib
import io
import os
import tracemalloc
from functools import partial
from typing import get_args

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.errors import SourceError, TransientError
from packhouse.read import compression, read_shard, scan_source
from packhouse.read.unread_fields import is_media
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.records.reasons import TurnOrder
from tests.sources.conftest import parquet

GOOD = b'{"instruction": "Add 1 and 2.", "input": "", "output": "3"}'
ALSO_GOOD = b'{"instruction": "Name a colour.", "input": "", "output": "Red"}'


def deep(levels: int) -> bytes:
    return b'{"instruction": "x", "output": "y", "z": ' + b"[" * levels + b"]" * levels + b"}"


BAD_ROWS = {
    "1-malformed": (b'{"instruction": "x", "output" "y"}', "json"),
    "6-latin-1": (b'{"instruction": "caf\xe9", "output": "y"}', "encoding"),
    "7-surrogate-escape": (b'{"instruction": "\\ud800", "output": "y"}', "encoding"),
    "8-raw-surrogate": (b'{"instruction": "\xed\xa0\x80", "output": "y"}', "encoding"),
    "9-escaped-nul": (b'{"instruction": "a\\u0000b", "output": "y"}', "control"),
    "10-raw-nul": (b'{"instruction": "a\x00b", "output": "y"}', "control"),
    "11-raw-control": (b'{"instruction": "a\x1bb", "output": "y"}', "control"),
    "12-long-line": (b'{"instruction": "' + b"x" * 5000 + b'", "output": "y"}', "row_too_long"),
    "13-deep": (deep(100_000), "depth"),
    "15-duplicate-key": (b'{"instruction": "x", "output": "a", "output": "b"}', "duplicate_key"),
    "15-duplicate-nested": (
        b'{"instruction": "x", "output": "y", "m": {"a": 1, "a": 2}}',
        "duplicate_key",
    ),
    "15-duplicate-escaped": (
        b'{"instruction": "x", "output": "y", "a" : ":", "\\u0061": "\\u003a"}',
        "duplicate_key",
    ),
    "16-nan": (b'{"instruction": "x", "output": "y", "n": NaN}', "number"),
    "17-minus-infinity": (b'{"instruction": "x", "output": "y", "n": -Infinity}', "number"),
    "18-int-over-64-bit": (
        b'{"instruction": "x", "output": "y", "n": 18446744073709551616}',
        "number",
    ),
    "18-negative-int": (
        b'{"instruction": "x", "output": "y", "n": -9223372036854775809}',
        "number",
    ),
    "19-5000-digits": (b'{"instruction": "x", "output": "y", "n": ' + b"7" * 5000 + b"}", "number"),
    "20-1e400": (b'{"instruction": "x", "output": "y", "n": 1e400}', "number"),
    "21-number-for-text": (b'{"instruction": 5, "output": "y"}', "type"),
    "24-null-for-text": (b'{"instruction": "x", "output": null}', "type"),
    "26-missing-field": (b'{"instruction": "x"}', "fields"),
    "29-number": (b"7", "not_an_object"),
    "29-list-of-numbers": (b"[1, 2]", "not_an_object"),
    "50-5000-keys": (
        orjson.dumps({"instruction": "x", "output": "y"} | {f"k{i}": 1 for i in range(200)})[:-1]
        + b"".join(b',"l%d":1' % i for i in range(4800))
        + b"}",
        "too_many_fields",
    ),
    "54-empty-answer": (b'{"instruction": "x", "output": " \\n"}', "empty_answer"),
    "54-empty-question": (b'{"instruction": "", "input": "", "output": "y"}', "empty_prompt"),
}
SMALL = {"max_row_bytes": 4096}
LONG_ON_PURPOSE = ("12-long-line",)


def rules_for(case: str) -> dict[str, int]:
    return SMALL if case in LONG_ON_PURPOSE else {}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_quarantined_with_its_bytes_and_its_neighbours_live(case, name, read_bytes):
    bad, reason = BAD_ROWS[case]
    data = b"\n".join([GOOD, bad, ALSO_GOOD]) + b"\n"
    if name == "rows.json":
        data = b"[\n  " + b",\n  ".join([GOOD, bad, ALSO_GOOD]) + b"\n]\n"

    source = read_bytes(data, name, rules=rules_for(case))

    assert source.validated["row"].to_pylist() == [0, 2]
    assert source.reasons == [reason]
    [found] = source.quarantined.to_pylist()
    assert (found["row"], found["step"]) == (1, "validate")
    assert found["byte_offset"] == data.index(bad, 10)
    assert found["raw"] == bad[: 64 * 1024]
    assert found["raw_size"] == len(bad)
    assert found["raw_sha256"] == hashlib.sha256(bad).hexdigest()
    assert len(found["detail"]) > 10


def test_depth_32_is_allowed_and_33_is_not(read_bytes):
    source = read_bytes(deep(31) + b"\n" + deep(32))

    assert source.validated["row"].to_pylist() == [0]
    assert source.reasons == ["depth"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("rows.jsonl", GOOD + b"\n" + ALSO_GOOD[:30], "the file ends inside this row"),
        ("rows.json", b"[" + GOOD + b",\n" + ALSO_GOOD[:30], ""),
    ],
)
def test_3_a_truncated_last_row_is_quarantined_and_flags_the_file(name, data, said, read_bytes):
    source = read_bytes(data, name)

    assert source.validated.num_rows == 1
    assert source.reasons == ["json"]
    assert said in source.quarantined["detail"][0].as_py()
    assert source.notes["truncated_files"] == 1


DAMAGE = {
    "open-string": b'{"instruction": "x, "output": "y"}',
    "open-bracket": b'{"instruction": "x", "output": "y", "z": [1}',
    "extra-brace": b'{"instruction": "x", "output": "y"}}',
    "missing-brace": b'{"instruction": "x", "output": "y"',
    "missing-quote": b'{"instruction": "x", "output: "y"}',
}


@pytest.mark.parametrize("between", [b",\n", b",\n    ", b", "])
@pytest.mark.parametrize("case", DAMAGE)
def test_1_damage_that_unbalances_an_array_stays_in_its_element(case, between, read_bytes):
    rows = between.join([GOOD, DAMAGE[case], ALSO_GOOD, GOOD])

    source = read_bytes(b"[" + between[1:] + rows + b"\n]", "rows.json")

    assert source.validated["row"].to_pylist() == [0, 2, 3]
    assert source.reasons == ["json"]
    assert source.quarantined["raw"].to_pylist() == [DAMAGE[case]]


@pytest.mark.parametrize("between", [b" ", b", ", b",", b"  ,", b""])
@pytest.mark.parametrize("case", DAMAGE)
def test_1_damage_on_a_line_of_several_objects_costs_one_object(case, between, read_bytes):
    line = between.join([GOOD, DAMAGE[case], ALSO_GOOD, GOOD])

    source = read_bytes(GOOD + b"\n" + line + b"\n" + line)

    assert source.validated["row"].to_pylist() == [0, 1, 3, 4, 5, 7, 8]
    assert source.quarantined["row"].to_pylist() == [2, 6]
    assert source.quarantined["raw"].to_pylist() == [DAMAGE[case]] * 2


@pytest.mark.parametrize("case", DAMAGE)
def test_1_damage_in_an_array_with_several_objects_on_a_line_costs_one_object(case, read_bytes):
    good, bad = b", ".join([GOOD] * 3), b", ".join([GOOD, DAMAGE[case], ALSO_GOOD])

    source = read_bytes(b"[" + b",\n".join([good, bad, good, good]) + b"]", "rows.json")

    assert source.validated["row"].to_pylist() == [0, 1, 2, 3, *range(5, 12)]
    assert source.quarantined["raw"].to_pylist() == [DAMAGE[case]]


def test_1_two_objects_on_a_line_of_which_the_first_is_open(read_bytes):
    source = read_bytes(DAMAGE["missing-brace"] + b" " + ALSO_GOOD)

    assert source.validated["row"].to_pylist() == [1]
    assert source.quarantined["raw"].to_pylist() == [DAMAGE["missing-brace"]]


INSIDE = [b'[{"text": "a"}]', b'[{"id": 1}, {"text": "a"}, {"text": "b"}]', b'{"text": "a"}']


@pytest.mark.parametrize("inside", INSIDE)
def test_1_objects_inside_a_broken_one_are_not_rows(inside, read_bytes):
    broken = b'{"text": "q", "n" 1, "replies": %b}' % inside
    line = b", ".join([broken, b'{"text": "c"}', b'{"text": "d"}'])

    source = read_bytes(b'{"text": "a"}\n' + line, format="text")

    assert source.texts == [[("assistant", text)] for text in "acd"]
    assert source.quarantined["raw"].to_pylist() == [broken]


@pytest.mark.parametrize("inside", INSIDE)
def test_1_objects_that_may_be_inside_a_broken_one_are_counted_in_its_detail(inside, read_bytes):
    broken = b'{"text": "q", "n" 1, "replies": %b' % inside.removesuffix(b"]")
    line = b", ".join([broken, b'{"text": "c"}', b'{"text": "d" 1}'])

    source = read_bytes(b'{"text": "a"}\n' + line, format="text")

    assert source.texts == [[("assistant", "a")]]
    (bad,) = source.quarantined.to_pylist()
    number = line.count(b'{"text":')
    assert f"; {number} objects begin in its {len(line)} bytes" in bad["detail"]


@pytest.mark.parametrize("key", ["input", "output"])
def test_1_an_object_that_is_closed_too_early_is_no_row(key, read_bytes):
    rows = [b'{"instruction": "x", "output": "y", "input": "z"}'] * 3
    rows[1] = rows[1].replace(b', "%b"' % key.encode(), b'}, "%b"' % key.encode())

    source = read_bytes(GOOD + b"\n" + b" ".join(rows))

    assert source.validated["row"].to_pylist() == [0, 1, 3]
    assert source.quarantined["raw"].to_pylist() == [rows[1]]


@pytest.mark.parametrize("case", ["open-string", "open-bracket", "missing-brace", "missing-quote"])
def test_an_open_object_over_several_lines_swallows_no_other(case, read_bytes):
    objects = [GOOD, DAMAGE[case], ALSO_GOOD, GOOD]
    written = [b"{\n  " + each[1:].replace(b', "', b',\n  "') for each in objects]

    source = read_bytes(b"\n\n".join(written), file_format="objects")

    assert source.validated["row"].to_pylist() == [0, 2, 3]
    assert len(source.reasons) == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_object_inside_a_broken_one_is_no_row(name, read_bytes):
    inner = b'{"instruction": "nested", "output": "y"}'
    broken = b'{"instruction": "x", "output": "y", "examples": [\n' + inner
    if name == "rows.json":
        data = b"[" + b", ".join([GOOD, broken.replace(b"\n", b""), ALSO_GOOD]) + b"]"
    else:
        data = b"\n".join([GOOD, broken, ALSO_GOOD]).replace(b'", "', b'",\n"')

    source = read_bytes(data, name, **({} if name == "rows.json" else {"file_format": "objects"}))

    assert "nested" not in str(source.texts)


def test_malformed_line_in_the_middle_does_not_flag_the_file(read_bytes):
    assert "truncated_files" not in read_bytes(b"{\n" + GOOD + b"\n").notes


def test_a_last_line_that_begins_no_row_does_not_flag_the_file(read_bytes):
    source = read_bytes(GOOD + b"\n...")

    assert "truncated_files" not in source.notes
    assert "the file ends" not in source.quarantined["detail"][0].as_py()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_4_byte_order_mark_is_stripped_and_counted(name, read_bytes):
    body = GOOD if name.endswith("l") else b"[" + GOOD + b"]"

    source = read_bytes(b"\xef\xbb\xbf" + body, name)

    assert source.validated.num_rows == 1
    assert source.notes == {"bom": 1}


def test_12_a_line_larger_than_a_shard_gets_a_shard_of_its_own(read_bytes):
    line = b'{"instruction": "' + b"x" * 300_000 + b'", "output": "y"}'

    source = read_bytes(
        b"\n".join([GOOD, line, ALSO_GOOD]), max_shard_bytes=10_000, rules={"max_row_bytes": 2**16}
    )

    assert [shard.num_rows for shard in source.shards] == [1, 1, 1]
    assert source.reasons == ["row_too_long"]
    assert source.quarantined["raw_size"].to_pylist() == [300_000 + 34]


def test_24_null_content_is_allowed_only_with_tool_calls(read_bytes):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "go"}
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    end = {"role": "assistant", "content": "done"}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [[user, asks, result, end], [user, {"role": "assistant", "content": None}]]

    source = read_bytes(b"\n".join(orjson.dumps({"messages": row}) for row in rows))

    assert source.validated["row"].to_pylist() == [0]
    assert source.reasons == ["type"]


def test_26_a_file_of_two_shapes_is_refused_and_both_are_shown(read_bytes):
    rows = [GOOD] * 100 + [b'{"question": "1 + 1?", "answer": "2"}']

    with pytest.raises(
        SourceError, match=r"alpaca \('instruction', .*line 101 has the fields 'question', 'answer'"
    ):
        read_bytes(b"\n".join(rows), max_shard_bytes=500)


def test_27_messages_as_json_text_are_read_and_bad_ones_are_quarantined(read_bytes):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = orjson.dumps(messages, option=orjson.OPT_INDENT_2).decode()
    twice = text.replace('"content": "b"', '"content": "b", "content": "c"')
    rows = [messages, text, text[:-9], twice, "no list", "[1, 2]"]

    source = read_bytes(b"\n".join(orjson.dumps({"messages": row}) for row in rows))

    assert source.texts == [[("user", "a"), ("assistant", "b")]] * 2
    assert source.reasons == ["json", "duplicate_key", "type", "type"]


@pytest.mark.parametrize("between", [b", ", b",\n"])
def test_28_an_array_named_jsonl_is_read_and_refused_where_lines_are_stated(between, read_bytes):
    data = b"[" + between.join([GOOD, ALSO_GOOD]) + b"]\n"

    assert read_bytes(data).texts == read_bytes(data, "rows.json").texts
    with pytest.raises(SourceError, match=r"one JSON array.*file_format"):
        read_bytes(data, file_format="jsonl")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl", b""),
        ("rows.jsonl", b"\n \n\r\n"),
        ("rows.json", b""),
        ("rows.json", b" [ \n] \n"),
        ("rows.csv", b""),
        ("rows.csv", b"text,label\n"),
        ("rows.tsv", b"text\tlabel\r\n"),
        ("rows.jsonl.gz", gzip.compress(b"", mtime=0)),
    ],
)
def test_30_a_file_without_rows_gives_no_rows_and_a_note(name, data, read_bytes):
    source = read_bytes(data, name)

    assert source.validated.num_rows == source.quarantined.num_rows == 0
    assert source.notes["empty_files"] == 1


def test_31_blank_lines_are_counted_and_do_not_number_rows(read_bytes):
    source = read_bytes(b"\n" + GOOD + b"\n\n \t\r\n" + ALSO_GOOD + b"\n\n")

    assert source.validated["row"].to_pylist() == [0, 1]
    assert source.notes == {"blank_lines": 4}


def test_32_and_35_windows_line_ends_and_no_last_one_are_accepted(read_bytes):
    source = read_bytes(GOOD + b"\r\n" + ALSO_GOOD)

    assert source.validated.num_rows == 2
    assert source.notes == {}


TEN_ROWS = [
    b'{"question": "\\\\frac{%d}{b} } {", "answer": "{\\"", "t": [{}, {}]}' % n for n in range(10)
]
TEN_PRETTY = [orjson.dumps(orjson.loads(line), option=orjson.OPT_INDENT_2) for line in TEN_ROWS]
BROKEN_SEPARATORS = {
    "space": b" ".join(TEN_ROWS),
    "nothing": b"".join(TEN_ROWS),
    "comma": b", ".join(TEN_ROWS),
    "comma-and-line": b",\n".join(TEN_ROWS) + b",\r\n",
    "line-and-comma": b"\n,".join(TEN_ROWS),
    "one-space-in-lines": b"\n".join(TEN_ROWS[:4]) + b" " + b"\n".join(TEN_ROWS[4:]),
    "two-of-one-comma": b"\n".join(TEN_ROWS[:4]) + b", " + b"\n".join(TEN_ROWS[4:]),
    "one-comma-in-lines": b"\n".join(TEN_ROWS[:4]) + b",\n" + b"\n".join(TEN_ROWS[4:]),
    "carriage-returns": b"\r".join(TEN_ROWS),
    "no-comma-in-array": b"[" + b"\n".join(TEN_ROWS) + b"]",
    "one-comma-missing": b"[" + b", ".join(TEN_ROWS[:4]) + b" " + b", ".join(TEN_ROWS[4:]) + b"]",
    "pretty-and-commas": b",\n".join(TEN_PRETTY),
    "pretty-on-a-line": b"\n".join(TEN_PRETTY[:4]) + b" " + b"\n".join(TEN_PRETTY[4:]),
    "pretty-and-one-comma": b"\n".join(TEN_PRETTY[:4]) + b",\n" + b"\n".join(TEN_PRETTY[4:]),
}


@pytest.mark.parametrize(("name", "max_shard_bytes"), [("rows.json", 100), ("rows.jsonl", 2**25)])
@pytest.mark.parametrize("case", BROKEN_SEPARATORS)
def test_36_a_broken_separator_costs_no_object(case, name, max_shard_bytes, read_bytes):
    data = BROKEN_SEPARATORS[case]
    asked = [orjson.loads(line)["question"] for line in TEN_ROWS]

    source = read_bytes(data, name, max_shard_bytes=max_shard_bytes)

    assert (source.reasons, source.validated["row"].to_pylist()) == ([], list(range(10)))
    assert [texts[0][1] for texts in source.texts] == asked

    source = read_bytes(data.replace(b"frac{3}{b}", b"\xff"), name, max_shard_bytes=max_shard_bytes)
    assert (source.reasons, source.quarantined["row"].to_pylist()) == (["encoding"], [3])
    assert [texts[0][1] for texts in source.texts] == asked[:3] + asked[4:]


@pytest.mark.parametrize(
    "line", [b'{"a": [{"a": 1} {"a": 2} {"a": 3}]}', b'{"a": [{"a": 1}, {"a": 2}, x]}']
)
def test_36_objects_inside_a_broken_object_are_not_rows(line, read_bytes):
    source = read_bytes(GOOD + b"\n" + line + b"\n" + GOOD)

    assert (source.reasons, source.validated["row"].to_pylist()) == (["json"], [0, 2])


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u2029", "\u001e"])
def test_34_unicode_line_separators_are_ordinary_text(separator, read_bytes):
    text = f"a{separator}b"
    row = orjson.dumps({"instruction": text, "output": text})

    source = read_bytes(row + b"\n" + row + b"\n")

    assert source.texts == [[("user", text), ("assistant", text)]] * 2


zstd = partial(pa.compress, codec="zstd", asbytes=True)
LINES = (GOOD + b"\n") * 2000
GZ = gzip.compress(LINES, mtime=0)
ZST = zstd(LINES)
# Arrow writes no checksums. This is `zstd` output for {"instruction": "a", "output": "b"}.
ZST_WITH_CHECKSUM = bytes.fromhex(
    "28b52ffd24242101007b22696e737472756374696f6e223a202261222c20226f7574707574223a202262227d0a"
    "4111e5f0"
)


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


def table_of(text: pa.Array) -> pa.Table:
    return pa.Table.from_arrays([text, text], names=["instruction", "output"])


def arrow_with_bad_offsets() -> bytes:
    offsets = pa.py_buffer(b"\0\0\0\0\x7f\0\0\0\x02\0\0\0")
    table = table_of(pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab")))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def parquet_with_latin_1() -> bytes:
    raw = pa.array([b"caf\xe9"], pa.binary())
    sink = io.BytesIO()
    pq.write_table(table_of(pa.StringArray.from_buffers(1, *raw.buffers()[1:])), sink)
    return sink.getvalue()


WEB_PAGE = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 22773992\n"
REFUSED_FILES = {
    "5-utf-16": ("rows.jsonl", GOOD.decode().encode("utf-16"), "UTF-16"),
    "5-utf-16-le": ("rows.json", GOOD.decode().encode("utf-16-le"), "UTF-16"),
    "5-utf-16-be": ("rows.csv", GOOD.decode().encode("utf-16-be"), "UTF-16"),
    "5-utf-32": ("rows.jsonl", GOOD.decode().encode("utf-32"), "UTF-32"),
    "33-carriage-returns": ("rows.csv", GOOD + b"\r" + ALSO_GOOD + b"\r", "CR-only line endings"),
    "38-truncated-gz": ("rows.jsonl.gz", GZ[:-20], "truncated"),
    "38-truncated-gz-trailer": ("rows.jsonl.gz", GZ[:-1], "truncated"),
    "38-truncated-zst": ("rows.jsonl.zst", ZST[:-20], "damaged"),
    "39-wrong-crc": ("rows.jsonl.gz", flipped(GZ, len(GZ) - 6), "damaged"),
    "39-wrong-zst-checksum": ("rows.jsonl.zst", flipped(ZST_WITH_CHECKSUM, -2), "damaged"),
    "40-garbage-after-gz": ("rows.jsonl.gz", GZ + b"garbage", "followed by garbage"),
    "40-zeros-after-gz": ("rows.jsonl.gz", GZ + bytes(100), "followed by garbage"),
    "40-garbage-after-zst": ("rows.jsonl.zst", ZST + b"garbage!", "damaged"),
    "46-fake-parquet": ("rows.parquet", GOOD, "not Parquet: it is text"),
    "46-damaged-parquet": ("rows.parquet", parquet([{"text": "x"}])[:-20], "damaged Parquet"),
    "46-shapeless-parquet": (
        "rows.parquet",
        parquet([{"height": 1.0, "weight": 2.0}]),
        r"'height', 'weight'.*no known format",
    ),
    "46-latin-1-in-parquet": (
        "rows.parquet",
        parquet_with_latin_1(),
        r"byte 0xe9 in row 0, column .instruction., is not UTF-8",
    ),
    "47-web-page": ("rows.jsonl", WEB_PAGE, "a web page"),
    "47-web-page-csv": ("rows.csv", WEB_PAGE, "a web page"),
    "47-web-page-parquet": ("rows.parquet", WEB_PAGE, "a web page"),
    "48-lfs-pointer": ("rows.jsonl", LFS, "git lfs pull"),
    "48-lfs-pointer-parquet": ("rows.parquet", LFS, "git lfs pull"),
    "zip": ("rows.jsonl", b"PK\x03\x04rest", "zip"),
    "bzip2": ("rows.jsonl", bz2.compress(b"x"), "bzip2"),
    "pdf": ("rows.jsonl", b"%PDF-1.7", "PDF"),
    "67-arrow-with-bad-offsets": ("rows.arrow", arrow_with_bad_offsets(), "damaged Arrow"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_a_file_that_is_damaged_or_of_another_kind_is_refused(case, read_bytes):
    name, data, what = REFUSED_FILES[case]

    with pytest.raises(SourceError, match=what):
        read_bytes(data, name)


def test_a_right_zst_checksum_is_accepted(read_bytes):
    assert read_bytes(ZST_WITH_CHECKSUM, "rows.jsonl.zst").validated.num_rows == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl.gz", gzip.compress(GOOD + b"\n") + gzip.compress(ALSO_GOOD + b"\n")),
        ("rows.jsonl", gzip.compress(GOOD + b"\n" + ALSO_GOOD + b"\n")),
        ("rows.jsonl.gz", GOOD + b"\n" + ALSO_GOOD),
    ],
    ids=["two members", "gzip named jsonl", "text named gz"],
)
def test_41_and_42_and_43_gzip_is_known_by_its_magic_and_members_are_joined(name, data, read_bytes):
    source = read_bytes(data, name)

    assert source.validated.num_rows == 2
    is_named_so = name.endswith(".gz") == (data[:2] == GZ[:2])
    assert source.notes == ({} if is_named_so else {"misnamed_compression": 1})


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gz", "zst"])
def test_44_decompression_bombs_are_refused_before_they_fill_memory(compress, read_bytes):
    bomb = compress(b" " * 100_000_000)
    tracemalloc.start()

    with pytest.raises(SourceError, match="100:1"):
        read_bytes(bomb, "rows.jsonl.gz")

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


@pytest.mark.parametrize("end", [b"]", b",]", b" ,\n ]\n"])
def test_a_comma_after_the_last_element_is_not_a_row(end, read_bytes):
    source = read_bytes(b"[" + GOOD + b",\n" + ALSO_GOOD + end, "rows.json")

    assert (source.validated.num_rows, source.reasons) == (2, [])
    assert source.notes == ({} if end == b"]" else {"trailing_commas": 1})


IMAGE = {"type": "image_url", "image_url": {"url": "a.jpg"}}


@pytest.mark.parametrize(
    "more",
    [
        {"photo": "train/0001.JPG"},
        {"frames": [{"bytes": None, "path": "0001.bin"}]},
        {"sound": "data:audio/wav;base64,UklGRg=="},
        {"messages": [IMAGE]},
        {"messages": [{"type": "video", "video": "a.mp4"}]},
        {"messages": [{"image": "a"}]},
    ],
)
def test_media_is_a_bad_row_or_dropped_as_the_source_sets(more, read_bytes):
    parts = [{"type": "text", "text": "Why?"}, *more.get("messages", [])]
    answer = {"role": "assistant", "content": "So."}
    row = {**more, "messages": [{"role": "user", "content": parts}, answer]}
    plain = {"messages": [{"role": "user", "content": "Where is a.jpg?"}, answer], "photo": ""}
    as_text = {**row, "messages": orjson.dumps(row["messages"]).decode()}
    data = b"\n".join(map(orjson.dumps, [row, as_text, plain]))

    assert read_bytes(data).reasons == ["media", "media"]
    rows = read_bytes(data, media="drop_rows")
    assert (rows.reasons, rows.dropped["reason"].to_pylist()) == ([], ["media", "media"])
    parts = read_bytes(data, media="drop_parts")
    assert [row[0] for row in parts.texts] == [("user", "Why?")] * 2 + [("user", "Where is a.jpg?")]
    assert (parts.reasons, parts.notes) == ([], {"media_parts": 2})
    if "messages" not in more:
        assert read_bytes(data, ignored_fields=list(more)).reasons == []


def test_images_in_the_form_of_qwen_vl_are_media(read_bytes):
    asked = ["Picture 1: <img>a.jpg</img>\nPicture 2: <img>b.jpg</img>\nWhy?", "Is <img> a tag?"]
    rows = [
        {"conversations": [{"role": "user", "content": ask}, {"role": "assistant", "content": "y"}]}
        for ask in asked
    ]
    data = b"\n".join(map(orjson.dumps, rows))

    assert read_bytes(data).reasons == ["media"]
    parts = read_bytes(data, media="drop_parts")
    assert [row[0] for row in parts.texts] == [("user", "Why?"), ("user", "Is <img> a tag?")]
    assert (parts.reasons, parts.notes) == ([], {"media_parts": 1})


def test_marks_of_images_are_dropped_with_them(read_bytes):
    talk = [{"role": "user", "content": "<image>\nWhy <b>?"}, {"role": "assistant", "content": "y"}]
    paths = ["a.jpg", "/home/ann b/a.jpg", "/home is full of jpg"]
    data = b"\n".join(orjson.dumps({"messages": talk, "photo": path}) for path in paths)

    assert read_bytes(data).reasons == ["media", "media"]
    parts = read_bytes(data, media="drop_parts")
    asked = ["Why <b>?", "Why <b>?", "<image>\nWhy <b>?"]
    assert [row[0] for row in parts.texts] == [("user", text) for text in asked]
    assert parts.notes == {"media_parts": 2}
    # `select` may leave out the field that shows what the marks are.
    select = {"messages": "messages"}
    selected = read_bytes(data, media="drop_parts", select=select)
    assert (selected.texts, selected.notes) == (parts.texts, parts.notes)
    ignored = read_bytes(data, media="drop_parts", ignored_fields=["photo"])
    assert {row[0] for row in ignored.texts} == {("user", asked[2])}
    part = [
        {"type": "image_url", "image_url": {"url": "a.jpg"}},
        {"type": "text", "text": asked[2]},
    ]
    row = {"messages": [{"role": "user", "content": part}, talk[1]]}
    read = read_bytes(orjson.dumps(row), media="drop_parts")
    assert read.texts[0][0] == ("user", asked[0])


@pytest.mark.parametrize(
    "text", ["Use <video>\n<source src='a.mp4'></video>", "Is <image> a tag?", "<video>x</video>"]
)
def test_tags_in_a_text_are_no_marks_of_images(read_bytes, text):
    row = {"instruction": "How?", "output": text, "image": "a.png"}

    read = read_bytes(orjson.dumps(row), media="drop_parts", format="alpaca")
    assert read.texts[0][1] == ("assistant", text)


@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin/ffmpeg -i 3.mov out.mp4",
        "/home is where 3 is and what is in c.jpg",
        "/imagine a cat on a mat, like the one in cat.png",
        r"\includegraphics[width=3cm] draws the file 3.png",
        "/a/b or /c/d or e/f or, as they say, g.jpg",
        "bin/ffmpeg to out.mp4",
        "and/or look at the picture.png",
    ],
)
def test_commands_with_names_of_images_are_text(text):
    assert not is_media(text)


def test_a_part_that_may_be_text_is_never_dropped_as_media(read_bytes):
    parts = [{"type": "text", "text": "Why?"}, {"type": "tool_result", "content": "So."}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "y"}]}

    assert read_bytes(orjson.dumps(row), media="drop_parts").reasons == ["type"]


MESSAGES = [
    {"role": "user", "content": "x", "name": "ann", "foo": 1},
    {"role": "assistant", "content": "y", "train": True, "weight": 1, "mask": False, "audio": None},
]


@pytest.mark.parametrize("is_text", [False, True])
def test_45_fields_of_messages_that_nobody_reads_are_reported(read_bytes, is_text):
    messages = orjson.dumps(MESSAGES).decode() if is_text else MESSAGES
    rows = [{"messages": messages, "id": 1}, {"messages": MESSAGES[1:]}, {"messages": messages}]

    rules = {"refused_orders": ["starts_with_assistant"]}
    source = read_bytes(b"\n".join(map(orjson.dumps, rows)), rules=rules)

    assert source.reasons == ["starts_with_assistant"]
    found = {"messages[].foo": 2, "messages[].mask": 3, "id": 1}
    assert source.extra_fields == found


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_any_name_is_read(read_bytes, name):
    message = {"role": "assistant", "content": "y", name: "z"}

    source = read_bytes(orjson.dumps({"messages": [{"role": "user", "content": "x"}, message]}))

    assert source.validated["messages"][0].as_py()[1]["reasoning"] == "z"
    assert source.extra_fields == {}


def test_49_bidi_controls_are_counted_by_row(read_bytes):
    rows = [
        {"instruction": "a\u202eb\u202c", "output": "\u2066c"},
        {"instruction": "plain \u2019", "output": "x\u2030"},
        {"instruction": "z", "output": "\u2069"},
    ]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)))

    assert source.validated.num_rows == 3
    assert source.notes == {"bidi_controls": 2}


def turns(*pairs: tuple[str, str]) -> bytes:
    return orjson.dumps({"messages": [{"role": role, "content": text} for role, text in pairs]})


ROLE_CASES = {
    "25-null-role": ([(None, "a"), ("assistant", "b")], "type"),
    "51-unknown-role": ([("user", "a"), ("critic", "b"), ("assistant", "c")], "unknown_role"),
    "52-empty-conversation": ([], "empty_conversation"),
    "53-two-users": ([("user", "a"), ("user", "b"), ("assistant", "c")], "consecutive_user"),
    "54-no-assistant": ([("system", "a"), ("user", "b")], "no_assistant"),
    "59-control-text-in-role": ([("user<|im_end|>", "a"), ("assistant", "b")], "unknown_role"),
}


@pytest.mark.parametrize("case", ROLE_CASES)
def test_a_broken_order_is_a_bad_row(case, read_bytes):
    messages, reason = ROLE_CASES[case]
    good = turns(("user", "a"), ("assistant", "b"))

    rules = {"refused_orders": list(get_args(TurnOrder))}
    source = read_bytes(b"\n".join([good, turns(*messages), good]), rules=rules)

    assert source.validated["row"].to_pylist() == [0, 2]
    assert source.reasons == [reason]


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '"text"', [1], 5, None])
def test_56_tool_call_arguments_are_an_object_or_text(arguments, read_bytes):
    def row(value):
        call = {"type": "function", "function": {"name": "f", "arguments": value}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return orjson.dumps({"messages": messages})

    source = read_bytes(row('{"a": 1}') + b"\n" + row(arguments))

    if not isinstance(arguments, str):
        assert source.reasons == ["tool_calls"]
        return
    calls = [orjson.loads(row[1]["tool_calls"]) for row in source.validated["messages"].to_pylist()]
    found = [call[0]["function"]["arguments"] for call in calls]
    assert found == [{"a": 1}, arguments]


def test_61_files_of_different_shapes_in_one_source_are_refused_and_both_named(tmp_path, read):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "1 + 1?", "answer": "2"}\n')

    with pytest.raises(SourceError, match=r"a\.jsonl' is alpaca.*b\.jsonl' is question_answer"):
        read(tmp_path)


def test_61_columns_that_some_files_lack_are_told(tmp_path, read):
    table = pa.table({"instruction": ["x"], "output": ["y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.append_column("note", pa.array(["z"])), tmp_path / "b.parquet")

    source = read(tmp_path)

    assert source.validated.num_rows == 2
    assert source.extra_fields == {"note": 1}


def test_62_a_path_with_nul_is_refused(read):
    with pytest.raises(SourceError, match="NUL"):
        read("rows\0.jsonl")


def test_63_links_pipes_and_folders_are_refused(tmp_path, read):
    target = tmp_path / "target.jsonl"
    target.write_bytes(GOOD)
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)

    with pytest.raises(SourceError, match=r"symbolic link.*target\.jsonl"):
        read(link)
    with pytest.raises(SourceError, match="FIFO"):
        read(pipe)
    with pytest.raises(SourceError, match="symbolic link"):
        read(tmp_path)


@pytest.mark.parametrize("pattern", ["*/rows.jsonl", "lin[k]/rows.jsonl", "in/../lin?/*"])
def test_63_a_glob_does_not_lead_out_of_its_folder(pattern, tmp_path, read):
    """A worker that allows a folder allows its contents, but not the target of a link in it."""
    for name in ("allowed/in", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rows.jsonl").write_bytes(GOOD)
    assert read(tmp_path / "allowed" / "*" / "rows.jsonl")
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")

    with pytest.raises(SourceError, match=r"leads outside .*outside"):
        read(tmp_path / "allowed" / pattern)


@pytest.mark.parametrize("name", ["", "rows.jsonl", "*"])
def test_63_a_name_that_is_no_unicode_is_refused(name, tmp_path, read):
    """A manifest could not contain it."""
    folder = tmp_path / os.fsdecode(b"\xff" if name == "rows.jsonl" else b"all")
    folder.mkdir()
    (folder / os.fsdecode(b"a\xff.jsonl")).write_bytes(GOOD)
    (folder / "rows.jsonl").write_bytes(GOOD)

    with pytest.raises(SourceError, match=r"xff.*not valid UTF-8"):
        read(folder / name if name else folder)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("rows.jsonl", GOOD, ALSO_GOOD[: len(GOOD)]),
        ("rows.parquet", parquet([{"text": "x"}]), parquet([{"text": "x"}] * 2)),
    ],
)
def test_65_a_file_that_changed_since_the_scan_is_refused(name, before, after, tmp_path):
    path = tmp_path / name
    path.write_bytes(before)
    config = SourceConfig(path=str(path))
    [shard] = scan_source(config)
    path.write_bytes(after)

    with pytest.raises(SourceError, match="changed since it was scanned"):
        read_shard(shard, config, ValidateConfig(), "prompt")


def test_a_file_that_vanished_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    config = SourceConfig(path=str(path))
    [shard] = scan_source(config)
    path.unlink()

    with pytest.raises(SourceError, match=r"rows\.jsonl' does not exist"):
        read_shard(shard, config, ValidateConfig(), "prompt")


@pytest.mark.parametrize("levels", [253, 1000])
def test_a_deep_element_of_an_array_longer_than_a_row_may_be(read_bytes, levels):
    data = b"[" + b",".join([GOOD] * 20 + [deep(levels)]) + b"]"

    source = read_bytes(data, "rows.json", rules={"max_row_bytes": len(deep(levels))})

    assert source.reasons == ["depth"]
    assert source.validated.num_rows == 20


class LostFile(io.BytesIO):
    """A file whose storage fails after its first bytes."""

    def read(self, size=-1):
        if self.tell():
            raise OSError("connection lost")
        return super().read(100)


@pytest.mark.parametrize(("compressed", "data"), [("gzip", GZ), ("zstd", ZST)])
def test_a_storage_that_fails_is_not_taken_for_a_damaged_stream(compressed, data, monkeypatch):
    monkeypatch.setattr(compression, "open_file", lambda uri: LostFile(data))

    with pytest.raises(TransientError, match="connection lost"):
        list(compression.FileStream("s3://bucket/rows", compressed))
