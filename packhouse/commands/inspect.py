"""`packhouse inspect VERSION`: what a trainer will see, tokens coloured by trained or not."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.cache.places import default_cache
from packhouse.engine.workspace import Workspace
from packhouse.errors import ConfigError, IntegrityError
from packhouse.runtime.confine import run_confined
from packhouse.runtime.disks import temporary_folder
from packhouse.store import OpenVersion
from packhouse.store.address import open_address
from packhouse.store.contracts import read_batches
from packhouse.terminal import console, echo

__all__ = ["inspect", "print_runs", "token_runs"]


@click.command()
@click.argument("target", metavar="VERSION")
@click.option("--split", help="Which split. [default: train, else the first there is]")
@click.option("--packs", default=1, show_default=True, help="How many packs.")
@click.option("--skip", default=0, show_default=True, help="Packs to skip first.")
@click.option("--tokenizer", help="Tokenizer folder, if this machine did not prepare the version.")
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
    """Print packs of a version, trained tokens in green.

    \b
    VERSION is STORE/DATASET, optionally with @REF or @VERSION (by default @latest):
    ./store/demo, s3://bucket/store/demo@prod, ./store/demo@0a1b2c3d4e5f6071.g0
    """
    opened = open_address(target)
    split = split or _first_split(opened)
    decode = _decoder(opened, tokenizer, cache)
    for number, row in _packs(opened, split, skip, packs):
        runs = token_runs(row)
        pieces = [row["input_ids"][start:end] for start, end, _ in runs]
        texts = decode(pieces) if decode else [" ".join(map(str, ids)) + " " for ids in pieces]
        if as_json:
            echo(json.dumps(_as_json(number, row, runs, texts)))
        else:
            _print(split, number, row, runs, texts)


def _first_split(opened: OpenVersion) -> str:
    splits = opened.manifest.splits()
    return "train" if "train" in splits or not splits else splits[0]


def _packs(
    opened: OpenVersion, split: str, skip: int, count: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of the wanted packs; fetches only the files that hold them."""
    entries = opened.files("data", split)
    if not entries:
        splits = ", ".join(opened.manifest.splits())
        raise ConfigError(
            f"no split '{split}' in {opened.dataset} {opened.version}; it has {splits}"
        )
    first = 0
    with temporary_folder("inspect") as folder:
        for entry in entries:
            low, high = max(skip, first), min(skip + count, first + entry.rows)
            if low < high:
                path = opened.fetch(entry, folder / Path(entry.key).name)
                rows = run_confined(  # some kilobytes of a file may stand for gigabytes
                    partial(_read_rows, path, low - first, high - low),
                    what=f"file '{entry.key}'",
                    blames=IntegrityError,
                    num_bytes=entry.size,
                )
                yield from zip(range(low, high), rows, strict=True)
            first += entry.rows


def _read_rows(path: Path, start: int, count: int) -> list[dict[str, Any]]:
    """In a child: rows [start, start + count) of a file."""
    rows: list[dict[str, Any]] = []
    first = 0
    for batch in read_batches(path):
        low, high = max(start - first, 0), min(start + count - first, batch.num_rows)
        if low < high:
            rows += batch.slice(low, high - low).to_pylist()
        first += batch.num_rows
        if first >= start + count:
            break
    return rows


def token_runs(row: dict[str, Any]) -> list[tuple[int, int, bool]]:
    """Cut a pack into [start, end) runs of equal colour, never across a record's border."""
    trained = np.zeros(len(row["input_ids"]), dtype=bool)
    if "labels" in row:
        trained[:] = np.asarray(row["labels"]) != -100
    for span in row.get("trained_ranges") or ():
        trained[span["start"] : span["end"]] = True
    borders = np.cumsum(row["seq_lengths"])
    changes = np.flatnonzero(np.diff(trained)) + 1
    edges = np.unique(np.concatenate([[0], changes, borders]))
    return [(int(a), int(b), bool(trained[a])) for a, b in itertools.pairwise(edges)]


def _decoder(opened: OpenVersion, folder: str | None, cache: Path) -> Any:
    """Return lists of ids -> their texts; None: the tokenizer is unknown, print ids."""
    from packhouse.foreign import decode, run_tokenizer
    from packhouse.tokenization import TokenizerSnapshot, load_snapshot
    from packhouse.tokenization.loading import find_snapshot

    wanted = opened.manifest.lineage.get("tokenizer", {}).get("fingerprint", "")
    tokenizers = Workspace(cache=cache).tokenizers
    load: Callable[[], TokenizerSnapshot | None] = partial(find_snapshot, wanted, tokenizers)
    if folder:
        load = partial(load_snapshot, folder, tokenizers)
    snapshot = load()
    if snapshot is None:
        echo("tokenizer unknown here: printing ids; give --tokenizer FOLDER for text", err=True)
        return None
    if snapshot.fingerprint != wanted:
        echo("warning: this is not the tokenizer the version was made with", err=True)
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
        out.print(Text(text, style="green" if trained else "dim"), end="")
    out.print()
