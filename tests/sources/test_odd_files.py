"""Source settings for files that `auto` does not expect: encodings, wrappers, workbooks."""

import gzip
import json
import re

import orjson
import pytest
import yaml

from packhouse.errors import SourceError
from packhouse.read.compression import lines_at, lines_of_rows
from packhouse.recipe import SourceConfig
from tests.sources.conftest import lines
from tests.sources.workbook_files import workbook

ROWS = [{"question": f"问题 {n}?", "answer": f"答案 {n}"} for n in range(20)]
TEXTS = [[("user", row["question"]), ("assistant", row["answer"])] for row in ROWS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
PRETTY = "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()


@pytest.mark.parametrize("max_shard_bytes", [300, 2**25])
@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("gb18030", "rows.jsonl"),
        ("gb18030", "rows.json"),
        ("gb18030", "rows.csv"),
        ("utf-16", "rows.jsonl.gz"),
        ("cp932", "rows.jsonl"),
        ("big5", "rows.csv"),
    ],
)
def test_text_of_another_encoding_gives_the_rows_of_utf8(
    encoding, name, max_shard_bytes, read_bytes
):
    texts = {
        "rows.jsonl": LINES,
        "rows.jsonl.gz": LINES,
        "rows.json": json.dumps(ROWS, ensure_ascii=False, indent=1),
        "rows.csv": "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS),
    }
    text = texts[name]
    if encoding in ("cp932", "big5"):  # which lack the simplified characters
        text = text.translate(str.maketrans("问题", "問題"))
    data = [text.encode(encoding), text.encode()]
    if name.endswith(".gz"):
        data = [gzip.compress(each) for each in data]

    source = read_bytes(data[0], name, encoding=encoding, max_shard_bytes=max_shard_bytes)

    expected = read_bytes(data[1], name, max_shard_bytes=max_shard_bytes)
    assert len(source.shards) == len(expected.shards)
    assert source.validated.equals(expected.validated)
    assert source.validated.num_rows == len(ROWS)


def test_a_byte_that_is_no_text_of_its_encoding_is_a_bad_row(read_bytes):
    lines = LINES.encode("gb18030").splitlines(keepends=True)
    lines[3] = lines[3].replace("答案".encode("gb18030"), b"\xff\xff")

    source = read_bytes(b"".join(lines), encoding="gb18030")

    (bad,) = source.quarantined.to_pylist()
    assert (bad["row"], bad["reason"]) == (3, "encoding")
    assert bad["detail"] == "bytes of the row are not gb18030"
    assert source.validated.num_rows == len(ROWS) - 1


def test_a_file_that_ends_inside_a_letter_of_utf16_is_refused(read_bytes):
    with pytest.raises(SourceError, match="not utf-16 text"):
        read_bytes(LINES.encode("utf-16")[:-1], encoding="utf-16")
    with pytest.raises(SourceError, match="does not start with BOM"):
        read_bytes(LINES.encode("utf-16-le"), encoding="utf-16")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows"])
@pytest.mark.parametrize("max_shard_bytes", [1, 1000, 2**25])
def test_objects_one_after_another_are_read(name, max_shard_bytes, read_bytes):
    source = read_bytes(PRETTY, name, max_shard_bytes=max_shard_bytes)

    assert {shard.file_format for shard in source.shards} == {"objects"}
    assert source.texts == TEXTS


@pytest.mark.parametrize("gap", [b"", b", ", b" "])
@pytest.mark.parametrize("max_shard_bytes", [200, 2**25])
def test_lists_of_messages_on_one_line_are_rows(gap, max_shard_bytes, read_bytes):
    talks = [
        orjson.dumps([{"role": role, "content": f"{text} [0][1]"} for role, text in turns])
        for turns in TEXTS
    ]
    data = b"\n".join([talks[0], gap.join(talks[1:4]), *talks[4:]])

    source = read_bytes(data, max_shard_bytes=max_shard_bytes)

    assert source.quarantined.num_rows == 0
    assert source.texts == [[(role, f"{text} [0][1]") for role, text in turns] for turns in TEXTS]


def test_a_broken_object_harms_itself_alone_and_keeps_its_place_and_bytes(read_bytes):
    broken = PRETTY.replace(b'"answer": "\\u7b54\\u6848 7"', b'"answer": oh')

    source = read_bytes(broken)

    (bad,) = source.quarantined.to_pylist()
    assert (bad["row"], bad["reason"]) == (7, "json")
    assert broken[bad["byte_offset"] :].startswith(bad["raw"])
    assert bad["raw"].startswith(b"{\n")
    assert bad["raw"].endswith(b"oh\n}")
    assert source.texts == TEXTS[:7] + TEXTS[8:]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("max_shard_bytes", [1, 300, 2**25])
@pytest.mark.parametrize(
    ("value", "rows_at"),
    [
        ({"data": ROWS}, "data"),
        ({"v": {"data": [1]}, "data": ROWS, "z": [[2]], "y": "]"}, "data"),
        ({"data": [], "of": {"v": 1, "data": ROWS, "z": [{}]}, "y": 2}, "of.data"),
    ],
)
def test_the_list_in_a_field_of_one_object_holds_the_rows(
    value, rows_at, indent, max_shard_bytes, read_bytes
):
    data = json.dumps(value, indent=indent).encode()

    source = read_bytes(data, "rows.json", rows_at=rows_at, max_shard_bytes=max_shard_bytes)

    assert source.texts == TEXTS
    assert source.notes == {}


@pytest.mark.parametrize("rows_at", ["of.part2", "of.part1", "more"])
def test_other_lists_of_such_objects_are_named(rows_at, read_bytes):
    lists = {"of.part1": ROWS[:3], "of.part2": ROWS, "more": ROWS[:5]}
    parts = {"part1": ROWS[:3], "unlike": [{"x": 1}], "part2": ROWS}
    data = json.dumps({"z": 1, "of": parts, "more": ROWS[:5]}).encode()

    source = read_bytes(data, "rows.json", rows_at=rows_at)

    assert source.validated.num_rows == len(lists.pop(rows_at))
    assert source.extra_fields == {f"list '{name}'": len(rows) for name, rows in lists.items()}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            {"meta": {"x": 1}, "of": {"data": ROWS}},
            "If the rows are in the list 'of.data', set `rows_at: of.data`",
        ),
        (
            {"of": {"part 1": ROWS}, "part2": ROWS},
            "The file has 2 lists of objects: 'of.part 1', 'part2'. A source reads one of them: "
            'for the first, set `rows_at: "of.part 1"`. Make each list that you want a source of',
        ),
        ({"a": {"x": 1}, "b": {"x": 2}}, "Its objects are in one object"),
    ],
)
def test_the_lists_of_an_only_object_are_named(value, says, read_bytes):
    with pytest.raises(SourceError, match=re.escape(says)):
        read_bytes(json.dumps(value).encode(), "rows.json")


def test_rows_that_are_lists_are_called_so(read_bytes):
    with pytest.raises(SourceError, match="jsonl' are lists, which match no known format"):
        read_bytes(b"[1, 2]\n[3, 4]\n")


def test_objects_in_a_row_over_several_lines_are_not_rows(read_bytes):
    data = b'{"messages": [\n{"text": "a"},\n{"text": "b"}\n], "text": "c"}\n' * 2

    source = read_bytes(data, "rows.jsonl")

    assert source.texts == [[("assistant", "c")]] * 2


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b'{"rows": [{"text": "a"}]}', "list in field 'data'"),
        (b'[{"text": "a"}]', "list in field 'data'"),
        (b'{"data": [{"text": "a"}], "data": [{"text": "b"}]}', "text after the end"),
        (b'{"data": [{"text": "a"}]} {"data": []}', "or remove `rows_at`"),
    ],
)
def test_an_object_that_does_not_match_rows_at_is_refused(data, match, read_bytes):
    with pytest.raises(SourceError, match=match):
        read_bytes(data, "rows.json", rows_at="data")


@pytest.mark.parametrize("name", ["data", "a.b", "дани"])
def test_the_list_may_come_after_many_others(name, read_bytes):
    words = {f"word {n}": [n] for n in range(150)}
    data = json.dumps({"words": words, name: ROWS}).encode()

    for each in (data, data.replace(b"043d", b"043D")):  # both are escapes of one letter
        assert read_bytes(each, "rows.json", rows_at=name).texts == TEXTS


def test_the_list_may_begin_within_the_first_megabyte(read_bytes):
    near, far = (orjson.dumps({"pad": "x" * size, "data": ROWS}) for size in (2**17, 2**21))

    assert read_bytes(near, "rows.json", rows_at="data").texts == TEXTS
    with pytest.raises(SourceError, match="move its field to the beginning of the object"):
        read_bytes(far, "rows.json", rows_at="data")


def test_an_object_that_is_cut_off_is_noted(read_bytes):
    data = orjson.dumps({"data": ROWS})

    source = read_bytes(data[:-9], "rows.json", rows_at="data")

    assert source.notes["truncated_files"] == 1
    assert source.texts == TEXTS[:-1]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    "data",
    [
        b"".join(orjson.dumps([row]) + b"\n" for row in ROWS),
        orjson.dumps({"n": 20, "my rows": ROWS}),
        orjson.dumps({"n": 20, "rows": ROWS[:1] * 20}, option=orjson.OPT_INDENT_2),
        LINES.encode("utf-16"),
    ],
)
def test_the_setting_that_a_message_shows_reads_the_file(name, data, read_bytes):
    with pytest.raises(SourceError) as refused:
        read_bytes(data, name)

    shown = str(refused.value).rpartition("et `")[2].partition("`")[0]
    assert len(read_bytes(data, name, **yaml.safe_load(shown)).texts) == len(ROWS)


@pytest.mark.parametrize(
    "rows", [{str(n): row for n, row in enumerate(ROWS)}, {"a": [1, 2], "b": [3, 4]}]
)
def test_a_shape_that_no_setting_reads_is_reported(rows, read_bytes):
    with pytest.raises(SourceError, match="in one object, which packhouse cannot read"):
        read_bytes(orjson.dumps(rows), "rows.json")


def test_articles_and_questions_with_answers_are_read(read_bytes):
    asked = {"question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    unanswered = {"question": "When?", "answers": [], "is_impossible": True}
    article = {"title": "T", "paragraphs": [{"context": "Ada did.", "qas": [asked, unanswered]}]}
    flat = {"context": "Ada did.", "question": "Who?", "answers": {"text": ["Ada", "A"]}}

    nested = read_bytes(orjson.dumps(article), "a.jsonl", format="squad")
    rows = read_bytes(orjson.dumps(flat), "b.jsonl")

    assert rows.shards[0].row_format == "squad"
    assert nested.texts == rows.texts == [[("user", "Who?"), ("assistant", "Ada")]]
    assert nested.messages[0][0]["context"] == "Ada did."
    assert nested.notes == {"unanswered": 1}
    bad = read_bytes(orjson.dumps({**flat, "answers": {"text": []}}), "c.jsonl")
    assert bad.reasons == ["no_assistant"]


def test_rows_of_several_shapes_are_read_if_the_source_is_mixed(read_bytes):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"instruction": "q", "output": "a", "id": 7},
        {"question": "q", "answer": "a"},
        {"messages": messages},
        messages,
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"text": "no conversation"},
    ]
    data = b"\n".join(map(orjson.dumps, rows))

    source = read_bytes(data, format="mixed")

    assert source.texts == [[("user", "q"), ("assistant", "a")]] * 5
    assert source.reasons == ["fields"]
    assert source.extra_fields == {"id": 1}
    with pytest.raises(SourceError, match="format: mixed"):
        read_bytes(data)


def test_messages_go_by_the_names_that_the_source_gives(read_bytes):
    said = [{"speaker": "Kunde", "text": "Hallo?"}, {"speaker": "Bot", "text": "Ja."}]
    given = {
        "format": "chat",
        "fields": {"messages": "dialog", "role": "speaker", "content": "text"},
        "roles": {"Kunde": "user", "Bot": "assistant"},
    }

    source = read_bytes(orjson.dumps({"dialog": said}), **given)

    assert source.texts == [[("user", "Hallo?"), ("assistant", "Ja.")]]
    other = read_bytes(orjson.dumps({"dialog": [{**said[0], "speaker": "X"}, said[1]]}), **given)
    assert other.reasons == ["unknown_role"]


def test_columns_may_be_divided_by_semicolons(read_bytes):
    data = b'question;answer\n"a;b?";c, d\n'

    source = read_bytes(data, "rows.csv", file_format="csv_semicolon")

    assert source.texts == [[("user", "a;b?"), ("assistant", "c, d")]]


def test_a_workbook_is_read_as_its_csv_would_be(read_bytes):  # ODS: test_workbooks.py
    pytest.importorskip("python_calamine")
    rows = [["question", "answer"], ["2 + 2?", 4], [None, None], ["half?", 0.5], ["<&>", "x"]]
    more = [["question", "answer"], ["more?", "yes"]]

    source = read_bytes(workbook(rows, [], more), "rows.xlsx")

    answers = [texts[1][1] for texts in source.texts]
    assert source.texts[0] == [("user", "2 + 2?"), ("assistant", "4")]
    assert answers == ["4", "0.5", "x", "yes"]


@pytest.mark.parametrize(
    ("sheets", "match"),
    [
        ([[["a", "b"], ["1", "2"]], [["c"], ["3"]]], "'Sheet1' and 'Sheet2' have different"),
        ([[["a", None], ["1", "2"]]], "a column without a name"),
        ([[["a", "a"], ["1", "2"]]], "two columns with the same name"),
    ],
)
def test_a_workbook_whose_rows_are_not_clear_is_refused(sheets, match, read_bytes):
    pytest.importorskip("python_calamine")
    with pytest.raises(SourceError, match=match):
        read_bytes(workbook(*sheets), "rows.xlsx")


def test_a_workbook_with_another_extension_is_recognized(read_bytes):
    data = workbook([["text"], ["a"]])

    with pytest.raises(SourceError, match=r"Excel workbook\. Set file_format to xlsx"):
        read_bytes(data, "rows.csv")
    with pytest.raises(SourceError, match="is not XLSX or ODS: it is text"):
        read_bytes(b"text\na\n", "rows.xlsx")
    pytest.importorskip("python_calamine")
    with pytest.raises(SourceError, match="is not a valid workbook"):
        read_bytes(data[:300], "rows.xlsx")


def test_a_folder_leaves_workbooks_out(tmp_path, read):
    (tmp_path / "rows.jsonl").write_text(LINES)
    (tmp_path / "costs.xlsx").write_bytes(workbook([["cost"], [1]]))

    assert read(tmp_path).validated.num_rows == len(ROWS)


@pytest.mark.parametrize(
    ("name", "data", "encoding", "line"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n \n{"text": 1}\n', "utf-8", 4),
        ("a.jsonl.gz", gzip.compress(b'\n{"text": "a"}\n\n{"text": 1}', mtime=0), "utf-8", 4),
        ("a.json", b'[\n{"text": "a"},\n\n{\n"text":\n1}\n]', "utf-8", 4),
        ("a.jsonl", '{"text": "\u4f60"}\n\n{"text": 1}\n'.encode("gb18030"), "gb18030", 3),
        ("a.json", PRETTY + b'\n\n{\n"question": 1}', "utf-8", 82),
    ],
)
def test_a_bad_row_is_found_by_the_line_on_which_it_begins(
    name, data, encoding, line, tmp_path, read_bytes
):
    source = read_bytes(data, name, encoding=encoding)
    (bad,) = source.quarantined.to_pylist()
    config = SourceConfig(path=str(tmp_path / name), encoding=encoding)

    assert lines_of_rows([bad], [config]) == {(f"a/{name}", bad["row"]): line}
    assert lines_of_rows([bad], [config.model_copy(update={"name": "other"})]) == {}


def test_lines_are_counted_across_the_pieces_of_a_large_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (2**22 - 1) + b"\n" + b"y\n" * 1000)

    assert lines_at(str(path), [0, 2**22 - 1, 2**22, 2**22 + 1998]) == [1, 1, 2, 1001]


@pytest.mark.parametrize(
    "answers",
    [
        ["I think that it rains.", "I think that it snows."],
        [{"text": "I think that it rains.", "score": 1}, {"text": "It snows.", "score": 2}],
    ],
)
def test_of_several_answers_without_a_context_none_is_chosen(answers, read_bytes):
    """In rows such as those of Stack Exchange, the first answer was trained, whatever its score."""
    row = {"question": "What is the weather?", "answers": answers}
    found = read_bytes(lines([row]), "a.jsonl")
    assert found.quarantined["reason"].to_pylist() == ["several_answers"]

    named = read_bytes(lines([row]), "a.jsonl", format="squad")
    assert named.texts == [[("user", row["question"]), ("assistant", "I think that it rains.")]]
    short = read_bytes(lines([row | {"answers": ["rain", "the rain"]}]), "a.jsonl")
    assert short.texts == [[("user", row["question"]), ("assistant", "rain")]]
    found_in_text = read_bytes(lines([row | {"context": "I think that it rains."}]), "a.jsonl")
    assert len(found_in_text.texts) == 1
