"""Evaluate the expressions of a source's `where` and `select` in DuckDB, in a child process.

Each expression is a column of its own query over the rows at hand. DuckDB has no way to files,
network, extensions or settings here, one thread, and a limit on memory; the child is limited by the
kernel (`packhouse.runtime.confine`). What a row gives depends on that row alone, so it does not
matter which rows are evaluated together: where an expression fails on some, these are found by
`TRY`, and the others go on.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, SourceError
from packhouse.records.lists import one_chunk
from packhouse.registry import TEXT_FUNCTIONS, is_there
from packhouse.runtime.confined import at
from packhouse.runtime.duckdb_limits import NO_FILES
from packhouse.runtime.extras import import_extra
from packhouse.sources.expressions import in_parentheses, parse_expression
from packhouse.wording import counted, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_FAILED = 10_000
"""Rows evaluated together on which an expression may fail; each costs a millisecond."""

_ROWS = '"packhouse rows"'
_VALUE = '"packhouse value"'
_MEMORY = "768MB"  # below that of the child, so that DuckDB says so first
_MAX_GROWTH = 16  # bytes of results for each byte of rows
_FREE_BYTES = 2**26  # results of this size are always allowed
_SETTINGS = {**NO_FILES, "memory_limit": _MEMORY, "threads": "1"}


def analyse(texts: list[str]) -> list[dict[str, Any]]:
    """Check expressions and return what each reads, as the fields of `Parsed`.

    Raises:
        ConfigError: one is not allowed; or what it needs is not installed.
    """
    found = []
    for text in texts:
        at(f"expression `{text}`")
        try:
            parsed = parse_expression(_connection(), text, frozenset(TEXT_FUNCTIONS))
            for name in parsed.functions:  # one may need a package
                check_text_function(name)
        except ConfigError as error:
            raise ConfigError(f"`{text}`: {error}") from None
        found.append(asdict(parsed))
    return found


def bind(where: list[str], select: dict[str, str], rows: pa.RecordBatch) -> None:
    """Check the types of expressions against columns without rows.

    Raises:
        ConfigError: says which expression and what is wrong with it.
    """
    texts = [(True, text) for text in where] + [(False, text) for text in select.values()]
    for is_where, text in texts:
        at(f"expression `{text}`")
        try:
            kind = _run(in_parentheses(text), rows).type
        except _duckdb().Error as error:
            raise ConfigError(f"`{text}`: {_problem(error)}") from None
        if is_where and kind != pa.bool_():
            raise ConfigError(f"`{text}` gives {_sql(kind)}, not true or false; compare it")
        if not is_where and not _is_plain(kind):
            raise ConfigError(f"`{text}` gives {_sql(kind)}; cast it to VARCHAR, BIGINT or DOUBLE")


def evaluate(
    where: list[str], select: dict[str, str], rows: pa.RecordBatch
) -> Iterator[dict[str, Any] | pa.RecordBatch]:
    """Yield which rows are kept and which fail, then the selected columns of the rows kept.

    The first item has `kept`, indexes of rows; `filtered`, pairs of index and number of the first
    of `where` that is false or NULL; and `failed`, pairs of index and what is wrong. Each of
    `where` is evaluated for the rows that those before it keep, `select` for those that all keep.

    Raises:
        SourceError: an expression needs too much memory, or fails on too many rows.
    """
    failed: dict[int, str] = {}
    filtered: dict[int, int] = {}
    # Rows 0 1 2 3, of which the first expression drops 1: kept [0, 2, 3]. Where the second one is
    # false at place 1 of those, row 2 goes.
    kept, of_kept = list(range(rows.num_rows)), rows
    for number, text in enumerate(where):
        at(f"where `{text}`")
        values, bad = _values(f"where `{text}`", text, of_kept)
        is_kept = pc.fill_null(values, False)
        for place in np.flatnonzero(~is_kept.to_numpy(zero_copy_only=False)).tolist():
            if place not in bad:
                filtered[kept[place]] = number
        failed |= {kept[place]: why for place, why in bad.items()}
        kept = pa.array(kept).filter(is_kept).to_pylist()
        of_kept = of_kept.filter(is_kept)
    columns: dict[str, pa.Array] = {}
    failed_kept: dict[int, str] = {}
    for name, text in select.items():
        at(f"select.{name} `{text}`")
        columns[name], bad = _values(f"select.{name} `{text}`", text, of_kept)
        failed_kept = bad | failed_kept
    size = sum(column.nbytes for column in columns.values())
    if size > _FREE_BYTES + _MAX_GROWTH * rows.nbytes:
        raise SourceError(
            f"`select` makes {size:,} bytes of {rows.nbytes:,}, over {_MAX_GROWTH} times as many"
        )
    good = [place for place in range(len(kept)) if place not in failed_kept]
    failed |= {kept[place]: why for place, why in failed_kept.items()}
    yield {
        "kept": [kept[place] for place in good],
        "filtered": sorted(filtered.items()),
        "failed": sorted(failed.items()),
    }
    if columns:
        table = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        yield table.take(pa.array(good, pa.int64()))


def _values(what: str, text: str, rows: pa.RecordBatch) -> tuple[pa.Array, dict[int, str]]:
    """The value of an expression for each row, null where it fails; and why it fails, by row."""
    expression = in_parentheses(text)
    try:
        return _run(expression, rows), {}
    except _row_errors():
        pass
    except _duckdb().Error as error:
        raise SourceError(f"{what}: {_problem(error)}; make it simpler") from None
    # An expression that fails has no value, and neither has one that is NULL; `... IS NULL` tells
    # them apart, since it is true or false of a row unless the expression fails on it.
    fails = [value is None for value in _run(f"TRY({expression} IS NULL)", rows).to_pylist()]
    if sum(fails) > MAX_FAILED:
        raise SourceError(
            f"{what}: fails on {sum(fails):,} of {counted(rows.num_rows, 'row')}, over "
            f"{MAX_FAILED:,}; "
            "where a value may be of no use, take TRY_CAST(...) or TRY(...), which give NULL"
        )
    why = {}
    for index in (index for index, is_bad in enumerate(fails) if is_bad):
        try:
            _run(expression, rows.slice(index, 1))
        except _row_errors() as error:
            why[index] = f"{what}: {_problem(error)}"
    return _run(f"TRY({expression})", rows), why


def _run(expression: str, rows: pa.RecordBatch) -> pa.Array:
    connection = _connection()
    connection.register("packhouse rows", pa.table(rows))
    found = connection.sql(f"SELECT {expression} AS {_VALUE} FROM {_ROWS}").to_arrow_table()
    assert found.num_rows == rows.num_rows, "an expression gives a value for each row"
    return found.column(0).combine_chunks()


def add_text_functions(connection: Any) -> None:
    """Add `TEXT_FUNCTIONS`, as far as they are installed, before the configuration is locked."""
    for name, (module, returns) in TEXT_FUNCTIONS.items():
        if is_there(module):
            function = text_function(name)
            arguments = ["VARCHAR"] * len(signature(function).parameters)
            how = {"type": "arrow", "null_handling": "special"}
            connection.create_function(name, function, arguments, returns, **how)


def text_function(name: str) -> Callable[..., pa.Array]:
    """Return one of `TEXT_FUNCTIONS`, for arrays and for the chunked columns of DuckDB."""
    function = getattr(import_module(TEXT_FUNCTIONS[name][0]), name)

    @wraps(function)
    def call(*texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        return function(*map(one_chunk, texts))

    return call


def check_text_function(name: str) -> None:
    """Call one of `TEXT_FUNCTIONS` once.

    Raises:
        ConfigError: the package that it needs is not installed.
    """
    function = text_function(name)
    text = pa.array(["a text that is long enough to have a language"])
    function(*[text] * len(signature(function).parameters))


@cache
def _connection() -> "DuckDBPyConnection":
    connection: DuckDBPyConnection = _duckdb().connect(":memory:", config=_SETTINGS)
    add_text_functions(connection)
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection


def _duckdb() -> Any:
    return import_extra("duckdb", "sql", "an expression of `where` or `select`")


def _row_errors() -> tuple[type[Exception], ...]:
    """Errors of single rows: others, such as memory, depend on what is evaluated with them."""
    duckdb = _duckdb()
    return (duckdb.ConversionException, duckdb.InvalidInputException, duckdb.OutOfRangeException)


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_string)
    return any(check(kind) for check in checks)


def _sql(kind: pa.DataType) -> str:
    """A type for messages."""
    return "text" if pa.types.is_string(kind) else str(kind)


def _problem(error: Exception) -> str:
    return first_line(error).replace("Error: ", "error: ", 1)
