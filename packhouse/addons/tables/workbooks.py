"""Read XLSX and ODS workbooks as tables of text, in the worker of `packhouse.read.tabular`.

The first row that holds anything names the columns, as in CSV. All sheets that hold rows are read,
one after the other, and must have the same columns. Values are text, as CSV would have them:

    4.0 -> 4    2**53 and beyond -> 9007199254740992.0, for a cell has 53 bits    true -> true
    a day -> 2024-01-31    a day and time -> 2024-01-31 10:30:00    a time -> 10:30:00

A cell that holds an error makes its row bad, and so does a formula whose value nobody computed.
Needs `pip install 'packhouse[xlsx]'`.
"""

import io
from collections import Counter
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc

from packhouse.addons.tables.workbook_cells import Faults, find_faults
from packhouse.errors import SourceError
from packhouse.read.tabular import fault_column, fault_field
from packhouse.system.plugins import import_extra

_BATCH_ROWS = 1024
MAX_CELLS = 2**24
"""Cells of a sheet, empty ones between others included: a sheet may say that it has 17 billion."""


def workbook_as_arrow(file: IO[bytes], uri: str, file_format: str, table: None) -> IO[bytes]:
    """Return the rows of all sheets as an Arrow file in memory; see `read_workbook`."""
    rows = read_workbook(file, uri)
    written = io.BytesIO()
    with pa.ipc.new_file(written, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_BATCH_ROWS)
    written.seek(0)
    return written


def read_workbook(file: IO[bytes], uri: str) -> pa.Table:
    """Return the rows of all sheets; columns are text, rows without any text are left out.

    The last column says which rows are bad (`packhouse.read.tabular`).

    Raises:
        SourceError: no workbook, sheets that differ, a column without a name or with that of
            another.
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
    # Rows 0 (empty), 1 (names), 2, 3 (empty) and 4: header 1, rows of the table 2 and 4.
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
    """The texts of a sheet from its first cell on; of a bad cell its error, or `=`."""
    num_before = (sheet.start or (0, 0))[1]  # columns that calamine leaves out
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
    """Name of a cell.

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
    """A cell's value as CSV would have it."""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(cell)
