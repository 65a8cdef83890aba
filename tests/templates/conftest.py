"""Real tokenizers, and real files as canonical messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def load_tokenizer(shared):
    """Load a real tokenizer by folder name, each once."""
    loaded = {}

    def load(name: str) -> Any:
        if name not in loaded:
            from transformers import AutoTokenizer

            loaded[name] = AutoTokenizer.from_pretrained(
                shared / "tokenizers" / name, local_files_only=True
            )
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def real_rows(shared):
    """Return conversations and tools of a real file, and as transformers would get them."""

    def read(name: str, limit: int | None = None) -> list[tuple[Rows, str | None]]:
        return list(_READERS[name](shared / "data"))[:limit]

    return read


def _alpaca(folder: Path) -> Iterator[tuple[Rows, str | None]]:
    for row in json.loads((folder / "alpaca_data.json").read_bytes()):
        user = {"role": "user", "content": row["instruction"]}
        if row["input"]:
            user["context"] = row["input"]
        yield [user, {"role": "assistant", "content": row["output"]}], None


def _fastchat(folder: Path) -> Iterator[tuple[Rows, str | None]]:
    roles = {"human": "user", "gpt": "assistant"}
    for row in json.loads((folder / "fastchat_dummy_conversation.json").read_bytes()):
        yield (
            [{"role": roles[t["from"]], "content": t["value"]} for t in row["conversations"]],
            None,
        )


def _xtuner(folder: Path) -> Iterator[tuple[Rows, str | None]]:
    for line in (folder / "xtuner_openai_sft.jsonl").read_text("utf-8").split("\n"):
        if line:
            yield json.loads(line), None


def _glaive(folder: Path) -> Iterator[tuple[Rows, str | None]]:
    for row in json.loads((folder / "glaive_toolcall_en_demo.json").read_bytes()):
        messages = []
        for turn in row["conversations"]:
            messages.append(_glaive_turn(turn, len(messages)))
        tools = json.loads(row["tools"]) if row.get("tools") else []
        tools = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]
        yield messages, json.dumps(tools, ensure_ascii=False) if tools else None


def _glaive_turn(turn: dict[str, str], number: int) -> dict[str, Any]:
    kind, text = turn["from"], turn["value"]
    if kind == "function_call":
        call = {"type": "function", "id": f"call{number - 1:05d}", "function": json.loads(text)}
        return {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    if kind == "observation":
        return {"role": "tool", "content": text, "tool_call_id": f"call{number - 2:05d}"}
    return {"role": {"human": "user", "gpt": "assistant"}[kind], "content": text}


def _reasoning(folder: Path) -> Iterator[tuple[Rows, str | None]]:
    for line in (folder / "reason_tool_use_demo_50.jsonl").read_text("utf-8").split("\n"):
        if line:
            row = json.loads(line)
            yield [_parts(message) for message in row["messages"]], row.get("tools")


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    turn = {"role": message["role"], "content": ""}
    calls = []
    for part in message["content"]:
        if part["type"] == "text":
            turn["content"] += part["value"]
        elif part["type"] == "reasoning":
            turn["reasoning"] = part["value"]
        elif part["type"] == "tool_call":
            calls.append({"type": "function", "function": json.loads(part["value"])})
    return turn | ({"tool_calls": json.dumps(calls, ensure_ascii=False)} if calls else {})


_READERS = {
    "alpaca": _alpaca,
    "fastchat": _fastchat,
    "xtuner": _xtuner,
    "glaive": _glaive,
    "reasoning": _reasoning,
}
