"""Evaluate the expressions of a source's `where` and `select` in DuckDB, in a worker process.

Each expression is a column of its own query over the rows at hand. DuckDB has no way to files,
network, extensions or settings here, one thread, and a limit on memory; the kernel limits the
worker (`packhouse.system.worker`). What a row gives depends on that row alone, so it does not
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
from packhouse.system.plugins import NO_FILES
from packhouse.system.wording import counted, first_line
from packhouse.system.worker import at

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
import json
from dataclasses import dataclass

from packhouse.system.wording import near_name

# What the expressions of a source's `where` and `select` may be; checked in a worker process.
#
# An expression may come from a form in the browser. DuckDB parses it, and its tree is held against
# lists of what is allowed: constants, columns, operators, CASE, casts, lambdas, and the functions
# in `FUNCTIONS`. All else is refused: statements, subqueries, aggregates, windows, parameters,
# files, settings, and whatever a later DuckDB may add.


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """An allowed expression, and which columns it reads."""

    columns: tuple[str, ...]
    functions: tuple[str, ...]
    """Those that it calls beyond `FUNCTIONS`."""
    bare: str | None
    """The column, where the expression is nothing else."""


FUNCTION_GROUPS = {
    "Text": (
        "length len strlen char_length character_length octet_length length_grapheme lower "
        "lcase upper ucase trim ltrim rtrim substring substr substring_grapheme left right "
        "left_grapheme right_grapheme overlay replace translate reverse concat concat_ws || chr "
        "ascii ord unicode split_part split string_split str_split string_to_array "
        "str_split_regex string_split_regex regexp_split_to_array contains starts_with "
        "ends_with prefix suffix instr strpos position strip_accents nfc_normalize format "
        "printf levenshtein editdist3 damerau_levenshtein hamming mismatches jaccard "
        "jaro_similarity jaro_winkler_similarity md5 sha1 sha256 url_encode url_decode "
        "regexp_matches regexp_full_match regexp_extract regexp_extract_all regexp_replace "
        "regexp_escape ~ !~ ~~ !~~ ~~* !~~* ~~~ ^@ like_escape ilike_escape not_like_escape "
        "not_ilike_escape"
    ),
    "Numbers": (
        "+ - * / // % ** ^ & | << >> @ xor add subtract multiply divide mod fmod abs sign ceil "
        "ceiling floor round round_even trunc sqrt cbrt exp ln log log2 log10 pow power "
        "greatest least isnan isinf isfinite"
    ),
    "Choices": "if ifnull nullif typeof",
    "Lists": (
        "list_value list_pack list_contains list_has array_contains array_has list_has_any "
        "array_has_any list_has_all array_has_all list_position list_indexof array_position "
        "array_indexof list_extract list_element array_extract element_at list_slice "
        "array_slice list_concat list_cat array_concat array_cat list_append array_append "
        "list_prepend array_prepend list_distinct array_distinct list_unique array_unique "
        "list_sort array_sort list_reverse_sort array_reverse_sort list_reverse array_reverse "
        "list_filter array_filter filter list_transform array_transform list_apply array_apply "
        "apply list_reduce array_reduce reduce list_intersect array_intersect list_zip "
        "array_zip list_where list_select flatten array_length list_sum list_avg list_min "
        "list_max list_count list_median list_first list_last list_any_value list_bool_and "
        "list_bool_or list_string_agg array_to_string && @> <@"
    ),
    "Objects, maps, JSON": (
        "row struct_pack struct_extract struct_insert struct_concat struct_keys struct_values "
        "map map_keys map_values map_extract map_extract_value map_contains map_entries "
        "map_from_entries cardinality -> ->> json_extract json_extract_path json_extract_string "
        "json_extract_path_text json_value json_exists json_type json_valid json_array_length "
        "json_keys json_contains json_object json_array json_quote to_json row_to_json "
        "from_json json_transform"
    ),
    "Times": (
        "strptime try_strptime strftime date_part datepart date_trunc datetrunc date_diff "
        "datediff make_date make_timestamp year month day hour minute second dayofweek epoch "
        "epoch_ms"
    ),
}
"""Functions and operators that an expression may call, by what they are of: none reads files,
settings, the clock or random numbers, and none makes much of little but by what it is given."""

FUNCTIONS = frozenset(name for names in FUNCTION_GROUPS.values() for name in names.split())

_WITH_LAMBDA = frozenset(
    "list_filter array_filter filter list_transform array_transform list_apply array_apply apply "
    "list_reduce array_reduce reduce".split()
)
_CLASSES = frozenset(
    "COLUMN_REF CONSTANT FUNCTION CONJUNCTION COMPARISON BETWEEN CASE CAST OPERATOR LAMBDA "
    "LAMBDA_REF TYPE".split()
)
_OPERATORS = frozenset(
    "OPERATOR_NOT OPERATOR_IS_NULL OPERATOR_IS_NOT_NULL OPERATOR_COALESCE OPERATOR_NULLIF "
    "OPERATOR_TRY COMPARE_IN COMPARE_NOT_IN ARRAY_EXTRACT ARRAY_SLICE ARRAY_CONSTRUCTOR "
    "STRUCT_EXTRACT".split()
)
_TYPES = frozenset(
    "varchar text string char bpchar boolean bool tinyint smallint integer int int1 int2 int4 int8 "
    "bigint hugeint utinyint usmallint uinteger ubigint uhugeint float float4 real double float8 "
    "decimal numeric date time timestamp datetime json list array struct row map".split()
)
_WHAT = {
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
    "STAR": "`*`; name the columns",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a column by number; name it",
    "COLLATE": "COLLATE; compare lower(...) or strip_accents(...)",
    "DEFAULT": "DEFAULT",
}
_PLACES = {"query_location", "query_location_length"}
_OF_STATEMENT = {"type", "select_list", "from_table", "aggregate_handling", *_PLACES}


def in_parentheses(text: str) -> str:
    r"""Return an expression as it stands in a query; a comment at its end ends with its line.

    Example:
        >>> in_parentheses("a > 1 -- long")
        '(\na > 1 -- long\n)'
    """
    return f"(\n{text}\n)"


def parse_expression(connection: Any, text: str, functions: frozenset[str]) -> Parsed:
    """Parse an expression and check that its tree holds what is allowed, and nothing else.

    Args:
        connection: of DuckDB.
        text: the expression.
        functions: names beyond `FUNCTIONS` that it may call.

    Raises:
        ConfigError: it is no expression, or holds what is not allowed.
    """
    # Alone as well: `a) or (b` is an expression only because parentheses are put around it.
    for query in (f"SELECT\n{text}", f"SELECT {in_parentheses(text)}"):
        ((answer,),) = connection.execute(
            "SELECT json_serialize_sql($1, skip_null := true, skip_empty := true)", [query]
        ).fetchall()
        try:
            tree = json.loads(answer)
        except RecursionError:
            raise ConfigError("it is nested too deeply; make it simpler") from None
        if tree.get("error"):
            said = str(tree.get("error_message", "")).splitlines()[0]
            what = "it is no expression" if "Only SELECT" in said else said
            raise ConfigError(f"{what}; give one expression over the row's columns")
    statements = tree["statements"]
    node = statements[0]["node"] if len(statements) == 1 else {}
    selected = node.get("select_list", [])
    is_more = any(value for key, value in node.items() if key not in _OF_STATEMENT)
    is_plain = node.get("type") == "SELECT_NODE" and node["from_table"]["type"] == "EMPTY"
    if not is_plain or is_more or len(selected) != 1:
        raise ConfigError("it is more than one expression; give one over the row's columns")
    if selected[0].get("function_name") == "row":  # of none, or of several
        raise ConfigError("it is empty, or more than one expression; give one")
    called = []
    for item in _nodes(selected[0]):
        _check(item, functions)
        if (name := str(item.get("function_name")).lower()) in functions:
            called.append(name)
    bare = selected[0].get("column_names", [])
    return Parsed(
        columns=tuple(dict.fromkeys(_column_names(selected[0]))),
        functions=tuple(dict.fromkeys(called)),
        bare=bare[0] if len(bare) == 1 else None,
    )


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield each node of a tree: each object that has a class."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            if "class" in value:
                yield value
            rest += reversed(value.values())
        elif isinstance(value, list):
            rest += reversed(value)


def _column_names(tree: Any) -> Iterator[str]:
    """Yield the names of columns, and none of the parameters of lambdas where these hold.

    Only what is given to a function of lists is a lambda: `meta -> '$.a'` looks the same.
    """
    # Each part of the tree with the names that are parameters there, and whether it is given to a
    # function of lists: of `list_filter(tags, x -> x <> lang)` first `tags`, then the lambda, whose
    # own x is a parameter in `x <> lang`. Columns: tags, lang.
    rest: list[tuple[Any, frozenset[str], bool]] = [(tree, frozenset(), False)]
    while rest:
        value, parameters, is_given = rest.pop()
        if isinstance(value, list):
            rest += ((item, parameters, is_given) for item in reversed(value))
        if not isinstance(value, dict):
            continue
        kind = value.get("class")
        if kind == "COLUMN_REF" and value["column_names"][0] not in parameters:
            yield value["column_names"][0]
        if kind == "LAMBDA" and is_given:
            own = (n["column_names"][0] for n in _nodes(value["lhs"]) if "column_names" in n)
            rest.append((value["expr"], parameters.union(own), False))
            continue
        if kind == "FUNCTION" and value["function_name"].lower() in _WITH_LAMBDA:
            passed = value.get("arguments") or value.get("children") or []
            rest += [(passed[1:], parameters, True), (passed[:1], parameters, False)]
        else:
            rest += ((item, parameters, is_given and kind is None) for item in value.values())


def _check(node: dict[str, Any], functions: frozenset[str]) -> None:
    kind, type_ = str(node["class"]), str(node.get("type", ""))
    if kind not in _CLASSES or (kind == "OPERATOR" and type_ not in _OPERATORS):
        what = _WHAT.get(kind, (type_ or kind).lower())
        raise ConfigError(f"an expression may not hold {what}")
    if kind == "FUNCTION":
        name = str(node["function_name"]).lower()
        path = node.get("qualified_name", {}).get("path", [name])
        if len(path) != 1 or node.get("schema") or node.get("catalog"):
            raise ConfigError(f"function '{name}' may not be named with its schema")
        if name not in FUNCTIONS and name not in functions:
            meant = near_name(name, FUNCTIONS | functions, likeness=0.8)
            raise ConfigError(
                f"function '{name}' may not be used: it is unknown, an aggregate, or may read more "
                f"than the row{meant}; docs/reference/functions.md lists them"
            )
        if node.get("distinct") or node.get("filter") or node["order_bys"].get("orders"):
            raise ConfigError(f"function '{name}' may have neither DISTINCT, FILTER nor ORDER BY")
    if kind == "TYPE" and str(node["type_name"]).lower() not in _TYPES:
        raise ConfigError(f"type '{node['type_name']}' may not be used; cast to VARCHAR, BIGINT...")


MAX_FAILED = 10_000
"""Rows evaluated together on which an expression may fail; each costs a millisecond."""

_ROWS = '"packhouse rows"'
_VALUE = '"packhouse value"'
_MEMORY = "768MB"  # below that of the worker, so that DuckDB says so first
_MAX_GROWTH = 16  # bytes of results for each byte of rows
_FREE_BYTES = 2**26  # results of this size are always allowed
_SETTINGS: dict[str, Any] = {**NO_FILES, "memory_limit": _MEMORY, "threads": "1"}


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
    import duckdb

    texts = [(True, text) for text in where] + [(False, text) for text in select.values()]
    for is_where, text in texts:
        at(f"expression `{text}`")
        try:
            kind = _run(in_parentheses(text), rows).type
        except duckdb.Error as error:
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
    import duckdb

    expression = in_parentheses(text)
    try:
        return _run(expression, rows), {}
    except _row_errors():
        pass
    except duckdb.Error as error:
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
    import duckdb

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    add_text_functions(connection)
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection


def _row_errors() -> tuple[type[Exception], ...]:
    """Errors of single rows: others, such as memory, depend on what is evaluated with them."""
    import duckdb

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
