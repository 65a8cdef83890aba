"""The texts of a part's conversations as flat columns, made when they are asked for.

Contents, thoughts and ids are columns of all messages; names and arguments of tool calls columns of
all calls; tool definitions are parsed once for each text that differs. A leaf of many rows is then
a column and one place in it a row. JSON is parsed and written in bulk: some 2 us a call.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.templates.leaves import JsonForm
from packhouse.templates.questions import Check, answers

__all__ = ["Column", "json_texts", "parse_texts"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_HUGE = re.compile(r"[0-9]{19}", re.ASCII)  # orjson makes floats of integers of over 64 bits
_BETWEEN = "\x1f between \x1f"


class Column:
    """Texts, and what was asked of them."""

    def __init__(self, make: Callable[[], pa.Array]) -> None:
        self._make = make
        self._texts: pa.Array | None = None
        self._answers: dict[Check, Bools] = {}
        self._noisy: Bools | None = None

    @property
    def texts(self) -> pa.Array:
        """The texts, type string; empty in place of null."""
        if self._texts is None:
            self._texts = self._make()
        return self._texts

    def agrees(self, check: Check) -> Bools:
        """Which texts give the answer that the check holds."""
        if check not in self._answers:
            self._answers[check] = answers(check, self.texts) == check.answer
        return self._answers[check]

    def noisy(self, control: re.Pattern[bytes]) -> Bools:
        """Which texts hold a control token."""
        if self._noisy is None:
            self._noisy = _matching(self.texts, control)
        return self._noisy


def _matching(texts: pa.Array, pattern: re.Pattern[bytes]) -> Bools:
    found = np.zeros(len(texts), np.bool_)
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return found
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    buffer = memoryview(data)
    at, end = int(offsets[0]), int(offsets[-1])
    while match := pattern.search(buffer, at, end):
        row = int(np.searchsorted(offsets, match.start(), side="right")) - 1
        if match.end() <= offsets[row + 1]:
            found[row] = True
            at = int(offsets[row + 1])
        else:  # a token that two texts make together hides none in the first: look on behind
            at = match.start() + 1
    return found


def parse_texts(texts: list[str]) -> list[Any]:
    """What `json.loads` makes of each text; orjson where it makes the same.

    Example:
        >>> parse_texts(['{"a": 1}', "[12345678901234567890]"])
        [{'a': 1}, [12345678901234567890]]
    """
    whole = "[" + ",".join(texts) + "]"
    if _HUGE.search(whole) is None:
        try:
            parsed = orjson.loads(whole)
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            pass
        else:
            if len(parsed) == len(texts):
                return list(parsed)
    return [json.loads(text) for text in texts]


def json_texts(values: Iterable[Any], form: JsonForm, cut: int = 0) -> pa.Array:
    """Values as JSON of a form, without the last `cut` characters.

    Example:
        >>> json_texts([{"a": 1}, {}], JsonForm()).to_pylist()
        ['{"a": 1}', '{}']
    """
    encode = form.encoder().encode
    items = list(values)
    texts: list[str] = []
    if items and form.indent is None:
        between = [_BETWEEN] * (2 * len(items) - 1)
        between[::2] = items
        parting = encode([_BETWEEN, 0])[1:-2]  # with the form's own separator
        texts = encode(between)[1:-1].split(f"{parting[len(encode(_BETWEEN)) :]}{parting}")
    if len(texts) != len(items):
        texts = [encode(item) for item in items]
    if cut:
        texts = [text[:-cut] for text in texts]
    return pa.array(texts, pa.string())


def filled(column: pa.Array) -> pa.Array:
    """A column with empty texts for null."""
    return pc.fill_null(column, "") if column.null_count else column
