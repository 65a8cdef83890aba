"""Inputs of the benchmarks: the real Alpaca file, and any number of perturbed copies.

A copy replaces a few words of a row's instruction and answer with words of another row, so lengths
stay realistic and no two rows are equal. The same number of rows gives the same bytes. Nothing is
downloaded: the file is searched for in `PACKHOUSE_SHARED`, otherwise in `../shared`.
"""

import json
import os
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".packhouse" / "bench"
DEMO = ROOT / "deployments" / "demo"


def find_shared() -> Path | None:
    """Folder of real data and tokenizers, or None."""
    named = os.environ.get("PACKHOUSE_SHARED")
    folder = Path(named) if named else ROOT.parent / "shared"
    return folder if (folder / "data" / "alpaca_data.json").is_file() else None


def grown_alpaca(shared: Path, num_rows: int) -> Path:
    """Return a JSON array of `num_rows` rows, cached; the real file if it has this size."""
    real = shared / "data" / "alpaca_data.json"
    rows = json.loads(real.read_bytes())
    return real if num_rows == len(rows) else _grown(rows, num_rows, f"alpaca-{num_rows}.json")


def small_alpaca(num_rows: int) -> Path:
    """Return the same from the demo's rows, which are in the repository."""
    lines = (DEMO / "instructions.jsonl").read_bytes().splitlines()
    rows = [row for row in map(_row_or_none, lines) if row is not None]
    return _grown(rows, num_rows, f"demo-{num_rows}.json")


def _row_or_none(line: bytes) -> dict[str, Any] | None:
    """Return True for a valid row of the demo, which contains bad rows on purpose."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    names = ("instruction", "input", "output")
    is_sound = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
    return {name: row[name] for name in names} if is_sound and row["output"].strip() else None


def _grown(rows: list[dict[str, Any]], num_rows: int, name: str) -> Path:
    path = WORK / name
    return path if path.is_file() else _write(path, perturb(rows, num_rows))


def _write(path: Path, rows: Iterable[dict[str, Any]], *, lines: bool = False) -> Path:
    """Write rows as a JSON array, or as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    between, first, last = ("\n", "", "\n") if lines else (",\n", "[\n", "\n]\n")
    with part.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            file.write(between if number else first)
            file.write(json.dumps(row, ensure_ascii=False))
        file.write(last)
    part.replace(path)
    return path


def edited(path: Path, *, inserts: bool) -> Path:
    """Return a copy of a JSON array with a changed or a new row in the middle, cached.

    It has the same name, in another folder, because the name is part of the keys of its shards.
    """
    copy = WORK / ("inserted" if inserts else "changed") / path.name
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads(path.read_bytes())
        middle = len(rows) // 2
        new = {**rows[middle], "instruction": "Which row is new?"}
        rows[middle : middle + (not inserts)] = [new]
        _write(copy, rows)
    return copy


def chats(shared: Path, kind: str, num_rows: int) -> Path:
    """Return JSON Lines of conversations in OpenAI's form, cached: `chats` or `tools`.

    Chats are two to four questions and answers of GPT-4 Alpaca; tool chats are Glaive's, perturbed.
    """
    path = WORK / f"{kind}-{num_rows}.jsonl"
    if path.is_file():
        return path
    if kind == "tools":
        from bench.templates import openai_rows

        found = shared / "data" / "glaive_toolcall_en_demo.json"
        return _write(path, openai_rows(found, num_rows), lines=True)
    lines = (shared / "data" / "alpaca_gpt4_eval_1000.jsonl").read_text("utf-8").splitlines()
    turns = perturb([json.loads(line) for line in lines], 3 * num_rows)
    rows = []
    for number in range(num_rows):
        messages = []
        for row in islice(turns, 2 + number % 3):
            question = f"{row['instruction']}\n{row['input']}".strip()
            messages += [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": row["output"]}]
        rows.append({"messages": messages})
    return _write(path, rows, lines=True)


def perturb(rows: list[dict[str, Any]], num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield the rows themselves, then perturbed copies of them until there are `num_rows`.

    Example:
        >>> rows = [{"instruction": "add two", "input": "", "output": "one and two are three"}]
        >>> grown = list(perturb(rows, 3))
        >>> grown[0] == rows[0], len({row["instruction"] for row in grown})
        (True, 3)
    """
    chance = random.Random(0)
    for number in range(num_rows):
        row = rows[number % len(rows)]
        if number < len(rows):
            yield row
            continue
        donor = rows[chance.randrange(len(rows))]["output"].split() or ["and"]
        copy = dict(row)
        for name in ("instruction", "output"):
            words = copy[name].split(" ")
            for _ in range(1 + len(words) // 16):
                words[chance.randrange(len(words))] = donor[chance.randrange(len(donor))]
            copy[name] = " ".join(words)
        copy["instruction"] += f" ({number})"
        yield copy
