"""Chat templates: conversations to text, against `apply_chat_template` row by row.

`python -m bench.templates [--rows N]`: real files, repeated until there are N rows (shapes are
remembered, contents are not), with three tokenizers. The text of every row is compared. Both sides
are timed by CPU in one process, in turn, three times; the ratio is of the medians.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.inputs import find_shared
from bench.measuring import spread
from bench.reporting import markdown_table

__all__ = ["main"]

FILES = {
    "alpaca_data.json": "alpaca",
    "fastchat_dummy_conversation.json": "auto",
    "xtuner_openai_sft.jsonl": "auto",
    "glaive_toolcall_en_demo.json": "auto",
    "reason_tool_use_demo_50.jsonl": "auto",
}
TOKENIZERS = ("qwen2.5-instruct", "qwen3", "mistral-7b-instruct-v0.3")
HEAD = ("file", "tokenizer", "rows", "us a row", "apply_chat_template", "ratio", "refused")


def main(arguments: list[str] | None = None) -> int:
    """Measure every file with every tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m bench.templates")
    parser.add_argument("--rows", type=int, default=5000)
    num_rows = parser.parse_args(arguments).rows
    shared = find_shared()
    if shared is None:
        print("skipped: PACKHOUSE_SHARED names no folder of real data")
        return 0
    rows = []
    for file, row_format in FILES.items():
        table = _validated(shared / "data" / file, row_format, num_rows)
        if table is None:
            print(f"skipped {file}: no row of it is sound")
            continue
        rows += [_measure(file, shared / "tokenizers" / name, table) for name in TOKENIZERS]
    print(markdown_table(HEAD, rows))
    return 0


def _validated(path: Path, row_format: str, num_rows: int) -> pa.Table | None:
    from packhouse.recipe import SourceConfig, ValidateConfig
    from packhouse.sources import read_shard, scan_source

    source = SourceConfig.model_validate({"path": str(path), "format": row_format})
    parts = [
        read_shard(shard, source, ValidateConfig(), "prompt").validated
        for shard in scan_source(source)
    ]
    table = pa.concat_tables(parts)
    if not table.num_rows:
        return None
    times = -(-num_rows // table.num_rows)
    return pa.concat_tables([table] * times).slice(0, num_rows).combine_chunks()


def _measure(file: str, folder: Path, table: pa.Table) -> list[str]:
    from transformers import AutoTokenizer

    from packhouse.recipe import FormatConfig
    from packhouse.templates import make_renderer
    from packhouse.templates.chat_messages import chat_messages
    from packhouse.templates.conversations import Conversations
    from packhouse.tokenization import load_snapshot

    tokenizer = AutoTokenizer.from_pretrained(folder)
    snapshot = load_snapshot(folder)
    conversations = Conversations.from_table(table, FormatConfig())
    given = [
        (chat_messages(messages), tools)
        for messages, tools in conversations.messages_of(np.arange(table.num_rows))
    ]

    def theirs() -> list[str | None]:
        return [_applied(tokenizer, messages, tools) for messages, tools in given]

    def ours() -> Any:
        return make_renderer(FormatConfig(), snapshot).render(table)

    own, peer = [], []
    for _ in range(3):
        seconds, rendered = _timed(ours)
        own.append(seconds)
        seconds, texts = _timed(theirs)
        peer.append(seconds)
    _compare(rendered, texts, table.num_rows)
    micros = [spread(values).median / table.num_rows * 1e6 for values in (own, peer)]
    refused = rendered.quarantined.num_rows
    return [
        file,
        folder.name,
        f"{table.num_rows:,}",
        *(f"{value:.1f}" for value in micros),
        f"{micros[1] / micros[0]:.1f}",
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
    """Every text that transformers makes came out, but for rows that were refused.

    transformers makes none where a template wants call ids that the row does not have.
    """
    kept = set(rendered.formatted["text"].to_pylist())
    assert rendered.formatted.num_rows + rendered.quarantined.num_rows == num_rows
    missing = [text for text in texts if text is not None and text not in kept]
    assert len(missing) <= rendered.quarantined.num_rows, f"not made: {missing[0][:80]}"


if __name__ == "__main__":
    sys.exit(main())
