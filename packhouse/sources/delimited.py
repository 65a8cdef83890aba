"""Parse CSV and TSV records: quotes as spreadsheets write them, every record as wide as the header.

A field that starts with a quote runs to the next quote that is not doubled; newlines in it are
text. In TSV, where many writers quote nothing, a line whose quotes make no sense but whose tabs
fit is taken literally. A record of another width, a quote that is closed before its field ends,
control characters or bytes that are not UTF-8 make that record bad, not the file.
"""

import csv
import io
import re

import numpy as np

from packhouse.sources.records import Failure, Records
from packhouse.sources.rows import Rows
from packhouse.sources.structure import Ints, filled_lines, record_ends

__all__ = ["parse_delimited", "record_spans"]

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
csv.field_size_limit(2**29)


def record_spans(data: bytes | bytearray, delimiter: str) -> Ints:
    r"""Start and end of each record, line end excluded, blank lines left out.

    Example:
        >>> record_spans(b'a,b\r\n\n"c\nd",e', ",").tolist()
        [[0, 3], [6, 13]]
    """
    array = np.frombuffer(data, np.uint8)
    lines = filled_lines(array)
    if b'"' in data:
        ends = record_ends(data, delimiter, is_whole=True, blank=False)
        if not len(ends) or ends[-1] <= lines[-1:, 0].max(initial=-1):
            ends = np.append(ends, lines[-1:, 1])  # behind the last record there is no newline
        first = np.searchsorted(lines[:, 0], np.concatenate([[0], ends[:-1]]))
        spans = np.stack([lines[first, 0], ends - (array[ends - 1] == 0x0A)], axis=1)
    else:
        spans = lines
    spans[:, 1] -= array[spans[:, 1] - 1] == 0x0D
    return spans[spans[:, 1] > spans[:, 0]]


def parse_delimited(
    data: bytes, header: tuple[str, ...], delimiter: str, max_row_bytes: int
) -> Records:
    r"""Parse records into dicts keyed by `header`; all values are text.

    Example:
        >>> parse_delimited(b'1,"a ""b"" c"\r\n2\r\n', ("label", "text"), ",", 2**20).rows
        [{'label': '1', 'text': 'a "b" c'}]
    """
    spans = record_spans(data, delimiter)
    records = Records(Rows(), np.arange(len(spans)), len(spans), spans=lambda: spans)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    if num_lines > len(spans):  # blank lines, or line ends between quotes
        inside = sum(data.count(b"\n", start, end) for start, end in spans.tolist())
        num_blank = num_lines - inside - len(spans)
        if num_blank:
            records.notes["blank_lines"] = num_blank
    values = _parse_all(data, spans, len(header), delimiter)
    widest = int((spans[:, 1] - spans[:, 0]).max(initial=0))
    if values is None or len(values) != len(spans) or widest > max_row_bytes:
        values = _parse_one_by_one(records, data, len(header), delimiter, max_row_bytes)
    records.rows = Rows(dict(zip(header, row, strict=True)) for row in values)
    return records


def _parse_all(data: bytes, spans: Ints, width: int, delimiter: str) -> list[list[str]] | None:
    """Every record at once; None where any is bad."""
    if len(spans) < data.count(b"\n"):  # leave blank lines out
        data = b"\n".join(data[start:end] for start, end in spans.tolist())
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if _CONTROL.search(text) or "\r" in text.replace("\r\n", ""):
        return None
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [row for row in reader if row]
    except csv.Error:
        return None
    return rows if set(map(len, rows)) <= {width} else None


def _parse_one_by_one(
    records: Records, data: bytes, width: int, delimiter: str, max_row_bytes: int
) -> list[list[str]]:
    assert records.spans is not None
    rows, numbers = [], []
    for number, (start, end) in enumerate(records.spans().tolist()):
        piece = data[start:end]
        if len(piece) > max_row_bytes:
            detail = f"the row has {len(piece):,} bytes, over max_row_bytes {max_row_bytes:,}"
            records.failures.append(Failure(number, "row_too_long", detail))
            continue
        parsed = _parse_record(piece, width, delimiter)
        if isinstance(parsed, list):
            rows.append(parsed)
            numbers.append(number)
        else:
            records.failures.append(Failure(number, *parsed))
    records.numbers = np.array(numbers, np.int64)
    return rows


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
            return text.split("\t")  # in TSV without quoting a quote is a letter
        return "csv", f"not a record: {error}"
    if len(rows) != 1:
        return "csv", "not one record: a bare carriage return or an open quote"
    if len(rows[0]) != width:
        return "fields", f"{len(rows[0])} fields where the header has {width}"
    return rows[0]
