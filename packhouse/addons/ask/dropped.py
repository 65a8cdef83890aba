"""`packhouse dropped VERSION`: list the rows and records that a policy or filter left out."""

import json
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.addons.ask.query import read
from packhouse.cli.options import cache_option, json_option
from packhouse.errors import ConfigError, PackhouseError
from packhouse.read import SourceShard, raw_rows, scan_source
from packhouse.read.files import source_name
from packhouse.recipe import Recipe, ValidateConfig
from packhouse.recipe.reading import load_recipe
from packhouse.records.tables import read_table
from packhouse.run.cache import Workspace
from packhouse.run.cache_room import load_last_run
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import shard_bytes
from packhouse.store import OpenVersion
from packhouse.store.read import open_address
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import echo, print_note, print_text
from packhouse.system.wording import counted
from packhouse.tokenize import run_tokenizer
from packhouse.tokenize.encoders import decode
from packhouse.tokenize.of_version import tokenizer_of

_TEXT = 400
"""Number of characters printed of a text; --json prints all of it."""
_ANY_SIZE = ValidateConfig(max_row_bytes=2**31)

Rows = list[dict[str, Any]]


@click.command()
@click.argument("target", metavar="VERSION")
@click.option("--reason", help="Only those of this reason.")
@click.option("--source", help="Only those of this source, or of this `source/file`.")
@click.option(
    "--limit",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many to print of each reason; 0: all.",
)
@click.option("--recipe", type=click.Path(), help="Says where the source files lie now.")
@cache_option("Folder of tokenizers and finished steps.")
@json_option("Print JSON, a line for each.")
def dropped(
    target: str,
    reason: str | None,
    source: str | None,
    limit: int,
    recipe: str | None,
    cache: Path,
    as_json: bool,
) -> None:
    """List the rows and records that a filter or policy left out of VERSION, and why.

    Over-length records show their token count, duplicates the row they repeat, and filtered rows
    the expression. Row numbers start at 0. Texts and token counts come from the cache if it still
    has the run that made the version. Other rows are read from the source files, where the last run
    on this machine found them or where --recipe says they are, provided the files are unchanged.

    \b
    packhouse dropped ./store/alpaca --reason over_seq_len
    packhouse dropped ./store/alpaca --recipe recipe.yaml --json
    """
    opened, workspace = open_address(target), Workspace(cache=cache)
    rows = _dropped_rows(opened, reason, source)
    groups = {name: number for name, number in Counter(r["reason"] for r in rows).most_common()}
    shown: Rows = rows
    if limit and not as_json:
        of_reason = {name: [row for row in rows if row["reason"] == name] for name in groups}
        shown = [row for each in of_reason.values() for row in each[:limit]]
    _add_texts(shown, opened, workspace)
    left = [row for row in shown if "text" not in row]
    notes = _add_raw(left, opened, workspace, load_recipe(recipe) if recipe else None)
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        for note in notes:
            print_note(note)
        return
    for name, number in groups.items():
        of_this = [row for row in shown if row["reason"] == name]
        unit = "record" if any(row["record_id"] for row in of_this) else "row"
        echo(f"{name}: {counted(number, unit)}")
        for row in of_this:
            _print(row)
        if number > len(of_this):
            echo(f"  ... and {number - len(of_this):,} more; see --limit")
    if not rows:
        echo("nothing was dropped" if not (reason or source) else "nothing was dropped for that")
    for note in notes:
        print_text(note)


def _print(row: dict[str, Any]) -> None:
    tokens = f", {counted(row['num_tokens'], 'token')}" if "num_tokens" in row else ""
    detail = f": {for_terminal(row['detail'])}" if row["detail"] else ""
    print_text(f"{row['source']} row {row['row']:,}{tokens}{detail}", 2)
    if text := for_terminal(row.get("text", row.get("raw", ""))):
        print_text(text if len(text) <= _TEXT else f"{text[: _TEXT - 4]} ...", 4)


def _dropped_rows(opened: OpenVersion, reason: str | None, source: str | None) -> Rows:
    """Return the dropped rows, without their texts.

    Raises:
        ConfigError: no row was dropped for this reason.
    """
    of_source = "? IS NULL OR ? IN (source, split_part(source, '/', 1))"
    query = f"FROM dropped WHERE (? IS NULL OR reason = ?) AND ({of_source})"
    rows: Rows = read(opened, query, [reason, reason, source, source]).to_pylist()
    if reason and not rows:
        found = read(opened, "SELECT reason, count(*) FROM dropped GROUP BY reason").to_pylist()
        reasons = [row["reason"] for row in found]
        if reason not in reasons:
            others = f", but for {', '.join(reasons)}" if reasons else ""
            raise ConfigError(f"nothing was dropped for '{reason}'{others}")
    return rows


def _add_texts(rows: Rows, opened: OpenVersion, workspace: Workspace) -> None:
    """Add token counts and texts from the cached tokenize jobs of the run that made the version."""
    wanted: dict[tuple[str, int, str], Rows] = {}  # one row may have several windows
    for row in rows:
        wanted.setdefault((row["source"], row["row"], row["record_id"]), []).append(row)
    jobs = load_last_run(workspace.cache, opened.dataset).values()
    # The last run may have made another version, whose tokens would be wrong here.
    if not any(job.key.startswith(opened.manifest.vid) for job in jobs):
        return
    ids: list[list[int]] = []
    found: Rows = []
    for job in jobs:
        receipt = TOKENIZE.peek(job.key, workspace) if job.step == "tokenize" else None
        if receipt is None or not wanted:
            continue
        table = read_table(receipt.path("tokenized.arrow"))
        columns = (table[name].to_pylist() for name in ("source", "row", "record_id"))
        places = [*zip(*columns, strict=True)]
        at = np.flatnonzero([place in wanted for place in places])
        lines = table.select(["num_tokens", "input_ids"]).take(at).to_pylist()
        for index, line in zip(at.tolist(), lines, strict=True):
            for row in wanted[places[index]]:
                row["num_tokens"] = line["num_tokens"]
                ids.append(line["input_ids"])
                found.append(row)
    load = tokenizer_of(opened, workspace.tokenizers) if found else None
    if load is not None:
        texts = run_tokenizer(partial(decode, load, ids), f"of {opened.dataset}")
        for row, text in zip(found, texts, strict=True):
            row["text"] = text


def _add_raw(
    rows: Rows, opened: OpenVersion, workspace: Workspace, recipe: Recipe | None
) -> list[str]:
    """Add `raw` from the source files, and return one note for each file that cannot provide it.

    A shard is read only if the manifest lists its digest at that position, and reading verifies the
    digest, so the text shown is exactly what the version was made from.
    """
    wanted: dict[str, dict[int, Rows]] = {}
    for row in rows:
        wanted.setdefault(row["source"], {}).setdefault(row["row"], []).append(row)
    if recipe is None:
        # Without a recipe, look where the last run on this machine read the files.
        shards, notes = _shards_of_run(opened, workspace), dict[str, str]()
        missing = "no run on this machine says where it lies; --recipe RECIPE does"
    else:
        shards, notes = _shards_of_recipe(recipe, {name.partition("/")[0] for name in wanted})
        missing = "no source of the recipe has it"
    of_version = {
        (each.file, each.row_start, each.sha256): each.rows
        for each in opened.manifest.facts.lineage.sources
    }
    for shard in shards:
        num_rows = of_version.get((shard.file, shard.row_start, shard.sha256), 0)
        of_file = wanted.get(shard.file, {})
        inside = [n for n in of_file if shard.row_start <= n < shard.row_start + num_rows]
        try:
            for number, (raw, _) in raw_rows(shard, _ANY_SIZE, inside).items():
                for row in of_file.pop(number):
                    row["raw"] = raw.decode("utf-8", "replace")
        except PackhouseError as error:  # omit the advice, which applies only to runs
            notes.setdefault(shard.file, str(error).partition("; run again")[0])
    uris = {shard.file: shard.uri for shard in shards}
    lines = []
    for name, left in wanted.items():
        why = notes.get(name.partition("/")[0], missing)
        if name in uris:
            why = f"'{uris[name]}' is not the file that the version was made of: its sha256 differs"
        if left:
            num_rows_left = counted(len(left), "row")
            lines.append(f"no text of {num_rows_left} of {name}: {notes.get(name) or why}")
    return lines


def _shards_of_run(opened: OpenVersion, workspace: Workspace) -> list[SourceShard]:
    """Return the shards that the last run of the dataset read, from the cache of this machine."""
    jobs = load_last_run(workspace.cache, opened.dataset).values()
    with suppress(TypeError):  # written by another release of packhouse
        return [SourceShard(**job.shard) for job in jobs if job.shard is not None]
    return []


def _shards_of_recipe(recipe: Recipe, names: set[str]) -> tuple[list[SourceShard], dict[str, str]]:
    """Return the shards of the named sources, and the error of each source that cannot be read."""
    shards: list[SourceShard] = []
    wrong: dict[str, str] = {}
    for source in recipe.sources:
        if (name := source_name(source)) in names:
            try:
                shards += scan_source(source, shard_bytes(recipe), recipe.validate_.max_row_bytes)
            except PackhouseError as error:
                wrong[name] = str(error)
    return shards, wrong
