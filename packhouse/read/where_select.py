"""`where` and `select` of a source: which of its rows are read, and which fields they have.

Expressions see the fields of the file, under its names. They are evaluated in a worker process
(`packhouse.read.evaluation`); a field that is only renamed goes around it and stays as it is.

The rows of a JSON file say no types, and values of one field may differ. So the kind of a field is
found when the source is scanned; it holds in all its rows, so that what a row gives does not depend
on its shard:

    values of the field              kind                  DuckDB
    "a", null                        "text"                VARCHAR
    true                             "bool"                BOOLEAN
    1                                "int"                 BIGINT
    1, 2.5                           "float"               DOUBLE
    ["a", "b"]                       ["text"]              VARCHAR[]
    {"role": "user", "n": 1}         {"role": "text", ...} STRUCT(n BIGINT, role VARCHAR)
    "a", 1, ["b"]                    "text"                VARCHAR: a, 1, ["b"]

Values of several kinds are text: text as it is, other values as JSON. So are objects with over 100
different keys, or with keys that differ by case alone, which SQL cannot tell apart. A field that
some rows lack is null there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import orjson
import pyarrow as pa

from packhouse.errors import ConfigError, SourceError
from packhouse.read.chat_messages import kind_of
from packhouse.read.evaluation import Parsed, analyse, bind, evaluate
from packhouse.read.files import source_name
from packhouse.read.records import Rows
from packhouse.read.tabular import without_fill
from packhouse.recipe import SourceConfig
from packhouse.registry import TEXT_FUNCTIONS_VERSION
from packhouse.system.fingerprint import library_versions
from packhouse.system.wording import near_name
from packhouse.system.worker import stream_from_worker

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind]"
"""`null`, `bool`, `int`, `float`, `text`; `[kind]` of a list; `{key: kind}` of an object."""

MAX_KEYS = 100
"""Different keys of an object beyond which it is JSON text."""

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
    """Return the kind that holds for all values, and for those that `known` was found in.

    Example:
        >>> kind_of_values([1, None, 2.5]), kind_of_values([{"a": 1}, {"b": []}])
        ('float', {'a': 'int', 'b': ['null']})
    """
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= _SCALARS.keys() - {int}:
        for kind in kinds:
            known = joined_kinds(known, _SCALARS[kind])
        return known
    for value in values:
        known = joined_kinds(known, _kind_of(value))
    return known


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
    """Return the kind that holds for the values of both.

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
        if not kind:  # of objects that are all empty: a struct without fields is none in SQL
            return pa.string()
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
    raise ValueError(f"a value of type {type(value).__name__} where {shown_kind(kind)} is due")


def shown_kind(kind: Kind) -> str:
    """Return a kind as people write it.

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


class Expression(NamedTuple):
    """One expression of a source."""

    place: str
    """`where`, or `select.` and the field that it makes."""
    text: str
    parsed: Parsed


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The rows of a block, as `where` and `select` leave them."""

    rows: Rows
    places: list[int]
    """Index of each among the rows that were given."""
    filtered: list[tuple[int, str]]
    """Index of each row that `where` leaves out, and its first expression that is false or NULL."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(index, reason, detail) of rows on which an expression fails."""


def columns_of(config: SourceConfig, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the columns that the expressions of a source read, as its files spell them.

    Args:
        config: a source with `where` or `select`.
        kinds: of all columns of its files.

    Returns:
        Their kinds, sorted by name; `any` for one that is only renamed.

    Raises:
        ConfigError: an expression is not allowed, or names no column; says what was meant.

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
                    f"source '{config.path}': {place} `{text}`: '{wanted}' may be "
                    f"{' or '.join(map(repr, sorted(alike)))}, which SQL takes for one"
                )
            if not alike:
                known = ", ".join(name[:40] for name in list(kinds)[:_SHOWN])
                raise ConfigError(
                    f"source '{config.path}': {place} `{text}`: no row has a field "
                    f"'{wanted[:40]}'; there are: {known or 'none'}"
                    f"{', ...' if len(kinds) > _SHOWN else ''}{near_name(wanted, kinds)}"
                )
            (name,) = alike
            is_renamed = parsed.bare is not None and place != _WHERE
            found[name] = found.get(name, _RENAMED) if is_renamed else kinds[name]
    return dict(sorted(found.items()))


def expression_libraries(config: SourceConfig) -> list[str]:
    """Return the packages whose version decides what the expressions of a source give."""
    names = {name for each in _expressions(config) for name in each.parsed.functions}
    detector = ["py3langid"] if "language" in names else []
    return ["duckdb", *detector] if config.is_reshaped else []


def expression_key(config: SourceConfig) -> dict[str, Any]:
    """Return what decides that beside the expressions, for a step's key; empty without any."""
    is_added = any(each.parsed.functions for each in _expressions(config))
    added = {"text_functions": TEXT_FUNCTIONS_VERSION} if is_added else {}
    return library_versions(expression_libraries(config)) | added


def wanted_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that the expressions of a source read, in lower case."""
    return {name.lower() for each in _expressions(config) for name in each.parsed.columns}


def check_types(config: SourceConfig, columns: Mapping[str, Kind]) -> None:
    """Check that the expressions of a source fit the types of its columns.

    Raises:
        ConfigError: says which expression does not, why, and the types.
    """
    where, select = _evaluated(config)
    try:
        _in_worker(config, partial(bind, where, select, _table([], columns)), 0)
    except ConfigError as error:
        typed = ((name, kind) for name, kind in columns.items() if kind != _RENAMED)
        types = ", ".join(f"{name} {shown_kind(kind)}" for name, kind in typed)
        said = f". Its columns: {types[:500]}" if types else ""
        raise ConfigError(f"source '{config.path}': {error}{said}") from None


def reshape(rows: Sequence[Any], config: SourceConfig, columns: Mapping[str, Kind]) -> Reshaped:
    """Return the rows that `where` keeps, with the fields that `select` gives them.

    Args:
        rows: parsed rows of any type; one that is no object fails.
        config: a source with `where` or `select`.
        columns: kind of each column that its expressions read.

    Raises:
        SourceError: an expression takes too much memory or time, or fails on too many rows.
    """
    if not rows:  # of a source without rows no column is known
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
            if parsed.bare is None:
                column = selected.column(place.removeprefix("select."))
                values.append(list(map(without_fill, column.to_pylist())))
            else:
                values.append([row.get(spelled[parsed.bare.lower()]) for row in of_kept])
        of_kept = [dict(zip(config.select, row, strict=True)) for row in zip(*values, strict=True)]
    # Of rows 0 to 3, 1 is no object: objects [0, 2, 3]. `where` keeps the first and the last of
    # these, kept [0, 2], and they were rows [0, 3].
    failures = [(objects[place], "expression", why) for place, why in failed]
    for index in set(range(len(rows))) - set(objects):
        detail = f"the row is {kind_of(rows[index])}, without fields for `where`"
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
    if not names:  # an expression of constants alone needs the number of rows
        return pa.RecordBatch.from_arrays([pa.nulls(len(rows), pa.bool_())], names=["no column"])
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _evaluated(config: SourceConfig) -> tuple[list[str], dict[str, str]]:
    """Return what DuckDB evaluates: `where`, and of `select` what is more than another name."""
    select = {
        place.removeprefix("select."): text
        for place, text, parsed in _expressions(config)
        if place != _WHERE and parsed.bare is None
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
    """Do a call of `packhouse.read.evaluation` in a worker."""
    return list(
        stream_from_worker(
            call,
            what=f"expressions of source '{source_name(config)}'",
            blames=SourceError,
            remedy="Make the expression simpler",
            num_bytes=num_bytes,
            more_memory=num_bytes,
        )
    )
