"""What a file is: compression by magic number, format by name and checked against its first bytes.

The name decides and the bytes may veto: a file called `.jsonl` that holds a web page, a Git LFS
pointer, UTF-16 text or another format is refused with what was seen, because every parser would
only say "unexpected character at line 1".
"""

import re
from typing import Literal

from packhouse.errors import SourceError
from packhouse.sources.streams import Compression

__all__ = ["BOM", "FileFormat", "check_text", "compression_of", "format_of"]

FileFormat = Literal["json", "jsonl", "csv", "tsv", "parquet", "arrow"]

BOM = b"\xef\xbb\xbf"

_ENDINGS: dict[str, FileFormat] = {
    "json": "json",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
}
_MAGICS: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_COMPRESSION_ENDINGS: dict[Compression, str] = {"gzip": ".gz", "zstd": ".zst"}
_REFUSED_MAGICS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"%PDF", "a PDF document"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
)


def compression_of(head: bytes, name: str) -> tuple[Compression, dict[str, int]]:
    """Compression by magic number, and a note where the name says otherwise.

    Example:
        >>> compression_of(bytes([0x1F, 0x8B, 8]), "rows.jsonl")
        ('gzip', {'misnamed_compression': 1})
    """
    found: Compression = "none"
    for magic, compression in _MAGICS:
        if head.startswith(magic):
            found = compression
    named = [c for c, ending in _COMPRESSION_ENDINGS.items() if name.lower().endswith(ending)]
    expected = named[0] if named else "none"
    return found, {} if found == expected or not head else {"misnamed_compression": 1}


def format_of(head: bytes, name: str, wanted: str, uri: str) -> FileFormat:
    """Format of a file, from what the recipe says, else its name, else its first bytes.

    Args:
        head: first bytes, uncompressed.
        name: file name.
        wanted: `file_format` of the recipe.
        uri: for messages.

    Raises:
        SourceError: the bytes are not of that format, or nothing tells the format.
    """
    named = _format_of_name(name) if wanted == "auto" else wanted
    is_parquet = head.startswith(b"PAR1")
    is_arrow = head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))
    if named in ("parquet", "arrow") and head:
        if is_parquet if named == "parquet" else is_arrow:
            return named  # type: ignore[return-value]
        raise SourceError(
            f"source file '{uri}' is not {named.capitalize()}: it is {_what_is(head)}", uri=uri
        )
    if is_parquet or is_arrow:
        return "parquet" if is_parquet else "arrow"
    check_text(head, uri)
    return _text_format(head, named, uri)


def check_text(head: bytes, uri: str) -> None:
    """Refuse what is no UTF-8 text with rows in it.

    Raises:
        SourceError: UTF-16 or UTF-32, HTML, a Git LFS pointer, or binary data, named as such.
    """
    encoding = _wide_encoding(head)
    if encoding:
        raise SourceError(
            f"source file '{uri}' is {encoding} text; convert it to UTF-8 "
            f"(iconv -f {encoding} -t UTF-8)",
            uri=uri,
            encoding=encoding,
        )
    what = _what_is(head)
    if what != "text":
        raise SourceError(f"source file '{uri}' holds no rows: it is {what}", uri=uri)


def _format_of_name(name: str) -> FileFormat | None:
    plain = re.sub(r"\.(gz|zst)$", "", name.lower())
    return _ENDINGS.get(plain.rsplit(".", 1)[-1])


def _text_format(head: bytes, named: str | None, uri: str) -> FileFormat:
    start = head.removeprefix(BOM).lstrip()[:1]
    if named == "json":
        return "json" if start == b"[" or not start else _json_without_array(head, uri)
    if named in ("jsonl", "csv", "tsv"):
        return named  # type: ignore[return-value]
    if start == b"{":
        return _json_without_array(head, uri)
    if start == b"[":
        return "jsonl" if is_list_lines(head) else "json"
    raise SourceError(
        f"source file '{uri}': neither its name nor its first bytes tell its format; "
        "set file_format to json, jsonl, csv, tsv, parquet or arrow",
        uri=uri,
    )


def _json_without_array(head: bytes, uri: str) -> FileFormat:
    """`.json` that starts with an object: JSON Lines, unless one object fills several lines."""
    import orjson

    text = head.removeprefix(BOM).lstrip()
    first, newline, _ = text.partition(b"\n")
    try:
        orjson.loads(first)
        return "jsonl"
    except orjson.JSONDecodeError:
        pass
    if text[:1] == b"{" and newline and not first.rstrip().endswith(b"}"):
        raise SourceError(
            f"source file '{uri}' is one JSON object over several lines; rows are read from an "
            "array of objects or from one object a line",
            uri=uri,
        )
    return "jsonl"


def is_list_lines(head: bytes) -> bool:
    """Whether the first line is a JSON value by itself (a list of messages), not an open array."""
    import orjson

    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    try:
        orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return rest.lstrip()[:1] in (b"[", b"")


def _wide_encoding(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    sample = head[:4096]
    if len(sample) >= 8:
        even, odd = sample[::2].count(0), sample[1::2].count(0)
        if odd > len(sample) / 4 and even < odd / 4:
            return "UTF-16LE"
        if even > len(sample) / 4 and odd < even / 4:
            return "UTF-16BE"
    return None


def _what_is(head: bytes) -> str:
    for magic, what in (*_REFUSED_MAGICS, (b"PAR1", "Parquet"), (b"ARROW1", "Arrow IPC")):
        if head.startswith(magic):
            return what
    start = head.removeprefix(BOM).lstrip()[:200].lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data; run `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        return "a web page (an error page of a failed download?)"
    return "text"
