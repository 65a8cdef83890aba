"""Stanford's two prompts, for the peers. packhouse has its own."""

from pathlib import Path
from typing import Any

_OPENING = "Below is an instruction that describes a task"
_CLOSING = "Write a response that appropriately completes the request."


def prompt_of(row: dict[str, Any]) -> str:
    """Return everything before the answer."""
    instruction, given = row["instruction"], row["input"]
    if given:
        return (
            f"{_OPENING}, paired with an input that provides further context. {_CLOSING}\n\n"
            f"### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:"
        )
    return f"{_OPENING}. {_CLOSING}\n\n### Instruction:\n{instruction}\n\n### Response:"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all data files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.suffix != ".json")
