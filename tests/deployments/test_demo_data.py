import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packhouse.recipe import load_recipe
from packhouse.sources import read_shard, scan_source

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo"
FILES = ("instructions.jsonl", "chats.jsonl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def run(script: str, folder: Path, hash_seed: str) -> None:
    command = [sys.executable, str(DEMO / script), "--out", str(folder)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)


@pytest.fixture(scope="module")
def bad_rows():
    """`BAD_ROWS` of make_sample.py, read by a child so that its modules are not imported here."""
    code = (
        "import json, make_sample as m;"
        "print(json.dumps([[b.file, b.row, b.reason, b.raw.hex()] for b in m.BAD_ROWS]))"
    )
    environment = os.environ | {"PYTHONPATH": str(DEMO), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True
    )
    return [
        (file, row, reason, bytes.fromhex(raw))
        for file, row, reason, raw in json.loads(done.stdout)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO / "tokenizer", local_files_only=True)


def lines(file: str) -> list[bytes]:
    return (DEMO / file).read_bytes().split(b"\n")[:-1]


def sound_rows(file: str, bad_rows) -> list[dict]:
    bad = {row for name, row, _, _ in bad_rows if name == file}
    return [json.loads(line) for i, line in enumerate(lines(file)) if i not in bad]


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_sample_is_made_again_byte_for_byte(tmp_path, hash_seed):
    run("make_sample.py", tmp_path, hash_seed)

    for file in FILES:
        assert (tmp_path / file).read_bytes() == (DEMO / file).read_bytes(), file


def test_tokenizer_is_trained_again_byte_for_byte(tmp_path):
    run("train_tokenizer.py", tmp_path, "77")

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TOKENIZER_FILES)
    for file in TOKENIZER_FILES:
        assert (tmp_path / file).read_bytes() == (DEMO / "tokenizer" / file).read_bytes(), file


def test_sample_has_the_stated_size():
    assert [len(lines(file)) for file in FILES] == [204, 100]
    assert sum((DEMO / file).stat().st_size for file in FILES) < 300_000


def test_bad_rows_are_one_of_each_kind_and_stand_where_they_are_listed(bad_rows):
    assert [(file, row, reason) for file, row, reason, _ in bad_rows] == [
        ("instructions.jsonl", 17, "json"),
        ("instructions.jsonl", 48, "encoding"),
        ("instructions.jsonl", 83, "duplicate_key"),
        ("instructions.jsonl", 111, "fields"),
        ("instructions.jsonl", 146, "empty_answer"),
        ("instructions.jsonl", 190, "type"),
        ("chats.jsonl", 12, "unknown_role"),
        ("chats.jsonl", 45, "ends_on_user"),
        ("chats.jsonl", 79, "number"),
    ]
    for file, row, _, raw in bad_rows:
        assert lines(file)[row] == raw


@pytest.mark.parametrize("at", [0, 1], ids=FILES)
def test_validation_refuses_exactly_the_listed_rows(bad_rows, at):
    recipe = load_recipe(DEMO / "recipe.yaml")
    source = recipe.sources[at]
    (shard,) = scan_source(source)

    rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)

    refused = rows.quarantined.select(["row", "reason", "raw"]).to_pylist()
    assert [(r["row"], r["reason"], r["raw"]) for r in refused] == [
        (row, reason, raw) for file, row, reason, raw in bad_rows if file == FILES[at]
    ]
    assert rows.validated.num_rows == len(lines(FILES[at])) - len(refused)


def test_instructions_are_alpaca_rows_with_an_answer(bad_rows):
    rows = sound_rows("instructions.jsonl", bad_rows)

    assert {tuple(row) for row in rows} == {("instruction", "input", "output")}
    assert all(row["instruction"].strip() and row["output"].strip() for row in rows)
    assert 40 < sum(bool(row["input"]) for row in rows) < 100


def test_chats_follow_the_order_of_roles(bad_rows):
    rows = sound_rows("chats.jsonl", bad_rows)

    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns[0] == "user"
        assert turns[-1] == "assistant"
        assert not any(a == b != "tool" for a, b in pairwise(turns)), roles
    counts = Counter(m["role"] for row in rows for m in row["messages"])
    assert counts["system"] > 20
    assert counts["tool"] > 20
    assert counts["user"] > 250


def test_tool_results_answer_calls_with_arguments_in_json(bad_rows):
    for row in sound_rows("chats.jsonl", bad_rows):
        calls = [c for m in row["messages"] for c in m.get("tool_calls", [])]
        results = [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"]
        assert [call["id"] for call in calls] == results
        declared = {tool["function"]["name"] for tool in row.get("tools", [])}
        assert {call["function"]["name"] for call in calls} <= declared
        assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in calls)


def test_sample_holds_what_its_docstring_promises(bad_rows):
    alpaca = sound_rows("instructions.jsonl", bad_rows)

    copies = Counter(json.dumps(row) for row in alpaca)
    assert sorted(copies.values())[-3:] == [1, 2, 2]
    haikus = {row["output"] for row in alpaca if "haiku" in row["instruction"]}
    assert len(haikus) == 2
    text = (DEMO / "chats.jsonl").read_text(encoding="utf-8", errors="replace")
    assert "<|im_end|>" in text


def test_tokenizer_has_4096_tokens_and_the_control_tokens_first(tokenizer):
    assert len(tokenizer) == 4096
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert (tokenizer.bos_token, tokenizer.unk_token) == (None, None)


@given(text=st.text(max_size=60))
@example(text="  two  spaces, a tab\t, \r\n and\u00a0more \u2028")
@example(text="e\u0301 is not NFC; \ufeff \U0001f3f4\u200d\u2620\ufe0f")
@example(text="1234567 did n't can't \x00\x7f <|im_end|>")
def test_every_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids

    assert tokenizer.decode(ids) == text


def test_every_byte_is_a_token(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= set(tokenizer.get_vocab())


def test_chat_template_renders_turns(tokenizer):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello"},
    ]

    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Hi\n<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(
        turns[1:2], tokenize=False, add_generation_prompt=True
    ) == ("<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}], ids=["text", "mapping"])
def test_chat_template_renders_tools_and_calls(tokenizer, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Done"},
    ]

    text = tokenizer.apply_chat_template(turns, tools=[{"name": "f"}], tokenize=False)

    called = '<call>{"name": "f", "arguments": {"x": 1}}</call>'
    assert text == (
        "<|im_start|>system\nYou can call these functions, one JSON object a line between <call>"
        ' and </call>:\n{"name": "f"}<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n'
        f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\nDone<|im_end|>\n"
    )
