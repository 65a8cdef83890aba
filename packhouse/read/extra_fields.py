"""Fields that rows have beyond what their format reads.

Every field that holds something is counted by name. One that holds text which nobody reads stops
the run, unless the source lists it under `ignored_fields`: names tell nothing of what a field is
for, so what it holds decides. Images and the like make a bad row.

Only rows with such fields are looked at, and what is read is compared only where one holds text.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.read.chat_messages import is_media_part
from packhouse.read.records import Rows, value_of
from packhouse.read.row_formats import Adapted, option_names, row_format_called
from packhouse.read.where_select import columns_read
from packhouse.recipe import SourceConfig

ExtraFields = dict[tuple[str, ...], list[str]]
"""Keys of rows -> those of them that the rows' format does not read."""

MAX_NAMES = 100
"""Names counted for a shard; all beyond are one, named `...`."""

IN_MESSAGES = "messages[]."
"""Before the name of a field that messages have, not rows."""


def find_extra_fields(
    layouts: Iterable[tuple[str, ...]], row_format: str, config: SourceConfig
) -> ExtraFields:
    """Find the fields that a format does not read, for each of the rows' sequences of keys.

    Example:
        >>> config = SourceConfig(path="", fields={"question": "ask"})
        >>> find_extra_fields([("ask", "question", "id")], "question_answer", config)
        {('ask', 'question', 'id'): ['question', 'id']}
    """
    unread = row_format_called(row_format).unread
    extra = {}
    for keys in layouts:
        beside = option_names(keys, config).values()
        extra[keys] = [name for name in unread(keys, config.fields) if name not in beside]
    return extra


_NOTHING: tuple[object, ...] = (None, "", [], {})


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of at most `MAX_NAMES` names, the most frequent ones; all others are `...`."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(sorted((name[:100], number) for name, number in named[:MAX_NAMES]))
    rest = sum(number for _, number in named[MAX_NAMES:])
    return kept | ({"...": rest} if rest else {})


def look_at_extra_fields(
    rows: Rows, extra: ExtraFields, config: SourceConfig
) -> tuple[Counter[str], dict[int, tuple[str, str]]]:
    """Count the rows that hold something in an extra field, and find those with media.

    Returns:
        Name of a field -> rows; index of each row with media that is not ignored -> reason,
        sentence.
    """
    counts: Counter[str] = Counter()
    media: dict[int, tuple[str, str]] = {}
    for index, row in enumerate(rows) if any(extra.values()) else ():
        if not isinstance(row, dict):
            continue
        held = [name for name in extra[tuple(row)] if row[name] not in _NOTHING]
        counts.update(held)
        for name in held:
            if name not in config.ignored_fields and is_media(row[name]):
                media[index] = "media", f"the field {name[:100]!r} holds what is not text"
                break
    return counts, media


_MEDIA_FILE = re.compile(
    r"\S+\.(jpe?g|png|gif|bmp|webp|tiff?|svg|mp3|wav|flac|ogg|m4a|opus|mp4|webm|mkv|mov|avi)",
    re.IGNORECASE,
)
_MEDIA_TEXT = ("data:image/", "data:audio/", "data:video/", "iVBORw0KGgo", "/9j/")
_MEDIA_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"ID3", b"OggS", b"fLaC", b"\x1aE")


def is_media(value: object) -> bool:
    """Return True for an image, a sound or a video: its bytes, its file, or a list of some.

    Example:
        >>> [is_media(value) for value in ("a/b.jpg", [{"bytes": None, "path": "x"}], "see b.jpg")]
        [True, True, False]
    """
    if isinstance(value, str):
        is_file = len(value) < 2000 and _MEDIA_FILE.fullmatch(value) is not None
        return is_file or value.startswith(_MEDIA_TEXT)
    if isinstance(value, bytes):
        return value.startswith(_MEDIA_BYTES)
    if isinstance(value, dict):  # as the library `datasets` stores images and audio
        return {"bytes", "path"} == value.keys() or {"array", "sampling_rate"} <= value.keys()
    return isinstance(value, list) and any(map(is_media, value[:10]))


def drop_media_parts(rows: Rows) -> tuple[Rows, set[int]]:
    """Return rows whose contents have no parts with media, and the indices of those that had."""
    num_parts = 0

    def clean(value: object) -> object:
        nonlocal num_parts
        if isinstance(value, str) and value.lstrip()[:1] == "[" and '"type"' in value:
            before, parsed = num_parts, clean(value_of(value))
            return value if num_parts == before else parsed
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list):
            kept = [item for item in value if not is_media_part(item)]
            num_parts += len(value) - len(kept)
            return list(map(clean, kept))
        return value

    cleaned, had_some = [], set()
    for index, row in enumerate(rows):
        before = num_parts
        cleaned.append(clean(row))
        if num_parts > before:
            had_some.add(index)
    return (Rows(cleaned), had_some) if had_some else (rows, had_some)


def check_labels(
    rows: Rows,
    name_of: Callable[[int], str],
    extra: ExtraFields,
    row_format: str,
    config: SourceConfig,
    uri: str,
) -> None:
    """Refuse rows of an `auto` source whose `label` says that an answer is a bad one.

    Args:
        rows: parsed rows.
        name_of: name of a row by its index, for messages: `line 18`.
        extra: from `find_extra_fields`.
        row_format: what `auto` found.
        config: the source.
        uri: for messages.

    Raises:
        SourceError: names the row, and what to write into the recipe.
    """
    if config.format != "auto" or "label" in config.ignored_fields:
        return
    labelled = {keys for keys, names in extra.items() if "label" in names}
    for index, row in enumerate(rows) if labelled else ():
        if isinstance(row, dict) and tuple(row) in labelled and row["label"] is False:
            said = f"source file '{uri}': {name_of(index)} {bad_answer_remedy(row_format)}"
            raise SourceError(said, uri=uri)


def bad_answer_remedy(row_format: str) -> str:
    """Say what to do with rows whose `label` is false, of a format that does not read it."""
    return (
        "has `label: false`, as data for KTO says of a bad answer, and the format "
        f"'{row_format}' would train it as a good one. Write `where: label` to leave such rows "
        "out, or `format: kto` and `pack: {strategy: none}` to publish all with their labels; if "
        f"it says something else, `format: {row_format}`"
    )


# Text that nobody reads.


MIN_ROWS = 3
"""Rows of a source that hold text in a field, at least, for the field to be one of text."""
MIN_SHARE = 0.05
"""The same as a share of the rows that gave a conversation."""
_MIN_WORDS = 4
_MIN_LETTERS = 10
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_WORD = re.compile(r"[^\W\d_]\S*")
"""A word, from its first letter on."""
_MAX_PIECES = 200
"""Texts of a field, or of a conversation, that are compared; a bound on time."""
_MAX_FIELDS = 1000


def is_text(value: str) -> bool:
    """Return True for at least four words, or ten letters of a script without spaces.

    Example:
        >>> is_text("What is the sum?"), is_text("2026-11-27 10:15:00 UTC +1"), is_text("cs.CL")
        (True, False, False)
    """
    if len(list(islice(_WORD.finditer(value), _MIN_WORDS))) == _MIN_WORDS:
        return True
    return not value.isascii() and len(UNSPACED.findall(value)) >= _MIN_LETTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadText:
    """A field of a shard that holds text which nobody reads."""

    rows: int
    """Rows in which it does."""
    row: int
    """Number in the file of the first of them."""
    byte_offset: int | None
    """Where that row begins in the uncompressed file; None: it has no bytes of its own."""


@dataclass(slots=True)
class UnreadTexts:
    """Text that nobody reads in the rows of a shard, by field.

    A field that is a part of what is read in its row, or is made of what is read and of words that
    are the same in other rows, is none: `text` is often the prompt and the answer in a template.
    """

    config: SourceConfig
    _rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Field -> hashes of its text, and of what is left of it without the texts that are read, of
    each row."""
    _first: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def count(
        self,
        rows: Rows,
        given: Sequence[Mapping[str, object]] | None,
        extra: ExtraFields,
        message_fields: Iterable[str],
        adapted: Adapted,
        arguments: pa.Array,
        place_of: Callable[[int], tuple[int, int | None]],
    ) -> None:
        """Look at the rows of a part.

        Args:
            rows: as the format reads them.
            given: the same rows before `select`; None without it.
            extra: of `rows`, from `find_extra_fields`.
            message_fields: fields of their messages that nobody reads.
            adapted: conversations of these rows.
            arguments: of the chat template, as JSON, for each conversation.
            place_of: number in the file and byte offset of a row, by its index.
        """
        ignored, read = set(self.config.ignored_fields), columns_read(self.config)
        unread = {
            keys: [n for n in names if n not in ignored and n.lower() not in read]
            for keys, names in extra.items()
        }
        of_messages = [n for n in message_fields if IN_MESSAGES + n not in ignored]
        if not (given or of_messages or any(unread.values())):
            return
        found: dict[int, dict[str, list[str]]] = {}
        for index in np.unique(adapted.origin).tolist():
            row, values = rows[index], []
            if isinstance(row, dict):
                values = [(name, row[name]) for name in unread[tuple(row)]]
            if of_messages:
                values += _of_messages(row, of_messages)
            if given:
                values += _left_by_select(given[index], read, ignored)
            texts = {
                name: said
                for name, value in values
                if type(value) in (str, list, dict)
                for name, said in _texts_by_name(name, value, ignored)
            }
            if texts:
                found[index] = texts
        if found:
            self._compare(found, adapted, arguments, place_of)

    def _compare(
        self,
        found: dict[int, dict[str, list[str]]],
        adapted: Adapted,
        arguments: pa.Array,
        place_of: Callable[[int], tuple[int, int | None]],
    ) -> None:
        """Count the fields that say what the row's conversations do not."""
        read: defaultdict[int, list[str]] = defaultdict(list)
        places = np.flatnonzero(np.isin(adapted.origin, list(found)))
        messages = adapted.messages.take(pa.array(places))
        ends = np.cumsum(messages.value_lengths())
        of_message = adapted.origin[places][
            np.searchsorted(ends, np.arange(len(messages.flatten())), side="right")
        ].tolist()
        for name in ("content", "context", "reasoning", "tool_calls"):
            for index, text in zip(
                of_message, messages.flatten().field(name).to_pylist(), strict=True
            ):
                if text:
                    read[index].append(text)
        for place in places.tolist():
            for text in (adapted.tools[place].as_py(), arguments[place].as_py()):
                if text:
                    read[int(adapted.origin[place])].append(text)
        for index, texts in found.items():
            pieces = sorted({_plain(t) for text in read[index] for t in (text, *_texts(text))})
            pieces = sorted(filter(None, pieces), key=len, reverse=True)[:_MAX_PIECES]
            everything = "\n".join(pieces)
            for name, said in texts.items():
                own = _joined(text for text in map(_plain, said) if text not in everything)
                if not own:
                    continue
                left = own
                for piece in pieces:
                    before, at, after = left.rpartition(piece)
                    left = f"{before} {after}" if at else left
                if is_text(left) and (name in self._rows or len(self._rows) < _MAX_FIELDS):
                    if name not in self._rows:
                        self._rows[name], self._first[name] = [], place_of(index)
                    self._rows[name].append((hash(own), hash(left)))

    def result(self) -> dict[str, UnreadText]:
        """Return the fields, the most frequent ones, by name."""
        counts = {}
        for name, rows in self._rows.items():
            different = Counter(left for own, left in set(rows) if own != left)
            counts[name] = sum(different[left] < MIN_ROWS for _, left in rows)
        names = sorted((n for n in counts if counts[n]), key=lambda n: (-counts[n], n))
        return {
            name: UnreadText(
                rows=counts[name], row=self._first[name][0], byte_offset=self._first[name][1]
            )
            for name in sorted(names[:MAX_NAMES])
        }


def _left_by_select(
    row: Mapping[str, object], read: set[str], ignored: set[str]
) -> Iterator[tuple[str, object]]:
    """Fields that no expression reads, and of an object whose fields some do the other ones."""
    for name, value in row.items():
        if name.lower() in read or name in ignored:
            continue
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if f"{name}.{k}".lower() not in read}
        yield name, value


def _of_messages(row: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Values of fields of a row's messages, wherever it has messages."""
    fields = row.values() if isinstance(row, dict) else [row]
    values: dict[str, list[object]] = {}
    for value in map(_parsed, fields):
        for message in value if isinstance(value, list) else [value]:
            if isinstance(message, dict):
                for name in names:
                    if name in message:
                        values.setdefault(IN_MESSAGES + name, []).append(message[name])
    yield from values.items()


def _texts_by_name(name: str, value: object, ignored: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a field that holds text with its texts, and after it those inside of it that do.

    Example:
        >>> list(_texts_by_name("input", {"n": 1, "ask": "How do you do?"}, set()))
        [('input', ['How do you do?']), ('input.ask', ['How do you do?'])]
    """
    value, inside = _parsed(value), dict[str, object]()
    if isinstance(value, dict):
        named = ((f"{name}.{key}", item) for key, item in value.items())
        value = inside = {key: item for key, item in named if key not in ignored}
    texts = list(islice(_texts(value), _MAX_PIECES))
    if is_text(_joined(texts)):
        yield name, texts
        for key, item in inside.items():
            yield from _texts_by_name(key, item, ignored)


def _joined(texts: Iterable[str]) -> str:
    """One text of several, without those of a single word: these are roles, tags and names."""
    return " ".join(t for t in texts if len(t.split(None, 1)) > 1 or UNSPACED.search(t))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _parsed(value: object) -> object:
    """A value, parsed where it is text that holds JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = value_of(value)
        return value if parsed is None else parsed
    return value


def _texts(value: object) -> Iterator[str]:
    """Every text in a value; a column of text may hold JSON."""
    value = _parsed(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            if type(inner) in (str, list, dict):  # a vector may have thousands of numbers
                yield from _texts(inner)
