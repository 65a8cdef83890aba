"""Read a table from an SQLite or DuckDB file, in the worker process of `packhouse.read.tabular`.

The worker opens its own read-only copy. Nothing is written next to the original, and the bytes read
are the ones that the parent process hashed. Only plain tables are read, because views, virtual
tables and computed columns could run code from an untrusted file. Rows are sorted by rowid (SQLite
tables without one: by primary key) and become an Arrow file in the worker's temporary folder.

SQLite stores a type with each value. A column of integers becomes int64; of numbers, float64 (53
bits); of blobs, binary; of text or mixed types, text. Dates and booleans stay the text or number
that the file stores. Text that is not UTF-8 makes its row bad. DuckDB does not accept such text,
and detects changed files by checksums.
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.read.tabular import fault_column, fault_field
from packhouse.system.plugins import NO_FILES
from packhouse.system.wording import first_line, near_name

DATABASES = {"sqlite": "SQLite", "duckdb": "DuckDB"}
"""File formats read here -> their names."""

_BATCH_ROWS = 1024
_MAX_VALUE_BYTES = 2**27
_MAX_RATIO = 100  # Arrow bytes of a table per byte of its file ...
_FREE_BYTES = 2**28  # ... if larger than this


def read_database(file: IO[bytes], uri: str, file_format: str, table: str | None) -> IO[bytes]:
    """Return the rows of a table as an Arrow file.

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
                raise SourceError(
                    f"source file '{uri}': its table has over {num_rows:,} rows of "
                    f"{num_bytes:,} bytes, too many for a file of {size:,} bytes; it is damaged",
                    uri=uri,
                )
    spool.seek(0)
    return spool


def _read_sqlite(path: Path, uri: str, table: str | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an SQLite table, after an empty batch with the schema."""
    # immutable: SQLite creates no lock or journal, and does not look for one.
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        # Schema code of the file must not run, and damaged pages must fail instead of giving rows.
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            database.execute(f"PRAGMA {pragma}")
        found = database.execute("SELECT name, type, rootpage FROM sqlite_schema").fetchall()
        plain = [name for name, kind, page in found if kind == "table" and page]
        others = {name for name, kind, page in found if kind == "view" or not page}
        plain = [name for name in plain if not name.startswith("sqlite_")]
        name = _chosen(plain, others, table, uri)
        yield from _sqlite_batches(database, name, uri)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _damaged(uri, "SQLite", error) from None
    finally:
        database.close()


def _sqlite_batches(database: sqlite3.Connection, table: str, uri: str) -> Iterator[pa.RecordBatch]:
    """Yield an empty batch with the schema, then the rows of a table in order."""
    quoted = _quoted(table)
    info = database.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
    names = [column[1] for column in info]
    if computed := [column[1] for column in info if column[6]]:
        raise SourceError(
            f"source file '{uri}': column '{computed[0]}' of table '{table}' is computed, which "
            "would run what it says; make it a plain column",
            uri=uri,
        )
    keys = [column[1] for column in sorted(info, key=lambda column: int(column[5])) if column[5]]
    lower = {name.lower() for name in names}
    rowid = next((name for name in ("rowid", "_rowid_", "oid") if name not in lower), None)
    order = rowid or ", ".join(map(_quoted, keys))
    try:
        database.execute(f"SELECT {order} FROM {quoted} LIMIT 0")
    except sqlite3.OperationalError:  # a table WITHOUT ROWID
        order = ", ".join(map(_quoted, keys))

    def allow(action: int, first: str | None, second: str | None, *_: object) -> int:
        is_of_table = action == sqlite3.SQLITE_READ and first == table
        is_typeof = action == sqlite3.SQLITE_FUNCTION and second == "typeof"
        is_allowed = is_of_table or is_typeof or action == sqlite3.SQLITE_SELECT
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    # The file may still hide code, so allow only reads of this table and `typeof`.
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
    if kind == pa.string():
        values = [_text(value, name, row, faults) for row, value in enumerate(values)]
    elif kind == pa.float64():
        values = [value if value is None else float(value) for value in values]
    return pa.array(values, kind)


def _text(value: Any, name: str, row: int, faults: dict[int, tuple[str, str]]) -> str | None:
    if not isinstance(value, bytes):
        return value if value is None else str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        around = value[max(error.start - 20, 0) : error.start + 20]
        detail = (
            f"column '{name}': byte 0x{value[error.start]:02x} is not UTF-8, in {around!r}; mend "
            "the value, or take the row out"
        )
        faults.setdefault(row, ("encoding", detail))
        return None


def _read_duckdb(path: Path, uri: str, table: str | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a DuckDB table, after an empty batch with the schema."""
    import duckdb

    settings: dict[str, Any] = {
        **NO_FILES,
        "memory_limit": "768MB",
        "threads": "1",  # keeps rows in order
    }
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
                raise SourceError(
                    f"source file '{uri}': a column of table '{name}' is computed, which would run "
                    "what it says; make it a plain column",
                    uri=uri,
                )
            rows = database.sql(f"SELECT * FROM main.{_quoted(name)}")
            reader = rows.to_arrow_reader(_BATCH_ROWS)
            yield pa.RecordBatch.from_pylist([], reader.schema.append(fault_field))
            for batch in reader:
                yield batch.append_column(fault_field, fault_column({}, batch.num_rows))
    except duckdb.Error as error:
        raise _damaged(uri, "DuckDB", error) from None


def _chosen(tables: Sequence[str], others: set[str], table: str | None, uri: str) -> str:
    """Return the table to read."""
    if table is None and len(tables) == 1:
        return tables[0]
    if table in tables:
        return str(table)
    shown = ", ".join(sorted(tables)[:20]) or "none"
    if table in others:
        why = f"'{table}' is a view or a virtual table, which would run what it says; make a table"
    elif table is None:
        why = "it has several tables; name one with `table`" if tables else "it has no table"
    else:
        why = f"it has no table '{table}'{near_name(table, tables)}"
    raise SourceError(f"source file '{uri}': {why}; tables: {shown}", uri=uri)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _damaged(uri: str, what: str, error: Exception) -> SourceError:
    problem = first_line(error)
    return SourceError(f"source file '{uri}' cannot be read as {what}: {problem}", uri=uri)


def refuse_unsaved(uri: str, path: str) -> None:
    """Reject a database whose latest rows are still in a log file next to it.

    Raises:
        SourceError: there is such a log; the message explains how to merge it.
    """
    for ending in ("-wal", "-journal", ".wal"):
        log = path + ending
        if os.path.isfile(log) and os.path.getsize(log):  # noqa: PTH113, PTH202
            raise SourceError(
                f"source file '{uri}': '{log}' holds changes that are not in it yet; end the "
                "program that writes them, or run `PRAGMA wal_checkpoint(TRUNCATE)` (SQLite) or "
                "CHECKPOINT (DuckDB) in it",
                uri=uri,
            )
