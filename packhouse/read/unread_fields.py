"""Find fields of rows that their format does not read.

Every such field that is not empty is counted by name. A field with text that nothing reads stops
the run unless the source lists it in `ignored_fields`: a name does not tell what a field is for, so
its contents decide. Images and other media make a row bad.

Only rows with such fields are examined, and only fields with text are compared with what is read.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa

from packhouse.read.chat_messages import IMAGE_PATHS, is_media_part
from packhouse.read.file_formats import file_error
from packhouse.read.json_parsing import Records, Rows, value_of
from packhouse.read.row_formats import Adapted, option_names, row_format_called
from packhouse.recipe import SourceConfig
from packhouse.records.message_rules import FlatMessages
from packhouse.registry import function_of_addon

ExtraFields = dict[tuple[str, ...], list[str]]
"""Keys of rows -> those of them that the rows' format does not read."""

MAX_NAMES = 100
"""Names counted per shard; all further ones are counted together as `...`."""

IN_MESSAGES = "messages[]."
"""Prefix for the name of a field of messages."""


def find_extra_fields(
    layouts: Iterable[tuple[str, ...]], row_format: str, config: SourceConfig
) -> ExtraFields:
    """Find the fields that a format does not read, for each distinct sequence of keys.

    Example:
        >>> config = SourceConfig(path="", fields={"question": "ask"})
        >>> find_extra_fields([("ask", "question", "id")], "question_answer", config)
        {('ask', 'question', 'id'): ['question', 'id']}
    """
    unread = row_format_called(row_format).unread
    extra = {}
    for keys in layouts:
        options = option_names(keys, config).values()
        extra[keys] = [name for name in unread(keys, config.fields) if name not in options]
    return extra


_NOTHING: tuple[object, ...] = (None, "", [], {})


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Keep the `MAX_NAMES` most frequent names; count all others together as `...`."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(sorted((name[:100], number) for name, number in named[:MAX_NAMES]))
    rest = sum(number for _, number in named[MAX_NAMES:])
    return kept | ({"...": rest} if rest else {})


def look_at_extra_fields(
    rows: Rows,
    extra: ExtraFields,
    name_of: Callable[[int], str],
    row_format: str,
    config: SourceConfig,
    uri: str,
) -> tuple[Counter[str], dict[int, tuple[str, str]]]:
    """Count the rows with a non-empty extra field, and find those with media.

    Args:
        rows: parsed rows.
        extra: from `find_extra_fields`.
        name_of: name of a row by its index, for messages: `line 18`.
        row_format: their format.
        config: the source.
        uri: for messages.

    Returns:
        Field -> number of rows; index of each row with media that is not ignored -> reason and
        detail.

    Raises:
        SourceError: the `label` of a row of an `auto` source marks its answer as bad; the message
            names the row and what to change in the recipe.
    """
    checks_labels = config.format == "auto" and "label" not in config.ignored_fields
    counts: Counter[str] = Counter()
    media: dict[int, tuple[str, str]] = {}
    for index, row in enumerate(rows) if any(extra.values()) else ():
        if not isinstance(row, dict):
            continue
        held = [name for name in extra[tuple(row)] if row[name] not in _NOTHING]
        # Not `== False`: classes are often called 0 and 1.
        if checks_labels and "label" in held and row["label"] is False:
            raise file_error(
                uri,
                f": {name_of(index)} has `label: false`, which marks a bad answer in data for KTO, "
                f"and format '{row_format}' would train it as a good one. Set `where: label` to "
                "leave out such rows, or `format: kto` and `pack: {strategy: none}` to publish all "
                f"rows with their labels. If the label means something else, set `format: "
                f"{row_format}`",
            )
        counts.update(held)
        for name in held:
            if name not in config.ignored_fields and is_media(row[name]):
                media[index] = "media", f"the field {name[:100]!r} contains media, not text"
                break
    return counts, media


_WORD_OF_PATH = r"[\w(][\w.()-]*"
_SOME_WORDS = rf"{_WORD_OF_PATH}(?: {_WORD_OF_PATH}){{0,5}}"
_MEDIA_FILE = re.compile(
    rf"(?:\S+|(?:[A-Z]:\\|/)(?:{_SOME_WORDS}[/\\]){{2,}}{_SOME_WORDS}"
    r"|(?:[\w.-]+/){2,}[\w-]+(?: [\w()-]+){1,5})"
    r"\.(jpe?g|png|gif|bmp|webp|tiff?|svg|mp3|wav|flac|ogg|m4a|opus|mp4|webm|mkv|mov|avi)",
    re.IGNORECASE,
)
"""A name without spaces, or a path with two folders and a few spaces, which a relative one may have
only after its last slash. A command such as `/usr/bin/ffmpeg -i 3.mov out.mp4` is
text."""
_MEDIA_TEXT = ("data:image/", "data:audio/", "data:video/", "iVBORw0KGgo", "/9j/")
_MEDIA_NAMES = ("image", "video", "audio")
_MEDIA_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"ID3", b"OggS", b"fLaC", b"\x1aE")


def is_media(value: object) -> bool:
    r"""Return True for an image, audio or video: its bytes, its file name, or a list of these.

    Example:
        >>> [is_media(value) for value in ("a/b.jpg", [{"bytes": None, "path": "x"}], "see b.jpg")]
        [True, True, False]
        >>> is_media("/Users/Ann Smith/b.mp3"), is_media("/usr/bin/ffmpeg -i 3.mov out.mp4")
        (True, False)
        >>> is_media("data/images/a b.png"), is_media([{"video": "a.mp4", "start": 0}])
        (True, True)
    """
    if isinstance(value, str):
        is_file = len(value) < 2000 and _MEDIA_FILE.fullmatch(value) is not None
        return is_file or value.startswith(_MEDIA_TEXT)
    if isinstance(value, bytes):
        return value.startswith(_MEDIA_BYTES)
    if isinstance(value, dict):  # as the library `datasets` stores images and audio, or by name
        is_stored = {"bytes", "path"} == value.keys() or {"array", "sampling_rate"} <= value.keys()
        named = (item for key, item in value.items() if key.lower().startswith(_MEDIA_NAMES))
        return is_stored or any(map(is_media, named))
    return isinstance(value, list) and any(map(is_media, value[:10]))


def drop_media_parts(rows: Rows) -> tuple[Rows, set[int]]:
    """Remove content parts with media; return the rows, and the indices of those that had some."""
    cleaned = list(map(_without_media, rows))
    had_some = {index for index, row in enumerate(rows) if row != cleaned[index]}
    for index in had_some:
        cleaned[index] = _without_marks(cleaned[index])
    return (Rows(cleaned), had_some) if had_some else (rows, had_some)


def drop_media_marks(rows: Rows, ignored: Collection[str]) -> tuple[Rows, set[int]]:
    """Remove marks such as `<image>` from rows with a field of media, as LLaVA has them.

    Args:
        rows: rows before `select`, which may leave out the field.
        ignored: fields that do not count.

    Returns:
        The rows, and the indices of those that had marks.
    """
    had_some = dict[int, object]()
    for index, row in enumerate(rows):
        if isinstance(row, dict) and any(is_media(row[n]) for n in row if n not in ignored):
            cleaned = _without_marks(row)
            if cleaned != row:
                had_some[index] = cleaned
    if not had_some:
        return rows, set()
    return Rows(had_some.get(index, row) for index, row in enumerate(rows)), set(had_some)


_MARK = r"<(?:image|audio|video)>"
# In the middle of a text, and with a closing tag, it is HTML.
_MARKS = re.compile(rf"\A\s*(?:{_MARK}\s*)+|(?:\s*{_MARK})+\s*\Z")
_CLOSING = re.compile("</(?:audio|video)>")


def _without_marks(value: object) -> object:
    """Remove the marks at the start and the end of each text in a value."""
    if isinstance(value, str):
        has_any = "<" in value and not _CLOSING.search(value)
        return _MARKS.sub("", value) if has_any else value
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return value


def _without_media(value: object) -> object:
    """Remove content parts with media from a value; text that is JSON becomes a list if it had."""
    if isinstance(value, str) and value.lstrip()[:1] == "[" and '"type"' in value:
        parsed = value_of(value)
        cleaned = _without_media(parsed)
        return value if cleaned == parsed else cleaned
    if isinstance(value, str):
        return IMAGE_PATHS.sub("", value) if "</img>" in value else value
    if isinstance(value, dict):
        return {key: _without_media(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_media(item) for item in value if not is_media_part(item)]
    return value


# Text that nothing reads.


MIN_ROWS = 3
"""Smallest number of rows with text in a field for it to count as a text field."""
MIN_SHARE = 0.05
"""Smallest share of rows, among those that gave a conversation."""
_MIN_WORDS = 4
_MIN_LETTERS = 10
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
# A word, from its first letter.
_WORD = re.compile(r"[^\W\d_]\S*")
# Texts of a field or conversation that are compared, and fields of a shard: bound time and memory.
_MAX_PIECES = 200
_MAX_FIELDS = 1000


def is_text(value: str) -> bool:
    """Return True for at least four words, or ten letters of a script without word spaces.

    Example:
        >>> is_text("What is the sum?"), is_text("2026-11-27 10:15:00 UTC +1"), is_text("cs.CL")
        (True, False, False)
    """
    if len(list(islice(_WORD.finditer(value), _MIN_WORDS))) == _MIN_WORDS:
        return True
    return not value.isascii() and len(UNSPACED.findall(value)) >= _MIN_LETTERS


@dataclass(frozen=True, slots=True)
class UnreadText:
    """A field of a shard with text that nothing reads."""

    rows: int
    """Number of rows with such text."""
    row: int
    """Number, in the file, of the first of these rows."""
    byte_offset: int | None
    """Offset of that row in the uncompressed file; None for formats without bytes."""


@dataclass(slots=True)
class UnreadTexts:
    """Counts fields with text that nothing reads, in the rows of a shard."""

    config: SourceConfig
    _rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Field -> for each row, the hash of its text and the hash of what remains of it after
    removing the texts that are read."""
    _first: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def count(
        self,
        records: Records,
        extra: ExtraFields,
        message_fields: Iterable[str],
        adapted: Adapted,
        arguments: pa.Array,
        place_of: Callable[[int], tuple[int, int | None]],
    ) -> None:
        """Count the fields in the rows of a part.

        Args:
            records: the rows that the format reads, also before `select`.
            extra: extra fields of the rows, from `find_extra_fields`.
            message_fields: fields of their messages that nothing reads.
            adapted: conversations of these rows.
            arguments: for each conversation, the chat template's arguments as JSON.
            place_of: returns the number in the file and the byte offset of a row, by index.
        """
        rows, given = records.rows, records.originals
        ignored, read = set(self.config.ignored_fields), set[str]()
        if self.config.is_reshaped:
            read = function_of_addon("columns_read")(self.config)
        unread = {
            keys: [n for n in names if n not in ignored and n.lower() not in read]
            for keys, names in extra.items()
        }
        of_messages = [n for n in message_fields if IN_MESSAGES + n not in ignored]
        by_plugin = adapted.unread_by_plugin
        if not (given or of_messages or any(unread.values()) or by_plugin):
            return
        found: dict[int, dict[str, list[str]]] = {}
        for index in np.unique(adapted.origin).tolist():
            row, values = rows[index], []
            if isinstance(row, dict):
                own = [n for n in by_plugin.get(index, ()) if n not in ignored]
                own = [name for name in own if name.lower() not in read]
                values = [(name, row[name]) for name in (*unread[tuple(row)], *own)]
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

    # A field does not count if its text is part of what is read from its row, or consists of what
    # is read and words that repeat in other rows: `text` is often the prompt and answer in a
    # template. So the hash of what remains is kept, and `result` drops those that repeat.

    def _compare(
        self,
        found: dict[int, dict[str, list[str]]],
        adapted: Adapted,
        arguments: pa.Array,
        place_of: Callable[[int], tuple[int, int | None]],
    ) -> None:
        """Count the fields with text that is not in the row's conversations."""
        read = defaultdict[int, list[str]](list)
        places = np.flatnonzero(np.isin(adapted.origin, list(found)))
        flat, origin = (
            FlatMessages.of(adapted.messages.take(pa.array(places))),
            adapted.origin[places],
        )
        columns = [(origin[flat.rows], text) for text in (flat.content, flat.context)]
        columns += [(origin[flat.rows], text) for text in (flat.reasoning, flat.tool_calls)]
        columns += [(origin, text.take(pa.array(places))) for text in (adapted.tools, arguments)]
        for rows, texts_read in columns:
            for index, text in zip(rows.tolist(), texts_read.to_pylist(), strict=True):
                if text:
                    read[index].append(text)
        for index, texts in found.items():
            pieces = sorted({_plain(t) for text in read[index] for t in (text, *_texts(text))})
            # The longest first, so that a prompt is removed before a short answer that occurs in
            # it.
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
                    # Hashes, so that not all texts of a shard are in memory. Python salts them per
                    # process, but they are compared only within one shard.
                    self._rows[name].append((hash(own), hash(left)))

    def result(self) -> dict[str, UnreadText]:
        """Return the most frequent fields, sorted by name."""
        counts = {}
        for name, rows in self._rows.items():
            different = Counter(left for own, left in set(rows) if own != left)
            counts[name] = sum(different[left] < MIN_ROWS for _, left in rows)
        names = sorted((n for n in counts if counts[n]), key=lambda n: (-counts[n], n))
        kept = sorted(names[:MAX_NAMES])
        return {name: UnreadText(counts[name], *self._first[name]) for name in kept}


def _left_by_select(
    row: Mapping[str, object], read: set[str], ignored: set[str]
) -> Iterator[tuple[str, object]]:
    """Yield fields that no expression reads; of objects read in part, the unread fields."""
    for name, value in row.items():
        if name.lower() in read or name in ignored:
            continue
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if f"{name}.{k}".lower() not in read}
        yield name, value


def _of_messages(row: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the values of fields of a row's messages, in whatever field these are."""
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
    """Yield a field with its texts if it has any, then the fields with texts inside of it.

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
    """Join texts, without single words, which are roles, tags and names."""
    return " ".join(t for t in texts if len(t.split(None, 1)) > 1 or UNSPACED.search(t))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _parsed(value: object) -> object:
    """Parse a value that is JSON text; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = value_of(value)
        return value if parsed is None else parsed
    return value


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a value; text may itself be JSON."""
    value = _parsed(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            if type(inner) in (str, list, dict):  # skips vectors with thousands of numbers
                yield from _texts(inner)
