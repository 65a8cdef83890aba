"""Tool definitions and calls get one form, whatever the file format does to them."""

import json

import pyarrow as pa
import pytest

from packhouse.render.template_arguments import chat_messages
from tests.sources.conftest import parquet
from tests.templates.toys import CHATML, chat_renderer

NAMED = {"name": "add", "description": "adds"}
BARE = NAMED | {"parameters": {"type": "object"}}
ODD = BARE | {"function": "text"}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (BARE, WRAPPED),
        (WRAPPED, WRAPPED),
        ({"function": BARE}, WRAPPED),
        ({"type": "function", **BARE}, WRAPPED),
        ({"type": "web_search"}, {"type": "web_search"}),  # without a name, left as it is
        (NAMED | {"input_schema": {"type": "object"}}, WRAPPED),
        (NAMED | {"inputSchema": {"type": "object"}}, WRAPPED),
        ({"function": NAMED | {"input_schema": {"type": "object"}}}, WRAPPED),
        ({"functionDeclarations": [BARE], "google_search": None}, WRAPPED),
        (BARE | {"input_schema": None}, WRAPPED),
        (ODD, {"type": "function", "function": ODD}),
        ({"functionDeclarations": [BARE], "googleSearch": {}},) * 2,
    ],
    ids=str,
)
def test_definitions_are_wrapped_as_chat_templates_want_them(read_bytes, given, read):
    row = {
        "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
        "tools": [given],
    }

    source = read_bytes(json.dumps(row).encode(), format="chat")

    assert json.loads(source.validated["tools"][0].as_py()) == [read]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "args": {"a": 1}},
        {"name": "add", "args": '{"a": 1}'},
        {"name": "add", "parameters": {"a": 1}, "args": None},
        {"function": {"name": "add", "args": {"a": 1}}},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        {"function": {"name": "add"}, "arguments": {"a": 1}},
        {"name": "add", "arguments": "{}", "args": {"a": 1}, "call_id": "c1"},
    ],
    ids=str,
)
def test_arguments_of_calls_have_several_names(read_bytes, call):
    row = {
        "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}]
    }

    source = read_bytes(json.dumps(row).encode(), format="chat")

    (read,) = json.loads(source.validated["messages"][0].as_py()[1]["tool_calls"])
    assert read["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "id": "c1", "kwargs": {"a": 1}},
        {"name": "add", "arguments": {}, "kwargs": {"a": 1}},
        {"name": "add", "kwargs": 0},
        {"name": "add", "arguments": {"a": 1}, "parameters": {"b": 1}},
        {"function": {"name": "add"}, "kwargs": {"a": 1}},
    ],
    ids=str,
)
def test_arguments_under_another_name_are_not_lost(read_bytes, call):
    row = {
        "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}]
    }

    source = read_bytes(json.dumps(row).encode(), format="chat")

    (bad,) = source.quarantined.to_pylist()
    assert (bad["reason"], "the arguments of a tool call" in bad["detail"]) == ("tool_calls", True)


def test_parameters_of_other_rows_do_not_leak_into_a_tool_call(read_bytes):
    # ms-swift#10125, #6467: Arrow gives each struct all keys of the column, null if a row has none,
    # and templates print `null` arguments that the model was never called with.
    rows = [talk({"city": "Rome"}), talk({"path": "/tmp", "depth": 2})]
    table = pa.Table.from_pylist(rows)
    filled = table["messages"][0].as_py()[1]["tool_calls"][0]["function"]["arguments"]
    assert filled == {"city": "Rome", "path": None, "depth": None}  # Arrow's version of it

    read = read_bytes(parquet(rows), "rows.parquet", format="chat")

    calls = [json.loads(m[1]["tool_calls"]) for m in read.validated["messages"].to_pylist()]
    arguments = [call[0]["function"]["arguments"] for call in calls]
    assert arguments == [{"city": "Rome"}, {"path": "/tmp", "depth": 2}]
    tools = [json.loads(text)[0]["function"] for text in read.validated["tools"].to_pylist()]
    assert [sorted(tool["parameters"]) for tool in tools] == [["city"], ["depth", "path"]]


def talk(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    tool = {"name": "look", "parameters": {key: {"type": "string"} for key in arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "Seen.", "tool_calls": None},
            {"role": "assistant", "content": "I looked."},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def test_a_call_in_openais_older_form_is_not_lost(read_bytes):
    asked = {"role": "user", "content": "1+1"}
    call = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    said = {"role": "assistant", "content": None, "function_call": call}
    told = {"role": "function", "name": "add", "content": "2"}
    rows = [
        {"messages": [asked, said, told, {"role": "assistant", "content": "2"}]},
        {"messages": [asked, {**said, "content": "I add."}]},
        {"messages": [asked, {**said, "content": "2", "function_call": None}]},
        {"messages": [asked, {**said, "content": "2", "function_call": {}}]},
    ]

    read = read_bytes(b"\n".join(json.dumps(row).encode() for row in rows), format="chat")

    assert read.reasons == []
    calls = [row[1].get("tool_calls") for row in read.messages]
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    assert [call and json.loads(call) for call in calls] == [[made], [made], None, None]


def test_parallel_calls_with_a_turn_each_become_one_turn(read_bytes):
    calls = [{"from": "function_call", "value": f'{{"name": "{name}"}}'} for name in "fg"]
    told = [{"from": "observation", "value": value} for value in ("1", "2")]
    ends = [{"from": "human", "value": "Both?"}, {"from": "gpt", "value": "1 and 2"}]
    rows = [[ends[0], *calls, *results, ends[1]] for results in (told, told[:1])]
    lines = [json.dumps({"conversations": row}).encode() for row in rows]

    read = read_bytes(b"\n".join(lines), format="sharegpt")

    assert read.reasons == ["call_without_result"]  # nobody knows whose result it is
    ((_, called, *_),) = read.messages
    names = [call["function"]["name"] for call in json.loads(called["tool_calls"])]
    assert ([m["role"] for m in read.messages[0]], names) == (
        ["user", "assistant", "tool", "tool", "assistant"],
        ["f", "g"],
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"a": 1, "a": 2}', "duplicate_key"), ('{"a": 123456789012345678901234567890}', "number")],
)
@pytest.mark.parametrize("field", ["tool_calls", "tools"])
def test_json_text_that_would_be_read_as_something_else_is_refused(
    read_bytes, field, arguments, reason
):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    if field == "tools":
        row["tools"] = '[{"name": "f", "parameters": ' + arguments + "}]"
    else:
        row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]

    assert read_bytes(json.dumps(row).encode(), format="chat").reasons == [reason]


@pytest.mark.parametrize("text", ['{"b":  2,"a":1}', '{"a":"caf\\u00e9"}', "no JSON {"])
def test_a_template_that_joins_texts_writes_the_arguments_as_the_row_has_them(read_bytes, text):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
        ]
    }
    read = read_bytes(json.dumps(row).encode(), format="chat")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}"

    out = chat_renderer(
        CHATML.replace("+ '<|im_end|>", "}}" + calls + "{% endfor %}{{ '<|im_end|>")
    ).render(read.validated)

    assert f"f {text}<|im_end|>" in out.formatted["text"][0].as_py()


def test_arguments_in_another_form_are_an_object_to_other_templates(read_bytes):
    def messages(arguments):
        call = {"name": "f", "arguments": arguments}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        row = {"messages": [{"role": "user", "content": "q"}, said]}
        (found,) = read_bytes(json.dumps(row).encode(), format="chat").messages
        return chat_messages(found)

    assert messages('{"a":1}') == messages({"a": 1}) == messages('{"a": 1}')
