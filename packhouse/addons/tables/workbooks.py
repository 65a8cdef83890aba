"""Read XLSX and ODS workbooks as tables of text, in the worker of `packhouse.read.tabular`.

The first row that is not empty gives the column names, as in CSV. All sheets with rows are read in
order and must have the same columns. Values become text as they would look in CSV:

    4.0 -> 4    2**53 and above -> 9007199254740992.0, as cells have 53 bits    true -> true
    a date -> 2024-01-31    a date and time -> 2024-01-31 10:30:00    a time -> 10:30:00

A cell with an error makes its row bad, and so does a formula without a computed value. The cell
reader (calamine) returns empty text for both, so they are found in the XML. A formula with a stored
value counts as a value, even if it is empty text.

    XLSX   <c r="B2" t="e"><f>1/0</f><v>#DIV/0!</v></c>           an error
           <c r="B3"><f>A3</f></c>                                 never computed
           <c r="B4" t="str"><f>""</f><v></v></c>                  an empty text
    ODS    <table-cell formula="of:=1/0" value-type="error">       an error; text: #DIV/0!
           <table-cell formula="of:=[.A3]"/>                       never computed

Needs `pip install 'packhouse[xlsx]'`. Sheets are held in memory, up to 16 million cells; save
larger ones as CSV.
"""

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from typing import IO, Any
from xml.parsers import expat

import pyarrow as pa
import pyarrow.ipc

from packhouse.errors import SourceError
from packhouse.read.tabular import fault_column, fault_field
from packhouse.system.plugins import import_extra

Faults = dict[tuple[int, int], str]
"""(row, column) of a cell, from 0 -> its error, such as `#REF!`; "" if it was never computed."""

_BATCH_ROWS = 1024
MAX_CELLS = 2**24
"""Cells per sheet, including empty ones in between: a small file can declare 17 billion."""


def workbook_as_arrow(file: IO[bytes], uri: str, file_format: str, table: None) -> IO[bytes]:
    """Return the rows of all sheets as an Arrow file in memory; see `read_workbook`."""
    rows = read_workbook(file, uri)
    written = io.BytesIO()
    with pa.ipc.new_file(written, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_BATCH_ROWS)
    written.seek(0)
    return written


def read_workbook(file: IO[bytes], uri: str) -> pa.Table:
    """Return the rows of all sheets. Columns are text; rows without text are left out.

    The last column marks bad rows (`packhouse.read.tabular`).

    Raises:
        SourceError: the file is not a valid workbook, its sheets differ, or a column has no name or
            a duplicate name.
    """
    calamine = import_extra("python_calamine", "xlsx", "reading XLSX")
    try:
        book = calamine.CalamineWorkbook.from_filelike(file)
        faults = find_faults(file, MAX_CELLS)
        names = book.sheet_names
        tables = [_read_sheet(book, name, faults.get(name, {}), uri) for name in names]
    except (calamine.CalamineError, ValueError) as error:
        raise SourceError(f"source file '{uri}' is no sound workbook: {error}", uri=uri) from None
    named = [(name, table) for name, table in tables if table.num_columns]
    for name, table in named[1:]:
        if table.schema != named[0][1].schema:
            raise SourceError(
                f"source file '{uri}': sheets '{named[0][0]}' and '{name}' have different columns; "
                "save the one that holds rows as CSV, or as a workbook of its own",
                uri=uri,
            )
    if not named:
        return pa.table([fault_column({}, 0)], schema=pa.schema([fault_field]))
    return pa.concat_tables([table for _, table in named])


def _read_sheet(book: Any, name: str, faults: Faults, uri: str) -> tuple[str, pa.Table]:
    """Return the name of a sheet and its rows; an empty table if it has none."""
    sheet = book.get_sheet_by_name(name)
    last_row, last_column = sheet.end or (0, 0)
    if (last_row + 1) * (last_column + 1) > MAX_CELLS:
        raise SourceError(
            f"source file '{uri}', sheet '{name}': {last_row + 1:,} rows of {last_column + 1:,} "
            f"columns, over {MAX_CELLS:,} cells; save it as CSV",
            uri=uri,
        )
    rows = _rows(sheet, faults)
    places = [place for place, row in enumerate(rows) if any(row)]
    if not places:
        return name, pa.table({})
    # Rows 0 (empty), 1 (names), 2, 3 (empty) and 4: header row 1, table rows 2 and 4.
    first, *places = places
    header = rows[first]
    columns = [n for n in range(len(header)) if any(rows[place][n] for place in (first, *places))]
    names = Counter(header[n].strip() for n in columns)
    bad = [(row, column) for row, column in faults if row == first]
    if bad or "" in names or max(names.values()) > 1:
        wrong = "two columns of one name" if "" not in names else "a column without a name"
        wrong = f"cell {_cell(*bad[0])}, which holds {header[bad[0][1]]}," if bad else wrong
        raise SourceError(
            f"source file '{uri}', sheet '{name}': {wrong} in its first row; name each column",
            uri=uri,
        )
    texts = {
        header[n].strip(): [None if (p, n) in faults else rows[p][n] for p in places]
        for n in columns
    }
    table = pa.table({key: pa.array(values, pa.string()) for key, values in texts.items()})
    wrong_rows: dict[int, tuple[str, str]] = {}
    numbers = {place: number for number, place in enumerate(places)}
    for (row, column), error in sorted(faults.items(), reverse=True):  # the first cell is named
        held = f"the error {error}" if error else "a formula that nobody computed"
        helps = "mend its formula" if error else "open the workbook in a spreadsheet and save it"
        wrong_rows[numbers[row]] = (
            "cell",
            f"cell {_cell(row, column)} of sheet '{name}', column '{header[column].strip()}', "
            f"holds {held}; {helps}, or take the row or the column out",
        )
    return name, table.append_column(fault_field, fault_column(wrong_rows, table.num_rows))


def _rows(sheet: Any, faults: Faults) -> list[list[str]]:
    """Return the texts of a sheet from cell A1 on, with the error or `=` in bad cells."""
    num_before = (sheet.start or (0, 0))[1]  # calamine skips empty columns at the left
    rows = [[""] * num_before + [_text(cell) for cell in row] for row in sheet.iter_rows()]
    num_rows = max([len(rows), *(row + 1 for row, _ in faults)])
    width = max([len(row) for row in rows[:1]] + [column + 1 for _, column in faults], default=0)
    rows += [[] for _ in range(len(rows), num_rows)]
    for row in rows:
        row += [""] * (width - len(row))
    for (row_number, column), error in faults.items():
        rows[row_number][column] = error or "="
    return rows


def _cell(row: int, column: int) -> str:
    """Return the name of a cell.

    Example:
        >>> _cell(6, 3), _cell(0, 26)
        ('D7', 'AA1')
    """
    letters, rest = "", column + 1
    while rest:
        rest, letter = divmod(rest - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return f"{letters}{row + 1}"


def _text(cell: object) -> str:
    """Return the value of a cell as it would look in CSV."""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(cell)


_MARKERS = re.compile(rb"""[<:]f[\s>/]|["']e["']|:formula|\0""")
"""A sheet without any of these has no bad cells. NUL means UTF-16, which is always parsed."""
_ODS_ERROR = re.compile(r"#[A-Z/0]{2,7}[!?]?|Err:[0-9]{3}")
_MAX_TEXT = 40
_PIECE = 2**20


def find_faults(file: IO[bytes], max_cells: int) -> dict[str, Faults]:
    """Return the bad cells of each sheet that has any.

    Args:
        file: a workbook that calamine has read.
        max_cells: limit per sheet, counted from its first cell to the last bad one.

    Raises:
        ValueError: the XML is invalid, the file is neither XLSX nor ODS, or a sheet is too large.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as book:
            parts = {name.lower(): name for name in book.namelist()}
            if "content.xml" in parts:
                found = _of_ods(book, parts["content.xml"], max_cells)
            elif "xl/workbook.xml" in parts:
                found = _of_xlsx(book, parts, max_cells)
            else:
                raise ValueError("it has neither xl/workbook.xml nor content.xml")
    except (expat.ExpatError, zipfile.BadZipFile, OSError) as error:
        raise ValueError(str(error)) from None
    return {name: faults for name, faults in found.items() if faults}


def _of_xlsx(book: zipfile.ZipFile, parts: dict[str, str], max_cells: int) -> dict[str, Faults]:
    """Return the bad cells of each sheet in an XLSX file."""
    links: dict[str, str] = {}
    sheets: dict[str, str] = {}

    def link(name: str, attributes: dict[str, str]) -> None:
        if name == "Relationship":
            links[attributes.get("Id", "")] = attributes.get("Target", "")

    def sheet(name: str, attributes: dict[str, str]) -> None:
        if name == "sheet":
            ids = (value for key, value in attributes.items() if key.endswith(" id"))
            sheets[attributes.get("name", "")] = links.get(next(ids, ""), "")

    _parse(book, parts.get("xl/_rels/workbook.xml.rels"), link)
    _parse(book, parts["xl/workbook.xml"], sheet)
    found = {}
    for name, target in sheets.items():
        path = target.replace("\\", "/").lstrip("/").lower()
        part = parts.get(path if path.startswith("xl/") else f"xl/{path}")
        # Searching bytes is fast; only sheets that may have bad cells are parsed.
        if part is not None and _is_marked(book, part):
            cells = _XlsxCells(max_cells)
            _parse(book, part, cells.start, cells.end, cells.text)
            found[name] = cells.faults
    return found


class _XlsxCells:
    """Finds bad cells from the XML elements of a sheet."""

    def __init__(self, max_cells: int) -> None:
        self.faults: Faults = {}
        self._max_cells = max_cells
        self._row = self._column = -1
        self._kind = self._value = ""
        self._is_formula = self._is_value = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "row":
            self._row = int(attributes["r"]) - 1 if "r" in attributes else self._row + 1
            self._column = -1
        elif name == "c":
            # The reference is optional: a cell without it follows the previous one.
            place = attributes.get("r", "")
            letters = place.rstrip("0123456789")
            self._column = _column_of(letters) if letters else self._column + 1
            self._row = int(place[len(letters) :]) - 1 if letters else self._row
            self._kind, self._value, self._is_formula = attributes.get("t", ""), "", False
        elif name == "f":
            self._is_formula = True
        self._is_value = name == "v"

    def text(self, piece: str) -> None:
        if self._is_value and len(self._value) < _MAX_TEXT:
            self._value += piece.strip()

    def end(self, name: str) -> None:
        self._is_value = False
        if name != "c":
            return
        is_missing = self._is_formula and not self._value and self._kind != "str"
        if self._kind == "e" or is_missing:
            _check_place(self._row, self._column, self._max_cells)
            error = self._value[:_MAX_TEXT] or "#ERROR"
            self.faults[self._row, self._column] = "" if is_missing else error


def _of_ods(book: zipfile.ZipFile, part: str, max_cells: int) -> dict[str, Faults]:
    if not _is_marked(book, part):
        return {}
    tables = _OdsTables(max_cells)
    _parse(book, part, tables.start, tables.end, tables.text)
    return tables.found


class _OdsTables:
    """Finds bad cells from the XML elements of all sheets; a row or a cell can be repeated."""

    def __init__(self, max_cells: int) -> None:
        self.found: dict[str, Faults] = {}
        self._max_cells = max_cells
        self._row, self._rows, self._column = 0, 1, 0
        self._faults: Faults = {}
        self._of_row: dict[int, str] = {}
        self._cell: dict[str, str] = {}
        self._text = ""
        self._is_text = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "table":
            self._row = 0
            self._faults = self.found.setdefault(_attribute(attributes, "name"), {})
        elif name == "table-row":
            self._column, self._of_row = 0, {}
            self._rows = _number(attributes, "number-rows-repeated")
        elif name in ("table-cell", "covered-table-cell"):
            self._cell, self._text = attributes, ""
        self._is_text = name in ("p", "span", "a")

    def text(self, piece: str) -> None:
        if self._is_text and len(self._text) < _MAX_TEXT:
            self._text += piece.strip()

    def end(self, name: str) -> None:
        self._is_text = False
        if name in ("table-cell", "covered-table-cell"):
            # One element can stand for many equal cells.
            columns = _number(self._cell, "number-columns-repeated")
            fault = self._fault()
            last = self._column + columns
            if fault is not None:
                _check_place(self._row + self._rows - 1, last - 1, self._max_cells)
                self._of_row |= dict.fromkeys(range(self._column, last), fault)
            self._column = last
        elif name == "table-row":
            last = self._row + self._rows
            if self._of_row:
                for row in range(self._row, last):
                    self._faults |= {(row, column): f for column, f in self._of_row.items()}
            self._row = last

    def _fault(self) -> str | None:
        kinds = [value for key, value in self._cell.items() if key.endswith(" value-type")]
        is_formula = any(key.endswith(" formula") for key in self._cell)
        if "error" in kinds or (is_formula and _ODS_ERROR.fullmatch(self._text)):
            return self._text[:_MAX_TEXT] or "#ERROR"
        return "" if is_formula and not kinds and not self._text else None


def _check_place(row: int, column: int, max_cells: int) -> None:
    if row < 0 or column < 0 or (row + 1) * (column + 1) > max_cells:
        raise ValueError(f"row {row + 1:,}, column {column + 1:,} is over {max_cells:,} cells")


def _attribute(attributes: dict[str, str], name: str) -> str:
    """Return the value of an attribute in any namespace."""
    return next((value for key, value in attributes.items() if key.endswith(f" {name}")), "")


def _number(attributes: dict[str, str], name: str) -> int:
    return int(_attribute(attributes, name) or 1)


def _column_of(letters: str) -> int:
    """Return the column number of letters, from 0.

    Example:
        >>> [_column_of(letters) for letters in ("A", "Z", "AA")]
        [0, 25, 26]
    """
    number = 0
    for letter in letters[:4].upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number - 1


def _is_marked(book: zipfile.ZipFile, part: str) -> bool:
    before = b""
    with book.open(part) as file:
        while piece := file.read(_PIECE):
            if _MARKERS.search(before + piece):
                return True
            # Keep the end of the piece: a marker may be split between two pieces.
            before = piece[-16:]
    return False


def _parse(
    book: zipfile.ZipFile,
    part: str | None,
    start: Callable[[str, dict[str, str]], None],
    end: Callable[[str], None] | None = None,
    text: Callable[[str], None] | None = None,
) -> None:
    """Call the handlers for each element of a part, with its name without namespace."""
    if part is None:
        return
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = lambda name, found: start(name.rpartition(" ")[2], found)
    if end is not None and text is not None:
        parser.EndElementHandler = lambda name: end(name.rpartition(" ")[2])
        parser.CharacterDataHandler = text
    with book.open(part) as file:
        parser.ParseFile(file)
