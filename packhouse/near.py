"""Names that a person may have meant: of files beside one that is not there."""

import difflib
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

_MOST_FILES = 5000
_MOST_NAMED = 3


def near_name(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return "; did you mean 'x'?", or nothing if no known name is near.

    Args:
        name: what was given.
        known: what could have been meant.
        likeness: least ratio of `difflib.SequenceMatcher`, 0 to 1.

    Example:
        >>> near_name("aplaca", ["alpaca", "chat"]), near_name("x", ["chat"])
        ("; did you mean 'alpaca'?", '')
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"; did you mean '{near[0]}'?" if near else ""


def near_files(path: str | Path, *endings: str) -> str:
    """Say which file or folder was meant by one that is not there, or what is in its folder.

    Args:
        path: of this machine; any other text gives nothing.
        endings: of the names that count, `.yaml`; by default all.
    """
    path = Path(path)
    names: list[str] = []
    with suppress(OSError, ValueError):
        if not path.parent.is_dir():
            return f"; there is no folder '{path.parent}'"
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
    return f"; there: {', '.join(names[:_MOST_NAMED])}{more}"
