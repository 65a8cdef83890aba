"""`packhouse dropped VERSION`: the rows that a policy or a filter left out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.compute as pc

from packhouse.commands.options import cache_option
from packhouse.engine.last_run import load_last_run
from packhouse.engine.workspace import Workspace
from packhouse.errors import ConfigError
from packhouse.escaping import for_terminal
from packhouse.records.tables import read_table
from packhouse.steps.tokenize import TOKENIZE
from packhouse.store import OpenVersion
from packhouse.store.address import open_address
from packhouse.terminal import echo, print_text
from packhouse.views import read_view

__all__ = ["dropped", "dropped_rows"]

_COLUMNS = ("source", "row", "record_id", "reason", "detail", "repeats")
_TEXT = 400
"""Characters of a text that are printed; --json has all."""


@click.command()
@click.argument("target", metavar="VERSION")
@click.option("--reason", help="Only rows of this reason.")
@click.option("--source", help="Only rows of this source, or of this `source/file`.")
@click.option("--limit", default=5, show_default=True, help="Rows to print of each reason.")
@cache_option("Folder of tokenizers and finished steps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each row.")
def dropped(
    target: str, reason: str | None, source: str | None, limit: int, cache: Path, as_json: bool
) -> None:
    """Print the rows that a policy or a filter left out of a VERSION, and why.

    Over-length rows have their token counts, duplicates the row that they repeat, filtered rows the
    expression. Texts and counts come from the cache, if it holds the run that made the version;
    filtered rows have none.

    \b
    packhouse dropped ./store/alpaca --reason over_seq_len
    """
    opened, workspace = open_address(target), Workspace(cache=cache)
    rows = dropped_rows(opened, workspace, reason, source)
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        return
    for name, number in Counter(row["reason"] for row in rows).most_common():
        of_reason = [row for row in rows if row["reason"] == name]
        echo(f"{name}: {number:,} {'row' if number == 1 else 'rows'}")
        for row in of_reason[: limit or None]:
            _print(row)
        if limit and number > limit:
            echo(f"  ... and {number - limit:,} more; see --limit")
    if not rows:
        echo("no row was dropped" if not (reason or source) else "no row was dropped for that")
    elif any(row["record_id"] for row in rows) and not any("text" in row for row in rows):
        echo("The cache does not hold the run that made this version: no texts, no token counts.")


def _print(row: dict[str, Any]) -> None:
    tokens = f", {row['num_tokens']:,} tokens" if "num_tokens" in row else ""
    detail = f": {for_terminal(row['detail'])}" if row["detail"] else ""
    print_text(f"{row['source']} row {row['row']:,}{tokens}{detail}", 2)
    if "text" in row:
        text = for_terminal(row["text"])
        print_text(text if len(text) <= _TEXT else f"{text[: _TEXT - 4]} ...", 4)


def dropped_rows(
    opened: OpenVersion, workspace: Workspace, reason: str | None, source: str | None
) -> list[dict[str, Any]]:
    """Return the dropped rows, with `num_tokens` and `text` where the cache has them.

    Raises:
        ConfigError: no row is dropped for such a reason.
    """
    table = read_view(opened, "dropped", _COLUMNS, workspace.tokenizers)
    if reason:
        reasons = pc.unique(table["reason"]).to_pylist()
        table = table.filter(pc.equal(table["reason"], reason))
        if not table.num_rows:
            raise ConfigError(f"no row was dropped for '{reason}'; reasons: {reasons}")
    rows = [
        row
        for row in table.to_pylist()
        if not source or source in (row["source"], row["source"].partition("/")[0])
    ]
    _add_texts(rows, opened, workspace)
    return rows


def _add_texts(rows: list[dict[str, Any]], opened: OpenVersion, workspace: Workspace) -> None:
    """Add token counts and texts from the tokenized shards of the run that made the version."""
    from functools import partial

    from packhouse.foreign import decode, run_tokenizer
    from packhouse.tokenization.of_version import tokenizer_of

    wanted = {(row["source"], row["row"]): row for row in rows}
    jobs = load_last_run(workspace.cache, opened.dataset).values()
    if not any(job["key"].startswith(opened.manifest.vid) for job in jobs):
        return
    ids: list[list[int]] = []
    found: list[dict[str, Any]] = []
    for job in jobs:
        receipt = TOKENIZE.peek(job["key"], workspace) if job["step"] == "tokenize" else None
        if receipt is None or not wanted:
            continue
        table = read_table(receipt.path("tokenized.arrow"))
        places = zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)
        at = np.flatnonzero([place in wanted for place in places])
        for line in table.select(["source", "row", "num_tokens", "input_ids"]).take(at).to_pylist():
            row = wanted[line["source"], line["row"]]
            row["num_tokens"] = line["num_tokens"]
            ids.append(line["input_ids"])
            found.append(row)
    load = tokenizer_of(opened, workspace.tokenizers) if found else None
    if load is not None:
        texts = run_tokenizer(partial(decode, load, ids), f"of {opened.dataset}")
        for row, text in zip(found, texts, strict=True):
            row["text"] = text
