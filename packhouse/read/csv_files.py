"""Read CSV and TSV, with quotes as spreadsheets write them and a header that sets the width.

A field that starts with a quote runs to the next quote that is not doubled; newlines in it are
text. Many writers of TSV do not quote at all, so there a line with unbalanced quotes but the right
number of tabs is taken literally. A wrong number of fields, a quote that closes before its field
ends, control characters or invalid UTF-8 make one record bad, not the file.
"""

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from packhouse.errors import SourceError
from packhouse.read.file_formats import file_error
from packhouse.read.json_parsing import MAX_BAD_ROWS, Failure, Ints, Records, Rows, too_long
from packhouse.read.parquet_files import MAX_COLUMNS, too_many_columns
from packhouse.read.record_boundaries import TextFile, filled_lines
from packhouse.read.row_formats import MESSAGE_FIELDS
from packhouse.recipe.sections import FileFormat
from packhouse.system.wording import counted

MAX_RECORDS = 2**22
"""Records in a shard. Each takes 600 bytes of memory, but may take only two bytes of the file, as
in `1\\n2\\n...`."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_SPACED = re.compile(r' +"(?:[^"]|"")*"?')
"""A value with spaces before its quote, whole or up to a comma in it.

Its quotes would become part of it.
"""
_REMOVE = "; remove the spaces before quotes, because a quoted value begins with its quote"
csv.field_size_limit(2**29)  # by default, Python refuses fields over 131,072 characters


DELIMITERS: dict[FileFormat, str] = {"csv": ",", "csv_semicolon": ";", "tsv": "\t"}
"""Spreadsheets write semicolons in locales with a decimal comma."""
_MARKS = {",": "commas", ";": "semicolons", "\t": "tabs"}


@dataclass(eq=False)
class DelimitedFile(TextFile):
    """CSV or TSV: records end at newlines outside quotes; the first record names the columns."""

    delimiter: str = ","

    def begin(self, head: bytearray) -> int:
        """Read the header; return its end."""
        start = super().begin(head)
        data = bytes(head[start:])
        ends = record_ends(data, self.delimiter)
        # One quote that is never closed would hide all record ends. So the second search, which
        # knows that nothing follows, ends an open field with its line.
        if not len(ends):
            ends = record_ends(data, self.delimiter, is_whole=True)
        line = data[: ends[0]] if len(ends) else data
        if not line.strip():
            return start + len(line)
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            names = next(csv.reader([text], delimiter=self.delimiter))
        except (UnicodeDecodeError, csv.Error) as error:
            what = f"the header of source file '{self.uri}'"
            raise SourceError(f"{what} cannot be read: {error}") from None
        if len(names) > MAX_COLUMNS:
            raise file_error(self.uri, f" {too_many_columns(len(names))}")
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        if twice == [""]:
            fix = "Name or remove them, and put values that contain commas in quotes"
            raise file_error(self.uri, f": {names.count('')} columns have no name. {fix}")
        if twice:
            raise file_error(self.uri, f" has two columns named {twice[0]!r}. Rename one of them")
        self.header = tuple(names)
        return start + len(line)

    def ends(self, data: bytearray) -> Ints:
        """Return the ends of records from which a cut is chosen; see `TextFile`."""
        # From the start of the shard, because quotes tell which newlines end a record.
        ends = record_ends(data[: self.max_shard_bytes], self.delimiter)
        if not len(ends):
            ends = record_ends(data, self.delimiter)[:1]
        within = ends[ends > self.max_shard_bytes // 2]
        return within if len(within) else ends[-1:]

    def find_open(self, data: bytearray) -> tuple[int, str]:
        """Return the offset of the quote that is never closed."""
        array = np.frombuffer(data, np.uint8)
        quotes, newlines = np.flatnonzero(array == _QUOTE), np.flatnonzero(array == _NEWLINE)
        for start, end in _quoted_fields(array, quotes, newlines, ord(self.delimiter), False)[-1:]:
            if end == len(array):
                return start, "the quote opened at {} is never closed"
        return 0, "the row that begins at {} does not end"

    def count(self, data: bytearray, *, is_last: bool) -> int | None:
        """Count records, without blank lines.

        Raises:
            SourceError: there are more than fit the memory of a worker.
        """
        num_records = len(self.spans(data))
        if num_records > MAX_RECORDS:
            raise file_error(
                self.uri,
                f" has {num_records:,} records in {len(data):,} bytes; a shard can have at most "
                f"{MAX_RECORDS:,}. Check the file and its file_format; if both are right, lower "
                "shard_mb",
            )
        return num_records

    def sample(self, head: bytes) -> list[object]:
        """Return a row with the header's names, and the first rows if they may contain messages."""
        if self.header is None:
            return []
        rows: list[object] = [dict.fromkeys(self.header, "")]
        if not MESSAGE_FIELDS.isdisjoint(self.header):  # only the texts tell the keys of messages
            rows += self.parse(head, len(head) + 1).rows
        return rows

    def spans(self, data: bytes | bytearray) -> Ints:
        r"""Return start and end of each record, without its line end and without blank lines.

        Example:
            >>> DelimitedFile("a.csv").spans(b'a,b\r\n\n"c\nd",e').tolist()
            [[0, 3], [6, 13]]
        """
        array = np.frombuffer(data, np.uint8)
        spans = lines = filled_lines(array)
        if b'"' in data:
            ends = record_ends(data, self.delimiter, is_whole=True, blank=False)
            if not len(ends) or ends[-1] <= lines[-1:, 0].max(initial=-1):
                ends = np.append(ends, lines[-1:, 1])  # no newline after the last record
            # A record of several lines begins with its first line and ends with its last one: lines
            # [0, 2] [3, 5] [6, 8] with ends 3 and 9 -> records [0, 2] and [3, 8].
            first = np.searchsorted(lines[:, 0], np.concatenate([[0], ends[:-1]]))
            spans = np.stack([lines[first, 0], ends - (array[ends - 1] == _NEWLINE)], axis=1)
        spans[:, 1] -= array[spans[:, 1] - 1] == _RETURN
        return spans[spans[:, 1] > spans[:, 0]]

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        r"""Parse records into dicts keyed by `header`; all values are text.

        Example:
            >>> file = DelimitedFile("a.csv", header=("label", "text"))
            >>> file.parse(b'1,"a ""b"" c"\r\n2\r\n', 2**20).rows
            [{'label': '1', 'text': 'a "b" c'}]
        """
        spans, header, failures = self.spans(data), self.header or (), list[Failure]()
        values = _parse_all(data, spans, len(header), self.delimiter)
        widest, numbers = int((spans[:, 1] - spans[:, 0]).max(initial=0)), np.arange(len(spans))
        if values is None or len(values) != len(spans) or widest > max_row_bytes:
            values, good = [], list[int]()
            for number, (start, end) in enumerate(spans.tolist()):
                if len(failures) > MAX_BAD_ROWS:  # the reader will refuse the shard
                    break
                piece = data[start:end]
                if len(piece) > max_row_bytes:
                    failures.append(too_long(number, piece, max_row_bytes))
                    continue
                parsed = _parse_record(piece, len(header), self.delimiter)
                if isinstance(parsed, list):
                    values.append(parsed)
                    good.append(number)
                else:
                    failures.append(Failure(number, *parsed))
            numbers = np.array(good, np.int64)
        rows = Rows(dict(zip(header, row, strict=True)) for row in values)
        records = Records(rows, numbers, len(spans), failures, lambda: spans)
        num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        if num_lines > len(spans):  # blank lines, or line ends between quotes
            inside = sum(data.count(b"\n", start, end) for start, end in spans.tolist())
            if num_blank := num_lines - inside - len(spans):
                records.notes["blank_lines"] = num_blank
        return records


def _parse_all(data: bytes, spans: Ints, width: int, delimiter: str) -> list[list[str]] | None:
    """Parse all records at once; return None if any is bad."""
    if len(spans) < data.count(b"\n"):  # leave out blank lines
        data = b"\n".join(data[start:end] for start, end in spans.tolist())
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if _CONTROL.search(text) or "\r" in text.replace("\r\n", ""):
        return None
    try:
        # Without newline="", StringIO turns \r\n inside quotes into \n. `strict` makes text after a
        # closing quote an error; by default Python appends it to the value.
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [row for row in reader if row]
    except csv.Error:
        return None
    may_be_spaced = delimiter != "\t" and ' "' in text
    if may_be_spaced and any(map(_SPACED.fullmatch, chain.from_iterable(rows))):
        return None
    return rows if set(map(len, rows)) <= {width} else None


def _parse_record(piece: bytes, width: int, delimiter: str) -> list[str] | tuple[str, str]:
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as bad:
        byte = piece[bad.start]
        return "encoding", f"byte 0x{byte:02x} at offset {bad.start} of the row is not UTF-8"
    if found := _CONTROL.search(text):
        return "control", f"a raw control character 0x{ord(found[0]):02x} in the row"
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        if delimiter == "\t" and text.count("\t") == width - 1 and "\n" not in text:
            return text.split("\t")  # in TSV without quoting, a quote is an ordinary character
        if "unexpected end" in str(error):
            return "csv", "a quote opened in the row is never closed"
        return "csv", f"the row cannot be parsed: {error}"
    if len(rows) != 1:
        return "csv", "the row has a bare carriage return or an open quote"
    is_spaced = re.search(rf'(?:^|{re.escape(delimiter)}) +"', text) is not None
    if len(rows[0]) != width:
        why = f"the row has {counted(len(rows[0]), 'field')}, but the header has {width:,}"
        marks = _MARKS[delimiter] if len(rows[0]) > width else "line breaks"
        fix = _REMOVE if is_spaced else f"; if values contain {marks}, put them in quotes"
        return "fields", why + fix
    if delimiter != "\t" and is_spaced and any(map(_SPACED.fullmatch, rows[0])):
        return "csv", f"a value has a space before its quote{_REMOVE}"
    return rows[0]


def record_ends(
    data: bytes | bytearray | memoryview,
    delimiter: str,
    *,
    is_whole: bool = False,
    blank: bool = True,
) -> Ints:
    r"""Return the offset after the newline of each complete record of CSV or TSV.

    A quote at the start of a field opens it, up to the next quote that is not doubled, if the field
    ends there; newlines in between belong to the field. Other quotes are text (`5" disk`).

    Args:
        data: bytes from the start of a record.
        delimiter: one ASCII character.
        is_whole: nothing follows `data`, so a field that is open at its end is never closed, and
            its record ends with its line.
        blank: count empty lines as records.

    Example:
        >>> record_ends(b'a,"b\nc"\n5" d,e\n"f\ng', ",").tolist()
        [8, 15]
        >>> record_ends(b'a,"b\nc"\n5" d,e\n"f\ng', ",", is_whole=True).tolist()
        [8, 15, 18]
    """
    array = np.frombuffer(data, np.uint8)
    is_end = array == _NEWLINE
    if not blank:
        is_end[1:] &= array[:-1] != _NEWLINE
        is_end[:1] = False
    newlines = np.flatnonzero(is_end)
    quotes = np.flatnonzero(array == _QUOTE)
    if not len(quotes):
        return newlines + 1
    # In a file whose quotes alternate, a newline is outside of quotes if an even number of quotes
    # precedes it. `_quoted_fields` walks over the quotes one by one and is for all other files.
    if _are_paired(array, quotes, ord(delimiter)):
        is_outside = np.searchsorted(quotes, newlines) % 2 == 0
    else:
        fields = _quoted_fields(array, quotes, newlines, ord(delimiter), is_whole)
        starts, ends = np.array([(-1, -1), *fields], np.int64).T
        is_outside = newlines >= ends[np.searchsorted(starts, newlines) - 1]
    return np.asarray(newlines[is_outside] + 1, np.int64)


def _are_paired(array: npt.NDArray[np.uint8], quotes: Ints, delimiter: int) -> bool:
    """Return True if quotes simply alternate between opening and closing."""
    if len(quotes) % 2:
        return False
    # An opening quote begins a field or is the second of a doubled quote: a doubled quote inside a
    # field closes and reopens it, which has the same effect.
    # `a,"b ""c"" d",e` has quotes at 2 5 6 8 9 12: opening 2 6 9, closing 5 8 12. 6 and 9 directly
    # follow a closing quote, so 5 6 and 8 9 are doubled quotes.
    opening, closing = quotes[::2], quotes[1::2]
    before = array[np.maximum(opening - 1, 0)]
    begins = (opening == 0) | (before == delimiter) | (before == _NEWLINE)
    doubles = np.concatenate([[False], opening[1:] == closing[:-1] + 1])
    after = array[np.minimum(closing + 1, len(array) - 1)]
    ends = (after == delimiter) | (after == _NEWLINE) | (after == _RETURN)
    ends |= np.concatenate([doubles[1:], [False]])
    ends[-1:] |= closing[-1:] == len(array) - 1
    return bool((begins | doubles).all() and ends.all())


def _quoted_fields(
    array: npt.NDArray[np.uint8], quotes: Ints, newlines: Ints, delimiter: int, is_whole: bool
) -> list[tuple[int, int]]:
    """Return the offsets of the opening and closing quote of each quoted field."""
    places = quotes.data  # a list would take five times the memory
    before = array[np.maximum(quotes - 1, 0)]
    begins = (quotes == 0) | (before == delimiter) | (before == _NEWLINE)
    can_open = begins.data
    closers = (delimiter, _NEWLINE, _RETURN)
    fields: list[tuple[int, int]] = []
    at = 0
    while at < len(places):
        if not can_open[at]:
            at += 1
            continue
        closing = at + 1
        while closing + 1 < len(places) and places[closing + 1] == places[closing] + 1:
            closing += 2
        after = places[closing] + 1 if closing < len(places) else len(array) + 1
        if after >= len(array) and not is_whole:  # the bytes that follow will decide
            return [*fields, (places[at], len(array))]
        if after == len(array) or (after < len(array) and array[after] in closers):
            fields.append((places[at], places[closing]))
            at = closing + 1
        else:  # never closed, or text follows the closing quote: continue after this line
            line_end = int(np.searchsorted(newlines, places[at]))
            stop = newlines[line_end] if line_end < len(newlines) else len(array)
            at = int(np.searchsorted(quotes, stop))
    return fields
