"""Adapters: one small row of every format, field names, and how `auto` distinguishes formats."""

import json
from functools import partial

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.errors import SourceError

QA = [("user", "q"), ("assistant", "a")]
as_line = partial(orjson.dumps, option=orjson.OPT_APPEND_NEWLINE)
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"sentence": "q", "label": "1"}, "classification"),
        ({"content": "q", "label": "1"}, "classification"),
        ({"messages": SHAREGPT}, "sharegpt"),
        ({"id": 7, "question": "q", "answer": "a", "level": "x"}, "question_answer"),
        ({"query": "q", "response": "a", "type": "MATH"}, "question_answer"),
        ({"query": "q", "resp": "a"}, "question_answer"),
        ({"chosen": CHAT}, "preference"),
    ],
)
def test_other_names_of_fields_are_known(row, name, read_bytes):
    source = read_bytes(orjson.dumps(row))

    assert source.shards[0].row_format == name
    assert source.texts[0][0] == ("user", "q")


def test_fields_rename(read_bytes):
    row = {"question_text": "q", "passage": "c", "gold": "a", "output": 5}
    fields = {"instruction": "question_text", "input": "passage", "output": "gold"}

    source = read_bytes(orjson.dumps(row), fields=fields)

    assert source.shards[0].row_format == "alpaca"
    assert source.messages == [
        [{"role": "user", "content": "q", "context": "c"}, {"role": "assistant", "content": "a"}]
    ]


def test_a_renamed_question_is_not_its_own_context(read_bytes):
    row = {"input": "q", "answer": "a"}

    source = read_bytes(orjson.dumps(row), format="question_answer", fields={"question": "input"})

    assert source.messages == [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    ]


@pytest.mark.parametrize("context", ["c", {"n": 1}])
def test_an_ignored_field_is_not_the_context_of_a_question(context, read_bytes):
    rows = [{"question": "q", "answer": "a", "input": context}, {"question": "q", "answer": "a"}]

    source = read_bytes(
        b"".join(map(as_line, rows)), format="question_answer", ignored_fields=["input"]
    )

    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert (source.messages, source.reasons) == ([said, said], [])


def test_an_ignored_field_may_have_the_name_of_a_selected_one(read_bytes):
    row = {"question": "q", "answer": "x", "replies": ["a"]}

    source = read_bytes(
        orjson.dumps(row),
        format="question_answer",
        ignored_fields=["answer"],
        select={"question": "question", "answer": "replies[1]"},
    )

    assert source.texts == [QA]


def test_a_renamed_key_of_messages_goes_before_ours(read_bytes):
    talk = [
        {"role": "user", "text": "q", "content": "x"},
        {"content": "x", "text": "a", "role": "assistant"},
    ]

    source = read_bytes(orjson.dumps({"messages": talk}), format="chat", fields={"content": "text"})

    assert source.texts == [QA]


def test_two_names_of_one_field_in_one_file_are_joined(read_bytes):
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "response": "a"}]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)))

    assert source.texts == [QA, QA]


def test_context_is_kept_apart_and_an_empty_one_is_none(read_bytes):
    rows = [{"instruction": "q", "context": c, "response": "a"} for c in ("c", "", None)]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)))

    assert [row[0].get("context") for row in source.messages] == ["c", None, None]


@pytest.mark.parametrize("extra", [{}, {"system": "s"}])  # by columns, and row by row
def test_a_context_without_a_question_is_the_question(extra, read_bytes):
    rows = [{"question": q, "context": "c", "answer": "a"} | extra for q in ("q", "")]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)))

    asked = [row[-2] for row in source.messages]
    assert [(each["content"], each.get("context")) for each in asked] == [("q", "c"), ("c", None)]


@pytest.mark.parametrize("extra", [{}, {"system": "s"}])  # by columns, and row by row
def test_reasoning_is_read_where_fields_name_it(extra, read_bytes):
    row = {"problem": "q", "deepseek_solution": "a", "reasoning": "other", **extra}
    rows = [row | {"deepseek_reasoning": text} for text in ("hm", "", None)]
    fields = {"prompt": "problem", "completion": "deepseek_solution"}

    data = b"\n".join(map(orjson.dumps, rows))
    source = read_bytes(
        data, format="prompt_completion", fields=fields | {"reasoning": "deepseek_reasoning"}
    )
    without = read_bytes(data, format="prompt_completion", fields=fields)

    assert [row[-1].get("reasoning") for row in source.messages] == ["hm", None, None]
    assert not any("reasoning" in message for row in source.messages for message in row[:-1])
    assert not any("reasoning" in message for row in without.messages for message in row)
    bad = orjson.dumps(row | {"deepseek_reasoning": 5})
    source = read_bytes(
        bad, format="prompt_completion", fields=fields | {"reasoning": "deepseek_reasoning"}
    )
    assert source.reasons == ["type"]


def test_alpaca_system_and_history_come_before_the_question(read_bytes):
    rows = [
        {"instruction": "q", "output": "a", "system": "s", "history": [["q0", "a0"]]},
        {"instruction": "q", "output": "a", "system": "", "history": []},
        {"instruction": "q", "output": "a", "history": [["only one"]]},
    ]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)))

    history = [("system", "s"), ("user", "q0"), ("assistant", "a0")]
    assert source.texts == [[*history, *QA], QA]
    assert source.reasons == ["type"]
    assert source.quarantined["row"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({"weight": 0.5}, 0.5),
        ({"loss_weight": 0}, 0.0),
        ({"train": False}, 0.0),
        ({"train": True}, 1.0),
        ({"loss": False}, 0.0),
        ({"loss": True, "weight": 0.5}, 0.5),
        ({"loss": 0.25}, None),  # a measured loss
        ({"loss_scale": 0.5, "loss": True}, 0.5),  # ms-swift
        ({"training": False}, 0.0),  # Axolotl
        ({"training": None, "loss_scale": None}, None),
        ({"weight": 0.5, "train": True}, 0.5),
        ({"weight": 0, "loss_weight": 0.0, "train": False}, 0.0),
        ({"weight": None, "train": False}, 0.0),
        ({"weight": 1, "train": False}, "type"),
        ({"weight": 0, "train": True}, "type"),
        ({"weight": 0.5, "loss_weight": 1}, "type"),
        ({"loss": False, "train": True}, "type"),
        ({"weight": -1}, "type"),
        ({"weight": "1"}, "type"),
        ({"train": 1}, "type"),
    ],
    ids=str,
)
def test_a_message_has_the_weight_of_its_keys_unless_they_contradict(given, weight, read_bytes):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **given}]

    source = read_bytes(orjson.dumps({"messages": messages}))

    weights = [row[1]["weight"] for row in source.validated["messages"].to_pylist()]
    assert source.reasons or weights == [weight]
    assert source.reasons == (["type"] if weight == "type" else [])


CALLS = [
    [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
    [{"id": "c1", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}],
    '[{"id": "c1", "name": "f", "arguments": {"b": 1, "a": 2}}]',
]


@pytest.mark.parametrize("calls", CALLS)
def test_tool_calls_have_one_form_whatever_the_file_writes(calls, read_bytes):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]

    [row] = read_bytes(orjson.dumps({"messages": messages, "tools": tools})).messages

    assert row[1]["tool_calls"] == (
        '[{"id":"c1","type":"function","function":{"name":"f","arguments":{"b":1,"a":2}}}]'
    )
    assert row[2] == {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"}
    assert row[3]["reasoning"] == "because"


@pytest.mark.parametrize("tools", [None, "", [], "[]", "{not json", {"name": "f"}, ["f"], 5])
def test_tools_are_a_list_of_objects_or_none(tools, read_bytes):
    row = {"messages": [{"role": m, "content": c} for m, c in QA], "tools": tools}

    source = read_bytes(orjson.dumps(row))

    is_none = tools in (None, "", [], "[]")
    assert source.reasons == ([] if is_none else ["tools"])
    assert source.validated["tools"].to_pylist() == ([None] if is_none else [])


def node(text, *replies, rank=None, deleted=False, role="assistant"):
    return {"text": text, "role": role, "replies": list(replies), "rank": rank, "deleted": deleted}


def test_trees_give_the_best_path_by_rank_without_deleted_messages(read_bytes):
    follow_up = node("q2", node("a2"), role="prompter")
    tree = node(
        "q",
        node("unranked"),
        node("second", rank=1),
        node("first", follow_up, rank=0),
        node("deleted", rank=-1, deleted=True),
        role="prompter",
    )
    data = orjson.dumps(tree)

    best, every = read_bytes(data), read_bytes(data, oasst_paths="all")

    assert best.texts == [
        [("user", "q"), ("assistant", "first"), ("user", "q2"), ("assistant", "a2")]
    ]
    assert [row[1][1] for row in every.texts] == ["first", "second", "unranked"]
    assert every.extra_paths == 2
    assert every.validated["row"].to_pylist() == [0, 0, 0]


def test_a_path_that_ends_on_a_question_stops_before_it(read_bytes):
    tree = node("q", node("a", node("unanswered", role="prompter")), role="prompter")

    assert read_bytes(orjson.dumps(tree)).texts == [QA]


@pytest.mark.parametrize(
    "tree",
    [
        node("q", role="prompter"),
        node("q", node("a", deleted=True), role="prompter"),
        node("q", node("a"), role="prompter", deleted=True),
    ],
)
def test_a_tree_without_an_answer_is_quarantined(tree, read_bytes):
    assert read_bytes(orjson.dumps(tree)).reasons == ["no_assistant"]


def test_labels_are_numbers_texts_of_numbers_or_names(read_bytes):
    rows = [{"text": "q", "label": label} for label in (1, "1", "pos", "neg")]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)), label_names=["neg", "pos"])

    assert source.validated["label"].to_pylist() == [1, 1, 1, 0]


@pytest.mark.parametrize("label", ["other", 2, -1, None, 1.0, True, [1], "", "99"])
def test_other_labels_are_quarantined(label, read_bytes):
    rows = [{"text": "q", "label": 0}, {"text": "q", "label": label}]

    source = read_bytes(b"\n".join(map(orjson.dumps, rows)), label_names=["neg", "pos"])

    assert source.reasons == ["label"]
    assert source.validated.num_rows == 1


def test_names_of_labels_must_be_given(read_bytes):
    source = read_bytes(b'{"text": "q", "label": "pos"}')

    assert source.reasons == ["label"]
    assert "label_names" in source.quarantined["detail"][0].as_py()


@pytest.mark.parametrize(
    ("prompt", "chosen", "texts"),
    [
        ("q", [{"role": "system", "content": "s"}, *CHAT], [("system", "s"), *QA]),
        ("q", [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], QA),
        ("q", CHAT[1], QA),
        ("q", CHAT, QA),
        (CHAT[:1], CHAT[1:], QA),
        (CHAT[:1], CHAT, QA),
        ("\n\nHuman: q\n\nAssistant:", "a", QA),
        (None, "\n\nHuman: q\n\nAssistant: a", QA),
        (CHAT, [{"role": "user", "content": "q2"}, CHAT[1]], [*QA, ("user", "q2"), QA[1]]),
        ([{"role": "system", "content": "s"}], CHAT, [("system", "s"), *QA]),
    ],
)
def test_a_preference_has_each_question_once(read_bytes, prompt, chosen, texts):
    row = {"prompt": prompt, "chosen": chosen, "rejected": "b"}

    assert read_bytes(orjson.dumps(row), format="preference").texts == [texts]


def test_an_answer_that_begins_with_another_question_than_the_prompt_is_a_bad_row(read_bytes):
    row = {"prompt": "q ", "chosen": CHAT, "rejected": "b"}

    source = read_bytes(orjson.dumps(row))

    assert source.reasons == ["prompt_differs"]
    assert source.quarantined["detail"][0].as_py().startswith("chosen is a conversation")


def test_a_record_of_another_width_is_quarantined(read_bytes):
    source = read_bytes(b"text,label\nq,0\nq\nq,0,1\nq,1\n", "rows.csv")

    assert source.validated["row"].to_pylist() == [0, 3]
    assert source.reasons == ["fields", "fields"]
    assert source.quarantined["byte_offset"].to_pylist() == [15, 17]


def test_a_space_before_a_quote_makes_a_bad_row(read_bytes):
    data = b'text,label\n "q",0\n" ""q""",0\n" ""q"", q",1\nq "q",1\n "q" q,1\n'

    source = read_bytes(data, "rows.csv")

    assert source.reasons == ["csv"]
    assert [row[0]["content"] for row in source.messages] == [' "q"', ' "q", q', 'q "q"', ' "q" q']


def test_a_column_named_twice_is_refused(read_bytes):
    with pytest.raises(SourceError, match="has two columns named 'text'"):
        read_bytes(b"text,text\nq,0\n", "rows.csv")


def test_arrow_files_and_streams_are_read(tmp_path, read):
    table = pa.table({"instruction": ["q"] * 5, "output": ["a"] * 5})
    for kind, open_writer in {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}.items():
        path = tmp_path / f"{kind}.arrow"
        with open_writer(path, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)

        source = read(path, max_shard_bytes=25)

        assert source.texts == [QA] * 5
        assert source.validated["row"].to_pylist() == list(range(5))
        assert len(source.shards) == 3


def test_parquet_row_groups_become_shards(tmp_path, read):
    path = tmp_path / "rows.parquet"
    rows = {"instruction": [f"q{i}" for i in range(100)], "output": ["a"] * 99 + [""]}
    pq.write_table(pa.table(rows), path, row_group_size=10)

    source, whole = read(path, max_shard_bytes=400), read(path)

    assert len(source.shards) > 3
    assert source.validated.equals(whole.validated)
    assert source.reasons == ["empty_answer"]
    [bad] = source.quarantined.to_pylist()
    assert (bad["row"], bad["byte_offset"]) == (99, None)
    assert json.loads(bad["raw"]) == {"instruction": "q99", "output": ""}


@pytest.mark.parametrize(
    ("header", "values", "texts"),
    [
        ("messages", json.dumps(CHAT), QA),
        ("prompt,chosen", "q,a", QA),
        ("chosen", json.dumps(CHAT), QA),
        ("question,answer,history", "q,a,", QA),
    ],
)
def test_a_column_without_a_name_is_no_part_of_the_conversation(header, values, texts, read_bytes):
    values = values if values.startswith("q") else '"' + values.replace('"', '""') + '"'

    source = read_bytes(f",{header}\n0,{values}\n".encode(), "rows.csv")  # as written by pandas

    assert source.texts == [texts]


@pytest.mark.parametrize("row_format", ["auto", "alpaca"])
def test_parquet_without_rows_is_an_empty_file(row_format, tmp_path, read):
    path = tmp_path / "rows.parquet"
    table = pa.table({"instruction": ["q"], "output": ["a"]})
    pq.write_table(table.slice(0, 0), path)

    source = read(path, format=row_format)

    assert source.validated.num_rows == 0
    assert source.notes == {"empty_files": 1}


def test_the_format_is_told_by_the_first_row_group_with_rows(tmp_path, read):
    path = tmp_path / "rows.parquet"
    table = pa.table({"instruction": ["q"], "output": ["a"]})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)

    source = read(path)

    assert source.shards[0].row_format == "alpaca"
    assert source.texts == [QA]
