"""Helpers to word messages: counts with units, suggestions, first lines of other errors."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

# A folder of rows may have millions of files, and this is only a hint.
_MOST_FILES = 5000
_MOST_NAMED = 3


def near_name(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return "; did you mean 'x'?", or an empty string if no known name is similar.

    Args:
        name: The given name.
        known: Possible names.
        likeness: Minimum ratio of `difflib.SequenceMatcher`, 0 to 1.

    Example:
        >>> near_name("aplaca", ["alpaca", "chat"]), near_name("x", ["chat"])
        ("; did you mean 'alpaca'?", '')
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"; did you mean '{near[0]}'?" if near else ""


def near_files(path: str | Path, *endings: str) -> str:
    """Suggest a file for a path that does not exist, or list the files in its folder.

    Args:
        path: Local path; for other text, returns an empty string.
        endings: File extensions to consider, such as `.yaml`; default: all.
    """
    path = Path(path)
    names: list[str] = []
    with suppress(OSError, ValueError):
        if not path.parent.is_dir():
            return f"; the folder '{path.parent}' does not exist"
        with os.scandir(path.parent) as entries:
            names = sorted(e.name for e in islice(entries, _MOST_FILES) if e.name[:1] != ".")
    if endings:
        names = [name for name in names if name.endswith(endings)]
    is_pattern = any(sign in path.name for sign in "*?[")
    if not is_pattern and (near := difflib.get_close_matches(path.name, names, n=1)):
        return f"; did you mean '{path.parent / near[0]}'?"
    if not endings or not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"; found {', '.join(names[:_MOST_NAMED])}{more}"


def in_mb(num_bytes: int) -> str:
    """Format a number of bytes in megabytes.

    Example:
        >>> in_mb(404_100_000)
        '404.1 MB'
    """
    return f"{num_bytes / 1e6:,.1f} MB"


def counted(number: int, what: str, plural: str | None = None) -> str:
    """Return a number with its unit in singular or plural.

    Args:
        number: The number.
        what: Singular of the unit.
        plural: Plural; default: `what` with s, or ies for a final y.

    Example:
        >>> counted(1, "row"), counted(2_000, "bad row"), counted(0, "copy")
        ('1 row', '2,000 bad rows', '0 copies')
        >>> counted(1, "row is bad", "rows are bad"), counted(3, "row is bad", "rows are bad")
        ('1 row is bad', '3 rows are bad')
    """
    if plural is not None:
        what = what if number == 1 else plural
    elif number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what}"


def text_table(rows: Iterable[Iterable[object]]) -> str:
    """Format rows as text columns: the first aligned left, the others right.

    Example:
        >>> print(text_table([("step", "rows", "tokens"), ("validate", 1200, None)]))
        step       rows  tokens
        validate  1,200       -
    """
    cells = [
        ["-" if c is None else f"{c:,}" if isinstance(c, int) else str(c) for c in row]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for first, *others in cells
    )


def by_name(counts: Mapping[str, int]) -> str:
    """Return names with their counts, sorted by name.

    Example:
        >>> by_name({"json": 1_000, "encoding": 2})
        'encoding 2, json 1,000'
    """
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))


def rows_and_records(rows: int, records: int, row: str = "row") -> str:
    """Return a number of rows, with the number of records if it is larger.

    Example:
        >>> rows_and_records(2, 5), rows_and_records(1, 1, "bad row")
        ('2 rows (5 records)', '1 bad row')
    """
    more = f" ({counted(records, 'record')})" if records > rows else ""
    return f"{counted(rows, row)}{more}"


def first_line(error: BaseException, most: int = 300) -> str:
    r"""Return the first line of a library's error, cut at `most` characters, or its class.

    Example:
        >>> first_line(ValueError("no such table\nLINE 1: ...")), first_line(TimeoutError())
        ('no such table', 'TimeoutError')
    """
    lines = str(error).splitlines()
    return lines[0][:most] if lines else type(error).__name__


def cut_pair(old: str, new: str, most: int) -> tuple[str, str]:
    """Shorten two texts to `most` characters each, around the place where they differ.

    Example:
        >>> cut_pair("length(output) > 20 and score > 1", "length(output) > 20 and score > 2", 24)
        ('...score > 1', '...score > 2')
    """
    differing = (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    start = next(differing, min(len(old), len(new))) - most // 3

    def cut(text: str) -> str:
        if len(text) > most and start > 0:
            text = "..." + text[start:]
        return text if len(text) <= most else text[: most - 3] + "..."

    return cut(old), cut(new)


def last_error(log: str) -> str:
    r"""Return the last line of a log that names an exception, which says more than the last line.

    Example:
        >>> last_error("Traceback:\nValueError: no such dialect\n\nExiting.")
        'ValueError: no such dialect'
        >>> last_error("ready\nstopped\n"), last_error("")
        ('stopped', 'no output')
    """
    lines = ["no output", *filter(str.strip, log.splitlines())]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1].strip()
