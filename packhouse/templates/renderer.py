"""From a validated table to a formatted one: what every template shares.

A template is an `Engine`: it renders what it can and refuses the rest, row by row, with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` whatever the table.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from packhouse.tables import FORMATTED, QUARANTINED
from packhouse.templates.conversations import Conversations, canonical_json
from packhouse.templates.segments import Filled

__all__ = ["Engine", "Refusal", "RefusedError", "Rendered", "Renderer", "Texts"]

PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
RAW_BYTES = 64 * 2**10  # of a quarantined row's raw form that is kept


class Refusal(NamedTuple):
    """Why a row cannot be rendered: a code for machines, a sentence for people."""

    reason: str
    detail: str


class RefusedError(Exception):
    """Raised and caught inside this room when one row is refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


@dataclass(slots=True)
class Texts:
    """What an engine made of a part: rendered rows (ascending), refused rows, counts."""

    filled: Filled
    refused: dict[int, Refusal]
    notes: Counter[str] = field(default_factory=Counter)


class Engine(Protocol):
    """One template, ready to render."""

    def render(self, conversations: Conversations) -> Texts:
        """Render every row or refuse it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The outcome of `Renderer.render`."""

    formatted: pa.Table
    """Schema FORMATTED, in the order of the input."""
    quarantined: pa.Table
    """Schema QUARANTINED, in the order of the input; `raw` is canonical JSON of the row."""
    notes: dict[str, int]
    """Counts worth knowing that are no errors, such as `reasoning_not_rendered`."""


class Renderer:
    """Renders conversations with one template; made by `make_renderer`.

    Output depends on the row alone: neither the table's size nor the other rows change it.
    """

    def __init__(self, engine: Engine, *, identity: str, system: str | None = None) -> None:
        self.identity = identity
        self._engine = engine
        self._system = system

    def render(self, table: pa.Table) -> Rendered:
        """Render a VALIDATED table.

        Returns:
            Formatted and quarantined rows; together as many as came in.

        Raises:
            TemplateError: the template itself cannot be used or proven, whatever the row.
        """
        formatted, quarantined, notes = [], [], Counter[str]()
        for part in _parts(table):
            texts = self._engine.render(Conversations.from_table(part, self._system))
            formatted.append(_formatted(part, texts.filled))
            quarantined.append(_quarantined(part, texts.refused))
            notes.update(texts.notes)
        rendered = Rendered(
            formatted=pa.concat_tables([FORMATTED.empty_table(), *formatted]),
            quarantined=pa.concat_tables([QUARANTINED.empty_table(), *quarantined]),
            notes={name: notes[name] for name in sorted(notes) if notes[name]},
        )
        assert table.num_rows == rendered.formatted.num_rows + rendered.quarantined.num_rows
        return rendered


def digest(*parts: str) -> str:
    """sha256 over texts, each preceded by its length, so that no two lists collide."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    by_size = -(-table.nbytes // PART_BYTES)
    by_rows = -(-table.num_rows // PART_ROWS)
    step = -(-table.num_rows // max(by_size, by_rows, 1))
    for start in range(0, table.num_rows, step):
        yield table.slice(start, step)


def _formatted(part: pa.Table, filled: Filled) -> pa.Table:
    kept = part if len(filled.rows) == part.num_rows else part.take(pa.array(filled.rows))
    own = {
        "text": filled.text,
        "content_spans": filled.content_spans,
        "trained_spans": filled.trained_spans,
    }
    columns = [own.get(name, None) for name in FORMATTED.names]
    return pa.table(
        [kept.column(n) if c is None else c for n, c in zip(FORMATTED.names, columns, strict=True)],
        schema=FORMATTED,
    )


def _quarantined(part: pa.Table, refused: dict[int, Refusal]) -> pa.Table:
    rows = sorted(refused)
    if not rows:
        return QUARANTINED.empty_table()
    bad = part.select(["source", "row", "messages", "tools", "label"]).take(pa.array(rows))
    raws = [_raw(row) for row in bad.select(["messages", "tools", "label"]).to_pylist()]
    return pa.table(
        {
            "source": bad.column("source").cast(pa.string()),
            "row": bad.column("row"),
            "byte_offset": pa.nulls(len(rows), pa.int64()),
            "step": ["format"] * len(rows),
            "reason": [refused[row].reason for row in rows],
            "detail": [refused[row].detail for row in rows],
            "raw": [raw[:RAW_BYTES] for raw in raws],
            "raw_size": [len(raw) for raw in raws],
            "raw_sha256": [hashlib.sha256(raw).hexdigest() for raw in raws],
        },
        schema=QUARANTINED,
    )


def _raw(row: dict[str, object]) -> bytes:
    """Canonical JSON of a row's messages (with tools and label where it has them)."""
    messages = row["messages"]
    assert isinstance(messages, list)
    kept = [{k: v for k, v in message.items() if v is not None} for message in messages]
    extra = {name: row[name] for name in ("tools", "label") if row[name] is not None}
    return canonical_json({"messages": kept, **extra} if extra else {"messages": kept})
