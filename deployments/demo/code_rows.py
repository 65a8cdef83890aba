"""Instruction rows about code: functions that were run, patterns that were matched."""

import inspect
import json
import re
from collections.abc import Callable

from dice import Dice, Row, row
from number_rows import NAMES
from snippets import SNIPPETS

__all__ = ["CODE_ROWS", "snippet"]


def snippet(dice: Dice) -> tuple[str, str, str, str]:
    """Return what a function does, its source, a call of it and the value of that call."""
    function, wish, arguments = dice.pick(SNIPPETS)
    chosen = dice.pick(arguments)
    call = f"{function.__name__}({', '.join(map(repr, chosen))})"
    source = inspect.getsource(function).rstrip()
    if "Counter(" in source:
        source = f"from collections import Counter\n\n\n{source}"
    return wish, source, call, repr(function(*chosen))


def write_function(dice: Dice) -> Row:
    """Write a function and show a call of it."""
    wish, source, call, value = snippet(dice)
    return row(
        f"Write a Python function that {wish}. Give an example.",
        f"```python\n{source}\n```\n\nExample: `{call}` returns `{value}`.",
    )


def predict_output(dice: Dice) -> Row:
    """Say what a call returns."""
    _, source, call, value = snippet(dice)
    return row("What does the last line print?", value, f"{source}\n\n\nprint(repr({call}))")


PATTERNS = (
    (r"\d{4}-\d{2}-\d{2}", "a date like 2024-05-31", ["2024-05-31", "31.5.2024", "1999-12-01"]),
    (r"[A-Z]{2}\d{3,5}", "two capital letters and three to five digits", ["AB1234", "A1234"]),
    (r"#[0-9a-f]{6}", "a colour like #ffcc00", ["#ffcc00", "#FFF", "#12ab9"]),
    (r"\w+@\w+\.(org|net)", "a simple mail address at .org or .net", ["eva@post.org", "eva@post"]),
    (r"([01]\d|2[0-3]):[0-5]\d", "a time of day from 00:00 to 23:59", ["23:59", "24:00", "07:30"]),
)


def pattern(dice: Dice) -> Row:
    """Write a regular expression and try it on a text."""
    expression, wish, texts = dice.pick(PATTERNS)
    text = dice.pick(texts)
    verdict = "matches" if re.fullmatch(expression, text) else "does not match"
    return row(
        f"Write a regular expression for {wish}. Does it match `{text}`?",
        f"`{expression}`, used with `re.fullmatch`. The text `{text}` {verdict}.",
    )


def query(dice: Dice) -> Row:
    """Write a SQL query for a table."""
    table, column, group = dice.pick(
        [("orders", "amount", "customer"), ("trips", "km", "driver"), ("shifts", "hours", "team")]
    )
    least = dice.number(2, 40) * 5
    wish = f"the sum of {column} for each {group}"
    having = []
    if dice.number(0, 1):
        wish += f" where it is more than {least}"
        having = [f"HAVING SUM({column}) > {least}"]
    lines = [f"SELECT {group}, SUM({column}) AS total", f"FROM {table}", f"GROUP BY {group}"]
    return row(
        f"The table `{table}` has the columns `{group}`, `{column}` and `day`. Write a SQL query"
        f" for {wish}.",
        "```sql\n" + "\n".join([*lines, *having, "ORDER BY total DESC;"]) + "\n```",
    )


def pretty_json(dice: Dice) -> Row:
    """Indent JSON and sort its keys."""
    value = {
        "name": dice.pick(NAMES),
        "tags": dice.some(["new", "urgent", "paid", "open", "late"], 2),
        "id": dice.number(100, 9999),
        "address": {"street": f"{dice.pick(NAMES)} Street", "number": dice.number(1, 80)},
    }
    return row(
        "Format this JSON with two spaces and sorted keys.",
        json.dumps(value, indent=2, sort_keys=True),
        json.dumps(value, separators=(",", ":")),
    )


SHELL = (
    ("count the lines of all .{0} files here", "cat *.{0} | wc -l"),
    ("list the {1} largest .{0} files", "ls -S *.{0} | head -n {1}"),
    ("find all .{0} files changed in the last {1} days", "find . -name '*.{0}' -mtime -{1}"),
    ("show line {1} of each .{0} file", "sed -s -n {1}p *.{0}"),
)


def shell(dice: Dice) -> Row:
    """Write a shell command."""
    wish, command = dice.pick(SHELL)
    values = dice.pick(["log", "csv", "txt", "py", "json"]), dice.number(3, 30)
    return row(f"Which shell command can {wish.format(*values)}?", f"`{command.format(*values)}`")


CODE_ROWS: tuple[Callable[[Dice], Row], ...] = (
    write_function, write_function, predict_output, pattern, query, pretty_json, shell,
)  # fmt: skip
