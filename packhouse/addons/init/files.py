"""Look at the first megabyte of a file: its encoding, its kind, where its rows are, their fields.

What is found is given as settings of a source, and as facts that a person can check. The rows are
parsed by the readers of `packhouse.read`; whether the settings are right is for a person to say,
who is shown rows that were read by them.
"""

import codecs
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packhouse.addons.init.fields import (
    Shape,
    is_whole_talk,
    join_shapes,
    remedy_for_answers_elsewhere,
    remedy_for_header,
    remedy_for_rendered,
    remedy_for_rows,
    remedy_for_text,
    remedy_for_transcripts,
    shape_of,
)
from packhouse.addons.init.words import CONVERSATIONAL, PARTS, left_out_of
from packhouse.errors import SourceError
from packhouse.read.extra_fields import bad_answer_remedy
from packhouse.read.file_formats import (
    BOM,
    compression_of,
    format_of,
    format_of_name,
)
from packhouse.read.files import SourceFile, file_errors, find_files, open_file
from packhouse.read.json_arrays import find_list
from packhouse.read.records import unwrapped
from packhouse.read.row_formats import MESSAGE_FIELDS, row_format_of, row_formats
from packhouse.read.shards import HEAD_BYTES, TEXT_FILES
from packhouse.read.streams import CHUNK_BYTES, FileStream
from packhouse.read.tabular import TABULAR, decode_head, without_fill
from packhouse.recipe import SourceConfig
from packhouse.recipe.source import FileFormat
from packhouse.system.wording import counted

_ANSWERS = (*sorted(PARTS["answer"]), "target", "reply")
_PROMPTS = (*sorted(PARTS["question"]), "messages", "input")
_BESIDE = (*sorted(PARTS["system"]), "tools")
"""Fields that formats of messages read, too."""

_KEYS = {"chat": ("role", "content"), "sharegpt": ("from", "value")}
"""Format -> the fields of a message that it reads."""


def select_messages(rows: Sequence[Any]) -> dict[str, Any]:
    """Return `format` and `select` of rows whose messages are no field of their own; else nothing.

    Example:
        >>> asked, said = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
        >>> print(select_messages([{"messages": [asked], "answer": "2"}])["select"]["messages"])
        list_append("messages", {'role': 'assistant', 'content': "answer"})
        >>> select_messages([{"messages": [asked, said], "id": 7}])
        {}
    """
    if not rows or not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        return {}
    if isinstance(rows[0].get("label"), bool):  # of KTO: some answers are bad ones
        return {}
    for row_format in _KEYS:
        for look in (_nested, _in_two_lists, _without_answer):
            if select := look(rows, row_format):
                beside = {name: f'"{name}"' for name in _BESIDE if name in rows[0]}
                return {"format": row_format, "select": beside | select}
    return {}


def _nested(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """Messages in an object."""
    if any(_are_messages([row[name] for row in rows], row_format) for name in rows[0]):
        return {}
    for outer in rows[0]:
        objects = [row[outer] for row in rows]
        if '"' in outer or not all(isinstance(each, dict) for each in objects):
            continue
        for inner in MESSAGE_FIELDS:
            talks = [each.get(inner) for each in objects]
            if _are_messages(talks, row_format) and not _are_questions(talks, row_format):
                names = [n for n in _BESIDE if any(each.get(n) for each in objects)]
                return {n: f'"{outer}"."{n}"' for n in names} | {"messages": f'"{outer}"."{inner}"'}
    return {}


def _in_two_lists(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """A prompt and its answer that are both lists of messages; the prompt has no loss."""
    if "chosen" in rows[0] or "rejected" in rows[0]:
        return {}
    lists = [name for name in rows[0] if _are_messages([row[name] for row in rows], row_format)]
    prompt = next((name for name in _PROMPTS if name in lists), None)
    answer = next((name for name in _ANSWERS if name in lists), None)
    if prompt is None or answer is None:
        return {}
    said = [message for row in rows for name in (prompt, answer) for message in row[name]]
    speaker, content = _KEYS[row_format]
    if any(set(each) != {speaker, content} for each in said):
        return {}
    parts = [
        f"list_transform(\"{name}\", lambda m: {{'{speaker}': m.\"{speaker}\", '{content}': "
        f"m.\"{content}\", 'loss': {loss}}})"
        for name, loss in ((prompt, "false"), (answer, "true"))
    ]
    return {"messages": f"list_concat({', '.join(parts)})"}


def _without_answer(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """Messages that end on a question, and a text that answers it."""
    prompt = next(
        (n for n in _PROMPTS if _are_messages([row.get(n) for row in rows], row_format)), None
    )
    answers = [n for n in _ANSWERS if all(isinstance(row.get(n), str) for row in rows)]
    if prompt is None or len(answers) != 1:
        return {}
    said = [message for row in rows for message in row[prompt]]
    speaker, content = _KEYS[row_format]
    is_plain = all(set(each) == {speaker, content} for each in said)
    if not is_plain or not _are_questions([row[prompt] for row in rows], row_format):
        return {}
    name = "assistant" if speaker == "role" else "gpt"
    answer = f"{{'{speaker}': '{name}', '{content}': \"{answers[0]}\"}}"
    return {"messages": f'list_append("{prompt}", {answer})'}


def _are_questions(talks: Sequence[Any], row_format: str) -> bool:
    """Return True if all end on a question."""
    return {talk[-1].get(_KEYS[row_format][0]) for talk in talks} <= {"user", "human"}


def _are_messages(values: Sequence[Any], row_format: str) -> bool:
    """Return True for lists of objects that have the fields of a format's messages."""
    return all(
        isinstance(value, list)
        and value
        and all(isinstance(each, dict) and each.keys() >= set(_KEYS[row_format]) for each in value)
        for value in values
    )


# Guess the encoding of text, by whether its letters are those that people write.
#
# Text that is UTF-8 but for a few bytes stays UTF-8: its rows with other bytes are bad rows. The
# guess is shown to a person, and nothing is read by it that the recipe does not say.


_ENOUGH = 0.6
"""Share of the letters beyond ASCII that must be common ones."""


def guess_encoding(data: bytes) -> str | None:
    """Return the encoding of the first bytes of a text; None: none that a source can have.

    Example:
        >>> guess_encoding("你好世界天空为什么是蓝色的".encode("gbk"))
        'gb18030'
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None if data.startswith(b"\xff\xfe\0\0") else "utf-16"
    letters = _letters_beyond_ascii(data, "utf-8")
    if letters.count("\ufffd") <= len(letters) / 10:
        return "utf-8"
    runs = re.findall(rb"[\x80-\xff]+", data)
    stand_alone = sum(len(run) == 1 for run in runs) > len(runs) / 2  # an accent in a Latin word
    names = [name for name in _COMMON if (name == "cp1252") == stand_alone]
    scores = {}
    for name in names:
        letters = _letters_beyond_ascii(data, name)
        scores[name] = sum(map(_COMMON[name], letters)) / max(1, len(letters))
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= _ENOUGH else None


def _letters_beyond_ascii(data: bytes, encoding: str) -> str:
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data)  # may end in a letter
    return "".join(letter for letter in text if letter > "\x7f")


def _lead_byte(first: int, last: int, encoding: str) -> Callable[[str], bool]:
    """True for letters of the part of a national set that holds the common ones."""

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

# In the order of trial; the first of equals wins: what is common in Korean, read as Chinese, is
# common as well.
_COMMON: dict[str, Callable[[str], bool]] = {
    "cp949": _lead_byte(0xB0, 0xC8, "euc_kr"),
    "gb18030": _lead_byte(0xB0, 0xD7, "gb2312"),
    "big5": _lead_byte(0xA4, 0xC6, "big5"),
    "cp932": lambda letter: "\u3040" <= letter <= "\u30ff" or _KANJI(letter),
    "cp1251": lambda letter: "\u0410" <= letter <= "\u044f",
    "cp1252": lambda letter: letter in _LATIN,
}


_SAMPLE_ROWS = 1000
_IN_ORDER = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "question_answer": ("question", "answer"),
    "alpaca": ("instruction", "output"),
}
"""Formats of plain texts -> their fields, in the order of the conversation."""
_LOOKED_AT = 50
"""Rows that are searched for what no field that is read says."""
_MAX_FILES = 200
"""Files of one path that are looked at."""
_BAD_SHARE = 0.1
"""Rows that nothing is known of, if they are no more than this share, are taken for bad rows."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a file, or files that are alike, hold."""

    path: str
    """For a recipe: a file, a folder, a glob or an address."""
    settings: dict[str, Any]
    """Keys of a recipe's source beside `path`."""
    is_guess: bool
    """True where nothing but the order of the fields told which is the question."""
    file_format: FileFormat
    num_files: int
    size: int
    """Bytes of the files as stored."""
    fields: dict[str, str]
    """Field of the first rows -> what it holds, and what it is read as."""


def look_at(path: str, asked: tuple[str, str] | None = None) -> list[Look]:
    """Look at what a path names: one result for files that are alike, else one for each file.

    Args:
        path: a file, folder, glob or address, as a source has it.
        asked: the fields of question and answer, where a person named them.

    Raises:
        SourceError: a file holds nothing that a source can read; says what to do about it.
    """
    files = find_files(SourceConfig(path=path))
    looks = [look_at_file(file, asked) for file in files[:_MAX_FILES]]
    alike = all(
        (look.settings, look.file_format) == (looks[0].settings, looks[0].file_format)
        for look in looks
    )
    if len(looks) == 1 or alike:
        size = sum(file.size for file in files)
        return [replace(looks[0], path=path, num_files=len(files), size=size)]
    if len(files) > _MAX_FILES:
        raise SourceError(
            f"'{path}' names {len(files):,} files that are not alike; give those that are, by "
            "folder or glob",
            path=path,
        )
    return looks


def look_at_file(file: SourceFile, asked: tuple[str, str] | None = None) -> Look:
    """Look at one file.

    Raises:
        SourceError: it holds nothing that a source can read; says what to do about it.
    """
    rows, file_format, settings = _read_rows(file)
    if file_format in ("csv", "csv_semicolon", "tsv", "xlsx"):
        if remedy := remedy_for_header(list(rows[0]), file.uri):
            raise _refusal(file, remedy)
    if asked is not None:
        shape = Shape("prompt_completion", {"prompt": asked[0], "completion": asked[1]})
    else:
        if remedy := remedy_for_answers_elsewhere(rows, file_format, file.uri):
            raise _refusal(file, remedy)
        if found := select_messages(rows):
            return _selected(file, file_format, settings | found, rows)
        shape = _shape_of_all(rows, file, file_format)
        if shape.format != "classification" and (bad := _first_bad_answer(rows)) is not None:
            raise _refusal(file, f"row {bad:,} {bad_answer_remedy(shape.format)}")
        read = [shape.fields.get(name, name) for name in _IN_ORDER.get(shape.format, ())]
        if remedy := remedy_for_rendered(rows, read, file_format, file.uri):
            raise _refusal(file, remedy)
        talks = {"text": [shape.fields.get("text", "text")], "preference": ["chosen"]}
        names = [n for n in shape.fields.values() if all(map(is_whole_talk, _texts_of(rows, n)))]
        for talk in talks.get(shape.format, names):
            if remedy := remedy_for_transcripts(rows, talk, file_format, file.uri):
                raise _refusal(file, remedy)
    return Look(
        path=file.uri,
        settings=settings | shape.settings | _label_names(rows, shape),
        is_guess=shape.is_guess,
        file_format=file_format,
        num_files=1,
        size=file.size,
        fields=_describe(rows, shape),
    )


def _selected(
    file: SourceFile,
    file_format: FileFormat,
    settings: dict[str, Any],
    rows: Sequence[Any],
) -> Look:
    """A file whose rows get their messages by `select`, which leaves other fields out."""
    described = _describe(rows, Shape("text", {"text": ""}))
    for ours, expression in settings["select"].items():
        for name in described:
            if f'"{name}"' in expression:
                described[name] = f"{described[name].partition('; not read')[0]}; read as {ours}"
    return Look(
        path=file.uri,
        settings=settings,
        is_guess=False,
        file_format=file_format,
        num_files=1,
        size=file.size,
        fields=described,
    )


def _first_bad_answer(rows: Sequence[Any]) -> int | None:
    """The first row with the `label` that KTO's data gives a bad answer; None: there is none."""
    labels = [row.get("label") if isinstance(row, dict) else None for row in rows]
    return next((number for number, label in enumerate(labels) if label is False), None)


def _texts_of(rows: Sequence[Any], name: str) -> list[Any]:
    return [row.get(name) if isinstance(row, dict) else None for row in rows]


def _read_rows(file: SourceFile) -> tuple[list[Any], FileFormat, dict[str, Any]]:
    """The first rows, the format of the file, and the settings by which they are found."""
    settings: dict[str, Any] = {}
    head, is_whole = _read_head(file)
    kind = format_of_name(file.name)
    if kind not in TABULAR and not head.startswith((b"PAR1", b"ARROW1", b"PK\x03\x04")):
        encoding = guess_encoding(head)
        if encoding is None:
            format_of(head, file.name, "auto", file.uri)  # says what it is, if it is no text
            raise _refusal(
                file, "its text is of no encoding that a source can have; save it as UTF-8"
            )
        if encoding != "utf-8":
            settings["encoding"] = encoding
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            head = decoder.decode(head).encode()
        if found := _divided_by(head, kind):
            settings["file_format"] = found
    if head.startswith(b"PK\x03\x04") and b"xl/workbook" in head and kind != "xlsx":
        settings["file_format"] = "xlsx"
    file_format = format_of(head, file.name, settings.get("file_format", "auto"), file.uri)
    rows = _rows_of(file, file_format, head, is_whole=is_whole)
    if len(rows) <= 1 and file_format in ("jsonl", "objects") and not _is_known(rows):
        field = _field_with_rows(head)
        if field is not None:
            settings["rows_at"] = field
            rows, file_format = _rows_of(file, "json", head, is_whole=is_whole, field=field), "json"
    if not rows:
        text = head.decode("utf-8", "replace")
        is_json = file_format in ("json", "jsonl", "objects")
        remedy = remedy_for_text(text, file.uri) if is_json else None
        why = f"no row of its first {len(head):,} bytes can be read as {file_format}"
        raise _refusal(file, remedy or why)
    if all(isinstance(row, list) and len(row) == 1 for row in rows) and not _is_known(rows):
        settings["unwrap"] = True
        rows = unwrapped(rows)
    return rows, file_format, settings


def _read_head(file: SourceFile) -> tuple[bytes, bool]:
    """The first bytes, uncompressed, and whether they are all there are."""
    with file_errors(file.uri), open_file(file.uri) as opened:
        head = opened.read(CHUNK_BYTES)
    compression, _ = compression_of(head, file.name)
    if compression == "none":
        return head[:HEAD_BYTES], file.size <= HEAD_BYTES
    head = b""
    for chunk in FileStream(file.uri, compression):
        head += chunk
        if len(head) > HEAD_BYTES:
            break
    return head[:HEAD_BYTES], len(head) <= HEAD_BYTES


def _divided_by(head: bytes, kind: FileFormat | None) -> FileFormat | None:
    """The file format, if the first line's columns are divided by another character than named."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    if kind == "csv":
        if first.count(b";") > first.count(b","):
            return "csv_semicolon"
        return "tsv" if b"\t" in first and b"," not in first else None
    if kind is None and first[:1] not in (b"{", b"[", b"<"):
        return "tsv" if b"\t" in first else "csv" if b"," in first else None
    return None


def _rows_of(
    file: SourceFile,
    file_format: FileFormat,
    head: bytes,
    *,
    is_whole: bool,
    field: str | None = None,
) -> list[Any]:
    """Rows of the first bytes, without those that are bad, and without one that is cut off."""
    if file_format in TABULAR:
        _, *batches = decode_head(file.uri, file_format, _SAMPLE_ROWS)
        return [without_fill(row) for batch in batches for row in batch.to_pylist()]
    text_file = TEXT_FILES[file_format](file.uri, 2 * HEAD_BYTES, rows_at=field)
    (cut,) = text_file.cut([head])
    records = text_file.parse(head[cut.start : cut.end], HEAD_BYTES)
    rows = records.rows[: _SAMPLE_ROWS + 1]
    return rows if is_whole or len(rows) < 2 else rows[:-1]


def _is_known(rows: Sequence[Any]) -> bool:
    return bool(rows) and row_format_of(rows[0], {}) is not None


def _field_with_rows(head: bytes) -> str | None:
    """The field of the file's one object that holds a list of objects, if there is one."""
    text = head.removeprefix(BOM).lstrip()
    found: list[bytes] = re.findall(rb'"([^"\\]{1,60})"\s*:\s*\[', text[: 2**16])
    for name in list(dict.fromkeys(each.decode("utf-8", "replace") for each in found))[:50]:
        start = find_list(text, name)
        if start is not None and text[start:].lstrip()[:1] == b"{":
            return name
    return None


def _shape_of_all(rows: Sequence[Any], file: SourceFile, file_format: FileFormat) -> Shape:
    """The shape of all rows; of several shapes, all of them that are not rare."""
    layouts: dict[object, list[Any]] = defaultdict(list)
    for row in rows:
        layouts[frozenset(row) if isinstance(row, dict) else type(row)].append(row)
    natural = {found for some in layouts.values() if (found := row_format_of(some[0], {}))}
    shapes: list[Shape] = []
    unknown: list[list[Any]] = []
    for some in sorted(layouts.values(), key=len, reverse=True):
        # Rows {"ask", "reply"} beside rows {"prompt", "completion"}: their fields cannot be called
        # prompt and completion too, so they become question and answer of `question_answer`. The
        # second try is for names that the shapes so far have taken.
        tries = (shape_of(some, natural), shape_of(some, natural | {s.format for s in shapes}))
        fitting = [
            shape
            for shape in tries
            if shape
            and join_shapes([*shapes, shape])
            and not (shapes and _is_odd(shape, shapes[0]))
        ]
        shapes += fitting[:1]
        if not fitting:
            unknown.append(some)
    num_unknown = sum(map(len, unknown))
    joined = join_shapes(shapes) if shapes else None
    if joined is None or num_unknown > _BAD_SHARE * len(rows):
        some = unknown[0] if unknown else list(rows)
        if remedy := remedy_for_rows(some, file_format, file.uri):
            raise _refusal(file, remedy)
        raise _refusal(
            file,
            f"{len(some):,} of {counted(len(rows), 'row')} hold {_kinds_of(some[0])}, in which "
            "nothing "
            "tells question and answer. If two fields hold them, call `packhouse init` with "
            "--question FIELD --answer FIELD; else write rows with messages ([{role, content}])",
        )
    return joined


def _is_odd(shape: Shape, first: Shape) -> bool:
    """True for plain texts, or a guess, beside conversations: these are rows that lack a field."""
    no_talk = ("text", "classification")
    return shape.format != first.format and (
        shape.is_guess or shape.format in no_talk or first.format in no_talk
    )


def _label_names(rows: Sequence[Any], shape: Shape) -> dict[str, Any]:
    """The classes of labels that are text."""
    if shape.format != "classification":
        return {}
    names = {row.get("label") for row in rows if isinstance(row, dict)}
    texts = sorted(name for name in names if isinstance(name, str) and not name.strip().isdigit())
    if texts:
        return {"label_names": texts}
    numbers = [int(name) for name in names if isinstance(name, int | str)]
    return {"label_names": [str(n) for n in range(max(numbers, default=0) + 1)]}


def _describe(rows: Sequence[Any], shape: Shape) -> dict[str, str]:
    """What each field of the rows holds, and what it is read as.

    Example:
        >>> rows = [{"ask": "Why?", "id": 4}, {"ask": "How so?"}]
        >>> described = _describe(rows, Shape("question_answer", {"question": "ask"}))
        >>> described["ask"]
        'text, 7 characters (median); read as question'
        >>> described["id"]
        'a number, in 1 of 2 rows; not read'
    """
    objects = [row for row in rows if isinstance(row, dict)]
    counts = Counter(name for row in objects for name in row)
    read = {}
    if shape.format in row_formats():
        names = row_formats()[shape.format].names(list(counts), shape.fields)
        read = {name: ours for ours, name in names.items()}
    suspects = CONVERSATIONAL.intersection(counts) - read.keys()
    lost = {name for row in objects[:_LOOKED_AT] for name in left_out_of(row, suspects)}
    described = {}
    for name, number in counts.most_common(40):
        values = [row[name] for row in objects if name in row]
        what = Counter(map(_kind_of, values)).most_common(1)[0][0]
        texts = sorted(len(value) for value in values if isinstance(value, str))
        size = f", {counted(texts[len(texts) // 2], 'character')} (median)" if texts else ""
        some = "" if number == len(rows) else f", in {number:,} of {counted(len(rows), 'row')}"
        as_what = f"; read as {read[name]}" if name in read else ""
        if shape.format != "mixed" and name not in read:
            as_what = "; not read" + ", so what it says is not trained" * (name in lost)
        described[name] = f"{what}{size}{some}{as_what}"
    return described


def _kind_of(value: object) -> str:
    kinds = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
    return kinds.get(type(value), "nothing" if value is None else "a number")


def _kinds_of(row: object) -> str:
    if not isinstance(row, dict):
        return _kind_of(row)
    shown = [f"{name[:40]!r} ({_kind_of(value)})" for name, value in list(row.items())[:8]]
    return f"{', '.join(shown)}{', ...' if len(row) > 8 else ''}"


def _refusal(file: SourceFile, why: str) -> SourceError:
    return SourceError(f"source file '{file.uri}': {why}", uri=file.uri)
