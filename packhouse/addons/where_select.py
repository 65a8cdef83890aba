"""Evaluate `where` and `select` of a source: which rows are read, and which fields they have.

Expressions use the field names of the file. They are evaluated by DuckDB in a worker process; a
field that is only renamed skips the worker and stays unchanged.

JSON has no column types, and the values of a field may differ. So the kind of each field is found
over all rows when the source is scanned; the result for a row then does not depend on its shard:

    values of the field              kind                  DuckDB
    "a", null                        "text"                VARCHAR
    true                             "bool"                BOOLEAN
    1                                "int"                 BIGINT
    1, 2.5                           "float"               DOUBLE
    ["a", "b"]                       ["text"]              VARCHAR[]
    {"role": "user", "n": 1}         {"role": "text", ...} STRUCT(n BIGINT, role VARCHAR)
    "a", 1, ["b"]                    "text"                VARCHAR: a, 1, ["b"]

Values of several kinds become text: text stays unchanged, other values are written as JSON. The
same holds for objects with more than 100 different keys, or with keys that differ only by case,
which SQL does not distinguish. A field is null in rows that lack it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, SourceError
from packhouse.read.chat_messages import kind_of
from packhouse.read.json_parsing import Rows, unwrapped
from packhouse.read.parquet_files import TABULAR, decode_head, without_fill
from packhouse.read.sharding import ANY_SIZE, SourceShard, read_parts
from packhouse.read.source_files import source_name
from packhouse.recipe import SourceConfig
from packhouse.records.duckdb_functions import (
    NO_FILES,
    add_text_functions,
    check_text_function,
)
from packhouse.registry import TEXT_FUNCTIONS, TEXT_FUNCTIONS_VERSION
from packhouse.system.fingerprint import library_versions
from packhouse.system.wording import counted, first_line, near_name
from packhouse.system.worker import at, stream_from_worker

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind]"
"""`null`, `bool`, `int`, `float`, `text`; `[kind]` of a list; `{key: kind}` of an object."""

MAX_KEYS = 100
"""An object with more different keys than this becomes JSON text."""

_SCALARS: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "text"}
_TYPES = {
    "null": pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
}
_MAX_INT = 2**63


def kind_of_values(values: list[object], known: Kind = "null") -> Kind:
    """Return the kind of all values together, joined with the `known` kind of earlier ones.

    Example:
        >>> kind_of_values([1, None, 2.5]), kind_of_values([{"a": 1}, {"b": []}])
        ('float', {'a': 'int', 'b': ['null']})
    """
    # Types decide, except for integers: one over 64 bits makes its field `float`.
    kinds = set(map(type, values)) - {type(None)}
    is_plain = kinds <= _SCALARS.keys() - {int}
    found = map(_SCALARS.__getitem__, kinds) if is_plain else map(_kind_of, values)
    return reduce(joined_kinds, found, known)


def _kind_of(value: object) -> Kind:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return _object({key: _kind_of(item) for key, item in value.items()})
    if isinstance(value, list):
        return [kind_of_values(value)]
    if type(value) is int and not -_MAX_INT <= value < _MAX_INT:
        return "float"
    return _SCALARS.get(type(value), "text")


def joined_kinds(one: Kind, other: Kind) -> Kind:
    """Return the kind that covers the values of both.

    Example:
        >>> joined_kinds("int", "float"), joined_kinds("null", ["text"])
        ('float', ['text'])
    """
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if isinstance(one, list) and isinstance(other, list):
        return [joined_kinds(one[0], other[0])]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        return _object(
            {key: joined_kinds(one.get(key, "null"), other.get(key, "null")) for key in keys}
        )
    if isinstance(one, str) and isinstance(other, str) and {one, other} == {"int", "float"}:
        return "float"
    return "text"


def _object(kinds: dict[str, Kind]) -> Kind:
    is_plain = len({key.lower() for key in kinds}) == len(kinds) and "" not in kinds
    return kinds if is_plain and len(kinds) <= MAX_KEYS else "text"


def kind_of_type(kind: pa.DataType) -> Kind:
    """Return the kind of an Arrow column. Times, dates and bytes are text, as `str` has them.

    Example:
        >>> kind_of_type(pa.list_(pa.struct({"n": pa.int8()}))), kind_of_type(pa.date32())
        ([{'n': 'int'}], 'text')
    """
    types = pa.types
    if types.is_null(kind):
        return "null"
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind):
        return "float" if types.is_uint64(kind) else "int"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "float"
    if types.is_struct(kind):
        return _object({field.name: kind_of_type(field.type) for field in kind})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [kind_of_type(kind.value_type)]
    return "text"


def column_of(values: list[object], kind: Kind) -> pa.Array:
    """Return values as a column of their kind.

    Raises:
        ValueError: a value is of another kind.

    Example:
        >>> column_of(["a", 1, [2]], "text").to_pylist()
        ['a', '1', '[2]']
    """
    arrow = _type_of(kind)
    if not isinstance(kind, str) or kind in ("bool", "int") or set(map(type, values)) <= _PLAIN:
        try:
            return pa.array(values, arrow)
        except (pa.ArrowException, TypeError):
            pass
    return pa.array([_conform(value, kind) for value in values], arrow)


_PLAIN = {str, float, type(None)}


def _type_of(kind: Kind) -> pa.DataType:
    if isinstance(kind, list):
        return pa.list_(_type_of(kind[0]))
    if isinstance(kind, dict):
        if not kind:  # all objects are empty, and SQL has no struct without fields
            return pa.string()
        # Sorted, or the type would depend on which file has a key first.
        return pa.struct([pa.field(key, _type_of(kind[key])) for key in sorted(kind)])
    return _TYPES[kind]


def _conform(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind in ("text", {}):
        if isinstance(value, bool | int | float | list | dict):
            return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if isinstance(kind, list) and isinstance(value, list):
        return [_conform(item, kind[0]) for item in value]
    if isinstance(kind, dict) and isinstance(value, dict) and value.keys() <= kind.keys():
        return {key: _conform(value.get(key), kind[key]) for key in kind}
    if kind == "float" and not isinstance(value, bool | str | list | dict):
        return float(value)
    if (kind, type(value)) in (("bool", bool), ("int", int)):
        return value
    raise ValueError(f"a value of type {type(value).__name__}, expected {shown_kind(kind)}")


def shown_kind(kind: Kind) -> str:
    """Format a kind for a message.

    Example:
        >>> shown_kind([{"role": "text", "n": "int"}])
        '{n int, role text}[]'
    """
    if isinstance(kind, list):
        return f"{shown_kind(kind[0])}[]"
    if isinstance(kind, dict):
        return "{" + ", ".join(f"{key} {shown_kind(kind[key])}" for key in sorted(kind)) + "}"
    return kind


_SHOWN = 30
_WHERE = "where"
_RENAMED = "any"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """An allowed expression and the columns it reads."""

    columns: tuple[str, ...]
    paths: tuple[str, ...]
    """The columns with the fields read from objects: `input.messages`."""
    functions: tuple[str, ...]
    """Functions that it calls beyond `FUNCTIONS`."""
    bare: str | None
    """The column, if the expression is only a column name."""
    as_json: tuple[str, ...]
    """The columns of `json(column, ...)`, which gives them with the file's keys and order."""
    in_json: tuple[str, ...] = ()
    """The columns that are read as `json(column)` inside a larger expression."""
    as_text: tuple[str, ...] = ()
    """The paths that a function such as `concat_ws` joins to text."""

    @property
    def is_evaluated(self) -> bool:
        """False where values are taken as they were read."""
        return self.bare is None and not self.as_json


class Expression(NamedTuple):
    """One expression of a source."""

    place: str
    """`where`, or `select.` and the name of the resulting field."""
    text: str
    parsed: Parsed


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The rows of a block after `where` and `select`."""

    rows: Rows
    places: list[int]
    """Index of each in the input rows."""
    filtered: list[tuple[int, str]]
    """Index of each row that `where` drops, with the first expression that is false or NULL."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(index, reason, detail) of rows for which an expression fails."""


def find_columns(files: Sequence[Sequence[SourceShard]], config: SourceConfig) -> dict[str, Kind]:
    """Return the columns that a source's expressions read, with their kinds over all its files.

    Args:
        files: shards of each file.
        config: a source with `where` or `select`.

    Raises:
        ConfigError: an expression names no column, or does not fit the types of the columns.
    """
    # All rows are parsed once more for this (0.3 s for Alpaca). The first megabyte alone does not
    # have the fields that come later, and a misspelt name could not be told from one of these.
    wanted = {name.lower() for each in _expressions(config) for name in each.parsed.columns}
    kinds: dict[str, Kind] = {}
    has_rows = False
    for shards in files:
        first = shards[0]
        if first.file_format in TABULAR:
            _, *batches = decode_head(first.uri, first.file_format, 1, config.table)
            found: dict[str, Kind] = {name: "null" for name in first.header or ()}
            for each in batches:
                found |= {field.name: kind_of_type(field.type) for field in each.schema}
            for name, kind in found.items():
                kinds[name] = joined_kinds(kinds.get(name, "null"), kind)
        else:
            for name in first.header or ():  # CSV has columns even without rows
                kinds.setdefault(name, "text")
            parts = (read_parts(shard, ANY_SIZE) for shard in shards)
            for records in chain.from_iterable(parts):
                values = unwrapped(records.rows) if config.unwrap else records.rows
                has_rows |= len(values) > 0
                rows = [row for row in values if type(row) is dict]
                for name in dict.fromkeys(key for keys in set(map(tuple, rows)) for key in keys):
                    kinds.setdefault(name, "null")
                    if name.lower() in wanted:
                        kinds[name] = kind_of_values([row.get(name) for row in rows], kinds[name])
    if not (kinds or has_rows):  # without rows and a header, no field can be missing
        return {}
    columns = columns_of(config, kinds)
    check_types(config, columns)
    return columns


def columns_of(config: SourceConfig, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the columns that a source's expressions read, spelled as in its files.

    Args:
        config: a source with `where` or `select`.
        kinds: kinds of all columns of its files.

    Returns:
        Their kinds, sorted by name; `any` for a column that is only renamed.

    Raises:
        ConfigError: an expression is not allowed or names an unknown column; the message suggests
            one.

    Example:
        >>> config = SourceConfig(path="", where="N > 1", select={"topic": "kind"})
        >>> columns_of(config, {"n": "int", "kind": "text", "note": "text"})
        {'kind': 'any', 'n': 'int'}
    """
    found: dict[str, Kind] = {}
    for place, text, parsed in _expressions(config):
        for wanted in parsed.columns:
            alike = [name for name in kinds if name.lower() == wanted.lower()]
            if len(alike) > 1:
                raise ConfigError(
                    f"source '{config.path}': {place} `{text}`: '{wanted}' is ambiguous; SQL does "
                    f"not distinguish {' and '.join(map(repr, sorted(alike)))}. Rename one of them"
                )
            if not alike:
                known = ", ".join(name[:40] for name in list(kinds)[:_SHOWN])
                raise ConfigError(
                    f"source '{config.path}': {place} `{text}`: no row has a field "
                    f"'{wanted[:40]}'. The fields are: {known or 'none'}"
                    f"{', ...' if len(kinds) > _SHOWN else ''}{near_name(wanted, kinds)}"
                )
            (name,) = alike
            if not parsed.is_evaluated and place != _WHERE:
                found.setdefault(name, _RENAMED)
                continue
            # A struct column would give each object the keys and types of all rows' objects.
            kind = "text" if wanted in parsed.in_json else kinds[name]
            if found.get(name, _RENAMED) not in (_RENAMED, kind):
                raise ConfigError(
                    f"source '{config.path}': {place} `{text}`: '{name}' is read both with and "
                    "without json(). Use one or the other everywhere"
                )
            found[name] = kind
    return dict(sorted(found.items()))


def expression_libraries(config: SourceConfig) -> list[str]:
    """Return the packages whose versions can change the results of a source's expressions."""
    names = {name for each in _expressions(config) for name in each.parsed.functions}
    detector = ["py3langid"] if "language" in names else []
    return ["duckdb", *detector] if config.is_reshaped else []


def expression_key(config: SourceConfig) -> dict[str, Any]:
    """Return what else can change these results, for a step's key; empty without expressions."""
    is_added = any(each.parsed.functions for each in _expressions(config))
    added = {"text_functions": TEXT_FUNCTIONS_VERSION} if is_added else {}
    return library_versions(expression_libraries(config)) | added


def columns_read(config: SourceConfig) -> set[str]:
    """Return the columns, or fields of columns, that a source's expressions read.

    Example:
        >>> config = SourceConfig(path="", where="N > 1", select={"messages": "input.messages"})
        >>> sorted(columns_read(config))
        ['input.messages', 'n']
    """
    return {path.lower() for each in _expressions(config) for path in each.parsed.paths}


def check_types(config: SourceConfig, columns: Mapping[str, Kind]) -> None:
    """Check that a source's expressions fit the types of its columns.

    Raises:
        ConfigError: one does not; the message names it, the reason and the types.
    """
    for place, text, parsed in _expressions(config):
        for path in parsed.as_text:
            kind = _kind_at(path, columns)
            while isinstance(kind, list):
                (kind,) = kind
            if kind and isinstance(kind, dict):  # empty ones are JSON already
                call = f"to_json({path})" if "." in path else f"json({path})"
                raise ConfigError(
                    f"source '{config.path}': {place} `{text}`: objects in {path} would become "
                    f"text that is not JSON, such as {{'key': value}}. Write {call}"
                )
    where, select = _evaluated(config)
    try:
        _in_worker(config, partial(bind, where, select, _table([], columns)), 0)
    except ConfigError as error:
        typed = ((name, kind) for name, kind in columns.items() if kind != _RENAMED)
        types = ", ".join(f"{name} {shown_kind(kind)}" for name, kind in typed)
        said = f". Its columns: {types[:500]}" if types else ""
        raise ConfigError(f"source '{config.path}': {error}{said}") from None


def _kind_at(path: str, columns: Mapping[str, Kind]) -> Kind:
    """Return the kind of a column, or of a field inside of it, such as `input.question`."""
    kind: Kind = dict(columns)
    for name in path.split("."):
        inside = {key.lower(): kind[key] for key in kind} if isinstance(kind, dict) else {}
        kind = inside.get(name.lower(), "null")
    return kind


def reshape(rows: Sequence[Any], config: SourceConfig, columns: Mapping[str, Kind]) -> Reshaped:
    """Return the rows that `where` keeps, with the fields that `select` makes.

    Args:
        rows: parsed rows of any type; rows that are not objects fail.
        config: a source with `where` or `select`.
        columns: kind of each column that its expressions read.

    Raises:
        SourceError: an expression takes too much memory or time, or fails on too many rows.
    """
    if not rows:  # the columns of a source without rows are unknown
        return Reshaped(rows=Rows([]), places=[], filtered=[])
    objects = [index for index, row in enumerate(rows) if isinstance(row, dict)]
    object_rows = [rows[index] for index in objects]
    where, select = _evaluated(config)
    kept, filtered, failed, selected = list(range(len(object_rows))), [], [], pa.table({})
    if object_rows and (where or select):
        table = _table(object_rows, columns)
        call = partial(evaluate, where, select, table)
        found, *batches = _in_worker(config, call, table.nbytes)
        kept, filtered, failed = found["kept"], found["filtered"], found["failed"]
        selected = batches[0] if batches else selected
    of_kept = [object_rows[place] for place in kept]
    if config.select and of_kept:
        spelled = {name.lower(): name for name in columns}
        values = []
        for place, _, parsed in _expressions(config)[len(config.filters) :]:
            if parsed.is_evaluated:
                column = selected.column(place.removeprefix("select."))
                values.append(list(map(without_fill, column.to_pylist())))
            # Not through DuckDB, where the arguments of a tool call would get the keys of other
            # rows.
            elif parsed.bare is not None:
                values.append([row.get(spelled[parsed.bare.lower()]) for row in of_kept])
            else:
                first, *rest = names = [spelled[name.lower()] for name in parsed.as_json]
                objects_of = ({name: row.get(name) for name in names} for row in of_kept)
                values.append([_conform(o if rest else o[first], "text") for o in objects_of])
        of_kept = [dict(zip(config.select, row, strict=True)) for row in zip(*values, strict=True)]
    # Example: of rows 0 to 3, row 1 is not an object, so objects is [0, 2, 3]. `where` keeps the
    # first and last of these: kept is [0, 2], which are rows [0, 3].
    failures = [(objects[place], "expression", why) for place, why in failed]
    for index in set(range(len(rows))) - set(objects):
        detail = f"the row is {kind_of(rows[index])}, so it has no fields for `where`"
        failures.append((index, "not_an_object", detail))
    return Reshaped(
        rows=Rows(of_kept),
        places=[objects[place] for place in kept],
        filtered=[(objects[place], where[number]) for place, number in filtered],
        failures=sorted(failures),
    )


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Kind]) -> pa.RecordBatch:
    names = [name for name, kind in columns.items() if kind != _RENAMED]
    try:
        arrays = [column_of([row.get(name) for row in rows], columns[name]) for name in names]
    except ValueError as error:
        raise SourceError(f"rows changed since their file was scanned: {error}") from None
    if not names:  # expressions without columns still need the number of rows
        return pa.RecordBatch.from_arrays([pa.nulls(len(rows), pa.bool_())], names=["no column"])
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _evaluated(config: SourceConfig) -> tuple[list[str], dict[str, str]]:
    """Return what DuckDB evaluates: `where`, and the parts of `select` that are not just names."""
    select = {
        place.removeprefix("select."): text
        for place, text, parsed in _expressions(config)
        if place != _WHERE and parsed.is_evaluated
    }
    return config.filters, select


def _expressions(config: SourceConfig) -> list[Expression]:
    """Return the expressions of a source: those of `where`, then those of `select`."""
    texts = (*config.filters, *config.select.values())
    places = [_WHERE] * len(config.filters) + [f"select.{name}" for name in config.select]
    try:
        parsed = _analysed(source_name(config), texts) if texts else []
    except ConfigError as error:
        raise ConfigError(f"source '{config.path}': {error}") from None
    return [Expression(*each) for each in zip(places, texts, parsed, strict=True)]


@cache
def _analysed(source: str, texts: tuple[str, ...]) -> list[Parsed]:
    call = partial(analyse, list(texts))
    (found,) = stream_from_worker(
        call, what=f"expressions of source '{source}'", blames=ConfigError
    )
    return [Parsed(**each) for each in found]


def _in_worker(config: SourceConfig, call: Callable[[], Any], num_bytes: int) -> list[Any]:
    """Run a call in a worker process."""
    return list(
        stream_from_worker(
            call,
            what=f"expressions of source '{source_name(config)}'",
            blames=SourceError,
            remedy="Simplify the expression",
            num_bytes=num_bytes,
            more_memory=num_bytes,
        )
    )


# The code below runs in the worker.
#
# Each expression is a separate query over the rows of a block. DuckDB has one thread, a memory
# limit, and no access to files, network, extensions or settings; the kernel limits the worker
# (`packhouse.system.worker`). The result for a row depends on that row alone, so rows can be
# evaluated in any groups. If an expression fails on some rows, `TRY` finds them.
#
# An expression may come from a web form. DuckDB parses it, and its tree is checked against lists of
# what is allowed: constants, columns, operators, CASE, casts, lambdas, and the functions in
# `FUNCTIONS`. Everything else is refused: statements, subqueries, aggregates, windows, parameters,
# files, settings, and anything that a later DuckDB may add.


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
"""Functions and operators that an expression may call, by topic. None reads files, settings, the
clock or random numbers, and none produces output much larger than its arguments ask for."""

FUNCTIONS = frozenset(name for names in FUNCTION_GROUPS.values() for name in names.split())

_JOINING = frozenset("concat concat_ws || format printf".split())
"""Functions that turn any argument to text."""
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
_CAST_TYPES = frozenset(
    "varchar text string char bpchar boolean bool tinyint smallint integer int int1 int2 int4 int8 "
    "bigint hugeint utinyint usmallint uinteger ubigint uhugeint float float4 real double float8 "
    "decimal numeric date time timestamp datetime json list array struct row map".split()
)
_WHAT = {
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
    "STAR": "`*`. Name the columns",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a column number. Use the column's name",
    "COLLATE": "COLLATE. Compare lower(...) or strip_accents(...)",
    "DEFAULT": "DEFAULT",
}
_PLACES = {"query_location", "query_location_length"}
_OF_STATEMENT = {"type", "select_list", "from_table", "aggregate_handling", *_PLACES}


def in_parentheses(text: str) -> str:
    r"""Put parentheses around an expression, on separate lines so that a comment cannot hide them.

    Example:
        >>> in_parentheses("a > 1 -- long")
        '(\na > 1 -- long\n)'
    """
    return f"(\n{text}\n)"


def parse_expression(connection: Any, text: str, functions: frozenset[str]) -> Parsed:
    """Parse an expression and check that its tree contains only what is allowed.

    Args:
        connection: to DuckDB.
        text: the expression.
        functions: functions beyond `FUNCTIONS` that it may call.

    Raises:
        ConfigError: it is not an expression, or contains something that is not allowed.
    """
    # Parse it without parentheses as well: `a) or (b` is an expression only inside of them.
    for query in (f"SELECT\n{text}", f"SELECT {in_parentheses(text)}"):
        ((answer,),) = connection.execute(
            "SELECT json_serialize_sql($1, skip_null := true, skip_empty := true)", [query]
        ).fetchall()
        try:
            tree = json.loads(answer)
        except RecursionError:
            raise ConfigError("it is nested too deeply. Simplify it") from None
        if tree.get("error"):
            said = str(tree.get("error_message", "")).splitlines()[0]
            what = "it is not an expression" if "Only SELECT" in said else said
            raise ConfigError(
                f"{what}. Write one expression over the row's columns. Put a name that SQL "
                'reserves, such as "order", in double quotes'
            )
    statements = tree["statements"]
    node = statements[0]["node"] if len(statements) == 1 else {}
    selected = node.get("select_list", [])
    is_more = any(value for key, value in node.items() if key not in _OF_STATEMENT)
    is_plain = node.get("type") == "SELECT_NODE" and node["from_table"]["type"] == "EMPTY"
    if not is_plain or is_more or len(selected) != 1:
        raise ConfigError("it is more than one expression. Write one over the row's columns")
    if selected[0].get("function_name") == "row":  # `()` or `(a, b)`
        raise ConfigError("it is empty or more than one expression. Write one expression")
    called, as_text = [], []
    as_json = _columns_in_json(selected[0])
    read = Counter(path[0] for path in _column_paths(selected[0]))
    in_json = Counter[str]()
    for item in _nodes(selected[0]):
        columns = _columns_in_json(item)
        if len(columns) == 1 and not as_json:
            in_json.update(columns)
        elif not columns or item is not selected[0]:
            _check(item, functions)
        if (name := str(item.get("function_name")).lower()) in functions:
            called.append(name)
        if item.get("function_name") in _JOINING:
            inside = [each["expression"].get("column_names") for each in item.get("arguments", ())]
            as_text += [".".join(names) for names in inside if names]
    for name, number in in_json.items():
        if read[name] != number:
            raise ConfigError(
                f"json() cannot be used on '{name}' here. Read it only as json({name})"
            )
    bare = selected[0].get("column_names", [])
    paths = tuple(dict.fromkeys(_column_paths(selected[0])))
    return Parsed(
        columns=tuple(dict.fromkeys(path[0] for path in paths)),
        paths=tuple(map(".".join, paths)),
        functions=tuple(dict.fromkeys(called)),
        bare=bare[0] if len(bare) == 1 else None,
        as_json=tuple(as_json),
        in_json=tuple(in_json),
        as_text=tuple(as_text),
    )


def _columns_in_json(node: dict[str, Any]) -> list[str]:
    """Return the columns of a call `json(column, ...)`, and nothing for other nodes."""
    path = node.get("qualified_name", {}).get("path")
    if path != ["json"] or node.get("distinct") or node.get("filter"):
        return []
    inside = [each["expression"].get("column_names", ()) for each in node.get("arguments", ())]
    return [names[0] for names in inside] if {*map(len, inside)} == {1} else []


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield each node of a tree: each object with a class."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            if "class" in value:
                yield value
            rest += reversed(value.values())
        elif isinstance(value, list):
            rest += reversed(value)


def _column_paths(tree: Any) -> Iterator[tuple[str, ...]]:
    """Yield the columns that a tree reads, each with the fields read inside of it.

    Parameters of lambdas are not columns. `->` is a lambda only in the arguments of a list
    function: in `meta -> '$.a'` it is an operator of JSON.
    """
    # Each item is a part of the tree, the lambda parameters visible there, and whether it is an
    # argument of a list function. In `list_filter(tags, x -> x <> lang)`, x is a parameter inside
    # the lambda, so the columns are tags and lang.
    rest: list[tuple[Any, frozenset[str], bool]] = [(tree, frozenset(), False)]
    while rest:
        value, parameters, is_given = rest.pop()
        if isinstance(value, list):
            rest += ((item, parameters, is_given) for item in reversed(value))
        if not isinstance(value, dict):
            continue
        kind = value.get("class")
        if kind == "COLUMN_REF" and value["column_names"][0] not in parameters:
            yield tuple(value["column_names"])
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
        raise ConfigError(f"an expression cannot contain {what}")
    if kind == "FUNCTION":
        name = str(node["function_name"]).lower()
        path = node.get("qualified_name", {}).get("path", [name])
        if len(path) != 1 or node.get("schema") or node.get("catalog"):
            raise ConfigError(f"function '{name}' cannot be called with its schema")
        if name not in FUNCTIONS and name not in functions:
            meant = near_name(name, FUNCTIONS | functions, likeness=0.8)
            raise ConfigError(
                f"function '{name}' is not allowed: it is unknown, an aggregate, or can read more "
                f"than the row{meant}. docs/reference/functions.md lists the functions"
            )
        if node.get("distinct") or node.get("filter") or node["order_bys"].get("orders"):
            raise ConfigError(f"function '{name}' cannot have DISTINCT, FILTER or ORDER BY")
    if kind == "TYPE" and str(node["type_name"]).lower() not in _CAST_TYPES:
        raise ConfigError(
            f"type '{node['type_name']}' is not allowed. Cast to VARCHAR, BIGINT or another type"
        )


MAX_FAILED = 10_000
"""Rows of a block on which an expression may fail; each costs a millisecond."""

_ROWS = '"packhouse rows"'
_VALUE = '"packhouse value"'
_MEMORY = "768MB"  # less than the worker's limit, so that DuckDB reports it first
_MAX_GROWTH = 16  # bytes of results per byte of rows
_FREE_BYTES = 2**26  # results of this size are always allowed
_SETTINGS: dict[str, Any] = {**NO_FILES, "memory_limit": _MEMORY, "threads": "1"}


def analyse(texts: list[str]) -> list[dict[str, Any]]:
    """Check expressions and return what each reads, as the fields of `Parsed`.

    Raises:
        ConfigError: one is not allowed, or a package that it needs is not installed.
    """
    found = []
    for text in texts:
        at(f"expression `{text}`")
        try:
            parsed = parse_expression(_connection(), text, frozenset(TEXT_FUNCTIONS))
            for name in parsed.functions:  # some need a package
                check_text_function(name)
        except ConfigError as error:
            raise ConfigError(f"`{text}`: {error}") from None
        found.append(asdict(parsed))
    return found


def bind(where: list[str], select: dict[str, str], rows: pa.RecordBatch) -> None:
    """Check the types of expressions against columns without rows.

    Raises:
        ConfigError: an expression has a wrong type; the message names it.
    """
    import duckdb

    texts = [(True, text) for text in where] + [(False, text) for text in select.values()]
    for is_where, text in texts:
        at(f"expression `{text}`")
        try:
            kind = _run(in_parentheses(text), rows).type
        except duckdb.Error as error:
            raise ConfigError(f"`{text}`: {_problem(error)}") from None
        shown = "text" if pa.types.is_string(kind) else str(kind)
        if is_where and kind != pa.bool_():
            raise ConfigError(f"`{text}` is {shown}, not true or false. Compare it")
        if not is_where and not _is_plain(kind):
            raise ConfigError(f"`{text}` is {shown}. Cast it to VARCHAR, BIGINT or DOUBLE")


def evaluate(
    where: list[str], select: dict[str, str], rows: pa.RecordBatch
) -> Iterator[dict[str, Any] | pa.RecordBatch]:
    """Yield which rows are kept and which fail, then the selected columns of the kept rows.

    The first item has `kept`, row indices; `filtered`, pairs of a row index and the number of the
    first expression of `where` that is false or NULL; and `failed`, pairs of a row index and a
    message. Each expression of `where` is evaluated on the rows that the earlier ones keep, and
    `select` on the rows that all of them keep.

    Raises:
        SourceError: an expression needs too much memory, or fails on too many rows.
    """
    failed: dict[int, str] = {}
    filtered: dict[int, int] = {}
    # Example: of rows 0 1 2 3 the first expression drops 1, so kept is [0, 2, 3]. If the second is
    # false at index 1 of these, row 2 is dropped.
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
            f"`select` turns {rows.nbytes:,} bytes into {size:,}, more than {_MAX_GROWTH} times as "
            "many. Select less"
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
    """Return an expression's value for each row, null if it fails, and why it fails, by row."""
    import duckdb

    expression = in_parentheses(text)
    try:
        return _run(expression, rows), {}
    except _row_errors():
        pass
    except duckdb.Error as error:
        raise SourceError(f"{what}: {_problem(error)}. Simplify it") from None
    # `TRY` gives NULL both for failures and for NULL values. `... IS NULL` distinguishes them: it
    # is true or false unless the expression fails. To halve the block until one row is left would
    # take 16 queries for each.
    fails = [value is None for value in _run(f"TRY({expression} IS NULL)", rows).to_pylist()]
    if sum(fails) > MAX_FAILED:
        raise SourceError(
            f"{what}: fails on {sum(fails):,} of {counted(rows.num_rows, 'row')}; the limit is "
            f"{MAX_FAILED:,}. Use TRY_CAST(...) or TRY(...), which give NULL for bad values"
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
    # Not as WHERE, whose parts DuckDB orders by cost, so that the first error would vary.
    found = connection.sql(f"SELECT {expression} AS {_VALUE} FROM {_ROWS}").to_arrow_table()
    assert found.num_rows == rows.num_rows, "an expression has one value per row"
    return found.column(0).combine_chunks()


@cache
def _connection() -> "DuckDBPyConnection":
    import duckdb

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    add_text_functions(connection)
    # Otherwise DuckDB takes an unknown table name for a Python variable and reads its rows.
    connection.execute("SET python_enable_replacements = false")
    # Otherwise that of the machine: a timestamp cast to a date would depend on the worker.
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("CREATE TEMP MACRO json(x) AS x")  # `columns_of` makes its column JSON text
    # Last, because no setting can be changed after it.
    connection.execute("SET lock_configuration = true")
    return connection


def _row_errors() -> tuple[type[Exception], ...]:
    """Return error types caused by single rows; others, such as memory, depend on the block."""
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


def _problem(error: Exception) -> str:
    return first_line(error).replace("Error: ", "error: ", 1)
