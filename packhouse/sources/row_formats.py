"""The formats of rows: how a format is recognised, and how its rows become conversations.

Each format is one object in `ROW_FORMATS`. To add one, write it here, and its name in
`recipe.RowFormat`.

Rows are read one by one. Rows of text fields (Alpaca and the like) are read column by column, 10
times as fast, as long as all rows of a block hold text in these fields.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from packhouse.errors import ConfigError, PluginError, SourceError
from packhouse.near import near_name
from packhouse.plugins import Plugin, find_plugin
from packhouse.recipe import SourceConfig
from packhouse.records.messages import Answers, assemble
from packhouse.records.tables import MESSAGE
from packhouse.sources.chat_messages import (
    BadRowError,
    Conversation,
    Turn,
    kind_of,
    read_messages,
    rename_messages,
    speaker_key,
)
from packhouse.sources.message_trees import Said, build_trees, tree_paths
from packhouse.sources.records import Ints, Rows
from packhouse.sources.squad import read_questions
from packhouse.sources.strict import parse_text
from packhouse.sources.transcripts import is_transcript, read_transcript

__all__ = [
    "MESSAGE_FIELDS",
    "ROW_FORMATS",
    "Adapted",
    "RowFormat",
    "TextFields",
    "adapt",
    "check_fields",
    "check_same_format",
    "find_row_format",
    "row_format_called",
    "row_format_of",
]


MESSAGE_FIELDS = frozenset(("messages", "conversations", "conversation"))
"""Names of fields that hold messages; what these say, not their names, tells chat from ShareGPT."""


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
    """Index of each conversation's row, rising."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(index of the row, reason, detail) of rows that gave none."""
    unread_fields: Counter[str] = field(default_factory=Counter)
    """Field of messages that holds something and that nobody reads -> rows with it."""
    num_unanswered: int = 0
    """Questions of the rows that have no answer, and so no conversation."""
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    """(index of the row, reason, detail) of rows that are part of another row's conversation."""


def _names(text: str) -> dict[str, tuple[str, ...]]:
    """Read `"text|sentence label"` as fields with the names that files give them."""
    return {item.split("|")[0]: tuple(item.split("|")) for item in text.split()}


@dataclass(frozen=True, kw_only=True)
class RowFormat(ABC):
    """A format: its fields, each with the names that files give it; the first one present counts.

    A row is of a format when it has all of its required fields.
    """

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: Answers = "required"
    needs_all_rows: ClassVar[bool] = False
    """True if a row means nothing without others of its file."""

    def names(self, keys: Collection[str], renamed: Mapping[str, str]) -> dict[str, str]:
        """Our field -> the file's field, for the fields that are among `keys`.

        What `renamed` gives to one field is not read a second time as another one.

        Example:
            >>> ROW_FORMATS["alpaca"].names(["id", "instruction", "context"], {})
            {'instruction': 'instruction', 'input': 'context'}
            >>> ROW_FORMATS["question_answer"].names(["input", "answer"], {"question": "input"})
            {'question': 'input', 'answer': 'answer'}
        """
        found = {}
        known = self.required | self.optional
        taken = {theirs for ours, theirs in renamed.items() if ours in known}
        for ours, aliases in known.items():
            for name in (renamed[ours],) if ours in renamed else aliases:
                if name in keys and (ours in renamed or name not in taken):
                    found[ours] = name
                    break
        return found

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Those of `keys` that the format does not read."""
        read = set(self.names(keys, renamed).values())
        return [key for key in keys if key not in read]

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if a row is of this format."""
        return isinstance(row, dict) and self.required.keys() <= self.names(row, renamed).keys()

    @abstractmethod
    def read(self, row: Any, names: dict[str, str], config: SourceConfig) -> list[Conversation]:
        """Return the conversations of a row, one or more.

        Args:
            row: an object; what its fields hold is not checked yet.
            names: our field -> the row's field, for the fields that it has.
            config: its source.

        Raises:
            BadRowError: it holds none.
        """


def _check_present(
    row: dict[str, object], fields: Iterable[str], names: dict[str, str], config: SourceConfig
) -> None:
    for ours in fields:
        if ours not in names:
            has = ", ".join(repr(key[:40]) for key in list(row)[:12]) or "none"
            wanted = config.fields.get(ours, ours)
            raise BadRowError("fields", f"no field {wanted!r}; the row has {has}")


def _optional(row: dict[str, Any], names: dict[str, str], ours: str) -> Any:
    return row[names[ours]] if ours in names else None


def _optional_text(row: dict[str, Any], names: dict[str, str], ours: str) -> str | None:
    value = _optional(row, names, ours)
    if not isinstance(value, str | None):
        raise BadRowError("type", f"{names[ours]} is {kind_of(value)}, not text")
    return value


@dataclass(frozen=True, kw_only=True)
class TextFields(RowFormat):
    """Rows that give each turn in a field of its own: Alpaca and the like, plain texts, labels."""

    turns: tuple[tuple[str, str], ...] = (("user", "question"), ("assistant", "answer"))
    """(role, our field) of each turn."""
    context: str = ""
    """Our field of what the question is about."""

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the turns, with the system prompt and earlier turns before them."""
        fields = [ours for _, ours in self.turns]
        _check_present(row, fields, names, config)
        for ours in fields:
            if type(row[names[ours]]) is not str:
                raise BadRowError("type", f"{names[ours]} is {kind_of(row[names[ours]])}, not text")
        context = _optional_text(row, names, self.context) or None
        system = _optional_text(row, names, "system")
        texts: list[tuple[str, str, str | None]] = [("system", system, None)] if system else []
        for question, answer in _read_history(_optional(row, names, "history")):
            texts += [("user", question, None), ("assistant", answer, None)]
        for role, ours in self.turns:
            texts.append((role, row[names[ours]], context if role == "user" else None))
        label = None
        if "label" in self.required:
            _check_present(row, ["label"], names, config)
            label = _class_index(row[names["label"]], config.label_names)
        return [
            Conversation([(*text, None, None, None, None, None) for text in texts], None, label)
        ]

    def read_columns(
        self, rows: Rows, naming: Mapping[tuple[str, ...], dict[str, str]], config: SourceConfig
    ) -> Adapted | None:
        """Read all rows at once; None if a row needs a closer look."""
        names: dict[str, str] = {}
        for of_layout in naming.values():
            if any(names.setdefault(ours, name) != name for ours, name in of_layout.items()):
                return None  # one field by two names
            if not self.required.keys() <= of_layout.keys():
                return None
        if not names or not rows.are_objects or "system" in names or "history" in names:
            return None
        columns = [[row[names[ours]] for row in rows] for _, ours in self.turns]
        contexts = None
        if self.context in names:
            contexts = [row.get(names[self.context]) for row in rows]
        if not rows.value_types <= {str}:
            if any(set(map(type, column)) != {str} for column in columns):
                return None
            if not set(map(type, contexts or ())) <= {str, type(None)}:
                return None
        labels = None
        if "label" in self.required:
            try:
                labels = _class_indexes([row[names["label"]] for row in rows], config.label_names)
            except BadRowError:
                return None
        # Columns [q1, q2], [a1, a2] -> contents [q1, a1, q2, a2], contexts [c1, None, c2, None].
        num_rows, step = len(rows), len(columns)
        contents = [""] * (num_rows * step)
        for at, column in enumerate(columns):
            contents[at::step] = column
        flat = {"role": [role for role, _ in self.turns] * num_rows, "content": contents}
        arrays = {name: pa.array(values, pa.string()) for name, values in flat.items()}
        if contexts is not None:
            spread: list[str | None] = [None] * len(contents)
            spread[::step] = [context or None for context in contexts]
            arrays["context"] = pa.array(spread, pa.string())
        return Adapted(
            messages=assemble(arrays, np.full(num_rows, step, np.int64)),
            tools=pa.nulls(num_rows, pa.string()),
            labels=pa.array([None] * num_rows if labels is None else labels, pa.int64()),
            origin=np.arange(num_rows),
        )


def _read_history(value: object) -> list[list[str]]:
    """Earlier turns as [question, answer] pairs."""
    if value is None or value == "":
        return []
    if isinstance(value, str):  # a column of text that holds JSON
        value, _ = parse_text(value)
    if not isinstance(value, list):
        raise BadRowError("type", f"history is {kind_of(value)}, not a list of pairs")
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise BadRowError("type", "history is not a list of [question, answer] pairs of text")
    return value


def _class_indexes(labels: list[object], classes: list[str] | None) -> list[int]:
    """Class index of each label; each different one is looked at once."""
    if not set(map(type, labels)) <= {int, str}:
        raise BadRowError("label", "a label is neither a number nor text")
    known = {label: _class_index(label, classes) for label in set(labels)}
    return [known[label] for label in labels]


def _class_index(label: object, classes: list[str] | None) -> int:
    if type(label) is not int and type(label) is not str:
        raise BadRowError("label", f"the label is {kind_of(label)}, neither a number nor text")
    if isinstance(label, str):
        if classes is not None and label in classes:
            return classes.index(label)
        text = label.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            known = f"not one of {classes}" if classes else "text; set label_names"
            raise BadRowError("label", f"the label {label[:60]!r} is {known}")
        label = int(text)
    if label < 0 or (classes is not None and label >= len(classes)):
        last = len(classes) - 1 if classes else "..."
        raise BadRowError("label", f"the label {label} is outside 0 to {last}")
    if label >= 2**31:
        raise BadRowError("label", f"the label {label} is no class index")
    return label


@dataclass(frozen=True, kw_only=True)
class Messages(RowFormat):
    """Rows with a field of messages, which name their speakers by `role` or by `from`."""

    speaker: Literal["role", "from"]

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if the first message that names its speaker does so by the format's key."""
        if not isinstance(row, dict):
            return False
        names = self.names(row, renamed)
        messages = _optional(row, names, next(iter(self.required)))
        if isinstance(messages, str) and messages.lstrip()[:1] == "[":
            messages, _ = parse_text(messages)
        return speaker_key(messages) == self.speaker

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the messages, after the row's system prompt."""
        _check_present(row, self.required, names, config)
        system = _optional_text(row, names, "system")
        messages = row[names[next(iter(self.required))]]
        if config.roles or not {"role", "content"}.isdisjoint(config.fields):
            messages = rename_messages(messages, self.speaker, config.fields, config.roles)
        return [read_messages(messages, _optional(row, names, "tools"), system)]


@dataclass(frozen=True, kw_only=True)
class BareMessages(RowFormat):
    """Rows that are themselves a list of messages."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if the row is a list in which a message names its speaker."""
        return speaker_key(row) is not None

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Nothing: a row that has keys is no list."""
        return []

    def read(self, row: object, names: dict[str, str], config: SourceConfig) -> list[Conversation]:
        """Read the messages."""
        return [read_messages(row, None, None)]


@dataclass(frozen=True, kw_only=True)
class Preference(RowFormat):
    """A prompt with a chosen and a rejected answer: the chosen one is read."""

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the chosen conversation, after the prompt unless it begins with it."""
        _check_present(row, self.required, names, config)
        chosen = _messages_in_text(row[names["chosen"]])
        prompt = _messages_in_text(_optional(row, names, "prompt"))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list | None):
            raise BadRowError("type", f"prompt is {kind_of(prompt)}, neither text nor messages")
        if isinstance(chosen, str):
            chosen = [{"role": "assistant", "content": chosen}]
        if not isinstance(chosen, list):
            raise BadRowError("type", f"chosen is {kind_of(chosen)}, neither text nor messages")
        if prompt and chosen[: len(prompt)] != prompt:
            chosen = [*prompt, *chosen]
        system = _optional_text(row, names, "system")
        return [read_messages(chosen, _optional(row, names, "tools"), system)]


def _messages_in_text(value: object) -> object:
    """The messages that JSON text holds; other text, and anything else, as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        parsed, bad = parse_text(value)
        if bad is None and parsed and all(speaker_key([item]) for item in parsed):
            return parsed
    return value


@dataclass(frozen=True, kw_only=True)
class MessageTree(RowFormat):
    """Message trees (OpenAssistant): one path, or every path, from the prompt to an answer."""

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """All but the fields of every message of a tree."""
        return [key for key in super().unread(keys, renamed) if key not in ("deleted", "rank")]

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the best path, or all paths, best first."""
        _check_present(row, self.required, names, config)
        root = {ours: row[name] for ours, name in names.items()} | {"deleted": row.get("deleted")}
        return [_spoken(path) for path in tree_paths(root, config.oasst_paths)]


def _spoken(path: list[Said]) -> Conversation:
    rest = (None, None, None, None, None, None)
    return Conversation([(said.role, said.text, *rest) for said in path])


@dataclass(frozen=True, kw_only=True)
class FlatMessages(RowFormat):
    """Message trees with a row for each message, which names its parent (OpenAssistant's OASST1).

    A conversation stands at the row of its first message. The other rows of its tree are dropped:
    as `joined` where they are part of a conversation, else as `other_path`.
    """

    needs_all_rows: ClassVar[bool] = True

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Not by itself: see `read_all`."""
        raise BadRowError("tree", "the row is one message of a tree; set format: oasst_flat")

    def read_all(
        self, rows: Rows, naming: Mapping[tuple[str, ...], dict[str, str]], config: SourceConfig
    ) -> "Found":
        """Read the trees of a whole file, in the order of their first messages."""
        trees = build_trees(rows, lambda row: naming[tuple(row)])
        found = Found(failures=trees.failures)
        for root in trees.roots:
            conversations: list[Conversation] = []
            joined: set[int] = set()
            try:
                paths = tree_paths(root, config.oasst_paths)
                joined = {said.message["row"] for path in paths for said in path}
                conversations = [_spoken(path) for path in paths]
            except BadRowError as bad:
                found.failures.append((root["row"], bad.reason, bad.detail))
            found.conversations += ((root["row"], each) for each in conversations)
            detail = f"in the tree of message {root['message_id'][:60]!r}"
            stack = list(root["replies"])
            while stack:
                message = stack.pop()
                reason = "joined" if message["row"] in joined else "other_path"
                found.dropped.append((message["row"], reason, detail))
                stack += message["replies"]
        found.dropped.sort()
        return found


@dataclass(slots=True)
class Found:
    """What a format finds in rows that are read together."""

    conversations: list[tuple[int, Conversation]] = field(default_factory=list)
    """With the index of their row, rising."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    """(index, reason, detail) of rows that are part of another row's conversation, or of none."""


@dataclass(frozen=True, kw_only=True)
class Transcript(RowFormat):
    """Rows with a conversation in one text; see `packhouse.sources.transcripts`."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if a field that is named for it holds one.

        A plain `text` may be meant as it is, and beside a `prompt` it is a preference.
        """
        if not isinstance(row, dict) or "prompt" in row:
            return False
        name = self.names(row, renamed).get("transcript")
        is_named = name in ("chosen", "transcript") or "transcript" in renamed
        return is_named and is_transcript(row.get(name))

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the turns, after the row's system prompt."""
        _check_present(row, self.required, names, config)
        text = row[names["transcript"]]
        if not isinstance(text, str):
            raise BadRowError("type", f"{names['transcript']} is {kind_of(text)}, not text")
        system = _optional_text(row, names, "system")
        turns = [("system", system)] if system else []
        rest = (None, None, None, None, None, None)
        return [Conversation([(*turn, *rest) for turn in turns + read_transcript(text)])]


@dataclass(frozen=True, kw_only=True)
class Squad(RowFormat):
    """Questions about a text, with answers found in it: SQuAD's articles, or a question a row.

    Of several answers the first is read; questions without any are left out of an article.
    """

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True for an article with paragraphs, and for a question with answers."""
        names = self.names(row, renamed) if isinstance(row, dict) else {}
        return "paragraphs" in names or {"question", "answers"} <= names.keys()

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read each question that has an answer."""
        if "paragraphs" in names:
            return read_questions(row[names["paragraphs"]], "question", "answers")
        _check_present(row, ("question", "answers"), names, config)
        paragraph = {"context": row.get(names.get("context", "")), "qas": [row]}
        return read_questions([paragraph], names["question"], names["answers"])


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


_ASIDE = "system|system_prompt history"
_TALK = "tools|functions system|system_prompt"
# In the order of trial: a format that asks for more comes before one that asks for less.
ROW_FORMATS: dict[str, RowFormat] = {
    "messages": BareMessages(required={}),
    "chat": Messages(
        required=_names("messages|conversations|conversation"),
        optional=_names(_TALK),
        speaker="role",
    ),
    "sharegpt": Messages(
        required=_names("conversations|messages|conversation"),
        optional=_names(_TALK),
        speaker="from",
    ),
    "transcript": Transcript(
        required=_names("transcript|chosen|text|conversation"),
        optional=_names("rejected system|system_prompt"),
    ),
    "preference": Preference(
        required=_names("chosen"), optional=_names("prompt rejected system|system_prompt tools")
    ),
    "oasst": MessageTree(required=_names("text role replies")),
    "oasst_flat": FlatMessages(
        required=_names("message_id parent_id text role"), optional=_names("rank deleted")
    ),
    "alpaca": TextFields(
        required=_names("instruction output"),
        optional=_names(f"input|context {_ASIDE}"),
        turns=(("user", "instruction"), ("assistant", "output")),
        context="input",
    ),
    "dolly": TextFields(
        required=_names("instruction response"),
        optional=_names(f"context|input category {_ASIDE}"),
        turns=(("user", "instruction"), ("assistant", "response")),
        context="context",
    ),
    "prompt_completion": TextFields(
        required=_names("prompt completion|response"),
        optional=_names(_ASIDE),
        turns=(("user", "prompt"), ("assistant", "completion")),
    ),
    "question_answer": TextFields(
        required=_names("question answer"),
        optional=_names(f"context|input {_ASIDE}"),
        turns=(("user", "question"), ("assistant", "answer")),
        context="context",
    ),
    "classification": TextFields(
        required=_names("text|sentence|content label"), turns=(("user", "text"),), answers="label"
    ),
    "text": TextFields(required=_names("text"), turns=(("assistant", "text"),), answers="text"),
    "squad": Squad(
        required=_names("paragraphs"), optional=_names("context question answers title id")
    ),
    "mixed": Mixed(required={}),
}
_CONVERSATIONS = {
    name: known
    for name, known in ROW_FORMATS.items()
    if known.answers == "required" and name not in ("mixed", "oasst_flat")
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
            given = self.function({**rest, **renamed})
        conversations = given if isinstance(given, list) else [given]
        if not conversations:
            raise BadRowError("no_messages", f"{self.plugin} found no conversation")
        return [self._conversation(each, config) for each in conversations]

    def _conversation(self, given: object, config: SourceConfig) -> Conversation:
        if not isinstance(given, dict) or not {"messages"} <= given.keys() <= _OF_CONVERSATION:
            raise PluginError(
                f"{self.plugin} returned {_keys_of(given)}; a conversation is a dict with "
                "'messages', and maybe 'tools' and 'label'"
            )
        found = read_messages(given["messages"], given.get("tools"), None)
        if given.get("label") is None:
            return found
        return found._replace(label=_class_index(given["label"], config.label_names))


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
    known = {name for each in formats for name in (*each.required, *each.optional)} | _OF_MESSAGES
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
