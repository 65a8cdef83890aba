"""Number rows as an editor does: by the line of their file on which they begin, from 1.

Tables hold the number of a record in its file and the offset of its first byte. Blank lines and
records of several lines come between that and a line, so the file is read up to there: for a
message to a person, and for files of this machine alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from packhouse.errors import PackhouseError
from packhouse.read.file_formats import compression_of
from packhouse.read.files import file_errors, find_files, local_path, open_file, source_name
from packhouse.read.streams import FileStream
from packhouse.recipe import SourceConfig


def lines_at(uri: str, offsets: Sequence[int], encoding: str = "utf-8") -> list[int]:
    """Return the line, from 1, that holds each byte of a file's text.

    Args:
        uri: a file, which may be compressed.
        offsets: into its uncompressed text in UTF-8, rising.
        encoding: of the file.

    Raises:
        SourceError: the file cannot be read.
    """
    with file_errors(uri), open_file(uri) as file:
        compression, _ = compression_of(file.read(4), uri)
    lines: list[int] = []
    position = line = 0
    for chunk in FileStream(uri, compression, encoding):
        while len(lines) < len(offsets) and offsets[len(lines)] < position + len(chunk):
            lines.append(1 + line + chunk.count(b"\n", 0, offsets[len(lines)] - position))
        if len(lines) == len(offsets):
            break
        position += len(chunk)
        line += chunk.count(b"\n")
    return lines


def lines_of_rows(
    rows: Iterable[Mapping[str, Any]], sources: Iterable[SourceConfig]
) -> dict[tuple[str, int], int]:
    """Return the line of each row of a table whose file is on this machine, by its file and number.

    Args:
        rows: with `source`, `row` and `byte_offset`, as in `tables.QUARANTINED`.
        sources: of the recipe that the rows were read for.
    """
    places: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["byte_offset"] is not None:
            places.setdefault(row["source"], {})[row["byte_offset"]] = row["row"]
    found: dict[tuple[str, int], int] = {}
    for source in sources:
        name = source_name(source)
        if "://" in source.path or not any(file.split("/")[0] == name for file in places):
            continue
        with suppress(PackhouseError):  # the file is gone; the row's number is there
            for file in find_files(source):
                of_file = places.get(f"{name}/{file.name}", {})
                offsets = sorted(of_file)
                lines = lines_at(file.uri, offsets, source.encoding) if offsets else []
                for offset, line in zip(offsets, lines, strict=False):
                    found[f"{name}/{file.name}", of_file[offset]] = line
    return found


def place_of(row: Mapping[str, Any], lines: Mapping[tuple[str, int], int]) -> str:
    """Return where a row stands, for people.

    Args:
        row: with `source` and `row`.
        lines: from `lines_of_rows`.

    Example:
        >>> row = {"source": "a/a.jsonl", "row": 17}
        >>> place_of(row, {("a/a.jsonl", 17): 18}), place_of(row, {})
        ('a/a.jsonl line 18', 'a/a.jsonl row 17')
    """
    line = lines.get((row["source"], row["row"]))
    place = f"row {row['row']:,}" if line is None else f"line {line:,}"
    return f"{row['source']} {place}"


def name_row(uri: str, row: int, byte_offset: int | None, encoding: str = "utf-8") -> str:
    """Return `line 18` for a row of a text file on this machine, else `row 17`."""
    with suppress(PackhouseError):
        if byte_offset is not None and local_path(uri) is not None:
            return f"line {lines_at(uri, [byte_offset], encoding)[0]:,}"
    return f"row {row:,}"
