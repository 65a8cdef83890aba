"""Kinds of the values that a field of rows holds, so that SQL expressions know their types.

The rows of a JSON file say no types, and values of one field may differ. A kind holds for a field
in all rows of a source, whatever shard they are in:

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

from typing import Any, TypeAlias

import orjson
import pyarrow as pa

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
