"""Tokens as runs of text with one colour each: trained, not trained, or special.

A terminal gets colours; a pipe gets trained text between `{+` and `+}`, as a diff by words has it;
a page gets spans. Whoever wrote a row chose its text: it leaves here escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.escaping import for_terminal

__all__ = ["PAGE_STYLE", "Run", "coloured", "html_runs", "html_text", "plain", "runs_of"]


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


# Half transparent, so that they go with a light and a dark page.
PAGE_STYLE = """<style>
.packhouse {font: 13px/1.5 system-ui, sans-serif; color: inherit}
.packhouse table {border-collapse: collapse; margin: 6px 0; background: none}
.packhouse th, .packhouse td {text-align: left; padding: 2px 12px 2px 0; background: none;
  border: 0; vertical-align: top; color: inherit}
.packhouse td.number {text-align: right; font-variant-numeric: tabular-nums}
.packhouse pre {white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 10px;
  padding: 6px 8px; border-left: 3px solid rgb(128 128 128 / .45); background: none;
  color: inherit; font: 12px/1.5 ui-monospace, monospace}
.packhouse .trained {background: rgb(46 160 67 / .32); border-radius: 2px}
.packhouse .special {outline: 1px solid rgb(64 128 240 / .75); outline-offset: -1px;
  border-radius: 2px}
.packhouse .quiet {opacity: .7}
.packhouse svg {display: block; margin: 6px 0}
</style>"""


def html_text(text: str) -> str:
    """Return text that a page shows as it is.

    Example:
        >>> html_text("<script>a & b")
        '&lt;script&gt;a &amp; b'
    """
    return escape(for_terminal(text, keep_lines=True))


def html_runs(runs: Sequence[Run]) -> str:
    """Return runs as a block of a page whose style is `PAGE_STYLE`."""
    parts = []
    for run in runs:
        names = "trained " * run.is_trained + "special" * run.is_special
        text = html_text(run.text)
        parts.append(f'<span class="{names.strip()}">{text}</span>' if names else text)
    return f"<pre>{''.join(parts)}</pre>"
