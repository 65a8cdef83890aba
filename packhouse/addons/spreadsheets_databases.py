"""Read workbooks (XLSX, ODS) and databases (SQLite, DuckDB) as tables.

Workbooks become tables of text, in the worker of `packhouse.read.parquet_files`.

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
import shutil
import sqlite3
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.ipc

from packhouse.errors import SourceError
from packhouse.read.parquet_files import fault_column, fault_field
from packhouse.records.duckdb_functions import NO_FILES
from packhouse.system.plugins import import_extra
from packhouse.system.wording import first_line, near_name

Faults = dict[tuple[int, int], str]
"""Error of each bad cell by (row, column), counted from 0; "" if a formula was never computed."""

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

    The last column marks bad rows (`packhouse.read.parquet_files`).

    Raises:
        SourceError: the file is not a valid workbook, its sheets differ, or a column has no name or
            a duplicate name.
    """
    calamine = import_extra("python_calamine", "xlsx", "reading XLSX")
    try:
        book = calamine.CalamineWorkbook.from_filelike(file)
        faults = find_faults(file)
        names = book.sheet_names
        tables = [_read_sheet(book, name, faults.get(name, {}), uri) for name in names]
    except (calamine.CalamineError, ValueError) as error:
        raise _bad_file(uri, f" is not a valid workbook: {error}") from None
    named = [(name, table) for name, table in tables if table.num_columns]
    for name, table in named[1:]:
        if table.schema != named[0][1].schema:
            raise _bad_file(
                uri,
                f": sheets '{named[0][0]}' and '{name}' have different columns. Save the sheet "
                "with the rows as CSV or in a separate workbook.",
            )
    if not named:
        return pa.table([fault_column({}, 0)], schema=pa.schema([fault_field]))
    return pa.concat_tables([table for _, table in named])


def _read_sheet(book: Any, name: str, faults: Faults, uri: str) -> tuple[str, pa.Table]:
    """Return the name of a sheet and its rows; an empty table if it has none."""
    sheet = book.get_sheet_by_name(name)
    last_row, last_column = sheet.end or (0, 0)
    if (last_row + 1) * (last_column + 1) > MAX_CELLS:
        raise _bad_file(
            uri,
            f", sheet '{name}': {last_row + 1:,} rows of {last_column + 1:,} columns, more than "
            f"{MAX_CELLS:,} cells. Save it as CSV.",
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
        wrong = "two columns with the same name" if "" not in names else "a column without a name"
        wrong = f"cell {_cell(*bad[0])}, which holds {header[bad[0][1]]}," if bad else wrong
        raise _bad_file(
            uri, f", sheet '{name}': {wrong} in its first row. Give each column its own name."
        )
    texts = {}
    for n in columns:
        values = [None if (place, n) in faults else rows[place][n] for place in places]
        texts[header[n].strip()] = pa.array(values, pa.string())
    table = pa.table(texts)
    wrong_rows: dict[int, tuple[str, str]] = {}
    numbers = {place: number for number, place in enumerate(places)}
    for (row, column), error in sorted(faults.items(), reverse=True):  # the first cell is named
        held = f"the error {error}" if error else "a formula without a computed value"
        helps = (
            "Fix its formula" if error else "Open the workbook in a spreadsheet program and save it"
        )
        wrong_rows[numbers[row]] = (
            "cell",
            f"cell {_cell(row, column)} of sheet '{name}', column '{header[column].strip()}', "
            f"holds {held}. {helps}, or remove the row or column.",
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
# LibreOffice stores some errors, such as Err:502, as the number 0 with this text.
_ODS_ERROR = re.compile(r"#[A-Z/0]{2,7}[!?]?|Err:[0-9]{3}")
_MAX_TEXT = 40
_PIECE = 2**20


def find_faults(file: IO[bytes]) -> dict[str, Faults]:
    """Return the bad cells of each sheet that has any.

    Args:
        file: a workbook that calamine has read.

    Raises:
        ValueError: the XML is invalid, the file is neither XLSX nor ODS, or a sheet is too large.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as book:
            parts = {name.lower(): name for name in book.namelist()}
            if "content.xml" in parts:
                found = _of_ods(book, parts["content.xml"])
            elif "xl/workbook.xml" in parts:
                found = _of_xlsx(book, parts)
            else:
                raise ValueError("it has neither xl/workbook.xml nor content.xml")
    except (ElementTree.ParseError, zipfile.BadZipFile, OSError) as error:
        raise ValueError(str(error)) from None
    return {name: faults for name, faults in found.items() if faults}


def _of_xlsx(book: zipfile.ZipFile, parts: dict[str, str]) -> dict[str, Faults]:
    """Return the bad cells of each sheet in an XLSX file."""
    links: dict[str, str] = {}
    if relations := parts.get("xl/_rels/workbook.xml.rels"):
        for element in _elements(book, relations, "Relationship"):
            links[element.get("Id", "")] = element.get("Target", "")
    found = {}
    for element in _elements(book, parts["xl/workbook.xml"], "sheet"):
        target = links.get(_attribute(element, "id"), "")
        path = target.replace("\\", "/").lstrip("/").lower()
        part = parts.get(path if path.startswith("xl/") else f"xl/{path}")
        # Searching bytes is fast; only sheets that may have bad cells are parsed.
        if part is not None and _is_marked(book, part):
            found[element.get("name", "")] = _of_sheet(book, part)
    return found


def _of_sheet(book: zipfile.ZipFile, part: str) -> Faults:
    """Return the bad cells of a sheet in an XLSX file."""
    faults: Faults = {}
    row = -1
    for element in _elements(book, part, "row"):
        row, space = int(element.get("r", row + 2)) - 1, element.tag.removesuffix("row")
        reference, num_after = "", 0  # a cell without a reference follows the previous one
        for cell in element:
            own = cell.get("r")
            reference, num_after = (own, 0) if own else (reference, num_after + 1)
            kind, is_formula = cell.get("t"), cell.find(f"{space}f") is not None
            if kind == "e" or is_formula:
                value = (cell.findtext(f"{space}v") or "").strip()
                is_missing = is_formula and not value and kind != "str"
                if kind == "e" or is_missing:
                    number, before = _place_of(reference) if reference else (row, -1)
                    place = number, before + num_after
                    _check_place(*place)
                    faults[place] = "" if is_missing else value[:_MAX_TEXT] or "#ERROR"
        row = _place_of(reference)[0] if reference else row
    return faults


def _of_ods(book: zipfile.ZipFile, part: str) -> dict[str, Faults]:
    """Return the bad cells of each sheet in an ODS file; rows and cells can be repeated."""
    found: dict[str, Faults] = {}
    faults: Faults = {}
    row = 0
    marked = _elements(book, part, "table-row", "table") if _is_marked(book, part) else ()
    for element in marked:
        if _name(element) == "table":  # after its rows
            found[_attribute(element, "name")] = faults
            faults, row = {}, 0
            continue
        next_row = row + int(_attribute(element, "number-rows-repeated") or 1)
        column, of_row = 0, dict[int, str]()
        for cell in element:
            last = column + int(_attribute(cell, "number-columns-repeated") or 1)
            texts = [(e.text or "").strip() for e in cell.iter() if _name(e) in ("p", "span", "a")]
            text, is_formula = "".join(texts)[:_MAX_TEXT], bool(_attribute(cell, "formula"))
            # LibreOffice writes two: office:value-type="string" calcext:value-type="error".
            kinds = [value for key, value in cell.items() if key.endswith("}value-type")]
            fault = None
            if "error" in kinds or (is_formula and _ODS_ERROR.fullmatch(text)):
                fault = text or "#ERROR"
            elif is_formula and not kinds and not text:
                fault = ""
            if fault is not None:
                _check_place(next_row - 1, last - 1)
                of_row |= dict.fromkeys(range(column, last), fault)
            column = last
        for number in range(row, next_row) if of_row else ():
            faults |= {(number, place): fault for place, fault in of_row.items()}
        row = next_row
    return found


def _elements(book: zipfile.ZipFile, part: str, *names: str) -> Iterator[ElementTree.Element]:
    """Yield the elements with one of these names, in any namespace, and then free their children.

    A sheet may have 16 million cells, so it is never held as a whole.
    """
    with book.open(part) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag.endswith(names) and _name(element) in names:
                yield element
                element.clear()


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _attribute(element: ElementTree.Element, name: str) -> str:
    """Return the value of an attribute in any namespace; empty if it is missing."""
    return next((value for key, value in element.items() if key.endswith(f"}}{name}")), "")


def _check_place(row: int, column: int) -> None:
    if row < 0 or column < 0 or (row + 1) * (column + 1) > MAX_CELLS:
        raise ValueError(
            f"row {row + 1:,}, column {column + 1:,} exceeds the limit of {MAX_CELLS:,} cells"
        )


def _place_of(reference: str) -> tuple[int, int]:
    """Return the row and column of a cell, from 0.

    Example:
        >>> [_place_of(reference) for reference in ("A1", "Z3", "AA20")]
        [(0, 0), (2, 25), (19, 26)]
    """
    letters = reference.rstrip("0123456789")
    number = 0
    for letter in letters[:4].upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return int(reference[len(letters) :]) - 1, number - 1


def _is_marked(book: zipfile.ZipFile, part: str) -> bool:
    before = b""
    with book.open(part) as file:
        while piece := file.read(_PIECE):
            if _MARKERS.search(before + piece):
                return True
            # Keep the end of the piece: a marker may be split between two pieces.
            before = piece[-16:]
    return False


DATABASES = {"sqlite": "SQLite", "duckdb": "DuckDB"}
"""Display names of the database formats that can be read."""

_MAX_VALUE_BYTES = 2**27
_MAX_RATIO = 100  # limit of Arrow bytes per byte of the database file
_FREE_BYTES = 2**28  # Arrow bytes that are always allowed


def read_database(file: IO[bytes], uri: str, file_format: str, table: str | None) -> IO[bytes]:
    """Return the rows of a table as an Arrow file.

    The worker opens a separate copy, read-only, so it writes nothing next to the file and reads
    exactly what the parent hashed. Only plain tables are read, because views, virtual tables and
    columns that call functions would run untrusted code. Rows are in the order of their rowid (in
    SQLite tables without one, of their primary key). They are written to an Arrow file in the
    worker's temporary folder.

    SQLite stores a type with each value, not with the column. A column with only whole numbers
    becomes int64, with other numbers float64 (53 bits of precision), and with only bytes binary;
    any other column becomes text. Dates and booleans stay the text or numbers that the file
    contains. Text that is not UTF-8 makes its row bad. DuckDB does not accept such text, and its
    checksums detect a modified file.

    Args:
        file: the database.
        uri: name of the file in messages.
        file_format: a key of `DATABASES`.
        table: table name; None if there is only one.

    Raises:
        SourceError: the table does not exist or is not a plain table, or the file is damaged.
        ConfigError: DuckDB is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        with copy.open("wb") as written:
            shutil.copyfileobj(file, written, 2**20)
        read = _read_sqlite if file_format == "sqlite" else _read_duckdb
        return _spool(read(copy, uri, table), uri, copy.stat().st_size)


def _spool(batches: Iterator[pa.RecordBatch], uri: str, size: int) -> IO[bytes]:
    """Write batches to an unnamed file, within limits: a damaged file may repeat rows forever."""
    spool = tempfile.TemporaryFile()
    first = next(batches)  # an empty batch, for the schema
    num_rows = num_bytes = 0
    with pa.ipc.new_file(spool, first.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
            if num_rows > size or num_bytes > max(_FREE_BYTES, _MAX_RATIO * size):
                raise _bad_file(
                    uri,
                    f": its table has over {num_rows:,} rows of {num_bytes:,} bytes, too many for "
                    f"a file of {size:,} bytes, so it is damaged. Restore the file.",
                )
    spool.seek(0)
    return spool


def _read_sqlite(path: Path, uri: str, table: str | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an SQLite table, after an empty batch with the schema."""
    # immutable: SQLite creates no lock or journal, and does not look for one.
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        # SQLite itself allows a billion bytes, about as much as a worker may use (1,024 MB).
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        # Schema code of the file must not run, and damaged pages must fail instead of giving rows.
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            database.execute(f"PRAGMA {pragma}")
        # SQLite stores no page for views and virtual tables: their root page is 0.
        found = database.execute("SELECT name, type, rootpage FROM sqlite_schema").fetchall()
        others = {name for name, kind, page in found if kind == "view" or not page}
        plain = [name for name, kind, page in found if kind == "table" and page]
        own = [name for name in plain if not name.startswith("sqlite_")]
        name = _chosen(own, others, table, uri)
        yield from _sqlite_batches(database, name, uri)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _bad_file(uri, f" cannot be read as SQLite: {first_line(error)}") from None
    finally:
        database.close()


def _sqlite_batches(database: sqlite3.Connection, table: str, uri: str) -> Iterator[pa.RecordBatch]:
    """Yield an empty batch with the schema, then the rows of a table in order."""
    quoted = _quoted(table)
    # `table_xinfo`, because `table_info` does not list computed columns (2 or 3 in column 6).
    info = database.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
    names = [column[1] for column in info]
    if computed := [column[1] for column in info if column[6]]:
        raise _bad_file(uri, f": column '{computed[0]}' of table '{table}' {_COMPUTED}")
    keys = [column[1] for column in sorted(info, key=lambda column: int(column[5])) if column[5]]
    lower = {name.lower() for name in names}
    by_key = ", ".join(map(_quoted, keys))
    # A column of one of these names hides the rowid, which then has only the other names.
    order = next((name for name in ("rowid", "_rowid_", "oid") if name not in lower), by_key)
    try:
        database.execute(f"SELECT {order} FROM {quoted} LIMIT 0")
    except sqlite3.OperationalError:  # a table WITHOUT ROWID
        order = by_key

    def allow(action: int, first: str | None, second: str | None, *_: object) -> int:
        is_of_table = action == sqlite3.SQLITE_READ and first == table
        is_typeof = action == sqlite3.SQLITE_FUNCTION and second == "typeof"
        is_allowed = is_of_table or is_typeof or action == sqlite3.SQLITE_SELECT
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    # The file may still hide code, so allow only reads of this table and `typeof`. From here on,
    # pragmas are denied, too.
    database.set_authorizer(allow)
    # SQLite types values, not columns, so all rows decide the type of a column.
    asked = ", ".join(f"typeof({_quoted(name)})" for name in names)
    kinds: list[set[str]] = [set() for _ in names]
    for row in database.execute(f"SELECT DISTINCT {asked} FROM {quoted}"):
        for of_column, kind in zip(kinds, row, strict=True):
            of_column.add(kind)
    types = [_type_of(of_column) for of_column in kinds]
    schema = pa.schema([*zip(names, types, strict=True), fault_field])
    yield pa.RecordBatch.from_pylist([], schema)
    columns = ", ".join(map(_quoted, names))
    database.text_factory = bytes  # decoded in `_text`, which knows the row
    cursor = database.execute(f"SELECT {columns} FROM {quoted} ORDER BY {order}")
    while rows := cursor.fetchmany(_BATCH_ROWS):
        faults: dict[int, tuple[str, str]] = {}
        columns_of_rows = zip(names, zip(*rows, strict=True), types, strict=True)
        arrays = [_array(values, kind, name, faults) for name, values, kind in columns_of_rows]
        arrays.append(fault_column(faults, len(rows)))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _type_of(kinds: set[str]) -> pa.DataType:
    kinds = kinds - {"null"}
    if kinds <= {"integer", "real"} and kinds:
        return pa.int64() if kinds == {"integer"} else pa.float64()
    return pa.binary() if kinds == {"blob"} else pa.string()


def _array(
    values: Sequence[Any], kind: pa.DataType, name: str, faults: dict[int, tuple[str, str]]
) -> pa.Array:
    """Convert the values of a column; rows with invalid UTF-8 are added to `faults`."""
    # Arrow refuses whole numbers above 2**53 as float64, and Python rounds them.
    if kind == pa.float64():
        return pa.array([value if value is None else float(value) for value in values], kind)
    if kind != pa.string():
        return pa.array(values, kind)
    texts: list[str | None] = []
    for row, value in enumerate(values):
        try:
            text = value.decode() if isinstance(value, bytes) else value
            texts.append(None if text is None else str(text))
        except UnicodeDecodeError as error:
            around = value[max(error.start - 20, 0) : error.start + 20]
            detail = (
                f"column '{name}': byte 0x{value[error.start]:02x} is not UTF-8, in {around!r}. "
                "Fix the value, or remove the row."
            )
            faults.setdefault(row, ("encoding", detail))
            texts.append(None)
    return pa.array(texts, kind)


def _read_duckdb(path: Path, uri: str, table: str | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a DuckDB table, after an empty batch with the schema."""
    import duckdb

    # One thread keeps rows in order.
    settings: dict[str, Any] = {**NO_FILES, "memory_limit": "768MB", "threads": "1"}
    try:
        with duckdb.connect(str(path), read_only=True, config=settings) as database:
            database.execute("SET TimeZone = 'UTC'")  # otherwise the time zone of the machine
            database.execute("SET lock_configuration = true")
            # Qualified names: the file could define a macro named `duckdb_tables`.
            plain = (
                "SELECT table_name, sql FROM system.main.duckdb_tables() WHERE schema_name = 'main'"
            )
            views = "SELECT view_name FROM system.main.duckdb_views() WHERE NOT internal"
            tables = dict(database.execute(plain).fetchall())
            others = {name for (name,) in database.execute(views).fetchall()}
            name = _chosen(list(tables), others, table, uri)
            if "GENERATED ALWAYS AS" in tables[name]:  # such as random()
                raise _bad_file(uri, f": a column of table '{name}' {_COMPUTED}")
            rows = database.sql(f"SELECT * FROM main.{_quoted(name)}")
            reader = rows.to_arrow_reader(_BATCH_ROWS)
            yield pa.RecordBatch.from_pylist([], reader.schema.append(fault_field))
            for batch in reader:
                yield batch.append_column(fault_field, fault_column({}, batch.num_rows))
    except duckdb.Error as error:
        raise _bad_file(uri, f" cannot be read as DuckDB: {first_line(error)}") from None


def _chosen(tables: Sequence[str], others: set[str], table: str | None, uri: str) -> str:
    """Return the table to read."""
    if table is None and len(tables) == 1:
        return tables[0]
    if table in tables:
        return str(table)
    shown = ", ".join(sorted(tables)[:20]) or "none"
    if table in others:
        why = (
            f"'{table}' is a view or a virtual table, whose SQL packhouse does not run. Copy "
            "it into a plain table."
        )
    elif table is None:
        why = "it has several tables. Name one with `table`" if tables else "it has no table"
    else:
        why = f"it has no table '{table}'{near_name(table, tables)}"
    raise _bad_file(uri, f": {why}; tables: {shown}")


_COMPUTED = "is computed, so reading it would run its SQL. Make it a plain column"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _bad_file(uri: str, problem: str) -> SourceError:
    return SourceError(f"source file '{uri}'{problem}", uri=uri)


def refuse_unsaved(uri: str, path: str) -> None:
    """Reject a database whose latest rows are still in a log file next to it.

    Raises:
        SourceError: there is such a log; the message explains how to merge it.
    """
    for ending in ("-wal", "-journal", ".wal"):
        log = Path(path + ending)
        if log.is_file() and log.stat().st_size:
            raise _bad_file(
                uri,
                f": '{log}' contains changes that are not in the database file yet. Stop the "
                "program that writes them, or run `PRAGMA wal_checkpoint(TRUNCATE)` (SQLite) or "
                "CHECKPOINT (DuckDB).",
            )
