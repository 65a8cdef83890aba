'''Find the format of rows, and turn rows into conversations.

A format is one object. Formats that share code are in `conversation_formats`,
`single_turn_formats` or an add-on (`registry.ROW_FORMATS`); any other is the `FORMAT` of its file,
and recipes use the file's name. `read/faq_format.py`:

    """Questions of users, with the replies that they got."""

    from dataclasses import dataclass

    from packhouse.read.chat_messages import Conversation, text_turn
    from packhouse.read.row_formats import Names, Row, RowFormat, aliases, check_present
    from packhouse.recipe import SourceConfig
    from packhouse.system.plugins import BadRowError


    @dataclass(frozen=True, kw_only=True)
    class Faq(RowFormat):
        """A question and its reply."""

        def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
            """Read the question and the reply of a row."""
            check_present(row, self.required, names, config)
            asked, answer = (row[names[ours]] for ours in self.required)
            if not isinstance(asked, str) or not isinstance(answer, str):
                raise BadRowError("type", "faq or reply is not text")
            return [Conversation([text_turn("user", asked), text_turn("assistant", answer)])]


    FORMAT = Faq(required=aliases("faq reply|response"))

`auto` and `mixed` try the formats in separate files first. Set `is_detected` to False for a
format that a recipe must name, or override `holds` to look at values.

Rows of any format can have options next to their conversation: `chat_template_kwargs` and
`documents`, named as in TRL and transformers, and a `loss_weight` if `fields` names it.
'''

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse import registry
from packhouse.errors import ConfigError, PluginError, SourceError
from packhouse.read.chat_messages import (
    MAX_WEIGHT,
    Conversation,
    Turn,
    kind_of,
    parse_field,
    read_messages,
    read_tools,
    speaker_key,
)
from packhouse.read.file_formats import file_error
from packhouse.read.json_parsing import Ints, Records, Rows, lists_in, unwrapped
from packhouse.recipe import SourceConfig
from packhouse.recipe.sections import DETECTED, ROW_FORMATS, check_arguments
from packhouse.records.message_rules import Answers, assemble
from packhouse.records.table_schemas import MESSAGE
from packhouse.system.plugins import BadRowError, Plugin, find_plugin
from packhouse.system.wording import near_name

MESSAGE_FIELDS = frozenset(("messages", "conversations", "conversation"))
"""Names of fields with messages. Only the messages' own keys distinguish chat from ShareGPT."""


Row: TypeAlias = dict[Any, Any]
"""Keys are text, so `row.get(names.get("tools"))` is None if the row has no such field."""
Names: TypeAlias = dict[str, str]
"""Our field -> the row's field, for the fields that it has."""


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
    """Index of each conversation's row, in ascending order."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(row index, reason, detail) of rows without a conversation."""
    unread_fields: Counter[str] = field(default_factory=Counter)
    """Non-empty field of messages that nothing reads -> number of rows with it."""
    num_unanswered: int = 0
    """Questions without an answer, which give no conversation."""
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    """(row index, reason, detail) of rows that belong to another row's conversation."""
    unread_by_plugin: dict[int, list[str]] = field(default_factory=dict)
    """Row index -> fields that the plug-in did not access."""

    @classmethod
    def of(
        cls,
        found: list[tuple[int, Conversation]],
        failures: list[tuple[int, str, str]],
        dropped: list[tuple[int, str, str]] | None = None,
    ) -> "Adapted":
        """Build columns from conversations, each given with the index of its row."""
        conversations = [each for _, each in found]
        turns: list[Turn] = [turn for each in conversations for turn in each.turns]
        columns = zip(MESSAGE, zip(*turns, strict=True), strict=False)
        arrays = {field.name: pa.array(column, field.type) for field, column in columns}
        return cls(
            messages=assemble(arrays, np.array([len(c.turns) for c in conversations], np.int64)),
            tools=pa.array([each.tools for each in conversations], pa.string()),
            labels=pa.array([each.label for each in conversations], pa.int64()),
            origin=np.array([row for row, _ in found], np.int64),
            failures=failures,
            unread_fields=Counter(chain.from_iterable(c.unread_fields for c in conversations)),
            num_unanswered=sum(each.num_unanswered for each in conversations),
            dropped=dropped or [],
        )

    def take(self, places: Ints) -> "Adapted":
        """Return the conversations at these indices."""
        at = pa.array(places)
        messages, tools, labels = (x.take(at) for x in (self.messages, self.tools, self.labels))
        origin = self.origin[places]
        return Adapted(messages, tools, labels, origin, unread_by_plugin=self.unread_by_plugin)


def aliases(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `"text|sentence label"` into fields with the names that occur in files."""
    return {item.split("|")[0]: tuple(item.split("|")) for item in text.split()}


@dataclass(frozen=True, kw_only=True)
class RowFormat(ABC):
    """A row format: its fields with the names that occur in files, of which the first one counts.

    A row has a format if it has all of the format's required fields.
    """

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: Answers = "required"
    needs_all_rows: ClassVar[bool] = False
    """True if a row can only be read together with the other rows of its file."""
    takes_lists: ClassVar[bool] = False
    """True if a row can be a list."""
    is_detected: ClassVar[bool] = True
    """False if rows have this format only if the recipe names it."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Keys that the format does not read because they follow from the others."""

    def names(self, keys: Collection[str], renamed: Mapping[str, str]) -> dict[str, str]:
        """Map our fields to the file's fields, for those among `keys`.

        Example:
            >>> formats = row_formats()
            >>> formats["alpaca"].names(["id", "instruction", "context"], {})
            {'instruction': 'instruction', 'input': 'context'}
            >>> formats["question_answer"].names(["input", "answer"], {"question": "input"})
            {'question': 'input', 'answer': 'answer'}
        """
        found = {}
        known = self.required | self.optional
        # A field that `renamed` assigns is not read a second time under its usual name.
        taken = {theirs for ours, theirs in renamed.items() if ours in known}
        for ours, aliases in known.items():
            for name in (renamed[ours],) if ours in renamed else aliases:
                if name in keys and (ours in renamed or name not in taken):
                    found[ours] = name
                    break
        return found

    def names_read(self, keys: Collection[str], config: SourceConfig) -> dict[str, str]:
        """Return `names` without the fields of the file that the recipe ignores."""
        # The fields that `select` makes are not those of the file.
        ignored = {*config.ignored_fields}.difference(config.fields.values(), config.select or ())
        return self.names([key for key in keys if key not in ignored], config.fields)

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Return the keys that the format does not read."""
        read = {*self.names(keys, renamed).values(), *self.ignored}
        return [key for key in keys if key not in read]

    def fits(self, keys: Collection[str], renamed: Mapping[str, str]) -> bool:
        """Return True if rows with these keys may have this format; `holds` checks the values."""
        return self.is_detected and self.required.keys() <= self.names(keys, renamed).keys()

    def holds(self, row: Row, names: Names) -> bool:
        """Return True if the values of a row with fitting keys have this format."""
        return True

    @abstractmethod
    def read(self, row: Any, names: Names, config: SourceConfig) -> list[Conversation]:
        """Return the conversations of a row, at least one.

        Args:
            row: an object; the values of its fields are not checked yet.
            names: our field -> the row's field, for the fields that it has.
            config: its source.

        Raises:
            BadRowError: it has no conversation.
        """

    def read_all(self, rows: Rows, config: SourceConfig) -> Adapted:
        """Return the conversations of rows of any type, and the rows that have none."""
        # Once per layout and not per row: millions of rows share a few sequences of keys.
        naming = {keys: self.names_read(keys, config) for keys in rows.layouts}
        found: list[tuple[int, Conversation]] = []
        failures: list[tuple[int, str, str]] = []
        for index, row in enumerate(rows):
            try:
                if not isinstance(row, dict) and not self.takes_lists:
                    raise BadRowError("not_an_object", f"the row is {kind_of(row)}, not an object")
                names = naming.get(tuple(row), {}) if isinstance(row, dict) else {}
                found += ((index, each) for each in self.read(row, names, config))
            except BadRowError as bad:
                failures.append((index, bad.reason, bad.detail))
        return Adapted.of(found, failures)


def check_present(row: Row, fields: Iterable[str], names: Names, config: SourceConfig) -> None:
    """Refuse a row that lacks one of `fields`.

    Raises:
        BadRowError: a field is missing; the message names it and the row's fields.
    """
    for ours in fields:
        if ours not in names:
            has = ", ".join(repr(key[:40]) for key in list(row)[:12]) or "none"
            wanted = config.fields.get(ours, ours)
            fix = ""
            kind = list if ours in MESSAGE_FIELDS else str
            others = [key for key in row if key not in names.values() and type(row[key]) is kind]
            if others:
                which = repr(others[0][:40]) if len(others) == 1 else "another of these"
                field = yaml_key(others[0]) if len(others) == 1 else "FIELD"
                fix = f"; if {which} is meant, set `fields: {{{ours}: {field}}}`"
            if isinstance(row.get(wanted.partition(".")[0]), dict):
                select = json.dumps(config.fields)
                fix = f". To read a part of an object, use `select` in place of `fields`: {select}"
            raise BadRowError("fields", f"no field {wanted!r}; the row has {has}{fix}")


def yaml_key(name: str) -> str:
    """Return a field's name as a recipe writes it: in quotes unless it is a plain word."""
    return name if name.replace(".", "_").isidentifier() else orjson.dumps(name).decode()


def class_index(label: object, classes: list[str] | None) -> int:
    """Return the index of a class that is given as a number, digits, or one of `classes`.

    Raises:
        BadRowError: it is not a class.
    """
    if type(label) is not int and type(label) is not str:
        raise BadRowError("label", f"the label is {kind_of(label)}, not a number or text")
    if isinstance(label, str):
        if classes is not None and label in classes:
            return classes.index(label)
        # Up to nine digits: `int` refuses texts of over 4,300 with an error of its own.
        text = label.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            known = f"not one of {classes}" if classes else "text, but `label_names` is not set"
            raise BadRowError("label", f"the label {label[:60]!r} is {known}")
        label = int(text)
    last = 2**31 - 1 if classes is None else len(classes) - 1
    if not 0 <= label <= last:
        raise BadRowError("label", f"the label {label} is outside 0 to {last}")
    return label


@dataclass(frozen=True, kw_only=True)
class Mixed(RowFormat):
    """Rows of several formats, each read by the first one that fits."""

    takes_lists: ClassVar[bool] = True
    is_detected: ClassVar[bool] = False

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Return the keys that no format which fits the row reads."""
        rests = [
            known.unread(keys, renamed)
            for known in _formats_of_conversations().values()
            if known.required and known.required.keys() <= known.names(keys, renamed).keys()
        ]
        return min(rests, key=len, default=[])

    def read(self, row: Any, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the row with the first format that fits."""
        formats = _formats_of_conversations()
        found = row_format_of(row, config.fields, formats)
        if found is None:
            detail = f"the row has {_keys_of(row)}, which match no known format"
            raise BadRowError("fields", detail)
        names = formats[found].names_read(row, config) if isinstance(row, dict) else {}
        return formats[found].read(row, names, config)


@cache
def row_formats() -> dict[str, RowFormat]:
    """Return the built-in formats by name, in the order in which they are tried."""
    from packhouse.read.conversation_formats import CONVERSATION_FORMATS
    from packhouse.read.single_turn_formats import TEXT_FORMATS

    together = CONVERSATION_FORMATS | TEXT_FORMATS | {"mixed": Mixed(required={})}
    installed = [n for n, module in registry.ROW_FORMATS.items() if registry.is_there(module)]
    known = {"auto", *together, *registry.ROW_FORMATS}
    files = [name for name in ROW_FORMATS if name not in known]
    # These come first: their rows may also fit a broader format, such as `text`.
    own = {name: registry.row_format(name) for name in installed}
    own |= {name: import_module(f"packhouse.read.{name}_format").FORMAT for name in files}
    return own | together


@cache
def _formats_of_conversations() -> dict[str, RowFormat]:
    """Return the formats that `mixed` tries."""
    # `oasst_flat` needs all rows of a file, and `pairs` and `kto` make the whole dataset one of
    # preferences, so a single row cannot decide for them.
    left_out = ("mixed", "oasst_flat", "pairs", "kto")
    formats = {name: known for name, known in row_formats().items() if name not in left_out}
    return {name: known for name, known in formats.items() if known.answers == "required"}


@dataclass(frozen=True, kw_only=True)
class PluginRows(RowFormat):
    """Rows that a plug-in reads: `read(row)` returns one conversation, or a list of them.

    A conversation is a dict with `messages` and optionally `tools` and `label`, in any form that
    files have. A field of a row counts as unread if the plug-in does not access it.
    """

    plugin: Plugin
    function: Callable[[dict[str, Any]], Any]

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Return nothing: only `read_all` can tell what the plug-in reads."""
        return []

    def read_all(self, rows: Rows, config: SourceConfig) -> Adapted:
        """Call the plug-in with each row, and note the fields that it does not access."""
        watched = [_WatchedRow(row, config.fields) if type(row) is dict else row for row in rows]
        adapted = super().read_all(Rows(watched), config)
        for index, row in enumerate(watched):
            if isinstance(row, _WatchedRow):
                read = row.fields_read().union(option_names(rows[index], config).values())
                if unread := [name for name in rows[index] if name not in read]:
                    adapted.unread_by_plugin[index] = unread
        return adapted

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Call the plug-in with the row."""
        with self.plugin.named_in_errors(" on a row"):
            returned = self.function(row)
        conversations = returned if isinstance(returned, list) else [returned]
        if not conversations:
            raise BadRowError("no_messages", f"{self.plugin} found no conversation")
        found: list[Conversation] = []
        for each in conversations:
            allowed = {"messages", "tools", "label"}
            if not isinstance(each, dict) or not {"messages"} <= each.keys() <= allowed:
                fix = "Return a dict with 'messages' and optionally 'tools' and 'label'"
                raise PluginError(f"{self.plugin} returned {_keys_of(each)}. {fix}")
            label = each.get("label")
            if label is not None:
                label = class_index(label, config.label_names)
            read = read_messages(each["messages"], each.get("tools"), None)
            found.append(read._replace(label=label))
        return found


class _WatchedRow(dict[str, Any]):
    """A row, with fields renamed as `fields` says, that notes which values a plug-in takes.

    With `__iter__` overridden, `dict(row)` and `{**row}` take values one by one.
    """

    def __init__(self, row: Row, fields: Mapping[str, str]) -> None:
        names = {name: name for name in row if name not in fields.values()}
        self._names = names | {ours: name for ours, name in fields.items() if name in row}
        self._taken: set[str] = set()
        super().__init__({ours: row[name] for ours, name in self._names.items()})

    def fields_read(self) -> set[str]:
        """Return the row's own names of the fields whose values were taken."""
        return {name for ours, name in self._names.items() if ours in self._taken}

    # Not superfluous: CPython copies a dict without calling `__getitem__`, unless its class has an
    # `__iter__` of its own.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        self._taken.add(name)
        return super().__getitem__(name)

    # Those of `dict` would not call `__getitem__`.
    get: Any = Mapping.get
    pop: Any = MutableMapping.pop

    def copy(self) -> Row:
        return dict(self)

    def items(self) -> Any:
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other


def row_format_called(name: str) -> RowFormat:
    """Return the format with a name: a built-in one, else a plug-in's.

    Raises:
        ConfigError: no format has this name.
    """
    if name in row_formats():
        return row_formats()[name]
    plugin = find_plugin("row_formats", name)
    return PluginRows(required={}, plugin=plugin, function=plugin.load())


def check_fields(config: SourceConfig) -> None:
    """Refuse keys of `fields` that no format has.

    Raises:
        ConfigError: a key is unknown; the message suggests one.
    """
    if config.format != "auto" and config.format not in row_formats():  # any name of a plug-in
        return
    is_any = config.format in DETECTED
    formats = row_formats().values() if is_any else [row_formats()[config.format]]
    known = {name for each in formats for name in (*each.required, *each.optional)}
    known |= {"role", "content", *OPTIONS}  # the first two are of messages
    for name in config.fields:
        if name not in known:
            named = "" if is_any else f" of format `{config.format}`"
            raise ConfigError(
                f"source '{config.path}': `fields` has the unknown key '{name}'{named}"
                f"{near_name(name, known) or '. Keys are: ' + ', '.join(sorted(known))}"
            )


def row_format_of(
    row: object, renamed: Mapping[str, str], formats: Mapping[str, RowFormat] | None = None
) -> str | None:
    """Return the format of a row, None if no format fits; `formats` to try default to all.

    Example:
        >>> row_format_of({"question": "1 + 1?", "answer": "2", "id": 7}, {})
        'question_answer'
    """
    if isinstance(row, list) and speaker_key(row) is not None:
        return "messages"
    if isinstance(row, dict):
        keys = tuple(row)
        for name, known in (formats or row_formats()).items():
            if known.fits(keys, renamed) and known.holds(row, known.names(keys, renamed)):
                return name
    return None


def find_row_format(rows: list[Any], config: SourceConfig, uri: str) -> str:
    """Return the format of the first row that has one; `auto` if no row is an object or a list.

    Raises:
        SourceError: there are rows, but none has a known format.
    """
    odd = None
    rows = unwrapped(rows) if config.unwrap else rows
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
        for name, known in row_formats().items()
        if known.required and known.is_detected
    )
    what = _keys_of(odd)
    what = f"have {what}" if isinstance(odd, dict) else f"are {what.replace('a list', 'lists', 1)}"
    raise SourceError(
        f"the rows of source file '{uri}' {what}, which match no known format "
        f"({known}). {_where_rows_are(odd, is_alone=len(rows) == 1)}",
        uri=uri,
    )


def _where_rows_are(row: object, *, is_alone: bool) -> str:
    """Return advice for a row of unknown format; `is_alone` if the file has no other row."""
    if isinstance(row, list) and len(row) == 1 and isinstance(row[0], dict):
        return "If each row is in a list with one element, set `unwrap: true`"
    values = row if isinstance(row, dict) and is_alone else {}
    lists = [path for path, _ in lists_in(values)]
    if lists:
        shown = ", ".join(map(repr, lists[:5])) + ", ..." * (len(lists) > 5)
        advice = f"set `rows_at: {yaml_key(lists[0])}`"
        if len(lists) == 1:
            return f"If the rows are in the list {shown}, {advice}"
        return (
            f"The file has {len(lists)} lists of objects: {shown}. A source reads one of them: for "
            f"the first, {advice}. Make each list that you want a source of its own"
        )
    kinds = set(map(type, values.values()))
    if kinds == {dict} or (kinds == {list} and len(values) > 1):
        what = f"{'objects' if kinds == {dict} else 'columns'} are in one object"
        fix = "Write a list of rows, or one object per line"
        return f"Its {what}, which packhouse cannot read. {fix}"
    return "Set `format`, and `fields` if the names differ. `packhouse init FILE` suggests both"


def check_same_format(
    rows: Rows, name_of: Callable[[int], str], row_format: str, renamed: Mapping[str, str], uri: str
) -> None:
    """Refuse a file with rows of a second known format; rows of no known format are just bad.

    Args:
        rows: parsed rows.
        name_of: name of a row by its index, for messages: `line 18`.
        row_format: the file's.
        renamed: `fields` of the source.
        uri: for messages.

    Raises:
        SourceError: there is one; the message names it and its fields.
    """
    if rows.are_objects and all(MESSAGE_FIELDS.isdisjoint(keys) for keys in rows.layouts):
        # The keys alone determine the format, so one row per layout is enough.
        alone = (row_format_of(dict.fromkeys(keys), renamed) for keys in rows.layouts)
        if all(found in (row_format, None) for found in alone):
            return
    seen = set()
    for index, row in enumerate(rows):
        # Rows with the same key have the same format.
        key: object = type(row)
        if isinstance(row, dict):
            messages = row.get("messages") or row.get("conversations") or row.get("conversation")
            key = (*row, speaker_key(messages) if isinstance(messages, list) else type(messages))
        elif isinstance(row, list):
            key = (list, speaker_key(row))
        if key in seen:
            continue
        seen.add(key)
        found = row_format_of(row, renamed)
        if found not in (row_format, None):
            own = ", ".join(repr(renamed.get(n, n)) for n in row_formats()[row_format].required)
            raise file_error(
                uri,
                f" mixes formats: it is {row_format} ({own or 'bare lists'}), and "
                f"{name_of(index)} has {_keys_of(row)} ({found}). Split the file, set `format: "
                "mixed` to read each row in its format, or set `format` to one of them to "
                "quarantine the other rows",
            )


def _keys_of(row: object) -> str:
    if isinstance(row, dict):
        names = ", ".join(repr(key[:40]) for key in list(row)[:12])
        return f"the fields {names}{', ...' if len(row) > 12 else ''}" if row else "no fields"
    if isinstance(row, list) and row and isinstance(row[0], dict):
        return f"a list of objects with {_keys_of(row[0])}"
    return "a list"


# Options that rows have next to their conversation.


_ARGUMENTS = ("chat_template_kwargs", "documents")
OPTIONS = (*_ARGUMENTS, "loss_weight")
"""Our names of these fields."""

_LEAVE_OUT = "if it is not for the chat template, list it in `ignored_fields`"
# The product of the weights of source, row and message must be a float32 above 0.
_WEIGHTS = (1e-6, MAX_WEIGHT)


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of rows next to their conversation: one item per row, null without the option."""

    arguments: pa.Array
    """JSON object with sorted keys."""
    tools: pa.Array
    """JSON list of the tool definitions among the arguments."""
    weights: pa.Array
    """float32, including the source's factor."""

    def take(self, rows: Ints | list[int]) -> "RowOptions":
        """Return the options of the rows at these indices."""
        at = pa.array(rows, pa.int64())
        return RowOptions(self.arguments.take(at), self.tools.take(at), self.weights.take(at))


def option_names(keys: Collection[str], config: SourceConfig) -> dict[str, str]:
    """Map our option fields to the row's fields, for those among its keys.

    Example:
        >>> config = SourceConfig(path="", fields={"loss_weight": "quality"})
        >>> option_names(["messages", "documents", "quality"], config)
        {'documents': 'documents', 'loss_weight': 'quality'}
    """
    taken = {*config.fields.values(), *config.ignored_fields}
    names = {ours: ours for ours in _ARGUMENTS if ours not in taken}
    names |= {ours: config.fields[ours] for ours in OPTIONS if ours in config.fields}
    return {ours: theirs for ours, theirs in names.items() if theirs in keys}


def read_options(records: Records, config: SourceConfig) -> RowOptions:
    """Read the options of rows; reject rows with invalid ones."""
    rows, number = records.rows, len(records.rows)
    arguments: list[str | None] = [None] * number
    tools: list[str | None] = [None] * number
    weights: list[float | None] = [None if config.loss_weight == 1 else config.loss_weight] * number
    failures: dict[int, tuple[str, str]] = {}
    naming = {keys: option_names(keys, config) for keys in rows.layouts}
    for index, row in enumerate(rows) if any(naming.values()) else ():
        names = naming[tuple(row)] if isinstance(row, dict) else {}
        present = {ours: row[theirs] for ours, theirs in names.items() if row[theirs] is not None}
        try:
            if "loss_weight" in present:
                own = _read_weight(present.pop("loss_weight"), names["loss_weight"])
                weight = own * config.loss_weight
                weights[index] = None if weight == 1 else weight
            if present:
                arguments[index], tools[index] = _read_template_arguments(present, names)
        except BadRowError as bad:
            failures[index] = bad.reason, bad.detail
    factors = pc.cast(pa.array(weights, pa.float64()), pa.float32())
    options = RowOptions(pa.array(arguments, pa.string()), pa.array(tools, pa.string()), factors)
    if failures:
        options = options.take([index for index in range(number) if index not in failures])
        records.reject(failures)
    return options


def _read_weight(value: object, name: str) -> float:
    weight, (low, high) = math.nan, _WEIGHTS
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            weight = float(value)
    if not low <= weight <= high:
        detail = f"{name} is {str(value)[:40]!r}, not a weight from {low:g} to {high:g}"
        raise BadRowError("loss_weight", detail)
    return weight


def _read_template_arguments(
    fields: dict[str, object], names: dict[str, str]
) -> tuple[str | None, str | None]:
    """Return template arguments and tools as JSON."""
    values: dict[str, object] = {}
    for ours in _ARGUMENTS:
        value, name = fields.get(ours), names.get(ours)
        if isinstance(value, str) and value.strip():  # a text column with JSON
            value = parse_field(value, f"{name} ({_LEAVE_OUT})", reason="arguments")
        if not value:
            continue
        if ours == "documents":
            value = {"documents": value}
        if not isinstance(value, dict):
            detail = f"{name} is {kind_of(value)}, not an object; {_LEAVE_OUT}"
            raise BadRowError("arguments", detail)
        if "documents" in value:
            documents = value["documents"]
            if not isinstance(documents, list) or not all(type(each) is dict for each in documents):
                what = f"{name} is not a list of objects, such as {{title, text}}"
                raise BadRowError("arguments", f"{what}; {_LEAVE_OUT}")
            own = [{key: v for key, v in each.items() if v is not None} for each in documents]
            value = value | {"documents": own}
        # Leave out nulls, which Arrow fills in for the keys of other rows.
        values |= {key: item for key, item in value.items() if item is not None}
    tools = read_tools(values.pop("tools", None))
    try:
        check_arguments(values)
        text = orjson.dumps(dict(sorted(values.items()))).decode() if values else None
    except (ValueError, TypeError) as error:  # orjson raises these too
        raise BadRowError("arguments", f"{error}") from None
    if text is not None and "\\u0000" in text:
        raise BadRowError("control", "an argument of the chat template contains the NUL character")
    return text, tools
