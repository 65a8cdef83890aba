"""Write the sample of the demo: `instructions.jsonl` (Alpaca rows) and `chats.jsonl` (messages).

    python deployments/demo/make_sample.py [--out FOLDER]

All of it is ours: rows from generators whose answers are computed (`number_rows`, `word_rows`,
`code_rows`, `chat_rows`) and rows written by hand (`handwritten.yaml`). The same bytes come out on
every run; a test holds the committed files to that. A run takes well under a second.

Some rows are bad on purpose, one of each kind, so that the demo has a quarantine to show: they are
listed in `BAD_ROWS`. Others are sound but worth a look: two rows that share a prompt (the haiku),
two rows that are exact copies, rows longer than the demo's `seq_len`, contents that hold
control-token text such as `<|im_end|>`, and tool calls.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from chat_rows import CHAT_ROWS, chat
from code_rows import CODE_ROWS
from dice import Dice, row
from number_rows import NUMBER_ROWS
from word_rows import HANDWRITTEN, WORD_ROWS

__all__ = ["BAD_ROWS", "BadRow", "chats", "instructions", "main"]

FILES = ("instructions.jsonl", "chats.jsonl")
SEED = 20_31


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that validation must refuse."""

    file: str
    """One of `FILES`."""

    row: int
    """0-based number of the row in its file."""

    reason: str
    """Reason code under which it is quarantined."""

    what: str
    """What is wrong, for people."""

    raw: bytes
    """The line, without its newline."""


BAD_ROWS = (
    BadRow(
        file="instructions.jsonl",
        row=17,
        reason="json",
        what="the line was cut off in the middle of a string",
        raw=b'{"instruction": "Name three primes between 10 and 20.", "input": "", "output": "11,',
    ),
    BadRow(
        file="instructions.jsonl",
        row=48,
        reason="encoding",
        what="a Latin-1 byte in a file that is UTF-8 otherwise",
        raw=b'{"instruction": "Spell coffee house in French.", "input": "", "output": "caf\xe9"}',
    ),
    BadRow(
        file="instructions.jsonl",
        row=83,
        reason="duplicate_key",
        what="two outputs, and no way to know which one is meant",
        raw=b'{"instruction": "What is 8 * 7?", "input": "", "output": "54", "output": "56"}',
    ),
    BadRow(
        file="instructions.jsonl",
        row=111,
        reason="fields",
        what="the output is missing",
        raw=b'{"instruction": "Suggest a name for a grey kitten.", "input": ""}',
    ),
    BadRow(
        file="instructions.jsonl",
        row=146,
        reason="empty_answer",
        what="the output is an empty text",
        raw=b'{"instruction": "Describe the painting.", "input": "painting.png", "output": ""}',
    ),
    BadRow(
        file="instructions.jsonl",
        row=190,
        reason="type",
        what="the output is a number, not a text",
        raw=b'{"instruction": "How many legs do four cats have?", "input": "", "output": 16}',
    ),
    BadRow(
        file="chats.jsonl",
        row=12,
        reason="unknown_role",
        what="a role that does not exist",
        raw=b'{"messages": [{"role": "user", "content": "Is the shop open on Sunday?"},'
        b' {"role": "operator", "content": "No, from Monday to Saturday."}]}',
    ),
    BadRow(
        file="chats.jsonl",
        row=45,
        reason="ends_on_user",
        what="the answer to the last question is missing",
        raw=b'{"messages": [{"role": "user", "content": "Do you know any riddles?"}, {"role":'
        b' "assistant", "content": "What has keys but opens no door? A piano."}, {"role": "user",'
        b' "content": "Another one, please!"}]}',
    ),
    BadRow(
        file="chats.jsonl",
        row=79,
        reason="number",
        what="NaN is no JSON, though some writers emit it",
        raw=b'{"messages": [{"role": "user", "content": "Say hello in Italian."}, {"role":'
        b' "assistant", "content": "Ciao!"}], "score": NaN}',
    ),
)


def instructions(seed: int, count: int) -> list[dict[str, str]]:
    """Return `count` different Alpaca rows, the generators taking turns."""
    return _generate((*NUMBER_ROWS, *WORD_ROWS, *CODE_ROWS), seed, count)


def chats(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` different rows of messages, the generators taking turns."""
    return _generate(CHAT_ROWS, seed, count)


def _generate(
    generators: Iterable[Callable[[Dice], dict[str, Any]]], seed: int, count: int
) -> list[dict[str, Any]]:
    dice = Dice(seed)
    rows: dict[str, dict[str, Any]] = {}
    for generator in islice(cycle(generators), 20 * count):
        made = generator(dice)
        rows.setdefault(json.dumps(made), made)
        if len(rows) == count:
            break
    assert len(rows) == count, f"the generators have fewer than {count} different rows"
    return list(rows.values())


def good_instructions() -> list[dict[str, str]]:
    """Return the sound rows of `instructions.jsonl` in their order."""
    written = [row(r["instruction"], r["output"], r.get("input", "")) for r in _written_rows()]
    rows = Dice(SEED + 1).mixed(written + instructions(SEED, 152))
    return [*rows, rows[5], rows[60]]  # two exact copies


def _written_rows() -> list[dict[str, str]]:
    return list(HANDWRITTEN["instructions"])


def good_chats() -> list[dict[str, Any]]:
    """Return the sound rows of `chats.jsonl` in their order."""
    written = [chat(*((role, text) for role, text in turns)) for turns in HANDWRITTEN["chats"]]
    return Dice(SEED + 2).mixed(written + chats(SEED + 3, 79))


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    for file, rows in zip(FILES, (good_instructions(), good_chats()), strict=True):
        lines = [json.dumps(r, ensure_ascii=False).encode() for r in rows]
        for bad in sorted((b for b in BAD_ROWS if b.file == file), key=lambda b: b.row):
            lines.insert(bad.row, bad.raw)
        (folder / file).write_bytes(b"".join(line + b"\n" for line in lines))
        print(f"{folder / file}: {len(lines)} rows, {sum(map(len, lines)) + len(lines):,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the sample of the demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder")
    main(parser.parse_args().out)
