"""Survey a file: its encoding, its format, the location of its rows, and the values of its fields.

A local file of up to 2 GB is read once, in full, by the cutters and parsers of `packhouse.read`.
Keys, types and shapes are counted over all rows, and examples are sampled evenly from the file.
Remote files above 16 MiB and local files above 2 GB are only read in part; `Survey.part` names the
ranges.

    {"ask": "1+1?", "id": 1}        layout (ask, id): 2 rows, of which 2 examples are kept
    {"ask": "2+2?", "id": 2}        field ask: text in 3 rows; id: a number in 2
    {"ask": "3+3?"}                 layout (ask): 1 row
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from packhouse.errors import SourceError
from packhouse.read.chat_messages import speaker_key
from packhouse.read.compression import FileStream, name_row, read_range
from packhouse.read.file_formats import (
    BOM,
    Compression,
    compression_of,
    format_of,
    format_of_name,
)
from packhouse.read.json_parsing import INVALID_ESCAPE, Records, gc_paused, parse_pieces, unwrapped
from packhouse.read.parquet_files import TABULAR, decode_head, parse_tables
from packhouse.read.record_boundaries import HEAD_BYTES, path_of_list, spans_by_layout
from packhouse.read.row_formats import row_format_of
from packhouse.read.sharding import TEXT_FILES, read_parts, scan_source
from packhouse.read.source_files import SourceFile, file_errors, local_path, open_file
from packhouse.read.unread_fields import is_media, is_text
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.recipe.sections import FileFormat
from packhouse.system.escaping import for_terminal
from packhouse.system.progress import advance

MAX_WHOLE_BYTES = 2 * 10**9
"""Largest local file that is read in full, in stored bytes."""
MAX_REMOTE_BYTES = 16 * 2**20
"""Largest remote file that is read in full, in stored bytes."""

_MAX_ROW_BYTES = 2**31
_ANY_SIZE = ValidateConfig(max_row_bytes=_MAX_ROW_BYTES)
_SHARD_BYTES = 8 * 2**20
_NUM_RANGES, _RANGE_BYTES, _RANGE_ROWS = 16, 2**20, 1000
_MAX_LAYOUTS = 200
_MAX_VALUES = 1000
"""Number of distinct short values counted per field."""
_LOOKED_AT = 100  # values per block that are checked for images, audio and video
_MAX_VALUE_CHARS = 200
_NUM_EXAMPLES = 100
"""Minimum number of examples kept per layout; at most twice as many are kept."""


@dataclass(slots=True)
class Field:
    """Values of one field, counted over all rows."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Number of rows by kind: `text`, `number`, `true or false`, `list`, `object`, `nothing`."""
    num_texts: int = 0
    """Number of rows whose value contains text, according to `holds_text`."""
    values: Counter[str | int | float | bool] = field(default_factory=Counter)
    """Number of rows by value; empty if `has_few_values` is False."""
    has_few_values: bool = True
    """False if a value is long, a list or an object, or if there are over `_MAX_VALUES` values."""
    has_media: bool = False
    """True if images, audio or video were found in the values checked."""

    def add(self, values: Sequence[Any]) -> None:
        """Count the values of a block of rows."""
        types = Counter(map(type, values))
        for kind, number in types.items():
            self.kinds[_KINDS.get(kind, kind.__name__)] += number
        if self.has_few_values:
            if types.keys() <= {str, int, float, bool, type(None)}:
                self.values.update(value for value in values if value not in (None, ""))
            is_long = any(isinstance(v, str) and len(v) > _MAX_VALUE_CHARS for v in self.values)
            if is_long or len(self.values) > _MAX_VALUES or types.keys() & {list, dict}:
                self.has_few_values = False
                self.values.clear()
        self.has_media = self.has_media or any(map(is_media, values[:_LOOKED_AT]))
        if types.keys() & {str, list, dict}:
            self.num_texts += sum(map(holds_text, values))

    @property
    def kind(self) -> str:
        """Most frequent kind other than `nothing`."""
        known = [kind for kind, _ in self.kinds.most_common() if kind != "nothing"]
        return known[0] if known else "nothing"


_KINDS = {
    str: "text",
    int: "number",
    float: "number",
    bool: "true or false",
    list: "list",
    dict: "object",
    type(None): "nothing",
}


@dataclass(slots=True)
class Layout:
    """Rows that have the same keys and the same kinds of lists and objects."""

    num_rows: int = 0
    examples: list[tuple[int, Any]] = field(default_factory=list)
    """Row numbers and rows, evenly spread over the file."""
    step: int = 1

    def add(self, number: int, row: Any) -> None:
        """Count a row and keep every `step`th one, doubling `step` when there are too many."""
        if self.num_rows % self.step == 0:
            self.examples.append((number, row))
            if len(self.examples) > 2 * _NUM_EXAMPLES:
                self.examples = self.examples[::2]
                self.step *= 2
        self.num_rows += 1

    @property
    def rows(self) -> list[Any]:
        """Rows of the examples, without their numbers."""
        return [row for _, row in self.examples]


@dataclass(slots=True)
class Survey:
    """Contents of one file: its format, fields, layouts and bad rows."""

    file: SourceFile
    file_format: FileFormat
    settings: dict[str, Any]
    """Keys of the recipe's source that locate the rows, such as `encoding` and `rows_at`."""
    beside: Sequence[str] = ()
    """With `rows_at`: the fields of the objects around the rows that have text."""
    part: str = ""
    """Description of the ranges read; empty if the file was read in full."""
    num_rows: int = 0
    """Number of rows read, good and bad."""
    num_bad: int = 0
    """Number of rows that cannot be parsed."""
    first_bad: str = ""
    fields: dict[str, Field] = field(default_factory=dict)
    layouts: dict[object, Layout] = field(default_factory=dict)

    def add(self, records: Records) -> None:
        """Count the rows of a block of records."""
        rows = unwrapped(records.rows) if self.settings.get("unwrap") else records.rows
        for failure in records.failures:
            self.num_bad += 1
            number = self.num_rows + failure.number
            if not self.first_bad:
                at = None
                if records.spans is not None and not self.part:
                    at = records.byte_start + int(records.spans[failure.number, 0])
                encoding = self.settings.get("encoding", "utf-8")
                place = name_row(self.file.uri, number, at, encoding)
                self.first_bad = f"{place}: {failure.detail}"
        by_keys: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for number, row in zip(records.numbers.tolist(), rows, strict=True):
            keys = _layout_of(row)
            if keys not in self.layouts:
                keys = keys if len(self.layouts) < _MAX_LAYOUTS else "other"
                self.layouts.setdefault(keys, Layout())
            self.layouts[keys].add(self.num_rows + number, row)
            if type(row) is dict:
                by_keys.setdefault(tuple(row), []).append(row)
        for names, alike in by_keys.items():
            for name in names:
                found = self.fields.setdefault(name, Field())
                found.add([row[name] for row in alike])
        self.num_rows += records.num_records

    @property
    def examples(self) -> list[tuple[int, Any]]:
        """The examples of all layouts, with their row numbers, in file order."""
        examples = (example for layout in self.layouts.values() for example in layout.examples)
        return sorted(examples, key=lambda example: example[0])


def _layout_of(row: Any) -> object:
    if type(row) is not dict:
        return type(row), speaker_key(row) if type(row) is list else None
    # Lists of messages with `role` and with `from` are two layouts, because two formats read them.
    # Rows of file 1312 have the same fields in any order.
    inner = []
    for name in (names := sorted(row)):
        value = row[name]
        if value and type(value) is list:
            first = value[0]
            inner.append((name, speaker_key(value) or type(first)))
        elif value and type(value) is dict:
            inner.append((name, dict))
    return tuple(names), tuple(inner)


def holds_text(value: object) -> bool:
    """Return True if a value is or contains text, by the same rule as `prepare`."""
    if isinstance(value, str):
        return is_text(value)
    if isinstance(value, list | dict):
        return any(map(holds_text, value.values() if isinstance(value, dict) else value))
    return False


def survey(file: SourceFile, given: Mapping[str, Any]) -> Survey:
    """Read a file and count its rows, fields and layouts.

    Args:
        file: a file returned by `find_files`.
        given: source settings from the user, such as `encoding`, `file_format` or `rows_at`.

    Raises:
        SourceError: no row can be read; the message gives the reason.
    """
    found = _find_rows(file, given)
    with gc_paused():
        for records in _records(found):
            found.add(records)
    if not found.layouts:
        why = found.first_bad or "it is empty"
        # Part of a message of `read/json_parsing.py`, for objects over `MAX_FIELDS`.
        if "fields; at most" in why:
            raise refusal(
                file,
                f"no row of it can be read ({why}). Write rows with fewer fields, such as a "
                "question and its answer"
                if found.num_rows > 1
                else "its rows are the values of one object. Write them as a list",
            )
        if INVALID_ESCAPE in why:
            then = "Remove or double the backslash of such escapes."
            raise refusal(file, f"no row of it is JSON ({why}). {then}")
        if (fault := _fault_at_the_start(file)) is not None:
            raise refusal(file, fault)
        then = "Pass a file with rows."
        if found.first_bad:
            then = "Pass a file with rows, or name its format with --set file_format=FORMAT."
        if "but the header has" in why:
            then = "Write every field of the header in each row, also empty ones."
        elif "file_format" in given:
            then = "Correct the file, or its format."
        raise refusal(file, f"no row of it can be read as {found.file_format} ({why}). {then}")
    return found


def _fault_at_the_start(file: SourceFile) -> str | None:
    """Return what is wrong with a file that starts with an object or a comment, or None."""
    head = next(iter(FileStream(file.uri, _compression_of(file))), b"")
    text = head.removeprefix(BOM).decode(errors="replace").lstrip()
    # Of file 783, only that its first line is not JSON was said, with advice that did not help.
    # A quote is the first text of JSON, unlike of Markdown such as `# Title\n[link](...)`.
    if re.match(r"(?:(?:(?:#|//).*\n|/\*(?:[^*]|\*(?!/))*\*/)\s*)+[\[{][\[{\s]*\"", text):
        return "it begins with a comment, which JSON does not allow. Remove the comment."
    if stray := re.match(r"(\w.*)\n\s*(?:\{\s*\"|\[\s*\{)", text):  # file 1693
        shown = for_terminal(stray[1].strip()[:20])
        return f"it begins with a line that is not JSON: {shown}. Remove this line."
    if re.match(r"[\[{][\[{\s]*'", text):  # file 1212
        return "its rows are Python literals, not JSON. Write them with `json.dumps`."
    # `strict=False` accepts raw line breaks and orjson does not, which tells the two faults apart.
    with suppress(ValueError):
        first, end = json.JSONDecoder(strict=False).raw_decode(text)
        if isinstance(first, dict):
            try:
                orjson.loads(text[:end])
            except orjson.JSONDecodeError:
                what = "its texts contain raw line breaks, which JSON does not allow. Replace them"
                return f"{what} with \\n."
            if after := for_terminal(text[end:].partition("\n")[0].strip()[:10]):
                what = f"its first row is followed by {after} on the same line"
                return f"{what}. Write one row per line."
    return None


def as_line(row: Any) -> bytes:
    """Return a row as a line of JSON."""
    return orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE)


def refusal(file: SourceFile, why: str) -> SourceError:
    """Return the error for a file that cannot be read."""
    return SourceError(f"source file '{file.uri}': {why}", uri=file.uri)


# Location of the rows: encoding, file format, and the lists around the rows.


def _find_rows(file: SourceFile, given: Mapping[str, Any]) -> Survey:
    """Detect, from the first bytes of a file, the settings needed to read its rows."""
    settings = {key: given[key] for key in ("encoding", "file_format", "table") if key in given}
    head = b""
    for chunk in FileStream(file.uri, _compression_of(file)):
        head += chunk
        if len(head) > HEAD_BYTES:
            break
    head, is_whole = head[:HEAD_BYTES], len(head) <= HEAD_BYTES
    kind = settings.get("file_format") or format_of_name(file.name)
    if kind not in TABULAR and not head.startswith((b"PAR1", b"ARROW1", b"PK\x03\x04")):
        encoding = settings.get("encoding") or guess_encoding(head)
        if encoding is None:
            format_of(head, file.name, "auto", file.uri)  # raises if it is binary
            raise refusal(file, "its encoding is not supported. Save it as UTF-8.")
        if encoding != "utf-8":
            settings["encoding"] = encoding
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            head = decoder.decode(head).encode()
        if "file_format" not in settings and (divided := _divided_by(head, kind)):
            settings["file_format"] = divided
    if head.startswith(b"PK\x03\x04") and b"xl/workbook" in head and kind != "xlsx":
        settings["file_format"] = "xlsx"
    file_format = format_of(head, file.name, settings.get("file_format", "auto"), file.uri)
    if file_format in TABULAR:
        return Survey(file, file_format, settings)
    if "rows_at" in given:
        settings["rows_at"] = given["rows_at"]
        path = given["rows_at"].split(".")
        return Survey(file, "json", settings, _texts_beside(_objects_around(file, path), path))
    text_file = TEXT_FILES[file_format](file.uri, 2 * HEAD_BYTES)
    (cut,) = text_file.cut([head])
    rows = list(text_file.parse(head[cut.byte_start : cut.byte_end], HEAD_BYTES).rows)
    if not is_whole and len(rows) > 1:
        rows = rows[:-1]  # the last one is truncated
    beside: list[str] = []
    if len(rows) <= 1 and file_format in ("jsonl", "objects") and not _holds_messages(rows):
        path = _path_of_rows(head)
        if path and not _is_asked(rows, path):
            if around := _objects_around(file, path):
                _check_other_lists(file, path, around[-1])
                beside = _texts_beside(around, path)
            settings["rows_at"] = ".".join(path)
            file_format = "json"
    if file_format == "jsonl" and "file_format" not in settings and _spans_lines(head):
        settings["file_format"] = file_format = "objects"
    if given.get("unwrap") or (
        rows
        and all(isinstance(row, list) and len(row) == 1 for row in rows)
        and not _holds_messages(rows)
    ):
        settings["unwrap"] = True
    return Survey(file, file_format, settings, beside)


def _holds_messages(rows: Sequence[Any]) -> bool:
    return bool(rows) and row_format_of(rows[0], {}) is not None


_ASKED = {"prompt", "question", "instruction", "query", "input"}
_ANSWERED = {"answer", "output", "response", "completion"}
"""Usual names of questions and answers; `reading.py`, which imports this module, has all."""


def _is_asked(rows: Sequence[Any], path: Sequence[str]) -> bool:
    """Return True if the only row has a prompt, and the list is part of it or of the answer.

    Of files 1520 and 1581, such lists were read as the rows.
    """
    value = rows[0] if rows else None
    if not isinstance(value, dict):
        return False
    asked = [value[name] for name in value.keys() & _ASKED]
    answers = value.keys() & _ANSWERED
    if not any(isinstance(each, str) for each in asked) and not (asked and answers):
        return False
    for name in path:
        value = value[name]
    return row_format_of(value[0], {}) is None


def _compression_of(file: SourceFile) -> Compression:
    with file_errors(file.uri), open_file(file.uri) as opened:
        return compression_of(opened.read(4), file.name)[0]


def _divided_by(head: bytes, kind: FileFormat | None) -> FileFormat | None:
    """Return the delimited format of the first line if it differs from the file name's."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    if kind == "csv":
        # Excel writes semicolons where the comma is the decimal sign, and tabs in Unicode text, and
        # both files may be named .csv.
        if first.count(b";") > first.count(b","):
            return "csv_semicolon"
        return "tsv" if b"\t" in first and b"," not in first else None
    if kind is None and first[:1] not in (b"{", b"[", b"<"):
        return "tsv" if b"\t" in first else "csv" if b"," in first else None
    return None


def _spans_lines(head: bytes) -> bool:
    """Return True if most lines go on with an object of a line before, such as in its texts."""
    lines = [line.strip() for line in head.removeprefix(BOM).splitlines() if line.strip()]
    begun = [line for line in lines if line.startswith(b"{")]
    if not begun or begun[0] != lines[0] or 2 * len(begun) >= len(lines):
        return False
    try:
        # Comments after whole objects, as at the end of file 672 of
        # docs/decisions/2026-11-27-thirty-files.md, took the row before them into quarantine.
        for line in begun:
            orjson.loads(line)
    except orjson.JSONDecodeError:
        return True
    return False  # each object ends in its line, so the other lines are comments


# In file 431, all 18 objects have an invalid escape. The search for a list found the messages of
# the first one and called the other rows superfluous.
_LINE_PER_OBJECT = re.compile(rb"\{.*\}[ \t\r]*\n\s*\{")
"""A line with an object, whatever is broken in it, before another object; JSON needs a comma."""


HELD_OUT = frozenset("test testing val valid validation dev eval".split())
"""Names of splits that are not for training."""
_SPLITS = HELD_OUT | {"train", "training"}
# Parsing takes about four times as much memory. The lists of a larger object are not compared.
_MAX_COMPARED = 2**27


def _objects_around(file: SourceFile, path: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects around a list, from the outermost; none if the file is large or faulty."""
    data = bytearray()
    for chunk in FileStream(file.uri, _compression_of(file)):
        data += chunk
        if len(data) > _MAX_COMPARED:
            return []
    found = []
    # Reading the rows will name a fault of JSON, or of a path that the user gave.
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        value = orjson.loads(data.removeprefix(BOM))
        for name in path:
            found.append(value)
            value = value[name]
        return found
    return []


def _texts_beside(around: Sequence[dict[str, Any]], path: Sequence[str]) -> list[str]:
    """Return the fields of the objects around the rows that have text, which no row has.

    Example:
        >>> _texts_beside([{"rows": [], "hint": "Answer in one word.", "n": 1}], ["rows"])
        ['hint']
    """
    return [
        ".".join((*path[:depth], name))
        for depth, owner in enumerate(around)
        for name, value in owner.items()
        if name != path[depth] and holds_text(value)
    ]


def _check_other_lists(file: SourceFile, path: Sequence[str], owner: Mapping[str, Any]) -> None:
    """Refuse an object with its rows in several lists, since `rows_at` names one.

    A list counts if its rows are like those found, or are questions and answers, or have text if
    those found have none. Of file 958, which has a list for each of 116 topics, the first one was
    published; of file 2202, a list of names was read instead of the mails. Lists named like splits
    are meant to be read one at a time.
    """
    keys, has_text = _keys_of(owner[path[-1]]), holds_text(owner[path[-1]])
    # Some rows may lack a field: at least half of all their fields are the same. Of file 1905,
    # articles were read, and not the questions and answers in the next list.
    lists = [
        name
        for name, value in owner.items()
        if 2 * len((own := _keys_of(value)) & keys) >= len(own | keys) > 0
        or (own & _ASKED and own & _ANSWERED)
        or (own and not has_text and holds_text(value))
    ]
    lists += [path[-1]] * (path[-1] not in lists)
    if len(lists) > 1 and not {name.lower() for name in lists} <= _SPLITS:
        place = f" of '{'.'.join(path[:-1])}'" if path[1:] else ""
        shown = ", ".join(f"'{name[:40]}'" for name in lists[:3])
        raise refusal(
            file,
            f"its rows are in {len(lists)} lists{place}: {shown}{', ...' * (len(lists) > 3)}. "
            "Write the rows to train as one list, or choose one list with --set rows_at=FIELD, "
            "where FIELD is its path, with dots between names.",
        )


def _keys_of(value: Any) -> set[str]:
    """Return the keys of the first object in a list, or in a list of lists; empty without one."""
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, dict):
            return {*value}
    return set()


def _path_of_rows(head: bytes) -> list[str]:
    """Return the path of the field that contains the list of rows; empty without one.

    The file is a single object, and the list contains objects or lists of messages.
    """
    text = head.removeprefix(BOM).lstrip()
    if _LINE_PER_OBJECT.match(text):
        return []
    # Each try reads the text from its start, so only the first 50 are made.
    # A list of messages may be a row, as in file 783.
    for found in islice(re.finditer(rb'"\s*:\s*(\[)\s*\[?\s*\{', text), 50):
        if path := path_of_list(text[: found.end(1)]):
            # Of file 1271, whose row has 1.5 MB, the messages were taken for rows.
            first = re.match(rb'\s*\{\s*"(?:role|from)"', text[found.end(1) :])
            return [] if first else path
    return []


# Rows of a file: all of them, or ranges spread over it.


def _records(found: Survey) -> Iterator[Records]:
    file, settings = found.file, found.settings
    limit = MAX_REMOTE_BYTES if local_path(file.uri) is None else MAX_WHOLE_BYTES
    if file.size <= limit:
        config = SourceConfig(path=file.uri, format="text", **settings)
        shards = scan_source(config, _SHARD_BYTES)
        for shard in shards:
            yield from read_parts(shard, _ANY_SIZE)
            advance(1 / len(shards))
        return
    if found.file_format in TABULAR:
        yield from _ranges_of_table(found)
        return
    if _compression_of(file) == "none" and "encoding" not in settings:
        records = list(_ranges_of_text(found))
        # There are no rows if records do not begin on separate lines, as in an array on one
        # line.
        if any(len(each.rows) for each in records):
            yield from records
            return
    found.part = f"the first {_NUM_RANGES * _RANGE_BYTES:,} bytes"
    yield from _beginning(found)


def _ranges_of_table(found: Survey) -> Iterator[Records]:
    file, table = found.file, found.settings.get("table")
    facts, *_ = decode_head(file.uri, found.file_format, 1, table)
    num_rows = sum(rows for rows, _ in facts["sizes"])
    found.part = f"{_NUM_RANGES} ranges of {_RANGE_ROWS:,} rows spread over the file"
    for first in sorted({num_rows * n // _NUM_RANGES for n in range(_NUM_RANGES)}):
        size = min(_RANGE_ROWS, num_rows - first)
        yield from parse_tables(file.uri, found.file_format, first, size, table)
        advance(1 / _NUM_RANGES)


def _ranges_of_text(found: Survey) -> Iterator[Records]:
    file = found.file
    found.part = f"{_NUM_RANGES} ranges of {_RANGE_BYTES:,} bytes spread over the file"
    text_file = TEXT_FILES[found.file_format](file.uri, _SHARD_BYTES)
    for number in range(_NUM_RANGES):
        start = file.size * number // _NUM_RANGES
        data = read_range(file.uri, "none", start, start + _RANGE_BYTES, file.pin)
        advance(1 / _NUM_RANGES)
        # Both ends of a range may cut a record. The first range also loses its first line: for CSV,
        # the header.
        lines = data[data.find(b"\n") + 1 : data.rfind(b"\n") + 1]
        if found.file_format in ("json", "objects"):  # each record starts on a new line
            yield parse_pieces(data, spans_by_layout(data)[1:-1], _RANGE_BYTES)
        elif found.file_format == "jsonl":
            yield text_file.parse(lines, _RANGE_BYTES)
        else:
            if number == 0:
                list(text_file.cut([data]))  # for the header
            yield text_file.parse(lines, _RANGE_BYTES)


def _beginning(found: Survey) -> Iterator[Records]:
    file, settings = found.file, found.settings
    encoding = settings.get("encoding", "utf-8")
    data = b""
    for chunk in FileStream(file.uri, _compression_of(file), encoding):
        data += chunk
        if len(data) > _NUM_RANGES * _RANGE_BYTES:
            break
    text_file = TEXT_FILES[found.file_format](
        file.uri, 2 * len(data), rows_at=settings.get("rows_at")
    )
    (cut,) = text_file.cut([data])
    records = text_file.parse(data[cut.byte_start : cut.byte_end], _MAX_ROW_BYTES)
    records.failures = records.failures[:-1]  # the truncated last record
    yield records


# Guess the encoding of text by how many of its letters are common in the language.
#
# Text that is UTF-8 except for a few bytes stays UTF-8, and rows with invalid bytes are bad rows.
# The guess is shown to the user and written to the recipe.


_ENOUGH = 0.6
"""Minimum share of common letters among those outside ASCII."""


def guess_encoding(data: bytes) -> str | None:
    """Return the encoding of the first bytes of a text, or None if no source supports it.

    Example:
        >>> guess_encoding("你好世界天空为什么是蓝色的".encode("gbk"))
        'gb18030'
    """
    # The mark of UTF-32, which no source reads, begins with that of UTF-16.
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None if data.startswith(b"\xff\xfe\0\0") else "utf-16"
    letters = _letters_beyond_ascii(data, "utf-8")
    num_wrong = letters.count("\ufffd") - data.count("\ufffd".encode())  # some files hold U+FFFD
    if num_wrong <= len(letters) / 10 or _has_utf8_lines(data):
        return "utf-8"
    runs = re.findall(rb"[\x80-\xff]+", data)
    stand_alone = sum(len(run) == 1 for run in runs) > len(runs) / 2  # accents in Latin words
    names = [name for name in _COMMON if (name == "cp1252") == stand_alone]
    scores = {}
    for name in names:
        letters = _letters_beyond_ascii(data, name)
        scores[name] = sum(map(_COMMON[name], letters)) / max(1, len(letters))
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= _ENOUGH else None


def _has_utf8_lines(data: bytes) -> bool:
    r"""Return True if a tenth of the lines beyond ASCII are UTF-8, which is never an accident.

    The other lines are bad rows: no encoding reads a file that was joined from two.

    Example:
        >>> _has_utf8_lines("天空为什么\n是蓝色的".encode() + "\n天空为什么".encode("gbk"))
        True
    """
    # File 649 was taken for GB 18030, because 3 of its 33 rows are in CP 1251. With fewer than 8
    # bytes, other text may look like UTF-8.
    lines = [line for line in data.split(b"\n") if len(re.findall(rb"[\x80-\xff]", line)) >= 8]
    num_utf8 = sum(line.decode("utf-8", "ignore").encode() == line for line in lines)
    return num_utf8 > len(lines) / 10


def _letters_beyond_ascii(data: bytes, encoding: str) -> str:
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data)  # may end in a letter
    return "".join(letter for letter in text if letter > "\x7f")


def _lead_byte(first: int, last: int, encoding: str) -> Callable[[str], bool]:
    """Return a test for common letters: those whose first byte is between `first` and `last`.

    National character sets keep their common letters in one range of first bytes.
    """

    def is_common(letter: str) -> bool:
        if "\u3000" <= letter <= "\u303f" or "\uff00" <= letter <= "\uff60":  # punctuation
            return True
        return first <= letter.encode(encoding, "replace")[0] <= last

    return is_common


_KANJI = _lead_byte(0x88, 0x97, "cp932")

_LATIN = (
    "äöüßÄÖÜéèêëàâáíìîïóòôúùûñçåæøÉÀÇÑÅØ\u00ab\u00bb\u20ac\u00b0"
    "\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
)

# Encodings in the order of trial. The first wins a tie, because common Korean letters, decoded as
# Chinese, are common letters, too.
_COMMON: dict[str, Callable[[str], bool]] = {
    "cp949": _lead_byte(0xB0, 0xC8, "euc_kr"),
    "gb18030": _lead_byte(0xB0, 0xD7, "gb2312"),
    "big5": _lead_byte(0xA4, 0xC6, "big5"),
    "cp932": lambda letter: "\u3040" <= letter <= "\u30ff" or _KANJI(letter),
    "cp1251": lambda letter: "\u0410" <= letter <= "\u044f",
    "cp1252": lambda letter: letter in _LATIN,
}
