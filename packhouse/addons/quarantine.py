"""`packhouse quarantine ls | show | retry`: list bad rows with reasons, and check fixed rows.

A quarantined row keeps its first 64 KiB. `bad_rows.editable` turns it into a line that users can
fix: the parsed row if it parses, otherwise its text. `check_fixed` reads fixed rows with the
recipe's own reader, as if they were in a separate file, renders and tokenizes them, and returns
those that pass as JSON Lines, which a recipe can add as another source. Holds the bad rows of one
dataset in memory: a few KB each.
"""

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from packhouse.cli import cache_option, json_option, number_option
from packhouse.errors import ConfigError, IntegrityError, PackhouseError, QuarantineLimitError
from packhouse.read import SourceShard, read_shard, scan_source
from packhouse.read.compression import lines_of_rows, place_of
from packhouse.read.csv_files import DELIMITERS
from packhouse.read.record_boundaries import LinesFile
from packhouse.read.row_formats import row_format_of, row_formats
from packhouse.read.sharding import TEXT_FILES
from packhouse.read.source_files import source_name
from packhouse.recipe import Recipe, SourceConfig
from packhouse.recipe.recipe_file import is_recipe_path
from packhouse.records.reasons import QUARANTINE_REASONS, WITH_REMEDY
from packhouse.records.record_ids import rewrites
from packhouse.records.table_schemas import QUARANTINED, REFUSED, read_table
from packhouse.render.renderer import run_template, try_rows
from packhouse.run.chain import plan_jobs
from packhouse.run.prepare_arguments import read_recipe
from packhouse.run.step_cache import Workspace
from packhouse.store import OpenVersion
from packhouse.store.version_reader import open_address, read_batches
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import echo, print_note, print_text
from packhouse.system.wording import counted, near_files, rows_and_records
from packhouse.system.worker import stream_from_worker

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSource:
    """Rows of one source that now pass, and recipe settings to read them."""

    lines: tuple[bytes, ...]
    """One line of JSON per row."""
    settings: Mapping[str, object]
    """Settings of the source in a recipe, except `path`: `format`, `fields`, ..., and `name`, which
    is that of the file, too: `<source>-fixed`."""


BadRow = Mapping[str, Any]
"""A quarantined row, schema `table_schemas.QUARANTINED`."""


def _source_of(line: Mapping[str, Any], sources: Collection[str], number: int) -> str:
    """Return the name of a line's source, after checking that the line is from `editable`."""
    kinds = {"source": str, "row": int, "step": str, "raw": object}
    missing = {n for n, kind in kinds.items() if n not in line or not isinstance(line[n], kind)}
    if missing:
        raise ConfigError(
            f"line {number + 1} of the edited rows: {', '.join(sorted(missing))} missing or of "
            "the wrong type. Restore it from the file that --edit wrote."
        )
    name: str = line["source"].split("/")[0]
    if name not in sources:
        known = ", ".join(sorted(sources))
        raise ConfigError(
            f"line {number + 1} of the edited rows has source '{name}', which is not in the "
            f"recipe (known: {known}). Restore the name that --edit wrote."
        )
    return name


def _problem(line: Mapping[str, Any]) -> str:
    """Return the reason why an edited row cannot be checked yet, or an empty string."""
    if line.get("is_cut"):
        return "only the first 64 KiB were kept. Insert the whole row and remove is_cut."
    text = line["raw"] if isinstance(line["raw"], str) else orjson.dumps(line["raw"]).decode()
    # `editable` wrote it for bytes that are not UTF-8. No later check finds it: it is valid.
    if _REPLACEMENT in text:
        return "it still contains U+FFFD in place of invalid UTF-8. Insert the intended text."
    return ""


def check_fixed(
    lines: Iterable[Mapping[str, object]], recipe: Recipe
) -> tuple[list[FixedSource], list[dict[str, object]]]:
    """Check fixed rows with the recipe's rules.

    Args:
        lines: lines from `editable`, fixed or not.
        recipe: the recipe whose sources the rows come from.

    Returns:
        Rows that pass, and lines to fix with the current reason. Each row is in one of the two.

    Raises:
        ConfigError: a line is not from `editable`, or its source is not in the recipe.
    """
    origins = {source_name(source): source for source in recipe.sources}
    groups: dict[tuple[str, str], list[tuple[Mapping[str, object], bytes]]] = defaultdict(list)
    still_bad = []
    for number, line in enumerate(lines):
        name = _source_of(line, origins, number)
        if problem := _problem(line):
            still_bad.append({**line, "detail": problem})
            continue
        source, raw = origins[name], line["raw"]
        row_format = source.format
        if row_format == "auto":  # use the format that a scan finds
            formats = {shard.row_format for shard in _shards_of(source.model_dump_json())}
            formats -= {"auto"}
            row_format = formats.pop() if len(formats) == 1 else "auto"
        if isinstance(raw, str):
            raw = _from_delimited(raw, str(line["source"]), source)
        text = raw.encode() if isinstance(raw, str) else orjson.dumps(raw)
        # A JSON array element may span lines.
        groups[name, row_format].append((line, b" ".join(text.split(b"\n"))))
    passed = []
    for (name, row_format), rows in sorted(groups.items(), key=lambda group: group[0]):
        # Fixed rows are JSON Lines, whatever the file format of the source was.
        own: dict[str, object] = {"path": "", "name": f"{name[:50]}-fixed", "format": row_format}
        own |= {"file_format": "jsonl", "encoding": "utf-8", "rows_at": None, "table": None}
        config = SourceConfig.model_validate(origins[name].model_dump() | own)
        why = _read_again([text for _, text in rows], config, recipe)
        still_bad += [
            {**rows[i][0], "reason": reason, "detail": detail}
            for i, (reason, detail) in sorted(why.items())
        ]
        good = tuple(text for i, (_, text) in enumerate(rows) if i not in why)
        if good:
            settings = config.model_dump(exclude={"path"}, exclude_defaults=True)
            passed.append(FixedSource(lines=good, settings=settings))
    return passed, still_bad


def _from_delimited(raw: str, file: str, config: SourceConfig) -> object:
    """Parse a CSV or TSV record into an object with the file's header; return other text as is."""
    shards = {shard.file: shard for shard in _shards_of(config.model_dump_json())}
    shard = shards.get(file)
    if shard is None or shard.file_format not in DELIMITERS:
        return raw
    text_file = TEXT_FILES[shard.file_format](shard.uri, header=shard.header)
    records = text_file.parse(raw.encode(), len(raw.encode()) + 1)
    return records.rows[0] if len(records.rows) == 1 and not records.failures else raw


@cache
def _shards_of(config: str) -> Sequence[SourceShard]:
    return scan_source(SourceConfig.model_validate_json(config), max_row_bytes=2**31)


def _read_again(
    lines: Sequence[bytes], config: SourceConfig, recipe: Recipe
) -> dict[int, tuple[str, str]]:
    """Return (reason, detail) for each bad line, by its number."""
    with temporary_folder("retry") as folder:
        path = folder / "rows.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        source = config.model_copy(update={"path": str(path)})
        bad: dict[int, tuple[str, str]] = {}
        for shard in scan_source(source):
            rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)
            # Conversations that pass here may still be rejected by the template or the tokenizer.
            with temporary_folder("retry") as tried:
                rows.write(tried)
                call = partial(try_rows, recipe, shard.row_format, source.label_names, None, tried)
                run_template(call, recipe, rows.validated.nbytes)
                for table in (rows.quarantined, read_table(tried / REFUSED)):
                    columns = (table[name].to_pylist() for name in ("row", "reason", "detail"))
                    for row, reason, detail in zip(*columns, strict=True):
                        bad.setdefault(row, (reason, detail))
    return bad


_FIXED = "_fixed.jsonl"
"""Lists which bad rows the fixed rows replace. Folder sources skip names that start with `_`."""
_PLACE = ("source", "row", "raw_sha256")
"""Columns that identify a bad row."""

_cache = cache_option("Cache folder, needed if TARGET is a recipe.")
_target = click.argument("target", metavar="TARGET")


@click.group()
def quarantine() -> None:
    """List, show and fix quarantined rows.

    \b
    Example:
      $ packhouse quarantine ls ./store/demo
      $ packhouse quarantine retry recipe.yaml --edit bad.jsonl
      9 rows in bad.jsonl ...              fix `raw` in bad.jsonl, then:
      $ packhouse quarantine retry recipe.yaml --from bad.jsonl --out fixed
      9 rows passed, 0 still bad
    """


@quarantine.command()
@_target
@number_option("--samples", "Number of sample rows per reason.", default=3)
@_cache
@json_option()
def ls(target: str, samples: int, cache: Path, as_json: bool) -> None:
    """Count bad rows by reason, with samples and remedies.

    TARGET is a version (STORE/DATASET[@REF]), a quarantine file (.parquet or .arrow), or a recipe,
    for the bad rows of its last run on this machine.

    \b
    Example:
      $ packhouse quarantine ls ./store/demo
      validate / json: 1 row
        instructions/instructions.jsonl row 17: not JSON: unexpected end of data
        remedy: ...
    """
    table = read_quarantine(target, cache)
    reasons = count_reasons(table, samples)
    num_rows = table.group_by(["source", "row"]).aggregate([]).num_rows
    if as_json:
        shown = [asdict(reason) for reason in reasons]
        echo(json.dumps({"rows": num_rows, "records": table.num_rows, "reasons": shown}))
        return
    echo(rows_and_records(num_rows, table.num_rows, "bad row"))
    rows = [row for reason in reasons for row in reason.samples]
    lines = _lines_of(rows, target)
    for reason in reasons:
        number = rows_and_records(reason.rows, reason.records)
        echo(f"\n{reason.step} / {reason.reason}: {number}")
        for row in reason.samples:
            print_text(f"{place_of(row, lines)}: {row['detail']}", 2)
        if remedy := _remedy_of(reason):
            print_text(f"remedy: {remedy}", 2)
    _explain_row_numbers(rows, lines)


@quarantine.command()
@_target
@click.option("--reason", help="Print only rows with this reason.")
@click.option("--source", help="Print only rows of this source or `source/file`.")
@number_option(
    "--row", "Print only the row with this 0-based number in its file (not the line number)."
)
@number_option("--limit", "Number of rows to print.", default=5)
@number_option("--bytes", "Number of raw bytes to print per row.", default=2000, into="num_bytes")
@_cache
@json_option()
def show(
    target: str,
    reason: str | None,
    source: str | None,
    row: int | None,
    limit: int,
    num_bytes: int,
    cache: Path,
    as_json: bool,
) -> None:
    """Print bad rows with their location and raw bytes.

    TARGET is a version (STORE/DATASET[@REF]), a quarantine file (.parquet or .arrow), or a recipe,
    for the bad rows of its last run on this machine.

    \b
    Example:
      $ packhouse quarantine show ./store/demo --reason json
      instructions/instructions.jsonl row 17, byte 3,536: validate / json
        not JSON: unexpected end of data
        {"instruction": "Name three primes ...
    """
    table = _chosen(read_quarantine(target, cache), reason, source, row)
    if not table.num_rows:
        raise ConfigError(
            f"no quarantined row of '{target}' matches. List them with `packhouse quarantine ls`."
        )
    shown = table.slice(0, limit).to_pylist()
    lines = {} if as_json else _lines_of(shown, target)
    for bad in shown:
        raw = for_terminal(bad.pop("raw")[:num_bytes].decode("utf-8", "backslashreplace"))
        if as_json:
            echo(json.dumps({**bad, "raw": raw}))
            continue
        at = "" if bad["byte_offset"] is None else f", byte {bad['byte_offset']:,}"
        at = f", row {bad['row']:,}{at}" if (bad["source"], bad["row"]) in lines else at
        place = for_terminal(place_of(bad, lines))
        echo(f"{place}{at}: {bad['step']} / {bad['reason']}")
        echo(f"  {for_terminal(bad['detail'])}")
        echo(f"  {bad['raw_size']:,} bytes, sha256 {bad['raw_sha256'][:16]}")
        echo(f"  {raw}\n")
    if table.num_rows > limit and not as_json:
        echo(f"... and {table.num_rows - limit:,} more; use --limit, --reason or --row")
    if not as_json:
        _explain_row_numbers(shown, lines)


@quarantine.command()
@_target
@click.option("--edit", type=click.Path(path_type=Path), help="File to write the bad rows to.")
@click.option("--from", "fixed", type=click.Path(path_type=Path), help="File of fixed rows.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for rows that pass.")
@click.option(
    "--recipe", "recipe_path", help="Recipe to check the rows with, if TARGET is not one."
)
@click.option("--reason", help="Check only rows with this reason.")
@_cache
@json_option()
def retry(
    target: str,
    edit: Path | None,
    fixed: Path | None,
    out: Path | None,
    recipe_path: str | None,
    reason: str | None,
    cache: Path,
    as_json: bool,
) -> None:
    """Fix bad rows and check them again.

    First, write the bad rows to a JSON Lines file with --edit FILE. In each line, fix `raw`, or
    delete the line to give up on the row. Then check the file with --from FILE: rows that pass are
    written to the --out folder, one file per source, which you add to the recipe. Rows that are
    still bad are written to OUT/_still-bad.jsonl, and the exit code is 4. Without --from, the
    original rows are checked again, for example after you change the recipe.

    TARGET is a version (STORE/DATASET[@REF]), a quarantine file (.parquet or .arrow), or a recipe,
    for the bad rows of its last run on this machine.

    \b
    Example:
      $ packhouse quarantine retry recipe.yaml --from bad.jsonl --out fixed
      8 rows passed, 1 still bad
        chats/chats.jsonl row 79: NaN is not JSON
        all of them: fixed/_still-bad.jsonl
    """
    if edit is not None:
        if fixed or out:
            raise ConfigError(
                "--edit cannot be combined with --from or --out. Write the file with --edit, "
                "fix it, then pass it as --from with --out."
            )
        rows = _rows_to_mend(target, cache, reason)
        _write_lines(edit, map(editable, rows))
        if as_json:
            echo(json.dumps({"rows": len(rows), "file": str(edit)}))
        else:
            echo(
                f"{counted(len(rows), 'row')} in {edit}. Fix `raw`, then run this again with "
                f"`--from {edit} --out FOLDER` instead of --edit."
            )
        return
    if out is None:
        raise ConfigError("Pass --edit FILE, or --out FOLDER (with --from FILE).")
    if recipe_path is None and not is_recipe_path(target):
        raise ConfigError("Pass --recipe RECIPE: its rules decide which rows pass.")
    recipe = read_recipe(recipe_path or target)
    if fixed:
        lines = _read_lines(fixed)
    else:
        lines = [editable(row) for row in _rows_to_mend(target, cache, reason)]
    passed, still_bad = check_fixed(lines, recipe)
    fixed_lines = _write_retried(lines, passed, still_bad, out, as_json)
    # Steps that can reject some records of a row and accept others. Format rejects a row as a
    # whole, but windows and paths separately.
    steps = {"tokenize"} if rewrites(recipe.format) else set()
    if recipe.pack.over_length == "window" or any(s.oasst_paths == "all" for s in recipe.sources):
        steps = {"format", "tokenize"}
    # Other records of these rows may be published already, and would then be in the data twice.
    if {line["step"] for line in fixed_lines} & steps:
        print_note(
            "note: if other records of these rows were published before, the fixed rows "
            "contain them again. `dedup.exact: drop` removes the duplicates."
        )
    if still_bad:
        raise click.exceptions.Exit(QuarantineLimitError.exit_code)


def _rows_to_mend(target: str, cache: Path, reason: str | None) -> list[BadRow]:
    """Return each bad row once, even if several of its windows or paths are bad."""
    # Otherwise, the fixed row would be in the new source once for each of its bad records.
    first: dict[tuple[object, ...], BadRow] = {}
    for row in _chosen(read_quarantine(target, cache), reason).to_pylist():
        first.setdefault(tuple(row[name] for name in _PLACE), row)
    return [*first.values()]


def _lines_of(rows: list[dict[str, Any]], target: str) -> dict[tuple[str, int], int]:
    """Return the line numbers of rows in a recipe's files; for other targets, files are unknown."""
    return lines_of_rows(rows, read_recipe(target).sources) if is_recipe_path(target) else {}


def _explain_row_numbers(rows: list[dict[str, Any]], lines: Mapping[tuple[str, int], int]) -> None:
    """Explain how rows are numbered if a row of a text file is named without its line."""
    texts = [row for row in rows if row["byte_offset"] is not None]
    if any((row["source"], row["row"]) not in lines for row in texts):
        print_note(
            "Rows are numbered from 0. If TARGET is a recipe whose files are on this machine, "
            "their lines are shown, numbered from 1."
        )


def read_quarantine(target: str, cache: Path) -> pa.Table:
    """Read the quarantined rows of a version, a file, or the last run of a recipe.

    Raises:
        ConfigError: the file contains something else, or the recipe has not run here.
        VersionNotFoundError: the version does not exist.
    """
    path = Path(target)
    if is_recipe_path(target):
        return _of_recipe(read_recipe(path), Workspace(cache=cache))
    if path.suffix in (".parquet", ".arrow") and "://" not in target:
        if not path.is_file():
            raise ConfigError(f"no file at '{target}'{near_files(target)}")
        return read_quarantine_file(path)
    return read_quarantined(open_address(target))


def _of_recipe(recipe: Recipe, workspace: Workspace) -> pa.Table:
    """Return the bad rows of the last run of a recipe, without those fixed since."""
    plan = plan_jobs(recipe)
    jobs = (*plan.validate, *plan.format, *plan.tokenize)
    # Keys include the recipe's settings, so runs of a changed recipe are not found.
    # A run that the limit stopped has finished only some of these steps.
    receipts = [workspace.steps.peek(*job.ref) for job in jobs]
    found = [receipt for receipt in receipts if receipt is not None]
    if not found:
        raise ConfigError(
            f"cache '{workspace.cache}' has no run of this recipe in its current form. Run it "
            "first, or pass --cache."
        )
    paths = [r.path("quarantined.arrow") for r in found if "quarantined.arrow" in r.files]
    table = pa.concat_tables([QUARANTINED.empty_table(), *map(read_table, paths)])
    # Leave out rows whose fixed form is already a source of the recipe.
    fixed: set[tuple[object, ...]] = set()
    for source in recipe.sources:
        path = Path(source.path)
        note = (path if path.is_dir() else path.parent) / _FIXED
        if "://" not in source.path and note.is_file():
            fixed |= {tuple(map(line.get, _PLACE)) for line in _read_lines(note)}
    places = zip(*(table[name].to_pylist() for name in _PLACE), strict=True)
    is_left = [place not in fixed for place in places]
    if num_fixed := len(is_left) - sum(is_left):
        are = counted(num_fixed, "row is", "rows are")
        print_note(f"{are} not shown, because sources of the recipe contain the fixed rows")
    return table.filter(pa.array(is_left, pa.bool_()))


def _chosen(
    table: pa.Table, reason: str | None = None, source: str | None = None, row: int | None = None
) -> pa.Table:
    # Arrow requires valid UTF-8, which text of the command line may not be.
    reason, source = (
        t and t.encode("utf-8", "backslashreplace").decode() for t in (reason, source)
    )
    if reason is not None:
        table = table.filter(pc.equal(table["reason"], reason))
    if source is not None:
        # With the slash, so that source `a` does not include those of `ab`.
        is_file = pc.equal(table["source"], source)
        table = table.filter(pc.or_(is_file, pc.starts_with(table["source"], f"{source}/")))
    if row is not None:
        table = table.filter(pc.equal(table["row"], row))
    return table.sort_by([("source", "ascending"), ("row", "ascending")])


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    try:
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                parsed = orjson.loads(line)
                if not isinstance(parsed, dict):
                    raise ConfigError(f"'{path}', line {number}: not an object")
                lines.append(parsed)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"'{path}', line {number}: not JSON ({error.msg})") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from None
    return lines


def _write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _write_retried(
    lines: list[dict[str, Any]],
    passed: list[FixedSource],
    still_bad: list[dict[str, object]],
    out: Path,
    as_json: bool,
) -> list[dict[str, Any]]:
    """Write rows that pass, rows that are still bad, and which bad rows the former replace.

    Returns:
        Lines of the rows that pass.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = {out / f"{source.settings['name']}.jsonl": source for source in passed}
    for path, source in files.items():
        path.write_bytes(b"".join(line + b"\n" for line in source.lines))
    left = out / "_still-bad.jsonl"  # folder sources skip names like this
    left.unlink(missing_ok=True)
    if still_bad:
        _write_lines(left, still_bad)
    bad = {(line["source"], line["row"]) for line in still_bad}
    fixed = [line for line in lines if (line["source"], line["row"]) not in bad]
    # Lines written by hand have no digest, so they cannot be matched to a bad row.
    replaced = [{name: row[name] for name in _PLACE} for row in fixed if "raw_sha256" in row]
    _write_lines(out / _FIXED, replaced)
    num_passed = sum(len(source.lines) for source in passed)
    if as_json:
        sources = [
            {"path": str(path), "rows": len(source.lines), **source.settings}
            for path, source in files.items()
        ]
        echo(json.dumps({"passed": num_passed, "still_bad": still_bad, "sources": sources}))
        return fixed
    echo(f"{counted(num_passed, 'row')} passed, {len(still_bad):,} still bad")
    for line in still_bad[:5]:
        echo(for_terminal(f"  {line['source']} row {line['row']:,}: {line.get('detail', '')}"))
    if still_bad:
        echo(f"  all of them: {left}")
    if files:
        echo("\nadd to the recipe's sources:")
        for path, source in files.items():
            entry = {"path": str(path.absolute()), **source.settings}
            echo(textwrap.indent(yaml.safe_dump([entry], sort_keys=False).rstrip(), "  "))
    return fixed


_MOST_FILES = 200
"""Maximum number of files opened for samples; counts always cover all rows."""
_MOST_ROWS = 1000
_MOST_DETAIL = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class BadReason:
    """Bad rows of one step and reason."""

    step: str
    reason: str
    rows: int
    records: int
    """More than `rows` if several windows or paths of a row are bad."""
    samples: list[dict[str, Any]]
    """First rows by source and row: `source`, `row`, `byte_offset` and `detail`."""


def _remedy_of(bad: BadReason) -> str:
    """Return the general remedy; empty if the details have better ones."""
    known = QUARANTINE_REASONS.get(bad.step, {}).get(bad.reason)
    return "" if known is None or bad.reason in WITH_REMEDY else known.remedy


def count_reasons(table: pa.Table, num_samples: int = 3) -> list[BadReason]:
    """Count bad rows and records by step and reason, most frequent first, with sample rows.

    Args:
        table: schema `table_schemas.QUARANTINED`.
        num_samples: sample rows per reason, the first ones by source and row.

    Example:
        >>> from packhouse.records.table_schemas import QUARANTINED
        >>> row = {"source": "a/a.jsonl", "row": 7, "byte_offset": 90, "step": "validate",
        ...        "reason": "json", "detail": "not JSON", "raw": b"{", "raw_size": 1,
        ...        "raw_sha256": ""}
        >>> (line,) = count_reasons(pa.Table.from_pylist([row], QUARANTINED))
        >>> line.step, line.reason, line.rows, line.records, line.samples[0]["row"]
        ('validate', 'json', 1, 1, 7)
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    columns = ["step", "reason", "source", "row", "byte_offset", "detail"]
    wanted = table.select(columns).sort_by([("source", "ascending"), ("row", "ascending")])
    for row in wanted.to_pylist():
        found[row.pop("step"), row.pop("reason")].append(row)
    return [
        BadReason(
            step=step,
            reason=reason,
            rows=len({(row["source"], row["row"]) for row in rows}),
            records=len(rows),
            samples=rows[:num_samples],
        )
        for (step, reason), rows in sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    ]


def read_quarantined(opened: OpenVersion) -> pa.Table:
    """Read the quarantined rows of a published version (schema `table_schemas.QUARANTINED`)."""
    with temporary_folder("quarantine") as folder:
        parts = [
            read_quarantine_file(opened.fetch(entry, folder / f"{number}.parquet"))
            for number, entry in enumerate(opened.files("quarantine"))
        ]
    return pa.concat_tables([QUARANTINED.empty_table(), *parts])


def read_quarantine_file(path: Path) -> pa.Table:
    """Read a file of quarantined rows, Parquet or Arrow.

    Raises:
        ConfigError: the file contains something else.
    """
    call, size = partial(_read_file, path), path.stat().st_size
    # In a worker, because a few kilobytes can expand to gigabytes.
    found = stream_from_worker(call, what=f"file '{path.name}'", blames=ConfigError, num_bytes=size)
    return pa.Table.from_batches(list(found), QUARANTINED)


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        for batch in read_batches(path):
            yield batch.select(QUARANTINED.names).cast(QUARANTINED)
    # A type that does not cast, a damaged file, a missing column, a value out of range. Not
    # `pa.ArrowException`, which includes running out of memory: that is not the file's fault.
    except (pa.ArrowNotImplementedError, IntegrityError, KeyError, ValueError) as error:
        raise ConfigError(f"'{path}' is not a quarantine file: {error}") from None


def editable(row: BadRow) -> dict[str, object]:
    """Convert a quarantined row into a line that can be fixed.

    `raw` is the parsed row if its bytes parse as one row, otherwise their text. Bytes that are not
    UTF-8 become U+FFFD and must be replaced. `is_cut` means that the end of the row is missing.

    Example:
        >>> raw = b'{"instruction": "Hi"}'
        >>> row = {"source": "a/a.jsonl", "row": 7, "step": "validate", "reason": "fields",
        ...     "detail": "no 'output'", "raw": raw, "raw_size": 21, "raw_sha256": ""}
        >>> editable(row)["raw"]
        {'instruction': 'Hi'}
        >>> editable(row | {"raw": b'{"instruction": "Hi",}', "raw_size": 22})["raw"]
        '{"instruction": "Hi",}'
    """
    line = {n: row[n] for n in ("source", "row", "step", "reason", "detail", "raw_sha256")}
    raw, size = row["raw"], row["raw_size"]
    text = raw.decode("utf-8", "replace")
    if size > len(raw):
        return line | {"raw": text, "is_cut": True}
    records = LinesFile("").parse(raw.replace(b"\n", b" "), max(size, 1))
    # Parsing would lose data for objects with duplicate keys and numbers outside float range.
    is_whole = not records.failures and len(records.rows) == 1
    return line | {"raw": records.rows[0] if is_whole else text}


def likely_causes(rows: Iterable[BadRow], recipe: Recipe) -> list[str]:
    """Return likely causes of bad rows, such as a source in another format than the recipe's.

    Args:
        rows: quarantined rows.
        recipe: the recipe that they were read with.

    Returns:
        A sentence for each source whose rows mostly look like another format, or are text in
        another encoding.

    Example:
        >>> source = {"path": "a.jsonl", "format": "alpaca"}
        >>> recipe = Recipe.model_validate({"dataset": "d", "tokenizer": "t", "sources": [source]})
        >>> raw = b'{"question": "1+1?", "answer": "2"}'
        >>> row = {"source": "a/a.jsonl", "row": 0, "step": "validate", "reason": "fields",
        ...     "detail": "no 'output'", "raw": raw, "raw_size": len(raw), "raw_sha256": ""}
        >>> likely_causes([row], recipe)
        ["Rows of 'a' look like `question_answer`, but the recipe reads them as `alpaca`. Try ..."]
    """
    shapes: dict[str, Counter[str | None]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    sources = {source_name(source): source for source in recipe.sources}
    for row in rows:
        name = row["source"].partition("/")[0]
        if name in sources and row["reason"] != "media":  # media rows have the right shape
            reasons[name][row["reason"]] += 1
            shapes[name][_other_format(editable(row)["raw"], sources[name])] += 1
    causes = []
    for name, counts in sorted(shapes.items()):
        if reasons[name].most_common(1)[0][0] == "encoding" and sources[name].encoding == "utf-8":
            causes.append(f"'{name}' is not UTF-8. `packhouse init` detects its encoding.")
        if (found := counts.most_common(1)[0][0]) is not None:
            causes.append(
                f"Rows of '{name}' look like `{found}`, but the recipe reads them as "
                f"`{sources[name].format}`. Try `format: {found}`, or `format: mixed` if rows "
                "have several shapes."
            )
    return causes


def _other_format(row: Any, source: SourceConfig) -> str | None:
    """Return the format of a row if it differs from its source's; None if no other format fits."""
    if source.format not in row_formats() or source.format == "mixed":
        return None
    wanted = row_formats()[source.format]
    if isinstance(row, dict) and wanted.required:
        names = wanted.names(tuple(row), source.fields)
        if wanted.required.keys() <= names.keys() and wanted.holds(row, names):
            return None  # the shape of the row is not the problem
    found = row_format_of(row, source.fields)
    return None if found == source.format else found


def read_bad_rows(files: Iterable[Path]) -> pa.Table | None:
    """Read the first bad rows of the first files; None if this machine has none.

    The files of a run may be on another worker.
    """
    tables = []
    for file in islice(files, _MOST_FILES):
        with suppress(OSError, pa.ArrowException):
            tables.append(read_table(file).slice(0, _MOST_ROWS))
    return pa.concat_tables(tables) if tables else None


def explain_bad_rows(
    error: PackhouseError, files: Sequence[Path], recipe: Recipe, target: str = "RECIPE"
) -> PackhouseError:
    """Return the error with the place and reason of the first bad row, and the command to see more.

    The command line, the page of a run and the summaries of a CI job all print this sentence.

    Args:
        error: raised by `check_quarantine`.
        files: files of quarantined rows, which become the error's fact `places`.
        recipe: the recipe that the rows were read with.
        target: argument of `packhouse quarantine show` in the command.
    """
    bad = read_bad_rows(files)
    if bad is None:
        return error
    reasons = count_reasons(bad)
    # The most frequent reason may follow from another fault: rows after a quote that is never
    # closed have too few fields. So the first bad row is named, too.
    first = min(reasons, key=lambda each: (each.samples[0]["source"], each.samples[0]["row"]))
    shown = [first, *reasons[:1]] if first is not reasons[0] else [first]
    lines = lines_of_rows([each.samples[0] for each in shown], recipe.sources)
    causes = "".join(f" {cause}" for cause in likely_causes(bad.to_pylist(), recipe))
    parts = []
    for each in shown:
        sample, remedy = each.samples[0], _remedy_of(each)
        # Details of some reasons include the remedy, which must not be cut off.
        most = _MOST_DETAIL if remedy else 4 * _MOST_DETAIL
        detail = shorten(sample["detail"], most, placeholder="...").rstrip(".")
        helps = causes if causes and each is reasons[0] else f" Remedy: {remedy}." * bool(remedy)
        parts.append(f"first '{each.reason}': {place_of(sample, lines)}, {detail}.{helps}")
    more = " The ".join(parts)
    gates = tuple(replace(gate, detail=f"{gate.detail}; {more}") for gate in error.gates)
    return type(error)(
        f"{error}; {more} To see the bad rows, run `packhouse quarantine show {target}`.",
        **error.facts | {"gates": gates, "places": [str(file) for file in files]},
    )
