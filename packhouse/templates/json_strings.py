r"""Strings within the JSON of tool calls, for templates that take calls apart.

    {"name": "find", "arguments": {"q": "a \"b\""}}
              ^^^^                  ^    ^^^^^^^
Such a template is shown to write each of these texts; what stands around them is JSON's.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.templates.json_texts import opens_or_closes
from packhouse.templates.leaves import Leaf
from packhouse.templates.marks import Marked, Occurrence

__all__ = ["CallStrings", "Strings", "strings_of", "written_strings"]

Ints = npt.NDArray[np.int64]

_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ORDERS = (["name", "arguments"], ["arguments", "name"])


class Strings(NamedTuple):
    """Spans of strings within each text of a column; no span is empty."""

    starts: Ints
    """int64 [number of texts + 1]: where those of each text begin in the columns below."""
    begins: Ints
    ends: Ints


def function_strings(data: bytes, keys: list[str]) -> list[tuple[int, int]] | None:
    """Spans of the name and of all strings in the arguments of a function's JSON.

    Args:
        data: an object of `keys`; a name that is a string, arguments that are an object.
        keys: in order; None is returned for others than `name` and `arguments`.

    Example:
        >>> function_strings(b'{"name": "f", "arguments": {"q": ""}}', ["name", "arguments"])
        [(10, 11), (29, 30)]
    """
    if keys not in _ORDERS:
        return None
    spans = [match.span(1) for match in _STRING.finditer(data)]
    if keys[0] == "name":
        own = [spans[1], *spans[3:]]
    else:
        own = [*spans[1:-2], spans[-1]]
    return [(start, end) for start, end in own if end > start]


def strings_in(data: bytes) -> list[tuple[int, int]]:
    """Spans of all strings of a JSON text that are not empty.

    Example:
        >>> strings_in(b'{"q": ["", "a"]}')
        [(2, 3), (12, 13)]
    """
    spans = (match.span(1) for match in _STRING.finditer(data))
    return [(start, end) for start, end in spans if end > start]


def strings_of(texts: pa.Array) -> Strings:
    """Spans of all strings of a column of JSON texts, as `strings_in` finds them.

    Example:
        >>> starts, begins, ends = strings_of(pa.array(['{"q": ["", "a"]}', "[]", '"b"']))
        >>> starts.tolist(), begins.tolist(), ends.tolist()
        ([0, 2, 2, 3], [2, 12, 1], [3, 13, 2])
    """
    owners, _, begins, ends = _all_strings(texts)
    return _not_empty(owners, begins, ends, len(texts))


def written_strings(texts: pa.Array, functions: list[dict[str, Any]]) -> Strings:
    """The same for the JSON of functions, as `function_strings` finds them."""
    keys = [list(function) for function in functions]
    orders = np.array([_ORDERS.index(own) if own in _ORDERS else -1 for own in keys], np.int64)
    owners, counts, begins, ends = _all_strings(texts)
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    order, behind = orders[owners], counts[owners] - 1 - rank
    by_name = (order == 0) & (rank != 0) & (rank != 2)
    by_arguments = (order == 1) & (rank != 0) & (behind != 1)
    own = by_name | by_arguments
    return _not_empty(owners[own], begins[own], ends[own], len(texts))


def _all_strings(texts: pa.Array) -> tuple[Ints, Ints, Ints, Ints]:
    """Text of each string, strings of each text, and begin and end of each in its text."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    bounds = offsets.astype(np.int64) - offsets[0]
    quotes = np.flatnonzero(opens_or_closes(data))
    begins, ends = quotes[::2] + 1, quotes[1::2]
    counts = np.diff(np.searchsorted(begins, bounds))
    owners = np.repeat(np.arange(len(texts)), counts)
    return owners, counts, begins - bounds[owners], ends - bounds[owners]


def _not_empty(owners: Ints, begins: Ints, ends: Ints, num_texts: int) -> Strings:
    kept = ends > begins
    counts = np.bincount(owners[kept], minlength=num_texts)
    return Strings(np.append(0, np.cumsum(counts)), begins[kept], ends[kept])


class CallStrings:
    """Renders one conversation's occurrences anew, with the strings of calls in place of calls.

    Args:
        leaves: of the conversation, calls whole.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        self._whole = leaves
        self.leaves: list[Leaf] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def apart(self, marked: Marked) -> Marked | None:
        """The same rendering; None where a call is written in a way that is not understood."""
        found: list[Occurrence] = []
        for occurrence in marked.occurrences:
            leaf = self._whole[occurrence.leaf]
            spans = self._strings(leaf, marked.text[occurrence.start : occurrence.end])
            if spans is None:
                return None
            for at, (begin, end) in enumerate(spans):
                number = self._number(occurrence.leaf, at)
                found.append(Occurrence(number, occurrence.start + begin, occurrence.start + end))
        return replace(marked, occurrences=found)

    def add_unwritten(self, marked: Marked) -> bool:
        """Number the leaves that are not in a whole rendering; False where calls are among them."""
        written = {occurrence.leaf for occurrence in marked.occurrences}
        unwritten: list[int] = []
        is_covered = False
        for number, leaf in reversed(list(enumerate(self._whole))):
            if leaf.kind == "function":
                is_covered = number in written
            elif number in written or leaf.kind == "tools" or (leaf.kind == "call" and is_covered):
                continue
            elif leaf.kind == "call":
                return False
            else:
                unwritten.append(number)
        for number in reversed(unwritten):
            self._number(number, 0)
        return True

    def _strings(self, leaf: Leaf, data: bytes) -> list[tuple[int, int]] | None:
        if not leaf.is_json:
            return [(0, len(data))]
        if leaf.kind == "tools":
            return []
        if leaf.kind == "function":
            name, given = leaf.value.get("name"), leaf.value.get("arguments")
            is_usual = isinstance(name, str) and isinstance(given, dict)
            return function_strings(data, list(leaf.value)) if is_usual else None
        return strings_in(data)

    def _number(self, leaf: int, at: int) -> int:
        own = self._numbers.setdefault((leaf, at), len(self.leaves))
        if own == len(self.leaves):
            whole = self._whole[leaf]
            kind = "call" if whole.is_json else whole.kind
            self.leaves.append(whole._replace(kind=kind, is_json=False))
        return own
