"""The formats of rows: how a format is recognised, and how its rows become conversations.

A format is one object. Those that share code stand together, in `conversation_formats` and
`text_formats`; any other is the `FORMAT` of a file of its own, as in `tokenized_format`. To be
found, it needs its name in `RowFormatName` (`packhouse.recipe.source`) and nothing else:

    "faq"  ->  packhouse/read/faq_format.py, FORMAT
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from packhouse.errors import ConfigError, PluginError, SourceError
from packhouse.read.base_format import MESSAGE_FIELDS, Adapted, Found, RowFormat
from packhouse.read.beside import BESIDE
from packhouse.read.chat_messages import Conversation, Turn, kind_of, read_messages, speaker_key
from packhouse.read.conversation_formats import CONVERSATION_FORMATS, FlatMessages
from packhouse.read.preference_formats import STATED
from packhouse.read.records import Rows
from packhouse.read.text_formats import TEXT_FORMATS, TextFields, class_index
from packhouse.recipe import SourceConfig
from packhouse.recipe.source import RowFormatName
from packhouse.records.messages import assemble
from packhouse.records.tables import MESSAGE
from packhouse.system.plugins import BadRowError, Plugin, find_plugin
from packhouse.system.wording import near_name


@dataclass(frozen=True, kw_only=True)
class Mixed(RowFormat):
    """Rows of several shapes, each read by its own."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Never: that a file mixes shapes is for its owner to say."""
        return False

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Those that none of the formats with the rows' fields reads."""
        rests = [
            known.unread(keys, renamed)
            for known in _CONVERSATIONS.values()
            if known.required and known.required.keys() <= known.names(keys, renamed).keys()
        ]
        return min(rests, key=len, default=[])

    def read(self, row: Any, names: dict[str, str], config: SourceConfig) -> list[Conversation]:
        """Read the row by the first format that it fits."""
        for reader in _CONVERSATIONS.values():
            if reader.fits(row, config.fields):
                names = reader.names(row, config.fields) if isinstance(row, dict) else {}
                return reader.read(row, names, config)
        raise BadRowError("fields", f"the row has {_keys_of(row)}, which is no known conversation")


_TOGETHER: dict[str, RowFormat] = {
    **CONVERSATION_FORMATS,
    **TEXT_FORMATS,
    "mixed": Mixed(required={}),
}

ROW_FORMATS: dict[str, RowFormat] = {
    # Those with files of their own first: what `fits` them might fit a broader one, such as `text`.
    **{
        name: import_module(f"packhouse.read.{name}_format").FORMAT
        for name in get_args(RowFormatName)
        if name not in ("auto", *_TOGETHER)
    },
    **_TOGETHER,
}
"""In the order of trial."""

_CONVERSATIONS = {
    name: known
    for name, known in ROW_FORMATS.items()
    if known.answers == "required" and name not in ("mixed", "oasst_flat", *STATED)
}


@dataclass(frozen=True, kw_only=True)
class PluginRows(RowFormat):
    """Rows that a plug-in reads: `read(row)` returns one conversation, or a list of them.

    A conversation is a dict with `messages`, and maybe `tools` and `label`, in any of the forms
    that files write them in. What it does not read is not known, so no field counts as unread.
    """

    plugin: Plugin
    function: Callable[[dict[str, Any]], Any]

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Nothing."""
        return []

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Call the plug-in; a row has our names where `fields` renames the file's."""
        renamed = {ours: row[theirs] for ours, theirs in config.fields.items() if theirs in row}
        rest = {name: row[name] for name in row if name not in config.fields.values()}
        with self.plugin.named_in_errors(" on a row"):
            returned = self.function({**rest, **renamed})
        conversations = returned if isinstance(returned, list) else [returned]
        if not conversations:
            raise BadRowError("no_messages", f"{self.plugin} found no conversation")
        return [self._conversation(each, config) for each in conversations]

    def _conversation(self, found: object, config: SourceConfig) -> Conversation:
        if not isinstance(found, dict) or not {"messages"} <= found.keys() <= _OF_CONVERSATION:
            raise PluginError(
                f"{self.plugin} returned {_keys_of(found)}; a conversation is a dict with "
                "'messages', and maybe 'tools' and 'label'"
            )
        read = read_messages(found["messages"], found.get("tools"), None)
        if found.get("label") is None:
            return read
        return read._replace(label=class_index(found["label"], config.label_names))


_OF_CONVERSATION = {"messages", "tools", "label"}


def row_format_called(name: str) -> RowFormat:
    """Return the format of a name: a built-in one, else a plug-in's.

    Raises:
        ConfigError: there is none.
    """
    if name in ROW_FORMATS:
        return ROW_FORMATS[name]
    plugin = find_plugin("row_formats", name)
    return PluginRows(required={}, plugin=plugin, function=plugin.load())


_OF_MESSAGES = {"role", "content"}


def check_fields(config: SourceConfig) -> None:
    """Refuse `fields` that name a field of ours that no format has.

    Raises:
        ConfigError: says which, and what was meant.
    """
    if config.format != "auto" and config.format not in ROW_FORMATS:  # a plug-in knows its own
        return
    is_any = config.format in ("auto", "mixed")
    formats = ROW_FORMATS.values() if is_any else [ROW_FORMATS[config.format]]
    known = {name for each in formats for name in (*each.required, *each.optional)}
    known |= {*_OF_MESSAGES, *BESIDE}
    for name in config.fields:
        if name not in known:
            named = "" if is_any else f" of format `{config.format}`"
            raise ConfigError(
                f"source '{config.path}': fields names '{name}', which is no field of ours{named}"
                f"{near_name(name, known) or '; known: ' + ', '.join(sorted(known))}"
            )


def adapt(rows: Rows, row_format: str, config: SourceConfig) -> Adapted:
    """Turn rows of one format into conversations.

    Args:
        rows: parsed rows; values of any type.
        row_format: a name in `ROW_FORMATS`, or of a plug-in.
        config: the source, for `fields`, `label_names` and `oasst_paths`.

    Returns:
        Conversations and failures; every row gives at least one or fails.
    """
    reader = row_format_called(row_format)
    naming = {keys: reader.names(keys, config.fields) for keys in rows.layouts}
    if isinstance(reader, TextFields):
        adapted = reader.read_columns(rows, naming, config)
        if adapted is not None:
            return adapted
    if isinstance(reader, FlatMessages):
        found = reader.read_all(rows, naming, config)
    else:
        found = _read_each(rows, row_format, reader, naming, config)
    conversations = [each for _, each in found.conversations]
    turns: list[Turn] = [turn for each in conversations for turn in each.turns]
    columns = zip(*turns, strict=True)
    arrays = {f.name: pa.array(column, f.type) for f, column in zip(MESSAGE, columns, strict=False)}
    return Adapted(
        messages=assemble(arrays, np.array([len(c.turns) for c in conversations], np.int64)),
        tools=pa.array([each.tools for each in conversations], pa.string()),
        labels=pa.array([each.label for each in conversations], pa.int64()),
        origin=np.array([row for row, _ in found.conversations], np.int64),
        failures=found.failures,
        unread_fields=Counter(chain.from_iterable(c.unread_fields for c in conversations)),
        num_unanswered=sum(each.num_unanswered for each in conversations),
        dropped=found.dropped,
    )


def _read_each(
    rows: Rows,
    row_format: str,
    reader: RowFormat,
    naming: Mapping[tuple[str, ...], dict[str, str]],
    config: SourceConfig,
) -> Found:
    found = Found()
    for index, row in enumerate(rows):
        try:
            if not isinstance(row, dict) and row_format not in ("messages", "mixed"):
                raise BadRowError("not_an_object", f"the row is {kind_of(row)}, not an object")
            names = naming[tuple(row)] if isinstance(row, dict) else {}
            found.conversations += ((index, c) for c in reader.read(row, names, config))
        except BadRowError as bad:
            found.failures.append((index, bad.reason, bad.detail))
    return found


def row_format_of(row: object, renamed: Mapping[str, str]) -> str | None:
    """Return the format of a row; None if it has none.

    Example:
        >>> row_format_of({"question": "1 + 1?", "answer": "2", "id": 7}, {})
        'question_answer'
    """
    for name, row_format in ROW_FORMATS.items():
        if row_format.fits(row, renamed):
            return name
    return None


def find_row_format(rows: Iterable[object], config: SourceConfig, uri: str) -> str:
    """Return the format of the first row that has one; `auto` if no row is an object or a list.

    Raises:
        SourceError: rows are there, but none is of a known format.
    """
    odd = None
    for row in rows:
        found = row_format_of(row, config.fields)
        if found is not None:
            return found
        if odd is None and isinstance(row, dict | list):
            odd = row
    if odd is None:
        return "auto"
    known = "; ".join(
        f"{name}: {', '.join(known.required)}"
        for name, known in ROW_FORMATS.items()
        if known.required
    )
    raise SourceError(
        f"source file '{uri}': rows have {_keys_of(odd)}, which is no known shape ({known}); "
        f"{_where_rows_are(odd)}set format, and fields where names differ: `packhouse init` looks "
        "at the file and proposes them",
        uri=uri,
    )


def _where_rows_are(row: object) -> str:
    """What to set first, for a row that only holds rows."""
    if isinstance(row, list) and len(row) == 1 and isinstance(row[0], dict):
        return "if each row stands in a list of its own, set `unwrap: true`; "
    for name, value in row.items() if isinstance(row, dict) else ():
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
            return (
                f"if the rows are those of the list in '{name[:40]}', set `rows_at: {name[:40]}`; "
            )
    return ""


def check_same_format(
    rows: Rows,
    name_of: Callable[[int], str],
    row_format: str,
    renamed: Mapping[str, str],
    uri: str,
) -> None:
    """Refuse rows of another known format than the file's; rows of none are bad by themselves.

    Args:
        rows: parsed rows.
        name_of: name of a row by its index, for messages: `line 18`.
        row_format: the file's.
        renamed: `fields` of the source.
        uri: for messages.

    Raises:
        SourceError: names the first such row and its fields.
    """
    if rows.are_objects and all(MESSAGE_FIELDS.isdisjoint(keys) for keys in rows.layouts):
        # Their keys alone tell the format, so one row of each layout is enough.
        alone = (row_format_of(dict.fromkeys(keys), renamed) for keys in rows.layouts)
        if all(found in (row_format, None) for found in alone):
            return
    seen = set()
    for index, row in enumerate(rows):
        # Equal for rows that must have the same format.
        key: object = type(row)
        if isinstance(row, dict):
            talk = row.get("messages") or row.get("conversations") or row.get("conversation")
            key = (*row, speaker_key(talk) if isinstance(talk, list) else type(talk))
        elif isinstance(row, list):
            key = (list, speaker_key(row))
        if key in seen:
            continue
        seen.add(key)
        found = row_format_of(row, renamed)
        if found not in (row_format, None):
            own = ", ".join(repr(renamed.get(n, n)) for n in ROW_FORMATS[row_format].required)
            raise SourceError(
                f"source file '{uri}' mixes shapes: it is {row_format} ({own or 'bare lists'}), "
                f"and {name_of(index)} has {_keys_of(row)} ({found}); split it by shape, set "
                "`format: mixed` to read each row by its own, or name a format to quarantine the "
                "other rows",
                uri=uri,
            )


def _keys_of(row: object) -> str:
    if isinstance(row, dict):
        names = ", ".join(repr(key[:40]) for key in list(row)[:12])
        return f"the fields {names}{', ...' if len(row) > 12 else ''}" if row else "no fields"
    if isinstance(row, list) and row and isinstance(row[0], dict):
        return f"a list of objects with {_keys_of(row[0])}"
    return "a list"
