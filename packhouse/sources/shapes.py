"""Which shapes a row may have, and how a file's own shape is told from all of its rows.

The first rows name the file's shape and every later row may object: a row of another known shape
stops the run with both shown, since guessing would fill one half of the dataset with nulls. A row
of no known shape is bad by itself and goes to quarantine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from packhouse.errors import SourceError
from packhouse.recipe import SourceConfig
from packhouse.sources.delimited import parse_delimited
from packhouse.sources.records import parse_text
from packhouse.sources.rows import Rows
from packhouse.sources.sniffing import BOM
from packhouse.sources.structure import line_spans, split_elements

__all__ = ["SHAPES", "Shape", "check_shapes", "find_row_format", "find_row_format_of_rows"]

SAMPLE_ROWS = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """Fields of a row, each with the names files give it; the first one present is taken."""

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]

    def names(self, keys: Iterable[str], renamed: dict[str, str]) -> dict[str, str]:
        """Our field -> the file's field, for the fields that `keys` has."""
        present = set(keys)
        found = {}
        for ours, aliases in (self.required | self.optional).items():
            choices = (renamed[ours],) if ours in renamed else aliases
            for name in choices:
                if name in present:
                    found[ours] = name
                    break
        return found

    def fits(self, keys: Iterable[str], renamed: dict[str, str]) -> bool:
        """Whether every required field is there."""
        return self.required.keys() <= self.names(keys, renamed).keys()


def _shape(required: str, optional: str = "") -> Shape:
    """Read `"text|sentence label"` as fields with alternative names."""

    def fields(text: str) -> dict[str, tuple[str, ...]]:
        return {item.split("|")[0]: tuple(item.split("|")) for item in text.split()}

    return Shape(fields(required), fields(optional))


# In the order of trial: a shape that asks for more comes before one that asks for less.
SHAPES: dict[str, Shape] = {
    "chat": _shape("messages|conversations|conversation", "tools|functions system|system_prompt"),
    "sharegpt": _shape(
        "conversations|messages|conversation", "tools|functions system|system_prompt"
    ),
    "preference": _shape("chosen", "prompt rejected system|system_prompt tools"),
    "oasst": _shape("text role replies"),
    "alpaca": _shape("instruction output", "input|context system|system_prompt history"),
    "dolly": _shape("instruction response", "context|input category system|system_prompt history"),
    "prompt_completion": _shape("prompt completion|response", "system|system_prompt history"),
    "question_answer": _shape("question answer", "context|input system|system_prompt history"),
    "classification": _shape("text|sentence|content label"),
    "text": _shape("text"),
}


def row_format_of(row: Any, renamed: dict[str, str]) -> str | None:
    """Format whose shape a row has; None if it has none.

    Example:
        >>> row_format_of({"question": "1 + 1?", "answer": "2", "id": 7}, {})
        'question_answer'
    """
    if isinstance(row, list):
        return "messages" if row and _speaker_key(row) is not None else None
    if not isinstance(row, dict):
        return None
    for name, shape in SHAPES.items():
        if shape.fits(row, renamed):
            if name in ("chat", "sharegpt"):
                found = _talk_format(row, shape, renamed)
                if found is None:
                    continue
                return found
            return name
    return None


def _talk_format(row: dict[str, Any], shape: Shape, renamed: dict[str, str]) -> str | None:
    field = next(iter(shape.required))
    value = row[shape.names(row, renamed)[field]]
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value, _ = parse_text(value)
    key = _speaker_key(value) if isinstance(value, list) else None
    return {"role": "chat", "from": "sharegpt", None: None}[key]


def _speaker_key(messages: list[Any]) -> str | None:
    for message in messages:
        if isinstance(message, dict):
            for key in ("role", "from"):
                if key in message:
                    return key
    return None


def find_row_format(
    head: bytes,
    file_format: str,
    header: tuple[str, ...] | None,
    config: SourceConfig,
    uri: str,
) -> str:
    """Format of a text file's rows from its first bytes; `auto` if none can be parsed there.

    Raises:
        SourceError: rows can be parsed, but have no known shape, or several.
    """
    if file_format in ("csv", "tsv"):
        rows: list[Any] = [dict.fromkeys(header, "")] if header else []
        if header and not _TALK_FIELDS.isdisjoint(header):  # whose format their texts tell
            delimiter = "," if file_format == "csv" else "\t"
            data = head.removeprefix(BOM)
            rows += parse_delimited(data, header, delimiter, len(data) + 1).rows[1:]
    else:
        rows = _sample(head, file_format)
    return find_row_format_of_rows(rows, config, uri)


def find_row_format_of_rows(rows: list[Any], config: SourceConfig, uri: str) -> str:
    """Format of the first row that has one; `auto` if there are no rows to tell by.

    Raises:
        SourceError: rows are there, but none has a known shape.
    """
    for row in rows:
        found = row_format_of(row, config.fields)
        if found is not None:
            return found
    objects = [row for row in rows if isinstance(row, dict | list)]
    if not objects:
        return "auto"
    known = "; ".join(f"{name}: {', '.join(s.required)}" for name, s in SHAPES.items())
    raise SourceError(
        f"source file '{uri}': rows have {_keys_of(objects[0])}, which is no known "
        f"shape ({known}); set format, and fields where names differ",
        uri=uri,
    )


def _sample(head: bytes, file_format: str) -> list[Any]:
    text = head.removeprefix(BOM).lstrip()
    if file_format == "json":
        text = text[1:]
        elements = split_elements(text)
        end = len(text) if elements.end is None else elements.end
        bounds = [-1, *elements.commas[: SAMPLE_ROWS + 1].tolist(), end]
        pieces = [text[a + 1 : b] for a, b in pairwise(bounds)]
    else:
        pieces = [text[a:b] for a, b in line_spans(text)[:SAMPLE_ROWS].tolist()]
    rows = []
    for piece in pieces[:SAMPLE_ROWS]:
        try:
            rows.append(orjson.loads(piece))
        except orjson.JSONDecodeError:
            continue
    return rows


def check_shapes(
    rows: Rows, numbers: list[int], row_format: str, renamed: dict[str, str], uri: str
) -> None:
    """Refuse rows of another known shape than the file's.

    Args:
        rows: parsed rows.
        numbers: number in the file of each.
        row_format: the file's.
        renamed: `fields` of the source.
        uri: for messages.

    Raises:
        SourceError: shows both shapes with a row of each.
    """
    if _are_alike(rows, row_format, renamed):
        return
    seen: dict[Any, str | None] = {}
    own: tuple[int, Any] | None = None
    for number, row in zip(numbers, rows, strict=True):
        key = _shape_key(row)
        if key not in seen:
            seen[key] = found = row_format_of(row, renamed)
            if found == row_format:
                own = own or (number, row)
            elif found is not None:
                _refuse_mixture(uri, row_format, own, found, number, row)


def _are_alike(rows: Rows, row_format: str, renamed: dict[str, str]) -> bool:
    """Whether all rows are objects whose keys alone show the file's format."""
    if not rows.are_objects:
        return False
    for keys in rows.layouts:
        if not _TALK_FIELDS.isdisjoint(keys):
            return False
        if row_format_of(dict.fromkeys(keys), renamed) not in (row_format, None):
            return False
    return True


_TALK_FIELDS = {"messages", "conversations", "conversation"}


def _shape_key(row: Any) -> Any:
    """Equal for rows that must have the same format: their keys, and how messages name speakers."""
    if type(row) is dict:
        talk = row.get("messages") or row.get("conversations") or row.get("conversation")
        if talk:
            return (*row, _speaker_key(talk) if type(talk) is list else type(talk))
        return tuple(row)
    return (type(row), _speaker_key(row)) if type(row) is list else type(row)


def _refuse_mixture(
    uri: str, row_format: str, own: tuple[int, Any] | None, found: str, number: int, row: Any
) -> None:
    first = f"row {own[0]} has {_keys_of(own[1])} ({row_format})" if own else f"it is {row_format}"
    raise SourceError(
        f"source file '{uri}' mixes shapes: {first}, row {number} has {_keys_of(row)} ({found}); "
        "split it by shape, or set format to quarantine the other rows",
        uri=uri,
        row=number,
    )


def _keys_of(row: Any) -> str:
    if isinstance(row, dict):
        names = ", ".join(repr(key[:40]) for key in list(row)[:12])
        return f"the fields {names}{', ...' if len(row) > 12 else ''}" if row else "no fields"
    if row and isinstance(row[0], dict):
        return f"a list of objects with {_keys_of(row[0])}"
    return "a list"
