"""`packhouse inspect VERSION|RECIPE`: what a trainer will see, trained tokens in green."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import numpy as np

from packhouse.commands.options import cache_option
from packhouse.engine.workspace import Workspace
from packhouse.recipe.reading import is_recipe_path
from packhouse.report.samples import first_split, read_pack, read_packs, trained_mask_of
from packhouse.store import OpenVersion
from packhouse.store.address import open_address
from packhouse.terminal import console, echo, page
from packhouse.token_runs import cut_runs, drawn

__all__ = ["inspect"]

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """Which records are asked for; nothing: packs."""

    source: str | None
    row: int | None
    record: str | None
    grep: str | None
    records: int | None

    @property
    def is_any(self) -> bool:
        return any(value is not None for value in (self.source, self.row, self.record, self.grep,
                                                   self.records))  # fmt: skip

    @property
    def limit(self) -> int:
        return self.records or 5


@click.command()
@click.argument("target", metavar="VERSION|RECIPE")
@click.option("--split", help="Which split. [default: train, else the first there is]")
@click.option("--packs", default=1, show_default=True, help="How many packs.")
@click.option("--skip", default=0, show_default=True, help="Packs to skip first.")
@click.option("--pack", type=click.IntRange(min=0), help="The pack of this number, from 0.")
@click.option("--records", type=int, help="So many records, each by itself. [default: 5]")
@click.option("--source", help="Records of this source, or of this `source/file`.")
@click.option("--row", type=int, help="Records of this row of their file, from 0.")
@click.option("--record", help="The record with this id.")
@click.option("--grep", metavar="TEXT", help="Records whose text holds this.")
@click.option("--quarantined", is_flag=True, help="Bad rows, and why.")
@click.option("--dropped", is_flag=True, help="Rows that were left out, and why.")
@click.option("--tokenizer", help="Tokenizer folder, if the store does not keep it.")
@cache_option("Folder of tokenizers and finished steps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line a pack or record.")
def inspect(
    target: str,
    split: str | None,
    packs: int,
    skip: int,
    pack: int | None,
    quarantined: bool,
    dropped: bool,
    tokenizer: str | None,
    cache: Path,
    as_json: bool,
    **wanted: Any,
) -> None:
    """Print packs or records of a version, trained tokens in green; in a pipe between {+ and +}.

    With a RECIPE: its first rows as they would be trained, before anything is prepared. On a
    terminal the output is in a pager.

    \b
    VERSION is STORE/DATASET, or with @REF or @VERSION (by default @latest):
    ./store/demo, s3://bucket/store/demo@prod, ./store/demo@0a1b2c3d4e5f6071.g0

    \b
    packhouse inspect ./store/demo --grep "I cannot" --records 20
    packhouse inspect ./store/demo --source instructions --row 17
    packhouse inspect recipe.yaml
    """
    chosen = _Wanted(**wanted)
    if quarantined or dropped:
        _invoke_other(target, cache, as_json, is_quarantine=quarantined)
    elif is_recipe_path(target):
        _show_records(*_of_recipe(target, chosen, cache), as_json=as_json)
    elif chosen.is_any:
        opened = open_address(target)
        decode = _decoder(opened, tokenizer, cache)
        _show_records(_of_version(opened, chosen, split, cache), decode, as_json=as_json)
    else:
        opened = open_address(target)
        split = split or first_split(opened)
        if pack is not None:
            packed = iter([(pack, read_pack(opened, split, pack))])
        else:
            packed = read_packs(opened, split, skip, packs)
        _show_packs(opened, split, packed, tokenizer, cache, as_json)


def _invoke_other(target: str, cache: Path, as_json: bool, *, is_quarantine: bool) -> None:
    """Do as `packhouse quarantine show` or `packhouse dropped`."""
    from packhouse.commands.dropped import dropped
    from packhouse.commands.quarantine import show

    command = show if is_quarantine else dropped
    words = [target, "--cache", str(cache), *(["--json"] if as_json else [])]
    parent = click.get_current_context()
    with command.make_context(command.name, words, parent=parent) as made:
        command.invoke(made)


def _show_packs(
    opened: OpenVersion,
    split: str,
    packed: Iterator[tuple[int, dict[str, Any]]],
    tokenizer: str | None,
    cache: Path,
    as_json: bool,
) -> None:
    decode = _decoder(opened, tokenizer, cache)
    out = console()
    sides = (", chosen", ", rejected") if opened.manifest.preferences == "pairs" else ("",)

    def blocks() -> Iterator[Any]:
        for number, row in packed:
            runs = cut_runs(trained_mask_of(row), np.cumsum(row["seq_lengths"]).tolist())
            texts = _texts(row["input_ids"], runs, decode)
            if as_json:
                echo(json.dumps(_as_json(number, row, runs, texts)))
                continue
            yield _rule(_title(split, number, row, runs, len(row["seq_lengths"]) // len(sides)))
            borders = np.cumsum([0, *row["seq_lengths"]]).tolist()
            names = zip(borders, row["record_ids"], cycle(sides), strict=False)
            titles = {at: f"-- record {name}{side} --" for at, name, side in names}
            yield drawn(runs, texts, titles, in_colour=out.is_terminal)

    if as_json:
        list(blocks())
    else:
        page(blocks())


def _show_records(
    rows: Sequence[Mapping[str, Any]], decode: Decode | None, *, as_json: bool
) -> None:
    """Print records: each has source, row, record_id, input_ids, trained and `about`."""
    out = console()
    if not rows:
        echo("no record matches", err=True)

    def blocks() -> Iterator[Any]:
        for row in rows:
            runs = cut_runs(np.asarray(row["trained"], np.bool_))
            texts = _texts(row["input_ids"], runs, decode)
            if as_json:
                told = {k: v for k, v in row.items() if k not in ("input_ids", "trained", "about")}
                echo(json.dumps({**told, "runs": _runs_json(runs, texts)}))
                continue
            trained = sum(b - a for a, b, is_on in runs if is_on)
            yield _rule(
                f"{row['source']} row {row['row']:,}: {len(row['input_ids']):,} tokens, "
                f"{trained:,} trained",
                row["about"],
            )
            yield drawn(runs, texts, {}, in_colour=out.is_terminal)

    if as_json:
        list(blocks())
    else:
        page(blocks())


def _of_version(
    opened: OpenVersion, wanted: _Wanted, split: str | None, cache: Path
) -> list[dict[str, Any]]:
    from packhouse.views import read_view

    columns = ["source", "row", "record_id", "split", "pack", "position", "input_ids", "trained"]
    only = {"record_id": wanted.record, "row": wanted.row, "text": wanted.grep, "split": split}
    only = {name: value for name, value in only.items() if value is not None}
    only["outcome"] = "kept"
    if wanted.source:
        only["source" if "/" in wanted.source else "source/"] = wanted.source
    rows: list[dict[str, Any]] = read_view(
        opened,
        "records",
        columns,
        Workspace(cache=cache).tokenizers,
        only=only,
        limit=wanted.limit,
    ).to_pylist()
    for row in rows:
        row["about"] = f"record {row['record_id']}, {row['split']} pack {row['pack']:,}"
    return [row for row in rows if row["input_ids"] is not None]


def _of_recipe(target: str, wanted: _Wanted, cache: Path) -> tuple[list[dict[str, Any]], Decode]:
    """The first rows of each source of a recipe, and what decodes them."""
    from packhouse.foreign import decode, run_tokenizer
    from packhouse.given import read_recipe
    from packhouse.proposal.sampling import try_first_rows
    from packhouse.tokenization import load_snapshot

    recipe = read_recipe(target)
    tokenizers = Workspace(cache=cache).tokenizers
    load = partial(load_snapshot, recipe.tokenizer, tokenizers)

    def texts(rows: Sequence[Sequence[int]]) -> list[str]:
        return list(run_tokenizer(partial(decode, load, rows), recipe.tokenizer))

    found: list[dict[str, Any]] = []
    for source in recipe.sources:
        tokenized, refused = try_first_rows(recipe, source, tokenizers)
        rows = [row for row in tokenized.to_pylist() if _is_wanted(row, wanted)]
        if wanted.grep is not None:
            whole = texts([row["input_ids"] for row in rows])
            rows = [row for row, text in zip(rows, whole, strict=True) if wanted.grep in text]
        found += [_sampled(row, recipe.pack.seq_len) for row in rows[: wanted.limit]]
        if refused:
            first = refused[0]
            are = "is" if len(refused) == 1 else "are"
            echo(
                f"note: {len(refused):,} of the first rows of '{source.path}' {are} bad; row "
                f"{first['row']:,}: {first['reason']}: {first['detail']}",
                err=True,
            )
    return found, texts


def _is_wanted(row: Mapping[str, Any], wanted: _Wanted) -> bool:
    sources = (None, row["source"], row["source"].partition("/")[0])
    is_record = wanted.record in (None, row["record_id"])
    return wanted.source in sources and wanted.row in (None, row["row"]) and is_record


def _sampled(row: dict[str, Any], seq_len: int) -> dict[str, Any]:
    over = f"; longer than seq_len {seq_len:,}" if row["num_tokens"] > seq_len else ""
    names = ("source", "row", "record_id", "input_ids")
    made = {name: row[name] for name in names}
    mask = trained_mask_of(row).tolist()
    return {**made, "trained": mask, "about": f"record {row['record_id']}{over}"}


def _decoder(opened: OpenVersion, folder: str | None, cache: Path) -> Decode | None:
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
    return lambda rows: list(run_tokenizer(partial(decode, load, rows), name))


def _texts(
    ids: Sequence[int], runs: Sequence[tuple[int, int, bool]], decode: Decode | None
) -> list[str]:
    pieces = [list(ids[start:end]) for start, end, _ in runs]
    return decode(pieces) if decode else [" ".join(map(str, own)) + " " for own in pieces]


def _rule(title: str, about: str = "") -> Any:
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    return Group(Rule(Text(title)), Text(f"{about}\n" if about else "", "cyan"))


def _title(
    split: str,
    number: int,
    row: Mapping[str, Any],
    runs: Sequence[tuple[int, int, bool]],
    num_records: int,
) -> str:
    num_trained = sum(b - a for a, b, trained in runs if trained)
    return (
        f"{split} pack {number:,}: {len(row['input_ids']):,} tokens, {num_trained:,} trained, "
        f"{num_records} records"
    )


def _as_json(
    number: int, row: dict[str, Any], runs: list[tuple[int, int, bool]], texts: list[str]
) -> dict[str, Any]:
    return {
        "pack": number,
        "num_tokens": len(row["input_ids"]),
        "seq_lengths": row["seq_lengths"],
        "record_ids": row["record_ids"],
        "runs": _runs_json(runs, texts),
    }


def _runs_json(runs: Sequence[tuple[int, int, bool]], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"start": a, "end": b, "trained": trained, "text": text}
        for (a, b, trained), text in zip(runs, texts, strict=True)
    ]
