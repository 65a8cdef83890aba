"""Query a version with SQL: DuckDB views (`views.sql`) over the tables of its files.

Each query runs twice, in a worker process without access to files or network, because versions and
queries may be untrusted. The first run uses empty tables: its plan names the columns it reads. Only
these columns are fetched, and the query then runs on them. To read whole packs for training, use
`packhouse.load_packed` instead.

    ask "select avg(num_trained) from packs" -> packs:num_trained -> labels, seq_lengths of `data`
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.addons.ask.version_tables import TABLES, FileTable, VersionFiles, columns_of_files
from packhouse.cli.token_display import LoadSnapshot, tokenizer_of
from packhouse.errors import ConfigError, IntegrityError, PackhouseError
from packhouse.records.arrays import one_chunk
from packhouse.records.duckdb_functions import NO_FILES, add_text_functions, check_text_function
from packhouse.records.ledger import LedgerLine, units_of
from packhouse.registry import TEXT_FUNCTIONS
from packhouse.store import store_requests
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.object_store import ObjectNotFoundError, ObjectStore
from packhouse.store.refs import scan_refs
from packhouse.store.version_reader import OpenVersion, scan_versions, stored_names
from packhouse.system.disks import temporary_folder
from packhouse.system.worker import at, run_in_worker, stream_from_worker
from packhouse.tokenize.encoders import decode_lists
from packhouse.tokenize.tokenizer_loading import MEMORY_PER_BYTE

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation
    from duckdb.sqltypes import DuckDBPyType


VIEWS = ("records", "packs", "contents", "quarantine", "dropped", "ledger", "audit", "versions")

_ON_REQUEST = {
    *("text", "input_ids", "trained", "loss_weights"),
    *("record_ids", "seq_lengths", "raw"),
}
"""Columns that views include only if the query names them, so that `*` never reads tokens or
text."""

_FACTS: Mapping[str, Mapping[str, pa.DataType]] = {
    "ledger": dict.fromkeys(("step", "event", "reason"), pa.string())
    | {"number": pa.int64(), "unit": pa.string(), "tokens": pa.int64()},
    "audit": {"source": pa.string(), "name": pa.string(), "value": pa.int64()},
    "versions": dict.fromkeys(("version", "refs"), pa.string())
    | dict.fromkeys(("packs", "tokens", "bytes"), pa.int64())
    | dict.fromkeys(("content_id", "manifest_id"), pa.string()),
}
"""Views filled from the manifest instead of from files."""

MEMORY = 2**30
"""Memory limit of a database in bytes, in addition to 32 bytes for each byte of files."""
_PLAIN_TYPES = {"boolean", "decimal", "double", "float", "varchar", "hugeint", "bigint", "integer"}
_PLAIN_TYPES |= {"smallint", "tinyint", "ubigint", "uinteger", "usmallint", "utinyint", "null"}
"""DuckDB types whose Python values print as JSON."""
_CANDIDATES = 3
"""Number of function signatures listed in an error."""


def ask(opened: OpenVersion, query: str, tokenizers: Path, *, is_printed: bool = False) -> pa.Table:
    """Run one SELECT over the views of a version.

    Args:
        opened: the version.
        query: SQL in DuckDB's dialect, over `VIEWS`.
        tokenizers: folder of tokenizers in the cache.
        is_printed: convert values of types that JSON lacks to JSON (done by DuckDB).

    Raises:
        ConfigError: the query is invalid or fails.
        IntegrityError: a file of the version is damaged.
    """
    question = Question(query=query, is_ours=False, is_printed=is_printed)
    answer = _run_question(opened, question, tokenizers)
    return answer.rename_columns(_unique_names(answer.column_names))


def read(
    opened: OpenVersion,
    query: str,
    values: Sequence[Any] = (),
    tokenizers: Path | None = None,
) -> pa.Table:
    """Run one of packhouse's own queries.

    Args:
        opened: the version.
        query: one SELECT over `VIEWS`.
        values: values of its `?` parameters.
        tokenizers: folder of tokenizers in the cache; only `text` needs it.

    Raises:
        ContractError: the query needs record ids, which the packs do not have.
        IntegrityError: a file of the version is damaged.
    """
    return _run_question(opened, Question(query=query, values=(*values,)), tokenizers)


def find_records(opened: OpenVersion, record_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return `input_ids`, `trained`, `loss_weights` and `label` of a few records of the packs.

    Lists cover one copy of the record, including the parts into which `concat` cut it. For a
    preference pair, the rejected side follows the chosen one.

    Raises:
        IntegrityError: a file of the version is damaged.
    """
    if not record_ids:
        return {}
    query = (
        "SELECT record_id, input_ids, trained, loss_weights, label FROM records "
        "WHERE record_id IN (SELECT unnest(?)) AND input_ids IS NOT NULL"
    )
    rows = read(opened, query, [sorted(record_ids)]).to_pylist()
    return {row.pop("record_id"): row for row in rows}


def _unique_names(names: Sequence[str]) -> list[str]:
    """Make column names unique.

    Example:
        >>> _unique_names(["row", "count(1)", "row"])
        ['row', 'count(1)', 'row_1']
    """
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(1))
        unique.append(next(each for each in chain([name], numbered) if each not in unique))
    return unique


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query over the views, with everything it needs except files."""

    query: str
    values: tuple[Any, ...] = ()
    """Values of its parameters."""
    is_ours: bool = True
    """False for a user's query, whose failure is a `ConfigError`."""
    is_printed: bool = False
    """See `ask`."""
    facts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of the views that are not built from files."""
    load: LoadSnapshot | None = None
    """Loads the tokenizer; None if the query needs no text."""

    @property
    def blames(self) -> type[PackhouseError]:
        """Error class to raise if the query fails."""
        return IntegrityError if self.is_ours else ConfigError


def _words(query: str) -> set[str]:
    return set(re.findall(r"[a-z_0-9]+", query.lower()))


def _run_question(opened: OpenVersion, question: Question, tokenizers: Path | None) -> pa.Table:
    """Fetch the files that a question needs, and answer it in a worker."""
    with temporary_folder("sql") as folder:
        files, num_bytes = fetch_files(opened, question, folder)
        words = _words(question.query)
        load = None
        if tokenizers is not None and "text" in words:
            load = tokenizer_of(opened, tokenizers)
        question = replace(question, facts=_facts(opened, words), load=load)
        memory = MEMORY + num_bytes * MEMORY_PER_BYTE
        answer = stream_from_worker(
            partial(_answer, question, files, memory),
            what=f"the files of {opened.dataset}" if question.is_ours else "the query",
            blames=question.blames,
            remedy="Query fewer rows, or leave out the text.",
            num_bytes=num_bytes,
            more_memory=memory,
        )
        return pa.Table.from_batches(list(answer))


def fetch_files(opened: OpenVersion, question: Question, folder: Path) -> tuple[VersionFiles, int]:
    """Fetch the columns that a query needs; return the files and the number of bytes fetched.

    Raises:
        ConfigError: a user's query is invalid.
        IntegrityError: a file of the version is damaged.
    """
    # Only columns in the plan are fetched: `avg(num_trained)` reads 0.12 MB of Alpaca's 14.8 MB.
    manifest = replace(opened.manifest, files=())  # sending 200,000 entries takes 1 s
    taken: dict[str, list[str]] = run_in_worker(
        partial(_plan, question, manifest), what="the query", blames=question.blames
    )
    wanted: dict[str, set[str]] = {}
    for table, columns in taken.items():
        kind, names = columns_of_files(table, columns)
        wanted.setdefault(kind, set()).update(names)
    found, num_bytes = fetch_columns(opened, wanted, folder)
    return VersionFiles(files=found, manifest=manifest), num_bytes


def _plan(question: Question, manifest: Manifest) -> dict[str, list[str]]:
    """Return the columns that a query reads, by table (in a worker).

    Raises:
        ConfigError: the query is not exactly one valid SELECT, or uses unknown names.
    """
    for name in TEXT_FUNCTIONS.keys() & _words(question.query):
        check_text_function(name)
    with open_views(VersionFiles(files={}, manifest=manifest), question) as views:
        return views.columns_taken(question.query, question.values)


def _answer(question: Question, files: VersionFiles, memory: int) -> Iterator[pa.RecordBatch]:
    """Yield the answer (in a worker): at least one batch, so that an empty answer has columns."""
    with open_views(files, question, memory) as views:
        answer = views.rows(question.query, question.values)
    yield from answer.to_batches(max_chunksize=2**16) or [
        pa.RecordBatch.from_pylist([], answer.schema)
    ]


@contextmanager
def open_views(
    files: VersionFiles, question: Question | None = None, memory: int = MEMORY
) -> Iterator["Views"]:
    """Open a database with the views of a version (in a worker).

    Args:
        files: files of the version.
        question: other inputs of the views; None if there are none.
        memory: memory limit of the database, in bytes.
    """
    import duckdb

    settings: dict[str, Any] = {**NO_FILES, "memory_limit": f"{memory}B", "threads": "2"}
    with duckdb.connect(":memory:", config=settings) as database:
        yield Views(database, files, question or Question(query=""))


class Views:
    """The views of a version in a database. Create it with `open_views`."""

    def __init__(
        self, database: "DuckDBPyConnection", files: VersionFiles, question: Question
    ) -> None:
        self.database, self.files, self.question = database, files, question
        self.errors: list[BaseException] = []
        """Errors raised by packhouse code inside DuckDB, which would keep only their text."""
        # Arrow reads the files, because DuckDB's `read_parquet` does not check page checksums: of
        # 30 flipped bits, 18 changed an answer.
        self.tables = {
            name: FileTable(name=name, files=files, errors=self.errors) for name in TABLES
        }
        add_text_functions(database)
        # DuckDB accepts type "arrow" for functions, but its type stubs do not.
        add: Any = database.create_function
        add("decode_ids", self._decode_ids, ["INTEGER[]"], "VARCHAR", type="arrow")
        add("decode_bytes", _decode_bytes, ["BLOB"], "VARCHAR", type="arrow")
        num_sides = 2 if files.manifest.preferences == "pairs" else 1
        database.execute(f"CREATE MACRO seq_len() AS {files.seq_len}::BIGINT")
        database.execute(f"CREATE MACRO num_sides() AS {num_sides}")
        # Three schemas: `files` has the tables, `whole` all columns, and `main` what queries see.
        database.execute("CREATE SCHEMA files; CREATE SCHEMA whole")
        for name, table in self.tables.items():
            database.register(f"files_{name}", table)
            named = ", ".join(f'"{name}:{column}" AS {column}' for column in TABLES[name])
            database.execute(f"CREATE VIEW files.{name} AS SELECT {named} FROM files_{name}")
        for name, kinds in _FACTS.items():
            rows = question.facts.get(name, [])
            facts = pa.Table.from_pylist(rows, pa.schema([*kinds.items()]))
            database.register(f"facts_{name}", facts)
        database.execute(Path(__file__).with_name("views.sql").read_text())
        # The query is untrusted: it must not read Python variables as tables or change settings.
        database.execute("SET python_enable_replacements = false")
        # Last, because no setting can be changed after it.
        database.execute("SET lock_configuration = true")

    def _show(self, query: str, left_out: Collection[str]) -> None:
        """Create the views that a query names, omitting columns that `*` must not read."""
        for view in {*VIEWS} & _words(query):  # all of them take 40 ms
            shown = [name for name in self._columns(view) if name not in left_out]
            of = "whole" if view != "records" or _ON_REQUEST & {*shown} else "files"
            select = f"SELECT {', '.join(shown)} FROM {of}.{view}"
            self.database.execute(f"CREATE OR REPLACE VIEW {view} AS {select}")

    def rows(self, query: str, values: Sequence[Any] = ()) -> pa.Table:
        """Run a SELECT.

        Raises:
            ConfigError: a user's query fails.
            ContractError: packs have no record ids or violate the data contract.
            IntegrityError: the content of a file is invalid, or packhouse's own query fails.
        """
        taken = self.columns_taken(query, values)
        for name, table in self.tables.items():
            table.columns = taken.get(name, ())
        with self._errors_named():
            answer = self.database.sql(query, params=[*values] or None)
            return _with_json(answer) if self.question.is_printed else answer.to_arrow_table()

    def columns_taken(self, query: str, values: Sequence[Any] = ()) -> dict[str, list[str]]:
        """Return the columns that a SELECT reads, by table, from its query plan.

        Raises:
            ConfigError: the query is not exactly one valid SELECT, or fails as in `rows`.
        """
        import duckdb

        try:
            kinds = [each.type for each in self.database.extract_statements(query)]
        except duckdb.Error as error:
            raise ConfigError(f"invalid SQL: {_first_line(error)}") from None
        if kinds != [duckdb.StatementType.SELECT]:
            raise ConfigError(
                "only one read-only query can be run. Pass a single statement that begins "
                "with SELECT, WITH or FROM."
            )
        with self._errors_named():
            explain = f"EXPLAIN (FORMAT json) {query}", [*values] or None
            self._show(query, _ON_REQUEST)
            try:
                ((_, plan),) = self.database.execute(*explain).fetchall()
            except duckdb.BinderException:  # it may need text or tokens, which are hidden
                self._show(query, _ON_REQUEST - _words(query))
                ((_, plan),) = self.database.execute(*explain).fetchall()
        # Scans appear in the plan as `TABLE:COLUMN` (see `FileTable`), whatever the aliases.
        taken: dict[str, list[str]] = {}
        for table, column in sorted({*re.findall(r"\b([a-z]+):([a-z_0-9]+)", plan)}):
            if column in TABLES.get(table, ()):
                taken.setdefault(table, []).append(column)
        return taken

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            if self.errors:
                raise self.errors[0] from None
            # Not an error raised by packhouse: the query itself is wrong.
            raise self.question.blames(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        """Describe the error in a line or two: DuckDB's first line, and the names that exist."""
        first, *rest = str(error).split("\n")
        helps = [line for line in rest if line.startswith("Did you mean")][:1]
        takes = [line.strip().partition(" -> ")[0] for line in rest if " -> " in line]
        if first.startswith("Catalog Error: Table"):
            helps = [f"Tables: {', '.join(VIEWS)}. See `packhouse sql --help`."]
        elif "Referenced" in first or "does not have a column" in first:
            named = [view for view in VIEWS if view in _words(self.question.query)]
            helps = [f"{view} has {', '.join(self._columns(view))}" for view in named]
        elif takes:
            more = ", ..." * (len(takes) > _CANDIDATES)
            shown = ", ".join(takes[:_CANDIDATES]).replace('"', "").replace(", /)", ")")
            helps = [f"Signature: {shown}{more}"]
        return "\n".join([f"the query failed: {_first_line(error)}", *helps])

    def _columns(self, view: str) -> list[str]:
        return [row[0] for row in self.database.execute(f"DESCRIBE whole.{view}").fetchall()]

    def _decode_ids(self, ids: pa.ChunkedArray | pa.Array) -> pa.Array:
        try:
            snapshot = self.question.load() if self.question.load else None
            if snapshot is None:
                raise ConfigError(
                    "column 'text' needs the version's tokenizer, but neither the cache nor "
                    "the store has it. Query input_ids instead."
                )
            lists = one_chunk(ids).cast(pa.large_list(pa.int32()))
            return decode_lists(lists, snapshot).cast(pa.string())
        except (PackhouseError, MemoryError) as error:
            self.errors.append(error)
            raise


def _with_json(answer: "DuckDBPyRelation") -> pa.Table:
    """Return the answer with JSON for types that Python may not hold, such as infinite dates."""
    is_json = [not _is_plain(kind) for kind in answer.types]
    shown = (f"to_json(#{n})" if cast else f"#{n}" for n, cast in enumerate(is_json, 1))
    table = answer.project(", ".join(shown)).to_arrow_table()
    pairs = zip(table.columns, is_json, strict=True)
    columns = [column.cast(pa.json_()) if cast else column for column, cast in pairs]
    return pa.Table.from_arrays(columns, answer.columns)


def _is_plain(kind: "DuckDBPyType") -> bool:
    if kind.id in ("list", "array"):
        child: Any = kind.children[0][1]
        return _is_plain(child)
    return kind.id in _PLAIN_TYPES


def _decode_bytes(raw: pa.ChunkedArray | pa.Array) -> pa.Array:
    return pa.array([each.decode("utf-8", "replace") for each in raw.to_pylist()], pa.string())


def _first_line(error: Exception) -> str:
    line = str(error).split("\n")[0]
    return line.partition("Error: ")[2] or line


def _facts(opened: OpenVersion, words: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of views that come from the manifest, for views named in the query."""
    facts: dict[str, list[dict[str, Any]]] = {}
    counts, audit = opened.manifest.facts.counts, opened.manifest.facts.audit
    if "ledger" in words:
        units = units_of(counts.ledger)
        facts["ledger"] = [
            {"step": line.step, "unit": f"{units[line.step][event != 'in']}s", "event": event}
            | {"reason": reason, "number": number, "tokens": tokens}
            for line in counts.ledger
            for event, reason, number, tokens in _events(line)
        ]
    if "audit" in words:
        facts["audit"] = [
            {"source": source, "name": name, "value": value}
            for source, found in [(None, audit.dataset), *audit.sources.items()]
            for name, value in found.items()
        ]
    if "versions" in words:
        facts["versions"] = _versions(opened)
    return facts


def _events(line: LedgerLine) -> Iterator[tuple[str, str | None, int, int | None]]:
    """Yield event, reason, rows and tokens for each count of a step."""
    yield "in", None, line.rows_in, line.tokens_in
    for event, counts, tokens in (
        ("added", line.added, line.tokens_added),
        ("quarantined", line.quarantined, {}),
        ("dropped", line.dropped, line.tokens_dropped),
    ):
        for reason, number in counts.items():
            yield event, reason, number, tokens.get(reason)
    yield "out", None, line.rows_out, line.tokens_out


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


# Columns of files. Each file gets a sparse local copy of the same size, which contains the footer
# and the requested columns, with holes in place of the others:
#
#     [ PAR1 | hole | num_tokens | hole | num_tokens | hole | footer ]
#                     row group 0         row group 1
#
# The digest of the whole file cannot be checked in this case. Instead, the size in each response of
# the store must match the manifest, the object's tag must not change, the footer must have as many
# rows as the manifest, and readers check the CRC32 of each page (`contracts.read_batches`). Reading
# a hole is an error, because zeros are not a valid page.
#
# The footer is untrusted. It is parsed in a worker, and its byte ranges are checked against the
# size of the file before any request.

_WHOLE_BYTES = 2**18  # smaller files are fetched whole and checked by digest
_TAIL_BYTES = 2**16  # first read from the end; footers take about 100 bytes per column chunk
_GAP_BYTES = 2**14  # smaller gaps between columns are fetched too, which saves a request
_PART_BYTES = 2**23  # per request, held in memory; `_THREADS` requests run at a time
_MAX_PIECES = 2**16  # column chunks per file; 5 GiB of packhouse's own files have 7,000
_THREADS = 8
_FOOTER_END = 8  # bytes: length of the footer (4, little-endian), then `PAR1`


def fetch_columns(
    opened: OpenVersion, wanted: Mapping[str, Collection[str]], folder: Path
) -> tuple[dict[str, list[tuple[Path, str]]], int]:
    """Fetch columns of all files of some kinds. Small and non-Parquet files are fetched whole.

    Args:
        opened: the version.
        wanted: column names by kind of file; names that a file does not have are ignored.
        folder: folder for the copies.

    Returns:
        Path and split of each copy in published order, by kind of file, and the number of bytes
        fetched.

    Raises:
        VersionNotFoundError: a file was deleted.
        IntegrityError: a file differs from the published size, digest or row count, changed
            while it was read, or has an invalid footer.
    """
    copies = [
        _Copy(opened=opened, entry=entry, path=folder / entry.key)
        for entry in opened.manifest.files
        if entry.kind in wanted
    ]
    store_requests.in_parallel(_Copy.begin, copies, _THREADS)
    sparse = [copy for copy in copies if not copy.is_whole]
    asked = [(c.path, stored_names(wanted[c.entry.kind]), c.entry.rows) for c in sparse]
    found = stream_from_worker(
        partial(_find_columns, asked),
        what=f"the footers of {opened.dataset}",
        blames=IntegrityError,
        num_bytes=sum(copy.num_bytes for copy in sparse),
    )
    parts = [
        (copy, *part)
        for copy, pieces in zip(sparse, found if sparse else (), strict=True)
        for part in _parts(pieces, copy.tail)
    ]
    store_requests.in_parallel(lambda part: part[0].read(*part[1:]), parts, _THREADS)
    files: dict[str, list[tuple[Path, str]]] = {}
    for copy in copies:
        files.setdefault(copy.entry.kind, []).append((copy.path, copy.entry.split))
    num_bytes = sum(copy.num_bytes for copy in copies) + sum(end - start for _, start, end in parts)
    return files, num_bytes


@dataclass(kw_only=True, slots=True)
class _Copy:
    """A local copy of one file, whole or sparse."""

    opened: OpenVersion
    entry: FileEntry
    path: Path
    tag: str | None = None
    """Tag of the object, known after the first read."""
    tail: int = 0
    """Offset of the part already fetched, which ends with the footer."""

    @property
    def is_whole(self) -> bool:
        return self.path.suffix != ".parquet" or self.entry.size < _WHOLE_BYTES

    @property
    def num_bytes(self) -> int:
        """Number of bytes that `begin` fetches."""
        return self.entry.size - self.tail

    def begin(self) -> None:
        """Fetch the footer, or the whole file if it is small.

        Reads the last 64 KiB first, then the rest of the footer if it is longer. With a footer of
        100 KB in a file of 1 MB, 36 KB more are read, and columns must end before byte 900,000.

        Raises:
            IntegrityError: the file does not end with a Parquet footer.
        """
        if self.is_whole:
            self.opened.fetch(self.entry, self.path)
            return
        size = self.entry.size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb") as file:
            file.truncate(size)
        self.tail = size - _TAIL_BYTES
        end = self.read(self.tail, size)[-_FOOTER_END:]
        footer = size - _FOOTER_END - int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or footer < 0:
            raise self._damaged("it has no Parquet footer")
        if footer < self.tail:
            for start, stop in _parts([(footer, self.tail)], size):
                self.read(start, stop)
            self.tail = footer

    def read(self, start: int, end: int) -> bytes:
        """Fetch bytes [start, end), write them at the same offset of the copy, and return them.

        Raises:
            VersionNotFoundError: the file was deleted.
            IntegrityError: the size or the tag of the object has changed.
        """
        key, store = self.opened.key(self.entry), self.opened.store
        steps = store_requests.ask(ObjectStore.get_range, key, start, end - start)
        try:
            part = store_requests.run(store, steps)
        except ObjectNotFoundError:
            raise self.opened.gone(self.entry) from None
        if part.size != self.entry.size:
            raise self._damaged(f"it has {part.size:,} bytes instead of {self.entry.size:,}")
        if len(part.data) != end - start:
            raise self._damaged(
                f"the store returned {len(part.data):,} of the {end - start:,} requested bytes"
            )
        self.tag = self.tag or part.tag
        if part.tag != self.tag:
            raise self._damaged("it was replaced while it was being read")
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(part.data)
        return part.data

    def _damaged(self, problem: str) -> IntegrityError:
        return IntegrityError(
            f"'{self.opened.uri(self.entry)}' does not hold the published bytes: {problem}. "
            "Restore it, or publish the version again elsewhere.",
            key=self.entry.key,
        )


def _parts(pieces: Sequence[Any], limit: int) -> Iterator[tuple[int, int]]:
    """Merge ranges that nearly touch, cut them into requests, and stop at `limit`.

    Example:
        >>> list(_parts([(30_000, 40_000), (4, 20_000), (2**20, 2**24)], 10_000_000))
        [(4, 40000), (1048576, 9437184), (9437184, 10000000)]
    """
    joined: list[list[int]] = []
    for start, end in sorted((max(0, int(each[0])), int(each[1])) for each in pieces):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    for start, end in joined:
        end = min(end, limit)
        for first in range(start, end, _PART_BYTES):
            yield first, min(first + _PART_BYTES, end)


def _find_columns(
    files: Sequence[tuple[Path, list[str], int]],
) -> Iterator[list[tuple[int, int]]]:
    """Yield the byte ranges [start, end) of the requested columns of each file (in a worker).

    Args:
        files: for each file, the copy with its footer, column names, and rows in the manifest.

    Raises:
        IntegrityError: a footer is invalid or gives impossible ranges.
    """
    for path, columns, rows in files:
        at(f"file '{path.name}'")
        try:
            yield _pieces(path, columns, rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def _pieces(path: Path, columns: list[str], rows: int) -> list[tuple[int, int]]:
    """Return the byte ranges of the requested columns, checked against the size of the file."""
    footer, size = pq.read_metadata(path), path.stat().st_size
    if footer.num_rows != rows:
        raise ValueError(f"it has {footer.num_rows:,} rows; the manifest says {rows:,}")
    names = [footer.schema.column(number).path for number in range(footer.num_columns)]
    wanted = [number for number, name in enumerate(names) if name.partition(".")[0] in columns]
    # Names of nested columns are paths: `input_ids.list.element` belongs to `input_ids`.
    if footer.num_row_groups * len(wanted) > _MAX_PIECES:
        raise ValueError(f"{footer.num_row_groups:,} row groups of {len(wanted):,} columns")
    pieces = []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, wanted):
            # An optional dictionary page comes before the data pages of its column.
            start = min(chunk.data_page_offset, chunk.dictionary_page_offset or size)
            end = start + chunk.total_compressed_size
            if not 0 <= start <= end <= size:
                named = f"column '{chunk.path_in_schema}'"
                raise ValueError(f"{named} has the invalid byte range {start:,} to {end:,}")
            pieces.append((start, end))
    return pieces
