"""Find rows of a version: `packhouse trace VERSION` and `packhouse dropped VERSION`.

`trace` finds the source row of a token, or the packs that contain a row. `dropped` lists the rows
and records that a policy or a filter dropped. Both query only the columns they need. Texts of
dropped rows are not in a version: they come from the cache or from unchanged source files.
"""

import json
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.addons.ask.duckdb_queries import read
from packhouse.addons.ask.inspect import (
    first_split,
    is_of_classes,
    label_names,
    read_packs,
    records_in,
)
from packhouse.cli import cache_option, json_option, number_option
from packhouse.cli.token_display import tokenizer_of, trained_ranges
from packhouse.errors import ConfigError, PackhouseError
from packhouse.read import SourceShard, raw_rows, scan_source
from packhouse.read.sharding import ANY_SIZE
from packhouse.read.source_files import source_name
from packhouse.recipe import Recipe
from packhouse.recipe.recipe_file import load_recipe
from packhouse.records.table_schemas import read_table
from packhouse.run.step_cache import Workspace, load_last_run
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import shard_bytes
from packhouse.store import OpenVersion
from packhouse.store.version_reader import open_address
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import cell_text, echo, print_facts, print_note, print_text
from packhouse.system.wording import counted
from packhouse.tokenize import run_tokenizer
from packhouse.tokenize.encoders import decode

Rows = list[dict[str, Any]]

_FROM = {name: f"{name} (0-based)" for name in ("row", "pack", "position", "token of the record")}
_RULES = {
    "assistant": "answers are trained",
    "last_assistant": "the last answer is trained",
    "all": "all text is trained",
}


@click.command()
@click.argument("target", metavar="STORE/DATASET[@REF]")
@click.option("--split", help="Split to read. [default: train, or the first one]")
@number_option("--pack", "Pack number in the split (0-based).")
@number_option("--token", "Token number in the pack (0-based).")
@click.option("--file", help="Source file: faq.jsonl, source/faq.jsonl, or its path.")
@number_option("--line", "Line number in a JSON Lines file (1-based).", least=1)
@number_option("--row", "Row number in the file, for any format (0-based).")
@json_option()
def trace(
    target: str,
    split: str | None,
    pack: int | None,
    token: int | None,
    file: str | None,
    line: int | None,
    row: int | None,
    as_json: bool,
) -> None:
    """Find the source row of a token and show why it is trained, or show what happened to a row.

    Rows, packs and tokens are numbered from 0, and lines from 1, as in an editor: if there are no
    blank lines, line 18 is row 17. --line requires the source file to be on this machine.

    \b
    Example:
      $ packhouse trace ./store/demo --pack 12 --token 345
      file           chats/chats.jsonl
      row (0-based)  16
      turn           trained answer 3 of 3
      trained        yes
      $ packhouse trace ./store/demo --file data/instructions.jsonl --line 18
    """
    opened = open_address(target)
    if pack is not None and token is not None:
        found = [_of_token(opened, split or first_split(opened), pack, token)]
    elif file is not None and (line is not None or row is not None):
        found = _of_row(opened, file, row if row is not None else _row_at(file, line or 1))
    else:
        raise click.UsageError("Pass --pack and --token, or --file and --line (or --row).")
    for number, each in enumerate(found):
        if as_json:
            echo(json.dumps(each))
            continue
        if number:
            echo("")
        print_facts("", [(_FROM.get(name, name), cell_text(v)) for name, v in each.items()])


def _of_token(opened: OpenVersion, split: str, pack: int, token: int) -> dict[str, Any]:
    """Return the source row of a token, and why it is trained or not."""
    ((_, row),) = read_packs(opened, split, pack, 1)
    ids = row["input_ids"]
    if token >= len(ids):
        has = f"the pack has {len(ids):,} tokens, counted from 0."
        raise ConfigError(f"{split} pack {pack:,} has no token {token:,}: {has}")
    preferences = opened.manifest.preferences
    records = records_in(row, preferences, label_names(opened.manifest))
    record_id, start, end, side = next(each for each in records if token < each.end)
    is_paired = preferences == "pairs"
    mask = np.asarray(row["trained"][start:end], np.bool_)
    query = "SELECT source, row, num_tokens, outcome = 'kept' FROM records WHERE record_id = ?"
    columns = (column.to_pylist() for column in read(opened, query, [record_id]).columns)
    places = [*zip(*columns, strict=True)]
    kept = [place for place in places if place[3]] or places
    source, row_number, num_tokens, _ = kept[0] if kept else (None, None, 0, False)
    size = end - start
    # `concat` cuts records at pack boundaries, so a pack may have only a part of the record.
    is_part = not is_paired and size < num_tokens
    before = 0
    if is_part:
        parts = [part for part in records_in(row) if part.record_id == record_id]
        query = (  # tokens in earlier packs
            "SELECT coalesce(sum(n), 0)::BIGINT FROM ("
            "SELECT unnest(record_ids) AS record_id, unnest(seq_lengths) AS n FROM packs "
            "WHERE split = ? AND pack < ?) WHERE record_id = ?"
        )
        before = read(opened, query, [split, pack, record_id])[0][0].as_py()
        before += sum(part.end - part.start for part in parts if part.end <= start)
        # A record that is repeated appears again from its first token on.
        before %= num_tokens
    facts = opened.manifest.facts
    train_on = facts.configuration.format.train_on or "assistant"
    rule = f"format.train_on: {train_on} ({_RULES.get(train_on, 'see docs/masks.md')})"
    tokenized = {shard.file for shard in facts.lineage.sources if shard.is_tokenized}
    if source in tokenized:
        rule = "the mask of the input row (format: tokenized)"
    if is_of_classes(opened.manifest):
        rule = "classification: only the record's label is trained"
    # For the mask 0 0 1 1 0 1 0, answers are [2, 4) and [5, 6). Token 4 is before answer 2 of 2,
    # token 5 is in it, and token 6 is after the last.
    answers = trained_ranges(mask)
    inner = token - start
    answer = 1 + sum(b <= inner for _, b in answers)
    is_trained = bool(mask[inner])
    turn = f"before trained answer {answer} of {len(answers)}"
    if is_trained:
        turn = f"trained answer {answer} of {len(answers)}"
    elif not answers:
        turn = "no token is trained"
    elif answer > len(answers):
        turn = f"after the last of {len(answers)} trained answers"
    if is_part:
        turn += f" (of the record's {counted(size, 'token')} in this pack)"
    return {
        "file": source,
        "row": row_number,
        "other rows with this content": max(len({place[:2] for place in kept}) - 1, 0),
        "record": record_id,
        **({"side" if is_paired else "label": side} if side else {}),
        f"token of the {'side' if is_paired else 'record'}": before + inner,
        "token id": ids[token],
        "turn": turn,
        "trained": "yes" if is_trained else "no",
        "rule": rule,
    }


def _row_at(file: str, line: int) -> int:
    """Return the row number of a line in a JSON Lines file; blank lines are not rows.

    Raises:
        ConfigError: the file is not on this machine, or the line is blank or after the end.
    """
    if not file.endswith(".jsonl") or not Path(file).is_file():
        raise ConfigError(
            f"--line needs a .jsonl file, and '{file}' does not exist on this machine or is not "
            "one. Pass the path of the file, or use --row."
        )
    with Path(file).open("rb") as opened:
        is_row = [bool(each.strip()) for each in islice(opened, line)]
    if len(is_row) < line or not is_row[-1]:
        raise ConfigError(f"'{file}' has no row on line {line:,}. Pass another line, or use --row.")
    return sum(is_row) - 1


def _of_row(opened: OpenVersion, file: str, row: int) -> Rows:
    """Return what happened to a row: its packs, or why it was dropped or quarantined."""
    files = {shard.file for shard in opened.manifest.facts.lineage.sources}
    # `faq.jsonl`, or a path that ends so, can match several sources; `team/faq.jsonl` matches one.
    chosen = {file} & files or {
        name
        for name in files
        if name.endswith(f"/{file}") or file.endswith(f"/{name.partition('/')[2]}")
    }

    def read_row(view: str, columns: str) -> Rows:
        where = "row = ? AND list_contains(?, source)"
        query = f"SELECT source, row, {columns} FROM {view} WHERE {where}"
        return list(read(opened, query, [row, sorted(chosen)]).to_pylist())

    found = read_row("records", "record_id, split, outcome, num_tokens, times, pack, position")
    for why in read_row("dropped", "record_id, reason, detail"):
        dropped = [
            record
            for record in found
            if record["source"] == why["source"]
            and record["outcome"] != "kept"
            and why["record_id"] in (None, record["record_id"])
        ]
        for record in dropped:
            record.update(why)
        if not dropped:
            row_itself = {name: value for name, value in why.items() if value is not None}
            found.append({**row_itself, "outcome": why["reason"]})
    for bad in read_row("quarantine", "step, reason, detail"):
        found.append({**bad, "outcome": "quarantined"})
    if not found:
        raise ConfigError(
            f"no row {row:,} (counted from 0) of '{file}' in {opened.dataset} "
            f"{opened.version}; its files: {', '.join(sorted(files)[:5])}"
        )
    return found


_TEXT = 400
"""Number of characters printed of a text; --json prints all of it."""


@click.command()
@click.argument("target", metavar="STORE/DATASET[@REF]")
@click.option("--reason", help="List only rows with this reason.")
@click.option("--source", help="List only rows from this source or `source/file`.")
@number_option("--limit", "Number of rows to print per reason; 0 prints all.", default=5)
@click.option(
    "--recipe", type=click.Path(), help="Recipe with the current paths of the source files."
)
@cache_option("Cache folder.")
@json_option("Print one line of JSON per row.")
def dropped(
    target: str,
    reason: str | None,
    source: str | None,
    limit: int,
    recipe: str | None,
    cache: Path,
    as_json: bool,
) -> None:
    """List the rows and records that a filter or setting dropped, with the reason for each.

    Each entry shows the cause: the length of a record, the row that a duplicate repeats, or the
    expression that filtered out the row. The text is read from the cache if the run is still
    cached, otherwise from the source files if they have not changed (see --recipe).

    \b
    Example:
      $ packhouse dropped ./store/demo --reason over_seq_len
      over_seq_len: 1 record
        chats/chats.jsonl row 65, 759 tokens: longer than seq_len (512 tokens)
          <|im_start|>user Hello, I am Hana ...
    """
    opened, workspace = open_address(target), Workspace(cache=cache)
    of_source = "? IS NULL OR ? IN (source, split_part(source, '/', 1))"
    query = f"FROM dropped WHERE (? IS NULL OR reason = ?) AND ({of_source})"
    rows: Rows = read(opened, query, [reason, reason, source, source]).to_pylist()
    if reason and not rows:
        found = read(opened, "SELECT DISTINCT reason FROM dropped ORDER BY reason")
        reasons = found["reason"].to_pylist()
        if reason not in reasons:
            others = f"(found: {', '.join(reasons)})" if reasons else ""
            raise ConfigError(f"nothing was dropped for reason '{reason}'{others}")
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["reason"], []).append(row)
    groups = dict(sorted(groups.items(), key=lambda group: -len(group[1])))
    most = len(rows) if as_json or not limit else limit
    shown = [row for group in groups.values() for row in group[:most]]
    _add_texts(shown, opened, workspace)
    left = [row for row in shown if "text" not in row]
    notes = _add_raw(left, opened, workspace, load_recipe(recipe) if recipe else None)
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        for note in notes:
            print_note(note)
        return
    for name, group in groups.items():
        unit = "record" if any(row["record_id"] for row in group[:most]) else "row"
        echo(f"{name}: {counted(len(group), unit)}")
        for row in group[:most]:
            tokens = f", {counted(row['num_tokens'], 'token')}" if "num_tokens" in row else ""
            detail = f": {for_terminal(row['detail'])}" if row["detail"] else ""
            print_text(f"{row['source']} row {row['row']:,}{tokens}{detail}", 2)
            if text := for_terminal(row.get("text") or row.get("raw") or ""):
                print_text(text if len(text) <= _TEXT else f"{text[: _TEXT - 4]} ...", 4)
        if len(group) > most:
            echo(f"  ... and {len(group) - most:,} more (raise --limit to see them)")
    if not rows:
        is_all = not (reason or source)
        echo("nothing was dropped" if is_all else "nothing matches --reason and --source")
    for note in notes:
        print_text(note)


def _add_texts(rows: Rows, opened: OpenVersion, workspace: Workspace) -> None:
    """Add token counts and texts from the cached tokenize jobs of the run that made the version."""
    wanted: dict[tuple[str, int, str], Rows] = {}  # one row may have several windows
    for row in rows:
        wanted.setdefault((row["source"], row["row"], row["record_id"]), []).append(row)
    jobs = load_last_run(workspace.cache, opened.dataset).values()
    # The last run may have made another version, whose tokens would be wrong here.
    if not any(job.key.startswith(opened.manifest.vid) for job in jobs):
        return
    found: list[tuple[dict[str, Any], list[int]]] = []
    for job in jobs:
        receipt = TOKENIZE.peek(job.key, workspace) if job.step == "tokenize" else None
        if receipt is None or not wanted:
            continue
        table = read_table(receipt.path("tokenized.arrow"))
        columns = (table[name].to_pylist() for name in ("source", "row", "record_id"))
        places = [*zip(*columns, strict=True)]
        at = np.flatnonzero([place in wanted for place in places])
        numbers, ids = (table[name].take(at).to_pylist() for name in ("num_tokens", "input_ids"))
        for index, num_tokens, own in zip(at, numbers, ids, strict=True):
            for row in wanted[places[index]]:
                row["num_tokens"] = num_tokens
                found.append((row, own))
    load = tokenizer_of(opened, workspace.tokenizers) if found else None
    if load is not None:
        call = partial(decode, load, [ids for _, ids in found])
        for (row, _), text in zip(found, run_tokenizer(call, f"of {opened.dataset}"), strict=True):
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
    shards, notes = list[SourceShard](), dict[str, str]()
    if recipe is None:
        # Without a recipe, look where the last run on this machine read the files.
        jobs = load_last_run(workspace.cache, opened.dataset).values()
        with suppress(TypeError):  # written by another release of packhouse
            shards = [SourceShard(**job.shard) for job in jobs if job.shard is not None]
        missing = "its path on this machine is unknown; pass --recipe RECIPE"
    else:
        names = {name.partition("/")[0] for name in wanted}
        for source in recipe.sources:
            if (name := source_name(source)) in names:
                try:
                    most = recipe.validate_.max_row_bytes
                    shards += scan_source(source, shard_bytes(recipe), most)
                except PackhouseError as error:
                    notes[name] = str(error)
        missing = "no source of the recipe contains it"
    of_version = {
        (each.file, each.row_start, each.sha256): each.rows
        for each in opened.manifest.facts.lineage.sources
    }
    for shard in shards:
        num_rows = of_version.get((shard.file, shard.row_start, shard.sha256), 0)
        of_file = wanted.get(shard.file, {})
        inside = [n for n in of_file if shard.row_start <= n < shard.row_start + num_rows]
        try:
            for number, (raw, _) in raw_rows(shard, ANY_SIZE, inside).items():
                for row in of_file.pop(number):
                    row["raw"] = raw.decode("utf-8", "replace")
        except PackhouseError as error:  # omit the advice, which applies only to runs
            notes.setdefault(shard.file, str(error).partition("; run again")[0])
    uris = {shard.file: shard.uri for shard in shards}
    lines = []
    for name, left in wanted.items():
        why = notes.get(name.partition("/")[0], missing)
        if name in uris:
            why = f"'{uris[name]}' changed since the version was made (its sha256 differs)"
        if left:
            many = f"{counted(len(left), 'row')} of {name}"
            lines.append(f"cannot show the text of {many}: {notes.get(name) or why}")
    return lines
