"""Tokens as runs of text with one colour each: trained, not trained, or special.

A terminal gets colours; a pipe gets trained text between `{+` and `+}`, as a diff by words has it;
a page gets spans. Whoever wrote a row chose its text: it leaves here escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.escaping import for_terminal
from packhouse.pages import html_text

__all__ = ["Run", "coloured", "cut_runs", "drawn", "html_runs", "plain", "runs_of"]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens behind one another that are alike."""

    text: str
    is_trained: bool
    is_special: bool = False
    """True for control tokens."""


def runs_of(
    ids: npt.NDArray[Any],
    trained: npt.NDArray[np.bool_],
    token_bytes: pa.BinaryArray | None,
    is_control: npt.NDArray[np.bool_],
) -> tuple[Run, ...]:
    """Cut tokens into runs; without `token_bytes` a token's text is its number."""
    if not len(ids):
        return ()
    known = np.clip(ids, 0, len(is_control) - 1)
    special = is_control[known] & (known == ids)
    edges = np.flatnonzero((np.diff(trained) != 0) | (np.diff(special) != 0)) + 1
    bounds = [0, *edges.tolist(), len(ids)]
    runs = []
    for start, end in pairwise(bounds):
        own = ids[start:end].tolist()
        known_bytes = token_bytes if token_bytes is not None else ()
        data = b"".join(
            known_bytes[token].as_py() if token < len(known_bytes) else b"[%d]" % token
            for token in own
        )
        text = data.decode("utf-8", "replace")
        runs.append(Run(text, bool(trained[start]), bool(special[start])))
    return tuple(runs)


def cut_runs(
    trained: npt.NDArray[np.bool_], borders: Sequence[int] = ()
) -> list[tuple[int, int, bool]]:
    """Cut tokens into [start, end) runs that are trained or not, never across a border.

    Example:
        >>> cut_runs(np.array([False, True, True, True]), borders=[2])
        [(0, 1, False), (1, 2, True), (2, 4, True)]
    """
    changes = np.flatnonzero(np.diff(trained)) + 1
    inner = [border for border in borders if 0 < border < len(trained)]
    edges = np.unique(np.concatenate([[0], changes, inner, [len(trained)]])).astype(int)
    return [(int(a), int(b), bool(trained[a])) for a, b in pairwise(edges)]


def drawn(
    runs: Sequence[tuple[int, int, bool]],
    texts: Sequence[str],
    titles: Mapping[int, str],
    *,
    in_colour: bool,
) -> Any:
    """Return the texts of runs as a `rich` text: trained green, or between {+ and +} for a pipe.

    Args:
        runs: from `cut_runs`.
        texts: of each run.
        titles: by the token at which a record begins.
        in_colour: False for a pipe, which colours do not reach.
    """
    from rich.text import Text

    text = Text()
    for (start, _, trained), own in zip(runs, texts, strict=True):
        if start in titles:
            text.append(f"\n{titles[start]}\n", "cyan")
        if not in_colour and trained:
            own = f"{{+{own}+}}"
        text.append(own, "green" if trained else "dim")
    return text.append("\n")


def plain(runs: Sequence[Run]) -> str:
    """Return runs as text without colours.

    Example:
        >>> plain([Run("2+2?", False), Run("4", True), Run("<|end|>", True, True)])
        '2+2?{+4<|end|>+}'
    """
    text = "".join(f"{{+{run.text}+}}" if run.is_trained else run.text for run in runs)
    return for_terminal(text.replace("+}{+", ""), keep_lines=True)


def coloured(runs: Sequence[Run]) -> Any:
    """Return runs as a `rich` text: trained green, special blue, bold where it is trained."""
    from rich.text import Text

    text = Text()
    for run in runs:
        style = "green" if run.is_trained else "dim"
        if run.is_special:
            style = "bold blue" if run.is_trained else "blue"
        text.append(run.text, style)
    return text


def html_runs(runs: Sequence[Run]) -> str:
    """Return runs as a block of a page whose style is `pages.PAGE_STYLE`."""
    parts = []
    for run in runs:
        names = "trained " * run.is_trained + "special" * run.is_special
        text = html_text(run.text)
        parts.append(f'<span class="{names.strip()}">{text}</span>' if names else text)
    return f"<pre>{''.join(parts)}</pre>"
