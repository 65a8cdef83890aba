"""Detect a file's compression from its first bytes and its format from its name.

The first bytes can veto the name: a file called `.jsonl` that contains a web page, a Git LFS
pointer, UTF-16 text or another format is refused with what it is, because a parser would only say
"unexpected character at line 1".
"""

import re
from typing import Any, Literal

from packhouse.errors import SourceError
from packhouse.read.json_parsing import json_in, split_elements
from packhouse.recipe.sections import FileFormat

Compression = Literal["none", "gzip", "zstd"]

BOM = b"\xef\xbb\xbf"

FORMATS_BY_ENDING: dict[str, FileFormat] = {
    "json": "json",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
}
"""Endings that a folder is searched for, also with `.gz` or `.zst` added."""

# Read only by name: folders of data often have files with these endings and other contents.
_NAMED_ONLY: dict[str, FileFormat] = {
    "xlsx": "xlsx",
    "ods": "xlsx",
    "sqlite": "sqlite",
    "sqlite3": "sqlite",
    "db": "sqlite",
    "duckdb": "duckdb",
}

_COMPRESSIONS: tuple[tuple[Compression, bytes, str], ...] = (
    ("gzip", b"\x1f\x8b", ".gz"),
    ("zstd", b"\x28\xb5\x2f\xfd", ".zst"),
)
_ARROW_MAGICS = (b"ARROW1", b"\xff\xff\xff\xff")  # of a file, and of a stream's first message
_SQLITE_MAGIC = b"SQLite format 3\0"
_ZIP_MAGIC = b"PK\x03\x04"
_MAGICS = (
    (_ZIP_MAGIC, "a zip archive. Unpack it and use the files in it"),
    (b"\xd0\xcf\x11\xe0", "an old Office document (.xls?). Save it as .xlsx or CSV"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"%PDF", "a PDF document"),
    (_SQLITE_MAGIC, "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow IPC"),
)


def file_error(uri: str, problem: str, **facts: Any) -> SourceError:
    """Return an error about a file of a source; `problem` follows its name: ` is empty`."""
    return SourceError(f"source file '{uri}'{problem}", uri=uri, **facts)


# Not by name, because there are text files called `.gz` and gzip files called `.jsonl`.
def compression_of(head: bytes, name: str) -> tuple[Compression, dict[str, int]]:
    """Return the compression by first bytes, with a note if the file name disagrees.

    Example:
        >>> compression_of(bytes([0x1F, 0x8B, 8]), "rows.jsonl")
        ('gzip', {'misnamed_compression': 1})
    """
    found: Compression = "none"
    is_misnamed = False
    for compression, magic, ending in _COMPRESSIONS:
        if head.startswith(magic):
            found = compression
        is_misnamed |= head.startswith(magic) != name.lower().endswith(ending)
    return found, {"misnamed_compression": 1} if is_misnamed and head else {}


def format_of_name(name: str) -> FileFormat | None:
    """Return the format that a file's name implies.

    Example:
        >>> format_of_name("Rows.v2.JSONL.gz")
        'jsonl'
    """
    plain = name.lower()
    for _, _, ending in _COMPRESSIONS:
        plain = plain.removesuffix(ending)
    _, dot, ending = plain.rpartition(".")
    return (FORMATS_BY_ENDING | _NAMED_ONLY).get(ending) if dot else None


_END = re.compile(rb"\}[ \t\r]*(\n\s*(?=\{)|\s*\Z)")


def _goes_on(text: bytes) -> bool:
    r"""Return True if a text begins with a JSON object that spans several lines.

    Example:
        >>> _goes_on(b'{"messages": [\n {"role": "user"}\n]}\n{'), _goes_on(b'{"a": \n{"a": 1}\n')
        (True, False)
    """
    end = _END.search(text) if text.startswith(b"{") else None
    return end is not None and isinstance(json_in(text[: end.start() + 1]), dict)


def format_of(head: bytes, name: str, wanted: FileFormat | Literal["auto"], uri: str) -> FileFormat:
    """Return the format of a file: from the recipe, else from its name, else from its first bytes.

    Args:
        head: first bytes, uncompressed: at least a megabyte, or the whole file.
        name: file name.
        wanted: `file_format` of the recipe.
        uri: for messages.

    Raises:
        SourceError: the bytes are not of that format, or the format cannot be detected.
    """
    named = format_of_name(name) if wanted == "auto" else wanted
    what = _what_is(head) if head else "empty"
    if named == "xlsx":
        if not head.startswith(_ZIP_MAGIC):
            raise file_error(uri, f" is not XLSX or ODS: it is {what}")
        return "xlsx"
    # DuckDB's magic follows a checksum of 8 bytes.
    database: FileFormat | None = "duckdb" if head[8:12] == b"DUCK" else None
    if head.startswith(_SQLITE_MAGIC):
        database = "sqlite"
    if named in ("sqlite", "duckdb") and database is None:
        raise file_error(uri, f" is not a database: it is {what}")
    if database is not None and named in (None, "sqlite", "duckdb"):
        return database
    is_parquet, is_arrow = head.startswith(b"PAR1"), head.startswith(_ARROW_MAGICS)
    if (named == "parquet" and not is_parquet) or (named == "arrow" and not is_arrow):
        raise file_error(uri, f" is not {named.capitalize()}: it is {what}")
    if is_parquet or is_arrow:
        return "parquet" if is_parquet else "arrow"
    if what.startswith("UTF-"):
        encoding = what.split()[0]
        is_known = encoding == "UTF-16"  # with a byte-order mark
        then = "Set `encoding: utf-16` for its source" if is_known else "Save it as UTF-8"
        raise file_error(uri, f" is {encoding} text. {then}", encoding=encoding)
    if head and what != "text":
        raise file_error(uri, f" has no rows: it is {what}")
    # The first line of a file called .json tells which kind of JSON it is:
    #   `[{...}, {...}]`  one array: json    `[{...}]` and `[{...}]` below  a list per line: jsonl
    #   `{"a": 1}`        a row: jsonl       `{` and `"a": 1` below         objects
    #   `{"a": 1}, {"a": 2}`  objects without brackets around them, read as an array: json
    text = head.removeprefix(BOM).lstrip()
    first, newline, rest = text.partition(b"\n")
    first = first.rstrip().removesuffix(b",")
    value = json_in(first)
    is_json = value is not None
    # Rows in the first line of an array; 2 for an array over several lines; 0 if lines are lists.
    num_rows = 0
    if text.startswith(b"[") and not is_json:
        num_rows = 2 if text[1:].lstrip()[:1] in (b"{", b"") else 0
    elif text.startswith(b"[") and not rest.strip() and value and isinstance(value[0], dict):
        num_rows = 0 if {"role", "from"} & value[0].keys() else len(value)
    found: FileFormat
    if wanted == "auto" and named in ("json", "jsonl", None) and text[:1] == b"{" and not is_json:
        # Objects with commas between them, or several on one line: an array without brackets.
        for comma in split_elements(text).commas[:1].tolist():
            after = text[comma:].removeprefix(b",").lstrip()
            if after[:1] == b"{" and (after != text[comma:] or b"\n" not in text.rstrip()):
                return "json"
    if named not in ("json", None):
        found = named
        if named == "jsonl" and wanted == "auto":
            is_open = first.rstrip() == b"{"
            if num_rows:
                found = "json"
            elif rest.lstrip().startswith(b'"') if is_open else not is_json and _goes_on(text):
                found = "objects"  # an open object goes on with its first key
    elif text.startswith(b"["):
        has_more = rest.lstrip()[:1] == b"[" and wanted == "auto"
        is_alone = named is None and not rest.strip()
        found = "jsonl" if is_json and (has_more or is_alone) else "json"
    elif text.startswith(b"{") or named == "json":
        is_object = text.startswith(b"{") and bool(newline)
        goes_on = is_object and not (first.rstrip().endswith(b"}") or is_json)
        found = "objects" if goes_on else "jsonl" if text else "json"
    else:
        raise SourceError(
            f"the format of source file '{uri}' cannot be determined from its name or first "
            "bytes. Set file_format to json, jsonl, csv, tsv, parquet, arrow, xlsx, sqlite or "
            "duckdb",
            uri=uri,
        )
    if found != "json" and b"\n" not in head and b"\r" in head.rstrip(b"\r\n"):
        why = "CR-only line endings, which packhouse cannot read. Save it with LF line endings"
        raise file_error(uri, f" has {why}")
    if found == "jsonl" and num_rows > 1:  # a list with one element may be a row on its line
        fix = "Set file_format to json, or rename the file to end in .json"
        raise file_error(uri, f" is one JSON array, not JSON Lines. {fix}")
    return found


def _what_is(head: bytes) -> str:
    if head.startswith(_ZIP_MAGIC) and b"xl/workbook" in head:
        return "an Excel workbook. Set file_format to xlsx, or rename the file to end in .xlsx"
    for magic, what in _MAGICS:
        if head.startswith(magic):
            return what
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32 text"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    # UTF-16 without a mark has a zero next to each ASCII character: "a" is 61 00 or 00 61.
    sample = head[:4096]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if len(sample) >= 8 and max(even, odd) > max(len(sample) / 4, 4 * min(even, odd)):
        return "UTF-16LE text" if odd > even else "UTF-16BE text"
    start = head.removeprefix(BOM).lstrip()[:200].lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data. Run `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        return "a web page (an error page of a failed download?)"
    return "text"
