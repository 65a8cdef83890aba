"""Ask a version in SQL: DuckDB over its views, in a worker process without files and network.

Versions come from anywhere, so their files are read, and the question is run, in a worker.
Only the columns that a question names are fetched (`packhouse.store.columns`), and `text` the
tokenizer.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, IntegrityError
from packhouse.read.evaluation import add_text_functions, check_text_function
from packhouse.records.ledger import units_of
from packhouse.registry import TEXT_FUNCTIONS
from packhouse.store.columns import fetch_columns
from packhouse.store.read import OpenVersion, scan_versions
from packhouse.store.refs import scan_refs
from packhouse.system.disks import temporary_folder
from packhouse.system.duckdb_limits import NO_FILES
from packhouse.system.worker import stream_from_worker
from packhouse.tokenize.loading import MEMORY_PER_BYTE
from packhouse.tokenize.of_version import tokenizer_of
from packhouse.views.tables import COLUMNS, ON_REQUEST, Tables, columns_of_files

_CANDIDATES = 3
"""Signatures of a function that an error names."""

_SETTINGS: dict[str, Any] = {**NO_FILES, "memory_limit": "1GB", "threads": "2"}


def ask(opened: OpenVersion, query: str, tokenizers: Path) -> pa.Table:
    """Answer one SELECT over the views of a version.

    Args:
        opened: the version.
        query: SQL of DuckDB, over the views of `packhouse.views.tables.COLUMNS`.
        tokenizers: folder of tokenizers in the cache.

    Raises:
        ConfigError: the query does not run.
        IntegrityError: a file of the version is damaged.
    """
    words = _words(query)
    views = [name for name in COLUMNS if name in words]
    every = {column for view in views for column in COLUMNS[view]}
    (parsed,) = stream_from_worker(
        partial(_parse, query), what="the query", blames=ConfigError, remedy="Make it simpler"
    )
    columns = (every - ON_REQUEST if parsed["is_of_rows"] else set()) | (every & words)
    question = _Question(query=query, views=views)
    answer = _asked(opened, question, columns, tokenizers)
    return answer.rename_columns(_apart(answer.column_names))


def _apart(names: Sequence[str]) -> list[str]:
    """Give columns of one name names of their own.

    Example:
        >>> _apart(["row", "count(1)", "row"])
        ['row', 'count(1)', 'row_1']
    """
    apart: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(1))
        apart.append(next(each for each in chain([name], numbered) if each not in apart))
    return apart


def read_view(
    opened: OpenVersion,
    view: str,
    columns: Sequence[str],
    tokenizers: Path | None = None,
    *,
    only: Mapping[str, Any] = MappingProxyType({}),
    limit: int | None = None,
) -> pa.Table:
    """Read some columns of one view, without SQL and DuckDB.

    Args:
        opened: the version.
        view: its name.
        columns: which; those of `only` are read too.
        tokenizers: folder of tokenizers in the cache; `text` alone needs it.
        only: rows with these values alone; of `record_id`, with one of these ids; of `text`, rows
            that hold this value, and of `source/` those of all its files.
        limit: rows at most.

    Raises:
        IntegrityError: a file of the version is damaged.
    """
    every = {*columns, *(name.rstrip("/") for name in only)}
    question = _Question(views=[view], only=dict(only), limit=limit)
    found = _asked(opened, question, every, tokenizers)
    return found.select(list(columns))


def find_records(opened: OpenVersion, record_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return `input_ids`, `trained`, `loss_weights` and `label` of a few records of the packs.

    Lists are those of one copy, whole where `concat` cuts it; both sides of a pair behind one
    another.

    Raises:
        IntegrityError: a file of the version is damaged.
    """
    if not record_ids:
        return {}
    columns = ("record_id", "input_ids", "trained", "loss_weights", "label")
    only = {"record_id": sorted(record_ids)}
    rows = read_view(opened, "records", columns, only=only).to_pylist()
    return {row.pop("record_id"): row for row in rows if row["input_ids"] is not None}


def _words(query: str) -> set[str]:
    return set(re.findall(r"[a-z_0-9]+", query.lower()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    views: list[str]
    query: str | None = None
    only: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


def _asked(
    opened: OpenVersion,
    question: _Question,
    columns: Collection[str],
    tokenizers: Path | None,
) -> pa.Table:
    load = tokenizer_of(opened, tokenizers) if tokenizers and "text" in columns else None
    wanted: dict[str, set[str]] = {}
    for view in question.views:
        for kind, names in columns_of_files(view, columns).items():
            wanted.setdefault(kind, set()).update(names)
    with temporary_folder("sql") as folder:
        fetched = fetch_columns(opened, wanted, folder)
        tables = Tables(
            files=fetched.files,
            manifest=replace(opened.manifest, files=()),  # 200,000 of them take a second
            columns=columns,
            facts=_facts(opened, question.views),
            load=load,
            record_ids=question.only.get("record_id"),
        )
        answer = stream_from_worker(
            partial(_answer, question, tables),
            what="the query" if question.query else f"the files of {opened.dataset}",
            blames=ConfigError if question.query else IntegrityError,
            remedy="Ask for less: fewer rows, no text",
            num_bytes=fetched.num_bytes,
            more_memory=2**30 + fetched.num_bytes * MEMORY_PER_BYTE,
        )
        return pa.Table.from_batches(list(answer))


def _facts(opened: OpenVersion, views: list[str]) -> dict[str, list[dict[str, Any]]]:
    manifest = opened.manifest
    facts: dict[str, list[dict[str, Any]]] = {}
    if "ledger" in views:
        ledger = manifest.counts.get("ledger", [])
        units = units_of(manifest.facts.counts.ledger)
        facts["ledger"] = [line for step in ledger for line in _ledger_lines(step, units)]
    if "audit" in views and manifest.audit:
        found = {None: manifest.audit["dataset"], **manifest.audit["sources"]}
        facts["audit"] = [
            {"source": source, "name": name, "value": value}
            for source, counts in found.items()
            for name, value in counts.items()
        ]
    if "versions" in views:
        facts["versions"] = _versions(opened)
    return facts


def _ledger_lines(
    line: Mapping[str, Any], units: Mapping[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    step = line.get("step", "")
    taken, given = units[step]

    def one(
        event: str, reason: str | None, number: int | None, tokens: int | None
    ) -> dict[str, Any]:
        unit = taken if event == "in" else given
        counts = {"number": number, "unit": f"{unit}s", "tokens": tokens}
        return {"step": step, "event": event, "reason": reason, **counts}

    yield one("in", None, line.get("rows_in"), line.get("tokens_in"))
    for event in ("added", "quarantined", "dropped"):
        tokens = line.get(f"tokens_{event}", {})
        for reason, number in line.get(event, {}).items():
            yield one(event, reason, number, tokens.get(reason))
    yield one("out", None, line.get("rows_out"), line.get("tokens_out"))


def _versions(opened: OpenVersion) -> list[dict[str, Any]]:
    names: dict[str, list[str]] = {}
    for ref in scan_refs(opened.store, opened.dataset)[0]:
        names.setdefault(ref.version, []).append(ref.name)
    rows = []
    for manifest in scan_versions(opened.store, opened.dataset)[0]:
        data = [entry for entry in manifest.files if entry.kind == "data"]
        rows.append(
            {
                "version": manifest.version,
                "refs": ", ".join(names.get(manifest.version, [])),
                "packs": sum(entry.rows for entry in data),
                "tokens": sum(entry.tokens for entry in data),
                "bytes": manifest.num_bytes,
                "content_id": manifest.content_id,
                "manifest_id": manifest.manifest_id,
            }
        )
    return rows


def _answer(question: _Question, tables: Tables) -> Iterator[pa.RecordBatch]:
    """In a worker: run the query over the views it names, or read the one view."""
    if question.query is None:
        found = tables.view(question.views[0])
        for name, value in question.only.items():
            if name == "record_id":
                found = found.filter(pc.is_in(found[name], pa.array(value, pa.string())))
            elif name == "text":
                found = found.filter(pc.match_substring(found[name], value))
            elif name == "source/":
                found = found.filter(pc.starts_with(found["source"], f"{value}/"))
            else:
                found = found.filter(pc.equal(found[name], value))
        yield from _batches(found.slice(0, question.limit).combine_chunks())
        return
    import duckdb

    database = duckdb.connect(":memory:", config=_SETTINGS)
    for name in TEXT_FUNCTIONS.keys() & _words(question.query):
        check_text_function(name)
    add_text_functions(database)
    database.execute("SET python_enable_replacements = false")
    database.execute("SET lock_configuration = true")
    for name in question.views:
        database.register(name, tables.view(name))
    try:
        answer = database.sql(question.query).to_arrow_table()
    except duckdb.Error as error:
        raise ConfigError(_explained(error, question.views)) from None
    yield from _batches(answer)


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield at least one batch, so that the columns of an empty table are said too."""
    yield from table.to_batches(max_chunksize=2**16) or [
        pa.RecordBatch.from_pylist([], table.schema)
    ]


def _parse(query: str) -> dict[str, bool]:
    """In a worker: say whether a query means columns that it does not name.

    Raises:
        ConfigError: several statements, another statement, or no SQL.
    """
    import duckdb

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    ((text,),) = connection.execute("select json_serialize_sql(?)", [query]).fetchall()
    parsed = orjson.loads(text)
    if parsed["error"] and parsed["error_type"] != "not implemented":
        raise ConfigError(f"the query is no SQL: {parsed['error_message']}")
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise ConfigError(
            "a question is one SELECT: a version never changes. Give a single statement that "
            "begins with SELECT, WITH or FROM"
        )
    return {"is_of_rows": _is_of_rows(parsed["statements"])}


def _is_of_rows(tree: Any) -> bool:
    """Return True if a query may mean columns that it does not name; `count(*)` means none.

    By `*`, `columns(...)` and `#1`; by a table that is taken for a value, as in
    `count(distinct records)`; where its columns get other names; in a natural join.
    """
    nodes, rest = [], [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            nodes.append(value)
        rest += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        )
    tables = [node for node in nodes if node.get("type") == "BASE_TABLE"]
    names = {str(node[key]).lower() for node in tables for key in ("alias", "table_name")}
    return any(
        node.get("class") in ("STAR", "POSITIONAL_REFERENCE")
        or node.get("ref_type") == "NATURAL"
        or node.get("type") in ("SHOW_REF", "PIVOT", "TABLE_FUNCTION")
        or (node.get("type") == "BASE_TABLE" and node["column_name_alias"])
        or (node.get("class") == "COLUMN_REF" and node["column_names"][-1].lower() in names)
        for node in nodes
    )


def _explained(error: Exception, views: Sequence[str]) -> str:
    """What is wrong with a query, in a line or two: DuckDB's first line, and what there is."""
    first, *rest = str(error).split("\n")
    said = f"the query does not run: {first.partition('Error: ')[2] or first}"
    if first.startswith("Catalog Error: Table"):
        return (
            f"{said}\nThere are {', '.join(COLUMNS)}; `packhouse sql --help` says what they hold."
        )
    if "Referenced" in first or "does not have a column" in first:
        there = (f"{view} has {', '.join(COLUMNS[view])}" for view in views)
        return "\n".join([said, *there])
    meant = [line for line in rest if line.startswith("Did you mean")]
    takes = [line.strip().partition(" -> ")[0] for line in rest if " -> " in line]
    if takes:
        more = ", ..." * (len(takes) > _CANDIDATES)
        shown = ", ".join(takes[:_CANDIDATES]).replace('"', "").replace(", /)", ")")
        meant = [f"It is called as {shown}{more}"]
    return "\n".join([said, *meant[:1]])
