"""What to do with files that no setting of a source reads: each answer is a command that works."""

import ast
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packhouse.proposal.fields import shape_of

__all__ = ["remedy_for_header", "remedy_for_rows", "remedy_for_text"]

_MESSAGES = '{"role": ["user", "assistant"][n % 2], "content": text}'


def remedy_for_text(head: str, path: str) -> str | None:
    """Return what to do with text of which no row can be read; None: nothing is known.

    Args:
        head: the first text of the file.
        path: of the file.
    """
    first, _, rest = head.lstrip("\ufeff \n\t").partition("\n")
    if first.rstrip().endswith("},") and rest.lstrip().startswith("{"):
        out = _out(path, ".json")
        return (
            "its objects are divided by commas, with no brackets around them: "
            f"(echo '['; sed '$ s/,[[:space:]]*$//' {shlex.quote(path)}; echo ']') > {out}"
        )
    if first.startswith(("{'", "[{'")):
        try:
            value = ast.literal_eval(first.rstrip().rstrip(","))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if isinstance(value, dict):
            code = (
                "import ast, json, sys\n"
                "for line in sys.stdin:\n"
                "    if line.strip(): print(json.dumps(ast.literal_eval(line)))"
            )
            return f"its rows are Python, not JSON: {_command(code, path)}"
    return None


def remedy_for_header(names: Sequence[str], path: str) -> str | None:
    """Return what to do with columns that are named by the first row; None: they have names."""
    texts = [name for name in names if len(name.split()) > 4 or name.rstrip().endswith("?")]
    if not texts:
        return None
    line = "," if not path.endswith(".tsv") else "\\t"
    wanted = line.join(["question", "answer", *(f"column{n}" for n in range(3, len(names) + 1))])
    return (
        "its first line is a row, where the names of the columns should be: "
        f"sed -i '1i {wanted}' {shlex.quote(path)}"
    )


def remedy_for_rows(rows: Sequence[Any], file_format: str, path: str) -> str | None:
    """Return what to do with rows that no format reads; None: nothing is known."""
    if file_format not in ("json", "jsonl", "objects") or not isinstance(rows[0], dict):
        return None
    row = rows[0]
    if len(rows) == 1 and row and file_format != "json":
        values = list(row.values())
        if all(isinstance(value, dict) for value in values):
            code = (
                "import json, sys\nfor row in json.load(sys.stdin).values(): print(json.dumps(row))"
            )
            return f"its rows are the values of one object: {_command(code, path)}"
        if all(isinstance(v, list) and len(v) == len(values[0]) for v in values):
            code = (
                "import json, sys\ncolumns = json.load(sys.stdin)\n"
                "for row in zip(*columns.values()): print(json.dumps(dict(zip(columns, row))))"
            )
            return f"it holds a list for each column, not rows: {_command(code, path)}"
    read = "map(json.loads, filter(str.strip, sys.stdin))"
    if file_format == "json":
        read = "json.load(sys.stdin)"
    for name, value in row.items() if file_format != "objects" else ():
        if not isinstance(value, list) or not value:
            continue
        if len(value) > 1 and all(isinstance(item, str) for item in value):
            code = _writing(read, f"text for text in row[{name!r}]")
            return f"'{name}' holds what is said in turn, without speakers: {_command(code, path)}"
        shape = shape_of(value) if all(isinstance(item, dict) for item in value) else None
        if shape is not None and len({"prompt", "question"} & shape.fields.keys()) == 1:
            question, answer = list(shape.fields.values())[:2]
            pair = f"(pair[{question!r}], pair[{answer!r}])"
            code = _writing(read, f"text for pair in row[{name!r}] for text in {pair}")
            return f"'{name}' holds pairs of question and answer: {_command(code, path)}"
    return None


def _writing(read: str, texts: str) -> str:
    return (
        "import json, sys\n"
        f"for row in {read}:\n"
        f"    said = [{_MESSAGES} for n, text in enumerate({texts})]\n"
        '    print(json.dumps({"messages": said}))'
    )


def _command(code: str, path: str) -> str:
    out = _out(path, ".jsonl")
    return f"python3 -c {shlex.quote(code)} < {shlex.quote(path)} > {out}"


def _out(path: str, ending: str) -> str:
    """Name of the file to write: in this folder, beside no other of the name."""
    return shlex.quote(f"{Path(path).name.split('.')[0]}-rows{ending}")
