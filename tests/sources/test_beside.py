"""Rows that set arguments of the chat template or loss weights next to their conversation."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
DOCUMENTS = [{"title": "Sky", "text": "It is blue."}]


def lines(*rows):
    return "".join(json.dumps({"messages": MESSAGES} | row) + "\n" for row in rows).encode()


def given(source, name):
    return source.validated[name].to_pylist()


def test_arguments_and_documents_are_read_and_name_the_record(read_bytes):
    source = read_bytes(
        lines(
            {},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"documents": DOCUMENTS, "chat_template_kwargs": {"b": 1, "a": None}},
            {"chat_template_kwargs": json.dumps({"enable_thinking": False}), "documents": []},
            {"chat_template_kwargs": {"documents": DOCUMENTS, "tools": [{"name": "f"}]}},
        )
    )
    arguments = [text and json.loads(text) for text in given(source, "arguments")]
    assert arguments == [
        None,
        {"enable_thinking": False},
        {"b": 1, "documents": DOCUMENTS},
        {"enable_thinking": False},
        {"documents": DOCUMENTS},
    ]
    assert given(source, "tools")[4] == '[{"type":"function","function":{"name":"f"}}]'
    names = given(source, "record_id")
    assert names[1] == names[3]
    assert len(set(names)) == 4
    assert source.extra_fields == {}


def test_nulls_that_a_table_fills_in_are_no_arguments(tmp_path, read):
    rows = [
        {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": MESSAGES,
            "chat_template_kwargs": {"effort": "low"},
            "documents": [{"a": "x"}],
        },
        {"messages": MESSAGES, "documents": [{"b": "y"}]},
    ]
    names = ("messages", "chat_template_kwargs", "documents")
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    source = read(tmp_path / "rows.parquet")
    assert [json.loads(text) for text in given(source, "arguments")] == [
        {"enable_thinking": False},
        {"documents": [{"a": "x"}], "effort": "low"},
        {"documents": [{"b": "y"}]},
    ]


def test_a_field_that_is_not_for_the_template_is_named(read_bytes):
    rows = lines({"documents": ["plain text"]}, {"documents": [7]}, {})
    bad = read_bytes(rows)
    assert bad.reasons == ["arguments", "arguments"]
    assert bad.quarantined["detail"][0].as_py() == (
        "documents is not a list of objects, such as {title, text}; if it is not for the chat "
        "template, list it in `ignored_fields`"
    )
    left_out = read_bytes(rows, ignored_fields=["documents"])
    assert given(left_out, "arguments") == [None] * 3
    mapped = read_bytes(
        json.dumps({"question": "Why?", "answer": "So.", "documents": "It is blue."}).encode(),
        format="question_answer",
        fields={"context": "documents"},
    )
    assert mapped.messages[0][0]["context"] == "It is blue."
    assert given(mapped, "arguments") == [None]


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"chat_template_kwargs": "{"}, "arguments", "not JSON"),
        ({"chat_template_kwargs": [1]}, "arguments", "is a list, not an object"),
        (
            {"chat_template_kwargs": {"messages": 1}},
            "arguments",
            "'messages' cannot be set as an argument",
        ),
        (
            {"chat_template_kwargs": {"eos_token": "x"}},
            "arguments",
            "'eos_token' cannot be set as an argument",
        ),
        ({"chat_template_kwargs": {"a": "\0"}}, "control", "NUL"),
        ({"chat_template_kwargs": {"tools": 7}}, "tools", "not a list of objects"),
        ({"documents": "text"}, "arguments", "not JSON"),
    ],
)
def test_an_argument_that_no_template_accepts_is_a_bad_row(read_bytes, row, reason, said):
    source = read_bytes(lines(row, {}))
    assert source.reasons == [reason]
    assert said in source.quarantined["detail"][0].as_py()


def test_weights_of_rows_and_of_the_source_multiply(read_bytes):
    rows = lines({"score": 0.5}, {"score": None}, {"score": "2"}, {})
    assert given(read_bytes(rows), "weight") == [None] * 4
    named = read_bytes(rows, fields={"loss_weight": "score"})
    assert given(named, "weight") == [0.5, None, 2.0, None]
    both = read_bytes(rows, fields={"loss_weight": "score"}, loss_weight=0.5)
    assert given(both, "weight") == [0.25, 0.5, None, 0.5]
    assert given(both, "record_id")[2] == given(read_bytes(rows), "record_id")[2]
    assert given(both, "record_id")[0] != given(named, "record_id")[0]


@pytest.mark.parametrize("score", [0, -1, True, "much", [1], 1e9, 1e-9, "nan"])
def test_an_invalid_weight_is_a_bad_row(read_bytes, score):
    source = read_bytes(lines({"score": score}, {}), fields={"loss_weight": "score"})
    assert source.reasons == ["loss_weight"]
    assert "score is" in source.quarantined["detail"][0].as_py()


def test_a_name_near_a_field_is_proposed(read_bytes):
    with pytest.raises(ConfigError, match="loss_weight"):
        read_bytes(lines({}), fields={"loss_wieght": "score"})
