"""`packhouse trace VERSION`: find the row of a token, or the place of a row in the packs."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.addons.ask.query import read
from packhouse.addons.ask.samples import (
    first_split,
    is_of_classes,
    label_names,
    read_pack,
    records_in,
)
from packhouse.cli.options import json_option
from packhouse.cli.tokens import trained_ranges
from packhouse.errors import ConfigError
from packhouse.store import OpenVersion
from packhouse.store.read import open_address
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import echo
from packhouse.system.wording import counted

_FROM = {name: f"{name} (from 0)" for name in ("row", "pack", "position", "token of the record")}
_RULES = {
    "assistant": "answers are trained",
    "last_assistant": "the last answer is trained",
    "all": "all text is trained",
}


@click.command()
@click.argument("target", metavar="VERSION")
@click.option("--split", help="Which split. [default: train, else the first there is]")
@click.option("--pack", type=click.IntRange(min=0), help="Number of the pack in its split, from 0.")
@click.option(
    "--token", type=click.IntRange(min=0), help="Number of the token in the pack, from 0."
)
@click.option("--file", help="A file of a source: faq.jsonl, source/faq.jsonl, or its path.")
@click.option("--line", type=click.IntRange(min=1), help="Line of a JSON Lines file, from 1.")
@click.option("--row", type=click.IntRange(min=0), help="Row of a file of any format, from 0.")
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
    """Find the source row of a token and why it is trained, or what happened to a row.

    Rows, packs and tokens count from 0. A LINE counts from 1, as in an editor, and needs the file
    on this machine: without blank lines, line 18 is row 17.

    \b
    packhouse trace ./store/demo --pack 12 --token 345
    packhouse trace ./store/demo --file instructions.jsonl --line 18
    """
    opened = open_address(target)
    if pack is not None and token is not None:
        found = [_of_token(opened, split or first_split(opened), pack, token)]
    elif file is not None and (line is not None or row is not None):
        found = _of_row(opened, file, row if row is not None else _row_at(file, line or 1))
    else:
        raise click.UsageError("give --pack and --token, or --file and --line (or --row)")
    for number, each in enumerate(found):
        if as_json:
            echo(json.dumps(each))
        else:
            if number:
                echo("")
            named = {_FROM.get(name, name): value for name, value in each.items()}
            width = max(map(len, named))
            for name, value in named.items():
                text = "-" if value is None else for_terminal(str(value))
                echo(f"{name:{width}}  {f'{value:,}' if type(value) is int else text}")


def _of_token(opened: OpenVersion, split: str, pack: int, token: int) -> dict[str, Any]:
    """Return the source row of a token, and why it is trained or not."""
    row = read_pack(opened, split, pack)
    if token >= len(row["input_ids"]):
        has = f"it has {len(row['input_ids']):,} tokens, from 0"
        raise ConfigError(f"no token {token:,} in {split} pack {pack:,}: {has}")
    preferences = opened.manifest.preferences
    record_id, start, end, side = next(
        each
        for each in records_in(row, preferences, label_names(opened.manifest))
        if token < each.end
    )
    is_paired = preferences == "pairs"
    mask = np.asarray(row["trained"][start:end], np.bool_)
    query = "SELECT source, row, outcome, num_tokens FROM records WHERE record_id = ?"
    places = read(opened, query, [record_id]).to_pylist()
    kept = [p for p in places if p["outcome"] == "kept"] or places
    size = end - start
    # `concat` cuts records at pack boundaries, so a pack may have only a part of the record.
    is_part = bool(kept) and not is_paired and size < kept[0]["num_tokens"]
    before = 0
    if is_part:
        parts = [part for part in records_in(row) if part.record_id == record_id]
        before = _tokens_before(opened, split, pack, record_id)
        before += sum(part.end - part.start for part in parts if part.end <= start)
        # A record that is repeated appears again from its first token on.
        before %= kept[0]["num_tokens"]
    facts = opened.manifest.facts
    train_on = facts.configuration.format.train_on or "assistant"
    rule = f"format.train_on: {train_on} ({_RULES.get(train_on, 'see docs/masks.md')})"
    tokenized = {shard.file for shard in facts.lineage.sources if shard.is_tokenized}
    if kept and kept[0]["source"] in tokenized:
        rule = "the mask that the row came with (format: tokenized)"
    if is_of_classes(opened.manifest):
        rule = "a classifier learns the label of the record, and no token"
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
        turn = f"behind the last of {len(answers)} trained answers"
    if is_part:
        turn += f" (of the record's {counted(size, 'token')} in this pack)"
    return {
        "file": kept[0]["source"] if kept else None,
        "row": kept[0]["row"] if kept else None,
        "rows of equal content": max(len({(p["source"], p["row"]) for p in kept}) - 1, 0),
        "record": record_id,
        **({"side" if is_paired else "label": side} if side else {}),
        f"token of the {'side' if is_paired else 'record'}": before + inner,
        "token id": row["input_ids"][token],
        "turn": turn,
        "trained": "yes" if is_trained else "no",
        "rule": rule,
    }


def _tokens_before(opened: OpenVersion, split: str, pack: int, record_id: str) -> int:
    """Return how many tokens of a record are in earlier packs, for records that `concat` cut."""
    query = (
        "SELECT coalesce(sum(n), 0)::BIGINT AS n FROM ("
        "SELECT unnest(record_ids) AS record_id, unnest(seq_lengths) AS n FROM packs "
        "WHERE split = ? AND pack < ?) WHERE record_id = ?"
    )
    return int(read(opened, query, [split, pack, record_id])["n"][0].as_py())


def _row_at(file: str, line: int) -> int:
    """Return the row number of a line in a JSON Lines file; blank lines are not rows.

    Raises:
        ConfigError: the file is not on this machine, or the line is blank or after the end.
    """
    if not file.endswith(".jsonl") or not Path(file).is_file():
        raise ConfigError(
            f"lines are counted in a .jsonl file on this machine, and '{file}' is none. Give its "
            "path, or --row instead"
        )
    with Path(file).open("rb") as opened:
        is_row = [bool(each.strip()) for each in islice(opened, line)]
    if len(is_row) < line or not is_row[-1]:
        raise ConfigError(f"'{file}' has no row in line {line:,}. Give the line of a row, or --row")
    return sum(is_row) - 1


def _of_row(opened: OpenVersion, file: str, row: int) -> list[dict[str, Any]]:
    """Return what happened to a row: its packs, or why it was dropped or quarantined."""
    files = {shard.file for shard in opened.manifest.facts.lineage.sources}
    # `faq.jsonl`, or a path that ends so, can match several sources; `team/faq.jsonl` matches one.
    chosen = {file} & files or {
        name
        for name in files
        if name.endswith(f"/{file}") or file.endswith(f"/{name.partition('/')[2]}")
    }

    def read_row(view: str, columns: str) -> list[dict[str, Any]]:
        query = (
            f"SELECT source, row, {columns} FROM {view} WHERE row = ? AND list_contains(?, source)"
        )
        rows: list[dict[str, Any]] = read(opened, query, [row, sorted(chosen)]).to_pylist()
        return rows

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
            f"no row {row:,} (from 0) of '{file}' in {opened.dataset} {opened.version}; its files: "
            f"{', '.join(sorted(files)[:5])}"
        )
    return found
