"""Read XLSX workbooks as tables of text, in the child process of `packhouse.sources.decoding`.

The first row that holds anything names the columns, as in CSV. All sheets that hold rows are read,
one after the other, and must have the same columns. Values are text, as CSV would have them:
4.0 is `4`. Needs `pip install 'packhouse[xlsx]'`.
"""

from collections import Counter
from typing import IO, Any

import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.runtime.extras import import_extra

__all__ = ["MAX_CELLS", "read_workbook"]

MAX_CELLS = 2**24
"""Cells of a sheet, empty ones between others included: a sheet may say that it has 17 billion."""


def read_workbook(file: IO[bytes], uri: str) -> pa.Table:
    """Return the rows of all sheets; columns are text, rows without any text are left out.

    Raises:
        SourceError: no workbook, sheets that differ, a column without a name or with that of
            another.
    """
    calamine = import_extra("python_calamine", "xlsx", "reading XLSX")
    try:
        book = calamine.CalamineWorkbook.from_filelike(file)
        tables = [_read_sheet(book, name, uri) for name in book.sheet_names]
    except calamine.CalamineError as error:
        raise SourceError(f"source file '{uri}' is no sound workbook: {error}", uri=uri) from None
    named = [(name, table) for name, table in tables if table.num_columns]
    for name, table in named[1:]:
        if table.schema != named[0][1].schema:
            raise SourceError(
                f"source file '{uri}': sheets '{named[0][0]}' and '{name}' have different columns; "
                "save the one that holds rows as CSV, or as a workbook of its own",
                uri=uri,
            )
    return pa.concat_tables([table for _, table in named]) if named else pa.table({})


def _read_sheet(book: Any, name: str, uri: str) -> tuple[str, pa.Table]:
    sheet = book.get_sheet_by_name(name)
    last_row, last_column = sheet.end or (0, 0)
    if (last_row + 1) * (last_column + 1) > MAX_CELLS:
        raise SourceError(
            f"source file '{uri}', sheet '{name}': {last_row + 1:,} rows of {last_column + 1:,} "
            f"columns, over {MAX_CELLS:,} cells; save it as CSV",
            uri=uri,
        )
    rows = [[_text(cell) for cell in row] for row in sheet.iter_rows()]
    rows = [row for row in rows if any(row)]
    if not rows:
        return name, pa.table({})
    header, *rows = rows
    columns = [n for n in range(len(header)) if header[n] or any(row[n] for row in rows)]
    names = Counter(header[n].strip() for n in columns)
    if "" in names or max(names.values()) > 1:
        wrong = "a column without a name" if "" in names else "two columns of one name"
        raise SourceError(
            f"source file '{uri}', sheet '{name}': {wrong} in its first row; name each column",
            uri=uri,
        )
    texts = {header[n].strip(): pa.array([row[n] for row in rows], pa.string()) for n in columns}
    return name, pa.table(texts)


def _text(cell: object) -> str:
    """A cell's value as CSV would have it."""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(cell)
