"""Count the functions that one row's text passes: `python -m bench.row_walk [alpaca | chat]`.

Prepares twelve rows, reads one back, and counts the functions of packhouse, including those in
child processes, that get the text of a row as an argument: directly, in lists, tuples, dicts and
dataclasses, or as Arrow data. Part of `make check`, which prints the two totals.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pyarrow as pa

REPOSITORY = Path(__file__).parents[1]
LIBRARY = str(REPOSITORY / "packhouse") + os.sep
TOKENIZER = REPOSITORY / "deployments/demo/tokenizer"
WORD = "zebrafish"
"""Part of each text of each row."""
NUM_ROWS = 12
_MAX_CALLS = 200  # calls of a function that are checked
_MAX_ITEMS = 16
_MAX_DEPTH = 4
_VARARGS = 4 | 8  # co_flags of *args and **kwargs


def holds(value: object, depth: int = 0) -> bool:
    """Return True if a value contains the word.

    Objects of a row (`DataObject`, a dict) are not opened, because they record every access.
    """
    if isinstance(value, str):
        return WORD in str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return WORD.encode() in bytes(value[: 2**20])
    if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
        return len(value) <= 64 and WORD in str(value.to_pylist())
    inner: list[object] = []
    if isinstance(value, dict) and type(value) is dict:
        inner = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [*value]
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return depth < _MAX_DEPTH and any(holds(each, depth + 1) for each in inner[:_MAX_ITEMS])


def watch(out: Path) -> None:
    """Record from now on which functions of this process get the text of a row."""
    seen: set[CodeType] = set()
    calls = Counter[CodeType]()
    found = out / f"{os.getpid()}.txt"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not code.co_filename.startswith(LIBRARY):
            return
        calls[code] += 1
        if calls[code] > _MAX_CALLS or code.co_name.startswith("<"):
            return
        count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & _VARARGS).bit_count()
        sys.setprofile(None)  # calls made by `holds` are not checked
        try:
            if any(holds(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
                seen.add(code)
                with found.open("a") as file:
                    file.write(f"{code.co_filename.removeprefix(LIBRARY)} {code.co_qualname}\n")
        finally:
            sys.setprofile(note)

    threading.setprofile(note)
    sys.setprofile(note)


def walk(kind: str) -> dict[str, set[str]]:
    """Return the names of the functions that a row's text passes through, by file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w") as file:
            for n in range(NUM_ROWS):
                asked, answer = f"Name animal {n} {WORD}.", f"Number {n} swims {WORD}."
                row: dict[str, Any] = {"instruction": asked, "input": "", "output": answer}
                if kind == "chat":
                    turn = (
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": answer},
                    )
                    row = {"messages": [*turn, *turn]}
                file.write(json.dumps(row) + "\n")
        (folder / "found").mkdir()
        command = [sys.executable, "-m", "bench.row_walk", "--prepare", name]
        environment = os.environ | {"PACKHOUSE_CACHE": f"{name}/cache"}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        files: dict[str, set[str]] = defaultdict(set)
        for path in (folder / "found").iterdir():
            for line in path.read_text().splitlines():
                where, function = line.split(" ", 1)
                files[where].add(function)
    return dict(files)


def _prepare(folder: Path) -> None:
    """Prepare and read rows while this process and its children are traced."""
    started: Callable[..., Any] = subprocess.Popen
    begin = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from pathlib import Path; "
    begin += f"from bench.row_walk import watch; watch(Path({str(folder / 'found')!r})); "

    def start(command: list[str], *args: Any, **options: Any) -> Any:
        if command[:2] == [sys.executable, "-c"]:
            command = [*command[:2], begin + command[2], *command[3:]]
        return started(command, *args, **options)

    import packhouse

    watch(folder / "found")
    with mock.patch("subprocess.Popen", start):
        version = packhouse.prepare(
            folder / "rows.jsonl", tokenizer=TOKENIZER, seq_len=128, store=folder / "store"
        )
        version.train[0]
    sys.setprofile(None)


def main() -> None:
    """Print the functions file by file, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", choices=["alpaca", "chat"])
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prepare:
        return _prepare(given.prepare)
    for kind in [given.kind] if given.kind else ["alpaca", "chat"]:
        files = walk(kind)
        if given.kind:
            for name, functions in sorted(files.items()):
                print(f"{name:<36} {len(functions):>3}  {', '.join(sorted(functions))}")
        print(f"{kind}: {sum(map(len, files.values()))} functions in {len(files)} files")


if __name__ == "__main__":
    main()
