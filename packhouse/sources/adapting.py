"""Adapters of row formats: parsed rows in, conversations as Arrow columns out.

Formats of plain fields (Alpaca and the like) go column by column: one comprehension per column,
Arrow arrays of stated types, no Python function per row. Only where a column turns out to hold
something else than text are rows looked at one by one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.messages import MessageColumns, assemble
from packhouse.recipe import SourceConfig
from packhouse.sources.conversations import BadRowError, talk_adapter
from packhouse.sources.records import parse_text
from packhouse.sources.rows import Rows
from packhouse.sources.shapes import SHAPES
from packhouse.sources.structure import Ints
from packhouse.sources.trees import add_tree

__all__ = ["Adapted", "adapt"]


@dataclass(slots=True)
class Adapted:
    """Conversations of a shard's good rows."""

    messages: pa.Array
    """Array of `list<MESSAGE>`."""
    tools: pa.Array
    """Canonical JSON text or null, per conversation."""
    labels: pa.Array
    """Class index or null, per conversation."""
    origin: Ints
    """Index into the given rows of each conversation, rising."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(index into the given rows, reason, detail) of rows that gave none."""
    extra: Counter[str] = field(default_factory=Counter)
    """Rows by name of a field that messages of theirs have and nobody reads."""


def adapt(rows: Rows, row_format: str, config: SourceConfig) -> Adapted:
    """Turn rows of one format into conversations.

    Args:
        rows: parsed rows; values of any type.
        row_format: one of `recipe.RowFormat` but `auto`.
        config: the source, for `fields`, `label_names` and `oasst_paths`.

    Returns:
        Conversations and failures; every row gives at least one or fails.
    """
    if row_format in _PAIRS:
        return _adapt_pairs(rows, row_format, config)
    if row_format == "classification":
        return _adapt_labelled(rows, config)
    if row_format == "text":
        return _adapt_texts(rows, config)
    if row_format == "oasst":
        rows, names = _one_naming(rows, "oasst", config)
        return _adapt_rows(rows, lambda row, out: add_tree(row, names, config.oasst_paths, out))
    return _adapt_rows(rows, talk_adapter(row_format, config.fields))


# Question, context and answer of the formats that are one question with one answer.
_PAIRS = {
    "alpaca": ("instruction", "input", "output"),
    "dolly": ("instruction", "context", "response"),
    "prompt_completion": ("prompt", None, "completion"),
    "question_answer": ("question", "context", "answer"),
}


@dataclass(slots=True)
class Output:
    """What row-by-row adapters fill."""

    columns: MessageColumns = field(default_factory=MessageColumns)
    tools: list[str | None] = field(default_factory=list)
    extra: Counter[str] = field(default_factory=Counter)


def _adapt_rows(rows: Rows, add: Callable[[Any, Output], int]) -> Adapted:
    """Adapt row by row; `add` appends a row's conversations and returns how many."""
    output = Output()
    origin: list[int] = []
    failures = []
    for index, row in enumerate(rows):
        try:
            origin.extend([index] * add(row, output))
        except BadRowError as bad:
            failures.append((index, bad.reason, bad.detail))
    return Adapted(
        messages=output.columns.to_arrow(),
        tools=pa.array(output.tools, pa.string()),
        labels=pa.nulls(len(origin), pa.int64()),
        origin=np.array(origin, np.int64),
        failures=failures,
        extra=output.extra,
    )


def _adapt_pairs(rows: Rows, row_format: str, config: SourceConfig) -> Adapted:
    question, context, answer = _PAIRS[row_format]
    texts = _Texts(rows, row_format, config, (question, answer), (context, "system"))
    good = texts.rows
    names = texts.names
    if "history" in names or "system" in names:
        return _adapt_long_pairs(texts, question, context, answer)
    q, a = names.get(question, question), names.get(answer, answer)
    content = chain.from_iterable(map(itemgetter(q, a), good))
    columns = {"role": _repeated(("user", "assistant"), len(good))}
    columns["content"] = pa.array(list(content), pa.string())
    if context in names:
        asked: list[str | None] = [None] * (2 * len(good))
        asked[::2] = [row.get(names[context]) or None for row in good]
        columns["context"] = pa.array(asked, pa.string())
    return texts.adapted(assemble(columns, np.full(len(good), 2, np.int64)))


def _adapt_long_pairs(texts: "_Texts", question: str, context: str | None, answer: str) -> Adapted:
    """Pairs with a system prompt or earlier turns before them."""
    names = texts.names

    def add(row: dict[str, Any], out: Output) -> int:
        turns = [("system", row.get(names.get("system", "")) or "", None)]
        for asked, answered in _history(row.get(names.get("history", ""))):
            turns += [("user", asked, None), ("assistant", answered, None)]
        turns.append(("user", row[names[question]], row.get(names.get(context or "", "")) or None))
        turns.append(("assistant", row[names[answer]], None))
        turns = [turn for turn in turns if turn[0] != "system" or turn[1]]
        out.columns.role += [turn[0] for turn in turns]
        out.columns.content += [turn[1] for turn in turns]
        out.columns.context += [turn[2] for turn in turns]
        out.columns.count.append(len(turns))
        out.tools.append(None)
        return 1

    return texts.merged(_adapt_rows(texts.rows, add))


def _history(value: Any) -> list[Sequence[str]]:
    if value is None or value == "":
        return []
    if isinstance(value, str):  # a column of text that holds JSON
        value, _ = parse_text(value)
    if not isinstance(value, list):
        raise BadRowError("type", f"history is {_kind(value)}, not a list of pairs")
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise BadRowError("type", "history is not a list of [question, answer] pairs of text")
    return value


def _adapt_texts(rows: Rows, config: SourceConfig) -> Adapted:
    texts = _Texts(rows, "text", config, ("text",), ())
    name = texts.names.get("text", "text")
    content = pa.array([row[name] for row in texts.rows], pa.string())
    columns = {"role": _repeated(("assistant",), len(content)), "content": content}
    return texts.adapted(assemble(columns, np.ones(len(content), np.int64)))


def _adapt_labelled(rows: Rows, config: SourceConfig) -> Adapted:
    texts = _Texts(rows, "classification", config, ("text",), ())
    name = texts.names.get("text", "text")
    label = texts.names.get("label", config.fields.get("label", "label"))
    classes = _Classes(config.label_names)
    labels, keep = [], []
    for place, row in enumerate(texts.rows):
        try:
            if label not in row:
                raise BadRowError("fields", f"no field {label!r}")
            labels.append(classes.index(row[label]))
            keep.append(place)
        except BadRowError as bad:
            texts.failures.append((int(texts.kept[place]), bad.reason, bad.detail))
    texts.keep(keep)
    content = pa.array([row[name] for row in texts.rows], pa.string())
    columns = {"role": _repeated(("user",), len(content)), "content": content}
    adapted = texts.adapted(assemble(columns, np.ones(len(content), np.int64)))
    adapted.labels = pa.array(labels, pa.int64())
    return adapted


class _Classes:
    """Class index of a raw label, with the answers remembered."""

    def __init__(self, names: list[str] | None) -> None:
        self.names = names
        self.known: dict[Any, int] = {}

    def index(self, raw: Any) -> int:
        if type(raw) not in (int, str):
            raise BadRowError("label", f"the label is {_kind(raw)}, neither a number nor text")
        found = self.known.get(raw)
        if found is None:
            found = self.known[raw] = self._find(raw)
        return found

    def _find(self, raw: int | str) -> int:
        if isinstance(raw, str):
            if self.names is not None and raw in self.names:
                return self.names.index(raw)
            text = raw.strip()
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                known = f"not one of {self.names}" if self.names else "text; set label_names"
                raise BadRowError("label", f"the label {raw[:60]!r} is {known}")
            raw = int(text)
        if raw < 0 or (self.names is not None and raw >= len(self.names)):
            bound = len(self.names) - 1 if self.names else "..."
            raise BadRowError("label", f"the label {raw} is outside 0 to {bound}")
        if raw >= 2**31:
            raise BadRowError("label", f"the label {raw} is no class index")
        return raw


class _Texts:
    """Rows whose named fields are proven to be text, and why the others are not."""

    def __init__(
        self,
        rows: Rows,
        row_format: str,
        config: SourceConfig,
        required: tuple[str, ...],
        optional: tuple[str | None, ...],
    ) -> None:
        self.num_rows = len(rows)
        self.kept: Ints = np.arange(len(rows))
        self.failures: list[tuple[int, str, str]] = []
        self.rows, self.names = _one_naming(rows, row_format, config)
        wanted = [config.fields.get(name, name) for name in required]
        must = [self.names.get(ours, name) for ours, name in zip(required, wanted, strict=True)]
        may = [self.names[name] for name in optional if name in self.names]
        if not _are_texts(self.rows, must, may):
            self._sift(must, may)

    def _sift(self, must: list[str], may: list[str]) -> None:
        keep = []
        for index, row in enumerate(self.rows):
            wrong = _why_not_texts(row, must, may)
            if wrong is None:
                keep.append(index)
            else:
                self.failures.append((index, *wrong))
        self.keep(keep)

    def keep(self, places: list[int]) -> None:
        """Keep only the rows at these places of `rows`."""
        if len(places) < len(self.rows):
            self.rows = Rows(map(self.rows.__getitem__, places))
            self.kept = self.kept[places]

    def adapted(self, messages: pa.Array) -> Adapted:
        """The result, with one conversation per kept row."""
        none = len(self.rows)
        return Adapted(
            messages=messages,
            tools=pa.nulls(none, pa.string()),
            labels=pa.nulls(none, pa.int64()),
            origin=self.kept,
            failures=sorted(self.failures),
        )

    def merged(self, adapted: Adapted) -> Adapted:
        """The result of an adapter that saw `rows`, in terms of all rows."""
        failures = [(int(self.kept[place]), code, why) for place, code, why in adapted.failures]
        adapted.failures = sorted([*self.failures, *failures])
        adapted.origin = self.kept[adapted.origin]
        return adapted


def _are_texts(rows: Rows, must: list[str], may: list[str]) -> bool:
    """Whether all rows are objects with text in these fields; optional ones may be null."""
    if not rows.are_objects or not all(set(must) <= set(keys) for keys in rows.layouts):
        return False
    if rows.value_types <= {str}:
        return True
    if any(set(map(type, map(itemgetter(name), rows))) - {str} for name in must):
        return False
    return all(not set(map(type, [row.get(name) for row in rows])) - _TEXT_OR_NULL for name in may)


_TEXT_OR_NULL = {str, type(None)}


def _why_not_texts(row: Any, must: list[str], may: list[str]) -> tuple[str, str] | None:
    if not isinstance(row, dict):
        return "not_an_object", f"the row is {_kind(row)}, not an object"
    missing = [name for name in must if name not in row]
    if missing:
        has = ", ".join(repr(key[:40]) for key in list(row)[:12]) or "none"
        return "fields", f"no field {missing[0]!r}; the row has {has}"
    for name in must:
        if type(row[name]) is not str:
            return "type", f"{name} is {_kind(row[name])}, not text"
    for name in may:
        if not isinstance(row.get(name), str | None):
            return "type", f"{name} is {_kind(row[name])}, not text"
    return None


def _one_naming(rows: Rows, row_format: str, config: SourceConfig) -> tuple[Rows, dict[str, str]]:
    """The rows, and our field -> theirs, as all of them agree; rows that differ are renamed.

    Files that call one field by two names are rare; most have one set of keys throughout.
    """
    shape = SHAPES[row_format]
    names: dict[str, str] = {}
    for keys in sorted(rows.layouts):
        for ours, name in shape.names(keys, config.fields).items():
            if names.setdefault(ours, name) != name:
                return _rename(rows, row_format, config)
    return rows, names


def _rename(rows: Rows, row_format: str, config: SourceConfig) -> tuple[Rows, dict[str, str]]:
    shape = SHAPES[row_format]
    naming = {keys: shape.names(keys, config.fields) for keys in rows.layouts}
    renamed = Rows(
        {ours: row[name] for ours, name in naming[tuple(row)].items()}
        if isinstance(row, dict)
        else row
        for row in rows
    )
    ours = {field for names in naming.values() for field in names}
    return renamed, {name: name for name in sorted(ours)}


def _repeated(words: tuple[str, ...], times: int) -> pa.Array:
    """`words` over and over, as an Arrow array built from buffers."""
    sizes = np.tile(np.array([len(word) for word in words], np.int32), times)
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    data = "".join(words).encode() * times
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.StringArray.from_buffers(len(sizes), *buffers[1:])


def _kind(value: Any) -> str:
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)
