"""Compare rendering of conversations with `apply_chat_template` row by row.

`python -m bench.templates [--rows N]`: real files with three tokenizers, each unchanged and grown
to N rows by perturbed copies (no two rows are equal; tool calls and half of the tool definitions
have different texts; conversations end at different turns). The text of every row is compared. Both
sides are timed by CPU in one process, alternating, three times; the ratio is of the medians.
Compiled shapes are kept for the life of the process, like transformers' compiled template: `first`
is the time of the first of the three, which includes compiling them.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.inputs import find_shared
from bench.measuring import spread
from bench.reporting import markdown_table
from packhouse.system.worker import keep_freed_memory

FILES = {
    "alpaca_data.json": "alpaca",
    "fastchat_dummy_conversation.json": "auto",
    "xtuner_openai_sft.jsonl": "auto",
    "glaive_toolcall_en_demo.json": "auto",
    "reason_tool_use_demo_50.jsonl": "auto",
}
TOKENIZERS = ("qwen2.5-instruct", "qwen3", "mistral-7b-instruct-v0.3")
HEAD = (
    *("file", "tokenizer", "rows", "us a row", "first", "apply_chat_template", "ratio"),
    *("ratio of the first", "refused"),
)


def main(arguments: list[str] | None = None) -> int:
    """Measure every file with every tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m bench.templates")
    parser.add_argument("--rows", type=int, default=5000)
    num_rows = parser.parse_args(arguments).rows
    shared = find_shared()
    if shared is None:
        print("skipped: PACKHOUSE_SHARED names no folder of real data")
        return 0
    keep_freed_memory()  # as every step does
    rows = []
    for file, row_format in FILES.items():
        table = _validated(shared / "data" / file, row_format)
        if table is None:
            print(f"skipped {file}: no row of it is sound")
            continue
        sizes = [table.slice(0, num_rows)]
        if table.num_rows < num_rows:
            sizes.append(_grown(table, num_rows))
        for some in sizes:
            rows += [_measure(file, shared / "tokenizers" / name, some) for name in TOKENIZERS]
    print(markdown_table(HEAD, rows))
    return 0


def _validated(path: Path, row_format: str) -> pa.Table | None:
    from packhouse.read import read_shard, scan_source
    from packhouse.recipe import SourceConfig, ValidateConfig

    source = SourceConfig.model_validate({"path": str(path), "format": row_format})
    parts = [
        read_shard(shard, source, ValidateConfig(), "prompt").validated
        for shard in scan_source(source)
    ]
    table = pa.concat_tables(parts)
    return table.combine_chunks() if table.num_rows else None


def _grown(table: pa.Table, num_rows: int) -> pa.Table:
    """Return perturbed copies of rows: words of texts are replaced by the copy's number."""
    chance = random.Random(num_rows)
    rows = table.to_pylist()
    grown = [
        _perturbed(json.loads(json.dumps(rows[number % len(rows)])), number, chance)
        for number in range(num_rows)
    ]
    return pa.Table.from_pylist(grown, schema=table.schema).combine_chunks()


def _perturbed(row: dict[str, Any], number: int, chance: random.Random) -> dict[str, Any]:
    """Return one copy, sometimes without its last turns."""

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: other(item) for key, item in value.items()}
        if isinstance(value, list):
            return [other(item) for item in value]
        if not isinstance(value, str) or not value:
            return value
        words = value.split(" ")
        words[chance.randrange(len(words))] = f"w{number}"
        return " ".join(words)

    questions = [n for n, message in enumerate(row["messages"]) if message["role"] == "user"]
    if len(questions) > 1 and chance.random() < 0.3:
        row["messages"] = row["messages"][: chance.choice(questions[1:])]
    for message in row["messages"]:
        message |= {key: other(message[key]) for key in ("content", "context", "reasoning")}
        calls = json.loads(message["tool_calls"] or "[]")
        for call in calls:
            call["function"]["arguments"] = other(call["function"].get("arguments"))
        message["tool_calls"] = json.dumps(calls, ensure_ascii=False) if calls else None
    if row["tools"] and chance.random() < 0.5:
        tools = json.loads(row["tools"])
        for tool in tools:
            function = tool.get("function", tool)
            function["description"] = other(function.get("description", "It helps."))
        row["tools"] = json.dumps(tools, ensure_ascii=False)
    return row | {"record_id": f"{number:020x}", "row": number}


def openai_rows(path: Path, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield `num_rows` perturbed conversations of a file in OpenAI's form."""
    from packhouse.recipe import FormatConfig
    from packhouse.records.conversation_shapes import Conversations
    from packhouse.render.template_arguments import chat_messages

    table = _validated(path, "auto")
    assert table is not None, f"{path} has no sound row"
    conversations = Conversations.from_table(_grown(table, num_rows), FormatConfig())
    for _, messages, (tools, _) in conversations.messages_of(np.arange(num_rows)):
        row: dict[str, Any] = {"messages": chat_messages(messages)}
        yield row | ({"tools": json.loads(tools)} if tools else {})


def _measure(file: str, folder: Path, table: pa.Table) -> list[str]:
    from transformers import AutoTokenizer

    from packhouse.recipe import FormatConfig
    from packhouse.records.conversation_shapes import Conversations
    from packhouse.render import make_renderer
    from packhouse.render.template_arguments import chat_messages
    from packhouse.tokenize import load_snapshot

    tokenizer = AutoTokenizer.from_pretrained(folder)
    snapshot = load_snapshot(folder)
    conversations = Conversations.from_table(table, FormatConfig())
    given = [
        (chat_messages(messages), tools)
        for _, messages, (tools, _) in conversations.messages_of(np.arange(table.num_rows))
    ]

    def theirs() -> list[str | None]:
        return [_applied(tokenizer, messages, tools) for messages, tools in given]

    def ours() -> Any:
        return make_renderer(FormatConfig(turns="whole"), snapshot).render(table)

    own, peer = [], []
    for _ in range(3):
        seconds, rendered = _timed(ours)
        own.append(seconds)
        seconds, texts = _timed(theirs)
        peer.append(seconds)
    _compare(rendered, texts, table.num_rows)
    micros = [spread(values).median / table.num_rows * 1e6 for values in (own, peer)]
    first = own[0] / table.num_rows * 1e6
    refused = rendered.quarantined.num_rows
    return [
        file,
        folder.name,
        f"{table.num_rows:,}",
        *(f"{value:.1f}" for value in (micros[0], first, micros[1])),
        *(f"{micros[1] / value:.1f}" for value in (micros[0], first)),
        f"{refused:,}",
    ]


def _applied(tokenizer: Any, messages: list[dict[str, Any]], tools: str | None) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=json.loads(tools) if tools else None, tokenize=False
        )
    except Exception:  # whatever a template raises: the row cannot be rendered
        return None
    return text


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    made = do()
    return time.process_time() - start, made


def _compare(rendered: Any, texts: list[str | None], num_rows: int) -> None:
    """Check that every text of transformers is the same here, except for refused rows.

    transformers has no text if a template needs call ids that the row lacks.
    """
    kept = set(rendered.formatted["text"].to_pylist())
    assert rendered.formatted.num_rows + rendered.quarantined.num_rows == num_rows
    missing = [text for text in texts if text is not None and text not in kept]
    assert len(missing) <= rendered.quarantined.num_rows, f"not made: {missing[0][:80]}"


if __name__ == "__main__":
    sys.exit(main())
