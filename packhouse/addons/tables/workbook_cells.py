"""Find cells of XLSX and ODS workbooks that hold no value: errors, and formulas nobody computed.

The reader of cells (calamine) gives an empty text for both, which is no row's answer. A formula
whose value was kept is a value like any other; that value may be an empty text.

    XLSX   <c r="B2" t="e"><f>1/0</f><v>#DIV/0!</v></c>           an error
           <c r="B3"><f>A3</f></c>                                 never computed
           <c r="B4" t="str"><f>""</f><v></v></c>                  an empty text
    ODS    <table-cell formula="of:=1/0" value-type="error">       an error; text: #DIV/0!
           <table-cell formula="of:=[.A3]"/>                       never computed
"""

import re
import zipfile
from collections.abc import Callable
from typing import IO
from xml.parsers import expat

Faults = dict[tuple[int, int], str]
"""Row and column of a cell from 0 -> its error, such as `#REF!`; "" for what nobody computed."""

_MARKERS = re.compile(rb"""[<:]f[\s>/]|["']e["']|:formula|\0""")
"""Without one of these, a sheet has no such cell. (NUL: it is UTF-16.)"""
_ODS_ERROR = re.compile(r"#[A-Z/0]{2,7}[!?]?|Err:[0-9]{3}")
_MAX_TEXT = 40
_PIECE = 2**20


def find_faults(file: IO[bytes], max_cells: int) -> dict[str, Faults]:
    """Return such cells of each sheet that has any.

    Args:
        file: a workbook that calamine has read.
        max_cells: of a sheet, from its first cell to the last of these.

    Raises:
        ValueError: its XML is not sound, it is neither XLSX nor ODS, or a sheet is too large.
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
        if part is not None and _is_marked(book, part):
            cells = _XlsxCells(max_cells)
            _parse(book, part, cells.start, cells.end, cells.text)
            found[name] = cells.faults
    return found


class _XlsxCells:
    """Follows the elements of a sheet."""

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
    """Follows the elements of all sheets; a row or a cell may stand for several."""

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
    """The value of an attribute of any namespace."""
    return next((value for key, value in attributes.items() if key.endswith(f" {name}")), "")


def _number(attributes: dict[str, str], name: str) -> int:
    return int(_attribute(attributes, name) or 1)


def _column_of(letters: str) -> int:
    """Column from 0.

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
            before = piece[-16:]
    return False


def _parse(
    book: zipfile.ZipFile,
    part: str | None,
    start: Callable[[str, dict[str, str]], None],
    end: Callable[[str], None] | None = None,
    text: Callable[[str], None] | None = None,
) -> None:
    """Call the handlers for each element of a part, by its name without the namespace."""
    if part is None:
        return
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = lambda name, found: start(name.rpartition(" ")[2], found)
    if end is not None and text is not None:
        parser.EndElementHandler = lambda name: end(name.rpartition(" ")[2])
        parser.CharacterDataHandler = text
    with book.open(part) as file:
        parser.ParseFile(file)
