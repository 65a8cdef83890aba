"""Snapshots of real and toy tokenizers, and validated tables of real files, for this room."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from packhouse.tables import VALIDATED
from packhouse.tokenization.snapshot import TokenizerSnapshot

Rows = list[dict[str, Any]]


def make_table(conversations: list[Any], tools: Any = None, labels: Any = None) -> pa.Table:
    """A VALIDATED table of conversations given as [(role, content), ...] or as dicts."""
    rows = []
    for number, conversation in enumerate(conversations):
        messages = [
            turn if isinstance(turn, dict) else dict(zip(("role", "content"), turn, strict=True))
            for turn in conversation
        ]
        rows.append(
            {
                "record_id": f"{number:020x}",
                "source": "toy/rows.jsonl",
                "row": number,
                "messages": messages,
                "tools": tools[number] if tools else None,
                "label": labels[number] if labels else None,
                "group_key": f"{number:020x}",
            }
        )
    source = pa.array([row.pop("source") for row in rows], pa.string()).dictionary_encode()
    names = [name for name in VALIDATED.names if name != "source"]
    columns = {
        name: pa.array([r[name] for r in rows], VALIDATED.field(name).type) for name in names
    }
    columns["source"] = source.cast(VALIDATED.field("source").type)
    return pa.table([columns[name] for name in VALIDATED.names], schema=VALIDATED)


def make_snapshot(**changes: Any) -> TokenizerSnapshot:
    """A toy tokenizer with ChatML's tokens."""
    facts: dict[str, Any] = {
        "fingerprint": "0" * 64,
        "class_name": "ToyTokenizer",
        "backend": "{}",
        "vocab_size": 300,
        "added_tokens": {"<s>": 0, "</s>": 1, "<|im_start|>": 2, "<|im_end|>": 3},
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "adds_bos": True,
        "chat_template": None,
    }
    return TokenizerSnapshot(**(facts | changes))


def pieces(formatted: pa.Table, spans: str = "trained_spans") -> list[list[str]]:
    """The text of each row's spans."""
    rows = formatted.select(["text", spans]).to_pylist()
    return [
        [row["text"].encode()[span["start"] : span["end"]].decode() for span in row[spans]]
        for row in rows
    ]


def snapshot_of(tokenizer: Any) -> TokenizerSnapshot:
    ids = tokenizer("a")["input_ids"]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    return make_snapshot(
        class_name=type(tokenizer).__name__,
        added_tokens={token: number for token, number in tokenizer.added_tokens_encoder.items()},
        special_tokens=dict(tokenizer.special_tokens_map),
        adds_bos=bool(ids) and first is not None and ids[0] == first,
        chat_template=tokenizer.chat_template,
        vocab_size=len(tokenizer),
    )


@pytest.fixture(scope="session")
def load_tokenizer(shared: Path) -> Any:
    """Load a real tokenizer by folder name, each once."""
    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            from transformers import AutoTokenizer

            loaded[name] = AutoTokenizer.from_pretrained(
                shared / "tokenizers" / name, local_files_only=True
            )
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def real_rows(shared: Path) -> Any:
    """Conversations and tools of a real file, and how transformers would be given them."""

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
        messages: Rows = []
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
    turn: dict[str, Any] = {"role": message["role"], "content": ""}
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
