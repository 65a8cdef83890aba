"""Read bad rows again that were mended in an editor.

A quarantined row keeps its first 64 KiB. `bad_rows.editable` turns it into a line
that people can mend: the row itself where it parses, its text where it does not. `check_mended`
reads mended rows by the very reader of the recipe, as if they stood in a file of their own, renders
and tokenizes them, and gives back those that pass as JSON Lines which a recipe can add as one more
source. Works on the bad rows of one dataset in memory: a few KB each.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import orjson

from packhouse.errors import ConfigError
from packhouse.read import SourceShard, read_shard, scan_source
from packhouse.read.delimited import parse_delimited
from packhouse.read.files import source_name
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.tables import REFUSED, read_table
from packhouse.run.rendering import run_template, try_rows
from packhouse.system.disks import temporary_folder

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
