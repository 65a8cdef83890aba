"""Quality of texts: empty answers, refusals, repetition, HTML, personal data, secrets, language.

Each function takes Arrow texts and returns an answer for each, null for null, from the text alone:
regular expressions of RE2 and numpy, in time linear in the text. `FUNCTIONS` has those that SQL
knows by name; the audit counts rows by them.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from packhouse.quality.answers import echoes, is_empty, is_refusal
from packhouse.quality.counting import COUNTERS, combine_quality, count_quality, quality_lines
from packhouse.quality.dirt import has_html, has_mojibake
from packhouse.quality.language import language, language_key
from packhouse.quality.personal import has_card, has_email, has_phone, has_secret
from packhouse.quality.repetition import repetition
from packhouse.records.lists import one_chunk

__all__ = [
    "COUNTERS",
    "FUNCTIONS",
    "VERSION",
    "TextFunction",
    "add_functions",
    "check_installed",
    "combine_quality",
    "count_quality",
    "language_key",
    "quality_lines",
]

VERSION = 1
"""Part of the keys of sources whose `where` or `select` calls a function of `FUNCTIONS`. Raise it
when one gives another answer for a text."""


class TextFunction(NamedTuple):
    """A function over texts, as SQL knows it."""

    call: Callable[..., pa.Array]
    """Takes texts, an array or a column, for each argument, all of one length; null gives null."""
    returns: Literal["BOOLEAN", "DOUBLE", "VARCHAR"]


def _of_columns(function: Callable[..., pa.Array]) -> Callable[..., pa.Array]:
    """The function over columns as well, which come in chunks, as DuckDB gives them."""

    @wraps(function)
    def call(*texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        return function(*map(one_chunk, texts))

    return call


FUNCTIONS = {
    "has_email": TextFunction(_of_columns(has_email), "BOOLEAN"),
    "has_phone": TextFunction(_of_columns(has_phone), "BOOLEAN"),
    "has_card": TextFunction(_of_columns(has_card), "BOOLEAN"),
    "has_secret": TextFunction(_of_columns(has_secret), "BOOLEAN"),
    "has_html": TextFunction(_of_columns(has_html), "BOOLEAN"),
    "has_mojibake": TextFunction(_of_columns(has_mojibake), "BOOLEAN"),
    "is_empty": TextFunction(_of_columns(is_empty), "BOOLEAN"),
    "is_refusal": TextFunction(_of_columns(is_refusal), "BOOLEAN"),
    "echoes": TextFunction(_of_columns(echoes), "BOOLEAN"),
    "repetition": TextFunction(_of_columns(repetition), "DOUBLE"),
    "language": TextFunction(_of_columns(language), "VARCHAR"),
}
"""By the names that SQL knows: `where` and `select` of a source, and `packhouse sql`."""


def add_functions(connection: Any) -> None:
    """Add all of `FUNCTIONS` to a connection of DuckDB, before its configuration is locked."""
    for name, (function, kind) in FUNCTIONS.items():
        arguments = ["VARCHAR"] * len(inspect.signature(function).parameters)
        how = {"type": "arrow", "null_handling": "special"}
        connection.create_function(name, function, arguments, kind, **how)


def check_installed(name: str) -> None:
    """Call one of `FUNCTIONS` once.

    Raises:
        ConfigError: the package that it needs is not installed.
    """
    function = FUNCTIONS[name].call
    text = pa.array(["a text that is long enough to have a language"])
    function(*[text] * len(inspect.signature(function).parameters))
