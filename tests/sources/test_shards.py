"""Shards hold whole records, depend only on the bytes before them, and keep the same rows."""

import gzip
import json
from functools import partial

import orjson
import pyarrow as pa
import pytest

from packhouse.errors import SourceError
from packhouse.read import scan_source
from packhouse.read.record_boundaries import ArrayFile, ObjectsFile
from packhouse.recipe import SourceConfig

zstd = partial(pa.compress, codec="zstd", asbytes=True)
ROWS = [
    {"instruction": f"Say {i}", "input": "", "output": 'a "quoted" [1, {2}] \\ text' * (i % 7 + 1)}
    for i in range(200)
]


def as_jsonl(rows):
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def as_array(rows):
    return orjson.dumps(rows)


def as_indented_array(rows):
    return json.dumps(rows, indent=4).encode()


def as_csv(rows):
    lines = ["instruction,input,output"]
    lines += [
        f'{r["instruction"]},,"{r["output"].replace(chr(34), chr(34) * 2)}\nand more"' for r in rows
    ]
    return "\n".join(lines).encode() + b"\n"


WRITERS = {
    "rows.jsonl": as_jsonl,
    "rows.json": as_array,
    "indented.json": as_indented_array,
    "rows.csv": as_csv,
}


@pytest.mark.parametrize("name", WRITERS)
def test_appended_rows_leave_earlier_shards_as_they_were(name, tmp_path):
    path = tmp_path / name
    config = SourceConfig(path=str(path))
    path.write_bytes(WRITERS[name](ROWS[:150]))
    before = scan_source(config, 2000)

    path.write_bytes(WRITERS[name](ROWS))
    after = scan_source(config, 2000)

    kept = len(before) - 1  # the last one was not full
    assert kept > 5
    assert [s.identity() for s in after[:kept]] == [s.identity() for s in before[:kept]]
    assert len(after) > len(before)


def test_objects_may_end_within_the_first_bytes_of_one():
    assert ObjectsFile.spans(b'{"aaaa": 1}\n\n{\n "').tolist() == [[0, 13], [13, 17]]


def test_white_space_between_two_chunks_belongs_to_no_shard(monkeypatch):
    monkeypatch.setattr("packhouse.read.record_boundaries.HEAD_BYTES", 1)
    data = b'[{"a": "12345"},\n {"b": 1}]'
    cuts = [list(ArrayFile("u", 14).cut([data[:n], data[n:]])) for n in range(1, len(data))]
    assert all(each == cuts[0] for each in cuts)
    assert len(cuts[0]) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_an_inserted_row_changes_one_or_two_shards(name, read_bytes):
    before = read_bytes(WRITERS[name](ROWS), name, max_shard_bytes=3000).shards
    rows = [*ROWS[:100], {**ROWS[0], "output": "inserted"}, *ROWS[100:]]
    after = read_bytes(WRITERS[name](rows), name, max_shard_bytes=3000).shards

    new = {shard.sha256 for shard in after} - {shard.sha256 for shard in before}
    assert len(before) > 10
    assert 1 <= len(new) <= 2


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("max_shard_bytes", "num_rows"), [(1, 30), (1000, 200)])
def test_the_rows_do_not_depend_on_the_shard_size(name, max_shard_bytes, num_rows, read_bytes):
    data = WRITERS[name](ROWS[:num_rows])
    whole = read_bytes(data, name)

    cut = read_bytes(data, name, max_shard_bytes=max_shard_bytes)

    assert whole.validated.num_rows == num_rows
    assert len(cut.shards) >= (num_rows if max_shard_bytes == 1 else len(data) // 1000)
    assert cut.validated.equals(whole.validated)


@pytest.mark.parametrize("name", WRITERS)
def test_shards_are_no_larger_than_asked_unless_a_record_is(name, read_bytes):
    source = read_bytes(WRITERS[name](ROWS), name, max_shard_bytes=3000)

    sizes = [shard.byte_end - shard.byte_start for shard in source.shards]
    assert max(sizes) <= 3000
    assert sum(size > 1200 for size in sizes) >= len(sizes) - 1


@pytest.mark.parametrize(
    ("name", "compress"),
    [("rows.jsonl", gzip.compress), ("rows.csv", gzip.compress), ("indented.json", zstd)],
    ids=["jsonl", "csv", "json"],
)
def test_compressed_files_have_the_shards_of_their_content(name, compress, tmp_path, read):
    plain, packed = tmp_path / "a" / name, tmp_path / "b" / name
    for path in (plain, packed):
        path.parent.mkdir()
    plain.write_bytes(WRITERS[name](ROWS))
    packed.write_bytes(compress(WRITERS[name](ROWS)))

    one, other = read(plain, max_shard_bytes=3000), read(packed, max_shard_bytes=3000)

    assert other.validated.equals(one.validated)
    assert [s.sha256 for s in other.shards] == [s.sha256 for s in one.shards]
    assert other.notes == {"misnamed_compression": 1}


def test_the_order_of_rows_changes_neither_names_nor_groups(read_bytes):
    forth, back = read_bytes(as_jsonl(ROWS)), read_bytes(as_jsonl(ROWS[::-1]))

    for column in ("record_id", "group_key", "messages"):
        assert forth.validated[column].to_pylist() == back.validated[column].to_pylist()[::-1]


def test_text_after_an_array_is_refused_with_its_place(read_bytes):
    data = as_array(ROWS[:2])

    with pytest.raises(SourceError, match="text after the end of its JSON array"):
        read_bytes(data + b" tail", "rows.json")
    with pytest.raises(SourceError, match="text after the end of its JSON array"):
        read_bytes(data + b"]", "rows.json")


def test_an_open_quote_in_csv_spoils_its_line_only(read_bytes):
    data = b'instruction,output\na,b\n"open,c\nd,e\nf,"g\nh"\n'

    source = read_bytes(data, "rows.csv")

    assert source.reasons == ["csv"]
    assert source.quarantined["row"].to_pylist() == [1]
    assert source.texts[1:] == [
        [("user", "d"), ("assistant", "e")],
        [("user", "f"), ("assistant", "g\nh")],
    ]


def test_quotes_inside_fields_are_text(read_bytes):
    data = b'instruction,output\n5" disk,b\nc,6" d\n"e ""f""",g\n'

    source = read_bytes(data, "rows.csv")

    texts = [[text for _, text in row] for row in source.texts]
    assert texts == [['5" disk', "b"], ["c", '6" d'], ['e "f"', "g"]]


def test_quotes_that_make_no_sense_are_text_in_tsv(read_bytes):
    data = b'text\tlabel\n"open\t0\n"a" b\t1\n"quoted ""c"""\t1\n'

    source = read_bytes(data, "rows.tsv")

    assert [row[0][1] for row in source.texts] == ['"open', '"a" b', 'quoted "c"']


def test_json_lines_named_json_are_read(read_bytes):
    assert read_bytes(as_jsonl(ROWS), "rows.json").shards[0].file_format == "jsonl"


def test_a_folder_is_read_in_order_of_names_and_other_files_are_left(tmp_path, read):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "README.md", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(as_jsonl(ROWS[:1]))

    source = read(tmp_path, name="talks")

    assert [s.file for s in source.shards] == [
        "talks/a.jsonl",
        "talks/b.jsonl",
        "talks/sub/c.jsonl",
    ]
    assert read(tmp_path / "*.jsonl", name="talks").validated.num_rows == 2


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("s3://KEY:SECRET@bucket/rows.jsonl", r"s3://\*\*\*@bucket.*credentials"),
        ("ftp://host/rows.jsonl", "scheme 'ftp' is not supported"),
        ("https://host/rows.jsonl", "scheme 'https' is not supported"),
        ("/no/such/file.jsonl", "does not exist"),
        ("/no/such/*.jsonl", "matches no files"),
    ],
)
def test_a_missing_source_gives_the_reason(path, match):
    with pytest.raises(SourceError, match=match) as caught:
        scan_source(SourceConfig(path=path))

    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(caught.value.facts)


def test_a_folder_without_data_lists_the_expected_files(tmp_path):
    with pytest.raises(SourceError, match=r"matches no files.*\.jsonl"):
        scan_source(SourceConfig(path=str(tmp_path)))


def test_another_header_is_another_identity_for_every_shard(tmp_path):
    path = tmp_path / "rows.csv"
    config = SourceConfig(path=str(path), format="question_answer")
    body = b"".join(b"q%d,a%d\n" % (i, i) for i in range(50))
    path.write_bytes(b"question,answer\n" + body)
    before = [shard.identity() for shard in scan_source(config, 100)]

    path.write_bytes(b"answer,question\n" + body)
    after = [shard.identity() for shard in scan_source(config, 100)]

    assert len(before) == len(after) > 3
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_small_first_gzip_member_hides_no_format(read_bytes):
    talk = orjson.dumps({"messages": [{"from": "human", "value": "q"}]})
    members = [talk[:20], talk[20:], b"\n", as_jsonl([{"instruction": "q", "output": "a"}])]

    with pytest.raises(SourceError, match="it is sharegpt"):
        read_bytes(b"".join(map(gzip.compress, members)), "rows.gz")


def test_an_open_array_of_white_space_has_no_rows(read_bytes):
    source = read_bytes(b"[" + b" " * (5 * 2**20), "rows.json", rules={"max_row_bytes": 100})

    assert (source.validated.num_rows, source.quarantined.num_rows) == (0, 0)
    assert source.notes["empty_files"] == 1


def test_shards_have_one_shape_even_if_the_first_rows_tell_none(read_bytes):
    numbers = b"7\n" * 150  # more than are read to detect the format
    alpaca = as_jsonl([{"instruction": "q", "output": "a"}] * 20)
    questions = as_jsonl([{"question": "q", "answer": "a"}] * 20)

    source = read_bytes(numbers + alpaca, max_shard_bytes=200)
    assert {shard.row_format for shard in source.shards} == {"alpaca"}
    assert source.reasons == ["not_an_object"] * 150
    with pytest.raises(SourceError, match=r"it is alpaca .*question_answer"):
        read_bytes(numbers + alpaca + questions, max_shard_bytes=200)
