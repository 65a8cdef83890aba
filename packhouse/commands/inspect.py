"""`packhouse inspect VERSION`: what a trainer will see, tokens coloured by trained or not."""

import itertools
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.cache.places import default_cache
from packhouse.engine.workspace import Workspace
from packhouse.report.samples import first_split, read_packs, trained_mask_of
from packhouse.store import OpenVersion
from packhouse.store.address import open_address
from packhouse.terminal import console, echo

__all__ = ["inspect", "print_runs", "token_runs"]


@click.command()
@click.argument("target", metavar="VERSION")
@click.option("--split", help="Which split. [default: train, else the first there is]")
@click.option("--packs", default=1, show_default=True, help="How many packs.")
@click.option("--skip", default=0, show_default=True, help="Packs to skip first.")
@click.option("--tokenizer", help="Tokenizer folder, if the store does not keep it.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line a pack.")
def inspect(
    target: str,
    split: str | None,
    packs: int,
    skip: int,
    tokenizer: str | None,
    cache: Path,
    as_json: bool,
) -> None:
    """Print packs of a version, trained tokens in green; in a pipe between {+ and +}.

    \b
    VERSION is STORE/DATASET, optionally with @REF or @VERSION (by default @latest):
    ./store/demo, s3://bucket/store/demo@prod, ./store/demo@0a1b2c3d4e5f6071.g0
    """
    opened = open_address(target)
    split = split or first_split(opened)
    decode = _decoder(opened, tokenizer, cache)
    for number, row in read_packs(opened, split, skip, packs):
        runs = token_runs(row)
        pieces = [row["input_ids"][start:end] for start, end, _ in runs]
        texts = decode(pieces) if decode else [" ".join(map(str, ids)) + " " for ids in pieces]
        if as_json:
            echo(json.dumps(_as_json(number, row, runs, texts)))
        else:
            _print(split, number, row, runs, texts)


def token_runs(row: dict[str, Any]) -> list[tuple[int, int, bool]]:
    """Cut a pack into [start, end) runs of equal colour, never across a record's border."""
    trained = trained_mask_of(row)
    borders = np.cumsum(row["seq_lengths"])
    changes = np.flatnonzero(np.diff(trained)) + 1
    edges = np.unique(np.concatenate([[0], changes, borders]))
    return [(int(a), int(b), bool(trained[a])) for a, b in itertools.pairwise(edges)]


def _decoder(opened: OpenVersion, folder: str | None, cache: Path) -> Any:
    """Return lists of ids -> their texts; None: the tokenizer is unknown, print ids."""
    from packhouse.foreign import decode, run_tokenizer
    from packhouse.tokenization import fingerprint_tokenizer, load_snapshot
    from packhouse.tokenization.of_version import LoadSnapshot, tokenizer_of

    tokenizers = Workspace(cache=cache).tokenizers
    load: LoadSnapshot | None
    if folder:
        load = partial(load_snapshot, folder, tokenizers)
        wanted = opened.manifest.lineage.get("tokenizer", {}).get("fingerprint", "")
        if fingerprint_tokenizer(folder) != wanted:
            echo("warning: this is not the tokenizer the version was made with", err=True)
    else:
        load = tokenizer_of(opened, tokenizers)
    if load is None:
        echo(
            "printing ids: neither the cache nor the store has the tokenizer; give --tokenizer "
            "FOLDER for text",
            err=True,
        )
        return None
    name = folder or f"of {opened.dataset}"
    return lambda rows: run_tokenizer(partial(decode, load, rows), name)


def _as_json(
    number: int, row: dict[str, Any], runs: list[tuple[int, int, bool]], texts: list[str]
) -> dict[str, Any]:
    return {
        "pack": number,
        "num_tokens": len(row["input_ids"]),
        "seq_lengths": row["seq_lengths"],
        "record_ids": row["record_ids"],
        "runs": [
            {"start": a, "end": b, "trained": trained, "text": text}
            for (a, b, trained), text in zip(runs, texts, strict=True)
        ],
    }


def _print(
    split: str,
    number: int,
    row: dict[str, Any],
    runs: list[tuple[int, int, bool]],
    texts: list[str],
) -> None:
    out = console()
    num_trained = sum(b - a for a, b, trained in runs if trained)
    out.rule(
        f"{split} pack {number:,}: {len(row['input_ids']):,} tokens, {num_trained:,} trained, "
        f"{len(row['seq_lengths'])} records"
    )
    borders = dict(
        zip(np.cumsum([0, *row["seq_lengths"]]).tolist(), row["record_ids"], strict=False)
    )
    print_runs(out, runs, texts, {at: f"-- record {name} --" for at, name in borders.items()})


def print_runs(
    out: Any, runs: list[tuple[int, int, bool]], texts: list[str], titles: Mapping[int, str]
) -> None:
    """Print the texts of runs of tokens, trained ones in green, each record under its title.

    Args:
        out: from `packhouse.terminal.console`.
        runs: from `token_runs`.
        texts: of each run.
        titles: by the token at which a record begins.
    """
    from rich.text import Text

    for (start, _, trained), text in zip(runs, texts, strict=True):
        if start in titles:
            out.print(Text(f"\n{titles[start]}", style="cyan"))
        if not out.is_terminal:  # colours do not reach a pipe
            text = f"{{+{text}+}}" if trained else text
        out.print(Text(text, style="green" if trained else "dim"), end="")
    out.print()
