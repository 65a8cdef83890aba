"""Bad rows of a run or a version: counted, mended and checked again.

A quarantined row keeps its first 64 KiB. `editable` turns it into a line that people can mend in
any editor: the row itself where it parses, its text where it does not. `check_mended` reads mended
rows by the very reader of the recipe, as if they stood in a file of their own, renders and
tokenizes them, and gives back those that pass as JSON Lines which a recipe can add as one more
source. Works on the bad rows of one dataset in memory: a few KB each.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import orjson
import pyarrow as pa

from packhouse.errors import ConfigError, IntegrityError, PackhouseError
from packhouse.foreign import REFUSED, run_template, try_rows
from packhouse.reasons import QUARANTINE_REASONS, WITH_REMEDY
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.tables import QUARANTINED, read_table
from packhouse.runtime.confine import stream_confined
from packhouse.runtime.disks import temporary_folder
from packhouse.sources import SourceShard, read_shard, scan_source
from packhouse.sources.delimited import parse_delimited
from packhouse.sources.files import source_name
from packhouse.sources.json_lines import parse_lines
from packhouse.sources.lines import lines_of_rows, place_of
from packhouse.sources.row_formats import row_format_of
from packhouse.store import OpenVersion
from packhouse.store.contracts import read_batches

_MOST_FILES = 200
"""Files of bad rows that are opened for samples; counts are always of all rows."""
_MOST_ROWS = 1000
_MOST_DETAIL = 240

_DELIMITERS = {"csv": ",", "csv_semicolon": ";", "tsv": "\t"}
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class MendedSource:
    """Rows of one source that pass now, and how a recipe names their shape."""

    name: str
    """For the file and the new source: `<source>-mended`."""
    lines: tuple[bytes, ...]
    """A JSON line per row."""
    settings: Mapping[str, object]
    """Keys of a recipe's source beside `path`: `name`, `format`, `fields`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried:
    """Result of reading mended rows again; every one of them is in one of the two."""

    passed: tuple[MendedSource, ...]
    still_bad: tuple[dict[str, object], ...]
    """Lines to mend, with the reason they have now."""

    @property
    def num_passed(self) -> int:
        """Rows that pass."""
        return sum(len(source.lines) for source in self.passed)


def count_reasons(table: pa.Table, num_samples: int = 3) -> list[dict[str, Any]]:
    """Count bad rows and their bad records by step and reason, most frequent first, with samples.

    Args:
        table: schema `tables.QUARANTINED`.
        num_samples: rows named for each reason, the first in order of source and row.

    Example:
        >>> from packhouse.records.tables import QUARANTINED
        >>> row = {"source": "a/a.jsonl", "row": 7, "byte_offset": 90, "step": "validate",
        ...        "reason": "json", "detail": "not JSON", "raw": b"{", "raw_size": 1,
        ...        "raw_sha256": ""}
        >>> (line,) = count_reasons(pa.Table.from_pylist([row], QUARANTINED))
        >>> line["step"], line["reason"], line["rows"], line["records"], line["samples"]
        ('validate', 'json', 1, 1, [{'source': 'a/a.jsonl', 'row': 7, 'byte_offset': 90, ...}])
    """
    counts: Counter[tuple[str, str]] = Counter()
    rows: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    samples: dict[tuple[str, str], list[dict[str, object]]] = defaultdict(list)
    wanted = table.select(["step", "reason", "source", "row", "byte_offset", "detail"])
    for row in sorted(wanted.to_pylist(), key=lambda row: (row["source"], row["row"])):
        key = row.pop("step"), row.pop("reason")
        counts[key] += 1
        rows[key].add((row["source"], row["row"]))
        if len(samples[key]) < num_samples:
            samples[key].append(row)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        {
            "step": key[0],
            "reason": key[1],
            "rows": len(rows[key]),
            "records": records,
            "samples": samples[key],
        }
        for key, records in ordered
    ]


def count_rows(table: pa.Table) -> int:
    """Count the rows that have one bad record or more."""
    return int(table.group_by(["source", "row"]).aggregate([]).num_rows)


def read_quarantined(opened: OpenVersion) -> pa.Table:
    """Read the quarantined rows of a published version, schema `tables.QUARANTINED`."""
    with temporary_folder("quarantine") as folder:
        parts = [
            read_quarantine_file(opened.fetch(entry, folder / f"{number}.parquet"))
            for number, entry in enumerate(opened.files("quarantine"))
        ]
    return pa.concat_tables([QUARANTINED.empty_table(), *parts])


def read_quarantine_file(path: Path) -> pa.Table:
    """Read a file of quarantined rows, Parquet or Arrow.

    Raises:
        ConfigError: the file holds something else.
    """
    call, size = partial(_read_file, path), path.stat().st_size
    # In a child: some kilobytes of a file may stand for gigabytes.
    found = stream_confined(call, what=f"file '{path.name}'", blames=ConfigError, num_bytes=size)
    return pa.Table.from_batches(list(found), QUARANTINED)


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        for batch in read_batches(path):
            yield batch.select(QUARANTINED.names).cast(QUARANTINED)
    # Not `pa.ArrowException`: memory that runs out is one, and is no fault of the file.
    except (pa.ArrowNotImplementedError, IntegrityError, KeyError, ValueError) as error:
        raise ConfigError(f"'{path}' is no quarantine file: {error}") from None


def editable(row: Mapping[str, Any]) -> dict[str, object]:
    """Turn a quarantined row into a line to mend.

    `raw` is the row itself where its bytes parse as one, else their text; bytes that are not UTF-8
    show as U+FFFD, which has to be replaced. `is_cut` says that the end is missing.

    Example:
        >>> row = {"source": "a/a.jsonl", "row": 7, "step": "validate", "reason": "fields",
        ...        "detail": "no field 'output'", "raw": b'{"instruction": "Hi"}', "raw_size": 21}
        >>> editable(row)["raw"]
        {'instruction': 'Hi'}
        >>> editable(row | {"raw": b'{"instruction": "Hi",}', "raw_size": 22})["raw"]
        '{"instruction": "Hi",}'
    """
    names = ("source", "row", "step", "reason", "detail")
    line = {name: row[name] for name in (*names, "raw_sha256") if name in row}
    if row["raw_size"] > len(row["raw"]):
        return line | {"raw": row["raw"].decode("utf-8", "replace"), "is_cut": True}
    records = parse_lines(row["raw"].replace(b"\n", b" "), max(row["raw_size"], 1))
    # Of an object with a key twice, or a number that no float holds, parsing would lose a part.
    is_whole = not records.failures and len(records.rows) == 1
    return line | {
        "raw": records.rows[0] if is_whole else row["raw"].decode("utf-8", "replace"),
    }


def likely_causes(rows: Iterable[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    """Say what is probably wrong with the sources of bad rows: they have another format's shape.

    Args:
        rows: quarantined rows, with the columns of `tables.QUARANTINED`.
        recipe: what they were read for.

    Returns:
        A sentence for each source of which most rows look like another format than the recipe's,
        or are text of another encoding.

    Example:
        >>> source = {"path": "a.jsonl", "format": "alpaca"}
        >>> recipe = Recipe.model_validate({"dataset": "d", "tokenizer": "t", "sources": [source]})
        >>> row = {"source": "a/a.jsonl", "row": 0, "step": "validate", "reason": "fields",
        ...        "detail": "no field 'output'", "raw": b'{"question": "1+1?", "answer": "2"}'}
        >>> likely_causes([row | {"raw_size": len(row["raw"])}], recipe)
        ["rows of 'a' look like `question_answer`, and the recipe reads them as `alpaca`: try ..."]
    """
    shapes: dict[str, Counter[str | None]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    sources = {source_name(source): source for source in recipe.sources}
    for row in rows:
        name = row["source"].partition("/")[0]
        if name in sources:
            reasons[name][row["reason"]] += 1
            shapes[name][row_format_of(editable(row)["raw"], sources[name].fields)] += 1
    causes = []
    for name, counts in sorted(shapes.items()):
        if reasons[name].most_common(1)[0][0] == "encoding" and sources[name].encoding == "utf-8":
            causes.append(f"the text of '{name}' is not UTF-8: `packhouse init` finds its encoding")
        found, wanted = counts.most_common(1)[0][0], sources[name].format
        if found is not None and wanted not in (found, "auto", "mixed"):
            causes.append(
                f"rows of '{name}' look like `{found}`, and the recipe reads them as `{wanted}`: "
                f"try `format: {found}`"
            )
    return causes


def read_bad_rows(files: Iterable[Path]) -> pa.Table | None:
    """Read the first bad rows of the first files; None if there are none on this machine.

    A run's files may lie on another worker.
    """
    tables = []
    for file in islice(files, _MOST_FILES):
        with suppress(OSError, pa.ArrowException):
            tables.append(read_table(file).slice(0, _MOST_ROWS))
    return pa.concat_tables(tables) if tables else None


def explain_bad_rows(
    error: PackhouseError, files: Sequence[Path], recipe: Recipe, target: str = "RECIPE"
) -> PackhouseError:
    """Return a refusal that also says where a bad row stands, what is wrong, and what to type.

    The command line, the page of a run and the summaries of a CI job all print this sentence.

    Args:
        error: of `check_quarantine`.
        files: the quarantined rows; they become its fact `places`.
        recipe: what the rows were read for.
        target: what `packhouse quarantine show` is to look at.
    """
    bad = read_bad_rows(files)
    if bad is None:
        return error
    line = count_reasons(bad)[0]
    sample = line["samples"][0]
    place = place_of(sample, lines_of_rows([sample], recipe.sources))
    causes = "".join(f"; {cause}" for cause in likely_causes(bad.to_pylist(), recipe))
    has_remedy = line["reason"] in WITH_REMEDY
    most = 4 * _MOST_DETAIL if has_remedy else _MOST_DETAIL
    detail = shorten(sample["detail"], most, placeholder="...")
    known = None if has_remedy else QUARANTINE_REASONS[line["step"]].get(line["reason"])
    helps = f"; remedy: {known.remedy}" if known and not causes else causes
    more = f"first '{line['reason']}': {place}, {detail}{helps}"
    gates = tuple(replace(gate, detail=f"{gate.detail}; {more}") for gate in error.gates)
    return type(error)(
        f"{error}; {more}; to see them: `packhouse quarantine show {target}`",
        **error.facts | {"gates": gates, "places": [str(file) for file in files]},
    )


def check_mended(lines: Iterable[Mapping[str, object]], recipe: Recipe) -> Retried:
    """Read mended rows again, by the recipe's rules.

    Args:
        lines: as `editable` makes them, mended or not.
        recipe: whose sources the rows come from, and whose rules they must keep.

    Raises:
        ConfigError: a line is not one of `editable`, or names a source that the recipe lacks.
    """
    origins = {source_name(source): source for source in recipe.sources}
    groups: dict[tuple[str, str], list[_Mended]] = defaultdict(list)
    still_bad = []
    for number, line in enumerate(lines):
        mended = _prepare(line, origins, number)
        if isinstance(mended, dict):
            still_bad.append(mended)
        else:
            groups[mended.source, mended.row_format].append(mended)
    passed = []
    for (name, row_format), rows in sorted(groups.items()):
        config = _config_of(origins[name], name, row_format)
        why = _read_again([row.line for row in rows], config, recipe)
        still_bad += [row.bad(*why[i]) for i, row in enumerate(rows) if i in why]
        good = tuple(row.line for i, row in enumerate(rows) if i not in why)
        if good:
            settings = config.model_dump(exclude={"path"}, exclude_defaults=True)
            passed.append(MendedSource(name=settings["name"], lines=good, settings=settings))
    return Retried(passed=tuple(passed), still_bad=tuple(still_bad))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mended:
    """A row as one line of JSON, of a shape that sources can have."""

    source: str
    row_format: str
    line: bytes
    given: Mapping[str, object] = field(repr=False)

    def bad(self, reason: str, detail: str) -> dict[str, object]:
        return {**self.given, "reason": reason, "detail": detail}


def _prepare(
    line: Mapping[str, Any], origins: Mapping[str, SourceConfig], number: int
) -> _Mended | dict[str, object]:
    """The row to read again, or the line with the reason why it cannot be."""
    kinds = {"source": str, "row": int, "step": str, "raw": object}
    missing = {n for n, kind in kinds.items() if n not in line or not isinstance(line[n], kind)}
    if missing:
        raise ConfigError(
            f"line {number + 1} of the mended rows has no sound {', '.join(sorted(missing))}"
        )
    name = line["source"].split("/")[0]
    if name not in origins:
        known = ", ".join(sorted(origins))
        raise ConfigError(
            f"line {number + 1} of the mended rows is of source '{name}', which the recipe lacks "
            f"(it has {known})"
        )
    raw = line["raw"]
    why = _cannot(raw, bool(line.get("is_cut")))
    if why:
        return {**line, "detail": why}
    row_format = origins[name].format
    if row_format == "auto":  # what a scan found
        shards = _shards_of(origins[name].model_dump_json())
        formats = {shard.row_format for shard in shards} - {"auto"}
        row_format = formats.pop() if len(formats) == 1 else "auto"
    if isinstance(raw, str):
        raw = _from_delimited(raw, line["source"], origins[name])
    text = raw.encode() if isinstance(raw, str) else orjson.dumps(raw)
    text = b" ".join(text.split(b"\n"))  # an element of a JSON array may span lines
    return _Mended(source=name, row_format=row_format, line=text, given=line)


def _cannot(raw: object, is_cut: bool) -> str | None:
    if is_cut:
        return "only its first 64 KiB are kept; put in the whole row and take out is_cut"
    text = raw if isinstance(raw, str) else orjson.dumps(raw).decode()
    if _REPLACEMENT in text:
        return "it still holds U+FFFD where its bytes were no UTF-8; put in what was meant"
    return None


def _from_delimited(raw: str, file: str, config: SourceConfig) -> object:
    """A CSV or TSV record as an object keyed by the file's header; any other text as it is."""
    shards = {shard.file: shard for shard in _shards_of(config.model_dump_json())}
    shard = shards.get(file)
    if shard is None or shard.file_format not in _DELIMITERS:
        return raw
    delimiter = _DELIMITERS[shard.file_format]
    records = parse_delimited(raw.encode(), shard.header or (), delimiter, len(raw.encode()) + 1)
    return records.rows[0] if len(records.rows) == 1 and not records.failures else raw


@cache
def _shards_of(config: str) -> Sequence[SourceShard]:
    return scan_source(SourceConfig.model_validate_json(config))


def _config_of(config: SourceConfig, name: str, row_format: str) -> SourceConfig:
    own = {"path": "", "name": f"{name[:50]}-mended", "format": row_format}
    lines = {"file_format": "jsonl", "encoding": "utf-8", "rows_at": None, "table": None}
    return SourceConfig.model_validate(config.model_dump() | own | lines)


def _read_again(
    lines: Sequence[bytes], config: SourceConfig, recipe: Recipe
) -> dict[int, tuple[str, str]]:
    """Number of each line that is bad -> reason and detail."""
    with temporary_folder("retry") as folder:
        path = folder / "rows.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        source = config.model_copy(update={"path": str(path)})
        bad: dict[int, tuple[str, str]] = {}
        for shard in scan_source(source):
            rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)
            # Rows that pass as conversations may be refused by the template or the tokenizer.
            with temporary_folder("retry") as tried:
                rows.write(tried)
                call = partial(try_rows, recipe, shard.row_format, source.label_names, None, tried)
                run_template(call, recipe, rows.validated.nbytes)
                for table in (rows.quarantined, read_table(tried / REFUSED)):
                    for row in table.select(["row", "reason", "detail"]).to_pylist():
                        bad.setdefault(row["row"], (row["reason"], row["detail"]))
    return bad
