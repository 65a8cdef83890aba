"""Real files: which of their known defects are found, and a few texts; OASST: test_trees.py."""

import itertools
import json

EMPTY_OUTPUTS = [  # of the Stanford Alpaca file
    *(284, 1223, 1347, 1736, 7723, 9038, 11263, 11355, 11471, 14634, 15015, 23488, 24322, 24449),
    *(24541, 25034, 28250, 30605, 31653, 32425, 35802, 44274, 45538, 46258, 46811, 49181, 49248),
    51388,
]


def test_alpaca_is_read_except_its_28_empty_outputs(shared, read):
    path = shared / "data" / "alpaca_data.json"
    data = path.read_bytes()
    raw = json.loads(data)

    source = read(path)

    assert source.quarantined["row"].to_pylist() == EMPTY_OUTPUTS
    assert set(source.reasons) == {"empty_answer"}
    for bad in source.quarantined.to_pylist():
        row = data[bad["byte_offset"] :][: bad["raw_size"]]
        assert row == bad["raw"]
        assert json.loads(row)["output"] == ""
    rows = source.validated["row"].to_pylist()
    assert len(rows) == len(raw) - 28
    for row, messages in list(zip(rows, source.messages, strict=True))[::97]:
        user, assistant = messages
        assert user["content"] == raw[row]["instruction"]
        assert user.get("context", "") == raw[row]["input"]
        assert assistant["content"] == raw[row]["output"]


def test_windows_line_ends_of_sst2_do_not_reach_the_text(shared, read_bytes):
    with (shared / "data" / "sst2_train.tsv").open("rb") as lines:
        head = b"".join(itertools.islice(lines, 1000))
    source = read_bytes(head, "rows.tsv", label_names=["negative", "positive"])

    assert source.texts[0] == [("user", "hide new secretions from the parental units")]
    assert source.validated["label"].to_pylist()[:3] == [0, 0, 1]
    assert not any(text.endswith("\r") for [(_, text)] in source.texts)


def test_tool_calls_of_glaive_are_canonical(shared, read):
    source = read(shared / "data" / "glaive_toolcall_en_demo.json")

    calling = source.messages[0][3]
    assert calling["role"] == "assistant"
    assert json.loads(calling["tool_calls"]) == [
        {
            "type": "function",
            "function": {
                "name": "search_recipes",
                "arguments": {"ingredients": ["chicken", "bell peppers", "rice"]},
            },
        }
    ]
    assert source.messages[0][4]["role"] == "tool"
    tools = source.validated["tools"].to_pylist()
    assert json.loads(tools[0])[0]["function"]["name"] == "search_recipes"
    assert sum(text is None for text in tools) == 109  # "[]" in the file


def test_reasoning_parts_go_to_reasoning(shared, read):
    path = shared / "data" / "reason_tool_use_demo_50.jsonl"
    raw = [json.loads(line) for line in path.read_bytes().splitlines()]

    source = read(path)

    answer = source.messages[0][2]
    assert answer["reasoning"].startswith("Okay, the user is asking for schools")
    assert answer["content"].startswith("I'm sorry, but the available tools")
    assert all(json.loads(text) for text in source.validated["tools"].drop_null().to_pylist())
    assert [m["role"] for m in source.messages[-1]] == [m["role"] for m in raw[-1]["messages"]]
