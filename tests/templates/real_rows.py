"""Rows of real files with calls and reasoning, rendered by packhouse and by a library."""

import json
from pathlib import Path
from typing import Any

from packhouse.read import scan_source
from packhouse.read.shard_reader import read_shard
from packhouse.recipe import FormatConfig, SourceConfig, TokenizeConfig, ValidateConfig
from packhouse.render import make_renderer
from packhouse.render.template_arguments import MessageForm, chat_messages
from packhouse.tokenize import load_snapshot, tokenize_table


def refusals(rendered: Any) -> list[str]:
    return [f"{row['reason']}: {row['detail']}" for row in rendered.quarantined.to_pylist()]


FILES = [
    ("glaive_toolcall_en_demo.json", "sharegpt", 8),
    ("reason_tool_use_demo_50.jsonl", "chat", 12),
]
"""Rows with calls and with reasoning; a library takes 0.1 s for all prompts of one row."""


def real_rows(shared: Path, file: str, form: str, number: int) -> Any:
    source = SourceConfig(path=str(shared / "data" / file), format=form)
    (shard,) = scan_source(source)
    return read_shard(shard, source, ValidateConfig(), "prompt").validated.slice(0, number)


KEYS = ("role", "content", "context", "reasoning", "tool_calls", "tool_call_id", "name")


class Compared:
    """Compare records, one per answer, with a library's text for the messages up to it.

    Args:
        write: (messages as a template gets them, tools) -> the library's text.
    """

    def __init__(self, folder: Path, table: Any, write: Any, **config: Any) -> None:
        snapshot = load_snapshot(folder)
        renderer = make_renderer(FormatConfig(turns="alone", **config), snapshot, folder=folder)
        self.rendered = renderer.render(table)
        tokens = tokenize_table(self.rendered.formatted, snapshot, TokenizeConfig(encoder="hf"))
        self.ids = tokens.tokenized["input_ids"].to_pylist()
        self.prompts: list[tuple[list[Any], Any]] = []
        """Messages up to each record's answer, and the row's tools."""
        rows = {row["row"]: row for row in table.to_pylist()}
        form = MessageForm(has_ids=config["template"] == "mistral")
        keys = {*KEYS} - ({"reasoning"} if config.get("reasoning") == "strip" else set())
        for record in self.rendered.formatted.to_pylist():
            row = rows[record["row"]]
            tools = row["tools"] and json.loads(row["tools"])
            known = [{k: m[k] for k in keys if m.get(k) is not None} for m in row["messages"]]
            # packhouse makes ids from the message's number, so all are made at once.
            chat = chat_messages(known, form)
            ends = [n + 1 for n, message in enumerate(chat) if message["role"] == "assistant"]
            parts = [chat[:end] for end in ends]
            same = (part for part in parts if write(part, tools) == record["text"])
            self.prompts.append((next(same), tools))
