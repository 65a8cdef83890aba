"""`where` and `select` of a source: which of its rows are read, and which fields they have.

Expressions see the fields of the file, under its names. Their columns have one type in all files of
a source (`packhouse.read.kinds`), found when the source is scanned, so what a row gives does not
depend on its shard. The expressions are evaluated in a worker process
(`packhouse.read.evaluation`); a field that is only renamed goes around it and stays as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pyarrow as pa

from packhouse.errors import ConfigError, SourceError
from packhouse.read.chat_messages import kind_of
from packhouse.read.evaluation import analyse, bind, evaluate
from packhouse.read.files import source_name
from packhouse.read.kinds import Kind, column_of, shown_kind
from packhouse.read.records import Rows
from packhouse.read.tabular import without_fill
from packhouse.recipe import SourceConfig
from packhouse.registry import TEXT_FUNCTIONS_VERSION
from packhouse.system.fingerprint import library_versions
from packhouse.system.wording import near_name
from packhouse.system.worker import stream_from_worker

_SHOWN = 30
_WHERE = "where"
_RENAMED = "any"


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
    for place, text, parsed in _parsed(config):
        for wanted in parsed["columns"]:
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
            is_renamed = parsed["bare"] is not None and place != _WHERE
            found.setdefault(alike[0], _RENAMED)
            if not is_renamed:
                found[alike[0]] = kinds[alike[0]]
    return dict(sorted(found.items()))


def expression_libraries(config: SourceConfig) -> list[str]:
    """Return the packages whose version decides what the expressions of a source give."""
    names = {name for _, _, parsed in _parsed(config) for name in parsed["functions"]}
    detector = ["py3langid"] if "language" in names else []
    return ["duckdb", *detector] if config.is_reshaped else []


def expression_key(config: SourceConfig) -> dict[str, Any]:
    """Return what decides that beside the expressions, for a step's key; empty without any."""
    is_added = any(parsed["functions"] for _, _, parsed in _parsed(config))
    added = {"text_functions": TEXT_FUNCTIONS_VERSION} if is_added else {}
    return library_versions(expression_libraries(config)) | added


def wanted_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that the expressions of a source read, in lower case."""
    return {name.lower() for _, _, parsed in _parsed(config) for name in parsed["columns"]}


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
    if config.select:
        values = [
            list(map(without_fill, selected.column(name).to_pylist()))
            if name in select
            else [row.get(select_from) for row in of_kept]
            for name, select_from in _sources_of_fields(config, columns, select)
        ]
        names = list(config.select)
        of_kept = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    # Of rows 0 to 3, 1 is no object: objects [0, 2, 3]. `where` keeps the first and the last of
    # these, kept [0, 2], and they were rows [0, 3].
    others = set(range(len(rows))) - set(objects)
    return Reshaped(
        rows=Rows(of_kept),
        places=[objects[place] for place in kept],
        filtered=[(objects[place], where[number]) for place, number in filtered],
        failures=sorted(
            [(objects[place], "expression", why) for place, why in failed]
            + [
                (n, "not_an_object", f"the row is {kind_of(rows[n])}, without fields for `where`")
                for n in others
            ]
        ),
    )


def _sources_of_fields(
    config: SourceConfig, columns: Mapping[str, Kind], evaluated: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield each field of `select` with the column that it renames; "" for what is evaluated."""
    spelled = {name.lower(): name for name in columns}
    bare = {place: parsed["bare"] for place, _, parsed in _parsed(config)}
    for name in config.select:
        column = bare[f"select.{name}"]
        yield name, "" if name in evaluated else spelled[str(column).lower()]


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
    bare = {place for place, _, parsed in _parsed(config) if parsed["bare"] is not None}
    select = {name: text for name, text in config.select.items() if f"select.{name}" not in bare}
    return config.filters, select


def _parsed(config: SourceConfig) -> list[tuple[str, str, dict[str, Any]]]:
    """Return each expression of a source with its place and what it reads."""
    texts = [(_WHERE, text) for text in config.filters]
    texts += [(f"select.{name}", text) for name, text in config.select.items()]
    if not texts:
        return []
    try:
        parsed = _analysed(source_name(config), tuple(text for _, text in texts))
    except ConfigError as error:
        raise ConfigError(f"source '{config.path}': {error}") from None
    return [(place, text, each) for (place, text), each in zip(texts, parsed, strict=True)]


@cache
def _analysed(source: str, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    call = partial(analyse, list(texts))
    (found,) = stream_from_worker(
        call, what=f"expressions of source '{source}'", blames=ConfigError
    )
    return list(found)


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
