"""`packhouse inspect VERSION|RECIPE`: show what a trainer sees, with trained tokens in green."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from packhouse.addons.ask.query import read
from packhouse.addons.ask.samples import (
    check_split,
    first_split,
    label_names,
    label_text,
    labels_of,
    pair_sides,
    read_packs,
    records_in,
    weights_text,
)
from packhouse.cli.options import cache_option, json_option, number_option
from packhouse.cli.tokens import (
    Run,
    coloured,
    pipeline_of,
    plain,
    rows_with_masks,
    runs_of,
    token_texts,
)
from packhouse.read.files import source_name
from packhouse.recipe.reading import is_recipe_path
from packhouse.registry import function_of_addon
from packhouse.run.cache import Workspace
from packhouse.store import OpenVersion
from packhouse.store.manifest import Manifest
from packhouse.store.read import open_address
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import console, echo, page, print_note
from packhouse.system.wording import counted
from packhouse.tokenize.encoders import Pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """Options that select records. If none is set, packs are shown."""

    source: str | None
    row: int | None
    record: str | None
    grep: str | None
    records: int | None

    @property
    def is_any(self) -> bool:
        return any(value is not None for value in astuple(self))

    @property
    def limit(self) -> int:
        return self.records or 5

    def note_more(self, number: int, of: str = "") -> None:
        """Print a note if `number` exceeds the default limit and --records was not given."""
        if self.records is None and number > self.limit:
            print_note(
                f"note: more than {self.limit} records match{of}. Raise --records to see more."
            )


@click.command()
@click.argument("target", metavar="VERSION|RECIPE")
@click.option("--split", help="Split to read. [default: train, or the first one]")
@number_option("--packs", "Number of packs to print.", default=1, least=1)
@number_option("--skip", "Number of packs to skip first.", default=0)
@number_option("--pack", "Print the pack with this number (0-based).")
@number_option(
    "--records", "Print this many individual records instead of packs. [default: 5]", least=1
)
@click.option("--source", help="Print records from this source, or from `source/file`.")
@number_option("--row", "Print the records from this row of a file (0-based).")
@click.option("--record", help="Print the record with this ID.")
@click.option("--grep", metavar="TEXT", help="Print records that contain this text.")
@click.option("--tokenizer", help="Tokenizer folder, if the store has no copy of the tokenizer.")
@cache_option("Cache folder.")
@json_option("Print one line of JSON per pack or record.")
def inspect(
    target: str,
    split: str | None,
    packs: int,
    skip: int,
    pack: int | None,
    tokenizer: str | None,
    cache: Path,
    as_json: bool,
    **wanted: Any,
) -> None:
    """Print packs or records; trained tokens are green, or between {+ and +} in piped output.

    VERSION is STORE/DATASET[@REF]. For a RECIPE, print the first rows as they would be trained,
    without preparing anything. In a terminal, the output opens in a pager.

    \b
    Example:
      $ packhouse inspect ./store/demo --source chats --row 0
      ------------ chats/chats.jsonl row 0: 132 tokens, 64 trained ------------
      <|im_start|>user
      Can you show me how to work out 61 * 6 in my head?<|im_end|>
      <|im_start|>assistant
      {+Split 61 into 60 and 1. ...<|im_end|>+}
    """
    chosen = _Wanted(**wanted)
    if is_recipe_path(target):
        rows, pipeline = _of_recipe(target, chosen, cache)
        if not rows:
            print_note("checked the first rows of each source, without those that `where` drops")
        _show_records(rows, pipeline, as_json=as_json)
    elif chosen.is_any:
        opened = open_address(target)
        pipeline = _pipeline(opened, tokenizer, cache)
        _show_records(_of_version(opened, chosen, split, cache), pipeline, as_json=as_json)
    else:
        opened = open_address(target)
        split = split or first_split(opened)
        packed = read_packs(opened, split, *((skip, packs) if pack is None else (pack, 1)))
        pipeline = _pipeline(opened, tokenizer, cache)
        _show_packs(split, packed, pipeline, opened.manifest, as_json=as_json)


def _show_packs(
    split: str,
    packed: Iterator[tuple[int, dict[str, Any]]],
    pipeline: Pipeline | None,
    manifest: Manifest,
    *,
    as_json: bool,
) -> None:
    """Print packs, record by record."""

    def blocks() -> Iterator[RenderableType]:
        labels = label_names(manifest)
        for number, row in packed:
            counts = f"{counted(len(row['input_ids']), 'token')}, {sum(row['trained']):,} trained"
            records = counted(row["num_records"], "record")
            yield Rule(Text(f"{split} pack {number:,}: {counts}, {records}"))
            for name, start, end, side in records_in(row, manifest.preferences, labels):
                weights = weights_text(row["loss_weights"][start:end])
                label = ", ".join(part for part in (f"record {name}", side, weights) if part)
                yield Text(f"\n-- {label} --\n", "cyan")
                yield _drawn(_runs(row, pipeline, start, end))

    if not as_json:
        page(blocks())
        return
    for number, row in packed:
        runs = [
            run
            for _, start, end, _ in records_in(row)
            for run in _runs_json(_runs(row, pipeline, start, end), start)
        ]
        counts = {"pack": number, "num_tokens": len(row["input_ids"])}
        records = {name: row[name] for name in ("seq_lengths", "record_ids")}
        echo(json.dumps({**counts, **records, "runs": runs}))


def _show_records(
    rows: Sequence[Mapping[str, Any]], pipeline: Pipeline | None, *, as_json: bool
) -> None:
    """Print records. Each has source, row, record_id, input_ids, trained and `about`."""
    if not rows:
        print_note("no record matches")

    def blocks() -> Iterator[RenderableType]:
        for row in rows:
            counts = f"{counted(len(row['input_ids']), 'token')}, {sum(row['trained']):,} trained"
            yield Rule(Text(f"{for_terminal(row['source'])} row {row['row']:,}: {counts}"))
            yield Text(f"{row['about']}\n", "cyan")
            yield _drawn(_runs(row, pipeline))

    if not as_json:
        page(blocks())
        return
    for row in rows:
        facts = {k: v for k, v in row.items() if k not in ("input_ids", "trained", "about")}
        echo(json.dumps({**facts, "runs": _runs_json(_runs(row, pipeline))}))


def _runs(
    row: Mapping[str, Any], pipeline: Pipeline | None, start: int = 0, end: int | None = None
) -> tuple[Run, ...]:
    mask = np.asarray(row["trained"][start:end], np.bool_)
    return runs_of(row["input_ids"][start:end], mask, pipeline)


def _drawn(runs: Sequence[Run]) -> Group:
    is_terminal = console().is_terminal
    return Group(coloured(runs) if is_terminal else Text(plain(runs)), Text())


def _runs_json(runs: Iterable[Run], first: int = 0) -> list[dict[str, Any]]:
    """Merge runs that are equally trained; `first` is the position of the record in its pack."""
    alike = [list(own) for _, own in groupby(runs, key=lambda run: run.is_trained)]
    return [
        {
            "start": first + own[0].start,
            "end": first + own[-1].end,
            "trained": own[0].is_trained,
            "text": "".join(run.text for run in own),
        }
        for own in alike
    ]


def _of_version(
    opened: OpenVersion, wanted: _Wanted, split: str | None, cache: Path
) -> list[dict[str, Any]]:
    """Return the selected records of a version, with a description as `about`."""
    if split is not None:
        check_split(opened, split)
    # The source of a record is the first part of its file: `chats` for `chats/chats.jsonl`.
    source = "source" if "/" in (wanted.source or "") else "split_part(source, '/', 1)"
    conditions = {
        "record_id = ?": wanted.record,
        "row = ?": wanted.row,
        "contains(text, ?)": wanted.grep,
        "split = ?": split,
        f"{source} = ?": wanted.source,
    }
    given = {where: value for where, value in conditions.items() if value is not None}
    where = " AND ".join(["outcome = 'kept'", *given])
    query = (
        "SELECT source, row, record_id, split, pack, position, label, input_ids, trained, "
        # One more than is shown, to know if there are more.
        f"loss_weights FROM records WHERE {where} LIMIT {wanted.limit + 1}"
    )
    table = read(opened, query, [*given.values()], Workspace(cache=cache).tokenizers)
    wanted.note_more(table.num_rows)
    rows = [row for row in table.slice(0, wanted.limit).to_pylist() if row["input_ids"] is not None]
    labels = label_names(opened.manifest)
    for row in rows:
        about = [f"record {row['record_id']}, {row['split']} pack {row['pack']:,}"]
        about += [label_text(row["label"], labels)]
        about += [weights_text(row.pop("loss_weights"))]
        row["about"] = ", ".join(part for part in about if part)
    if not rows and wanted.row is not None:
        print_note(
            "no pack contains this row. `packhouse trace VERSION --file F --row N` shows why."
        )
    is_paired = opened.manifest.preferences == "pairs"
    return [side for row in rows for side in _sides_of(row)] if is_paired else rows


def _sides_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a preference pair into its two sides.

    Example:
        >>> mask = [False, True, True, False, True]
        >>> row = {"about": "record x", "input_ids": [1, 2, 3, 1, 4], "trained": mask}
        >>> [(side["about"], side["input_ids"]) for side in _sides_of(row)]
        [('record x, chosen', [1, 2, 3]), ('record x, rejected', [1, 4])]
    """
    return [
        {
            **row,
            "about": f"{row['about']}, {side}",
            "side": side,
            "input_ids": row["input_ids"][part],
            "trained": row["trained"][part],
        }
        for side, part in pair_sides(row["trained"])
    ]


def _of_recipe(
    target: str, wanted: _Wanted, cache: Path
) -> tuple[list[dict[str, Any]], Pipeline | None]:
    """Return the first rows of each source of a recipe, and the pipeline that decodes them."""
    # Imported here because tokenizer libraries are slow to load and not needed with a VERSION.
    from packhouse.run.inputs import read_recipe
    from packhouse.tokenize import load_snapshot

    recipe = read_recipe(target)
    tokenizers = Workspace(cache=cache).tokenizers
    pipeline = pipeline_of(
        partial(load_snapshot, recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    )
    found: list[dict[str, Any]] = []
    for source in recipe.sources:
        if wanted.source and wanted.source.partition("/")[0] != source_name(source):
            continue
        first_rows = function_of_addon("try_first_rows")(recipe, source, tokenizers)
        refused = first_rows.refused()
        rows = [
            row
            for row in rows_with_masks(first_rows.tokenized)
            if wanted.source in (None, row["source"], row["source"].partition("/")[0])
            and wanted.row in (None, row["row"])
            and wanted.record in (None, row["record_id"])
            and (not wanted.grep or wanted.grep in "".join(token_texts(row["input_ids"], pipeline)))
        ]
        wanted.note_more(len(rows) if wanted.is_any else 0, f" in '{source.path}'")
        names = labels_of(recipe, source)
        for row in rows[: wanted.limit]:
            is_over = row["num_tokens"] > recipe.pack.seq_len
            about = [
                f"record {row['record_id']}",
                f"longer than seq_len {recipe.pack.seq_len:,}" if is_over else "",
                label_text(row["label"], names),
                weights_text(row.get("range_weights") or []),
            ]
            shown = {name: row[name] for name in _SHOWN}
            shown["about"] = "; ".join(filter(None, about))
            found += _sides_of(shown) if recipe.preferences == "pairs" else [shown]
        if refused:
            first = refused[0]
            number = len({row["row"] for row in refused})
            are = "is" if number == 1 else "are"
            file = for_terminal(str(first["source"]))
            print_note(
                f"note: {number:,} of the first rows of '{file}' {are} bad; "
                f"row {first['row']:,}: {first['reason']}: {first['detail']}",
            )
    return found, pipeline


_SHOWN = ("source", "row", "record_id", "label", "input_ids", "trained")


def _pipeline(opened: OpenVersion, folder: str | None, cache: Path) -> Pipeline | None:
    """Return the pipeline that decodes ids, or None (print ids) if the tokenizer is unknown."""
    from packhouse.cli.tokens import pipeline_of_version, tokenizer_of
    from packhouse.tokenize import fingerprint_tokenizer, load_snapshot

    tokenizers = Workspace(cache=cache).tokenizers
    if folder:
        if fingerprint_tokenizer(folder) != opened.manifest.tokenizer_fingerprint:
            print_note("warning: this is not the tokenizer that the version was made with")
        load = partial(load_snapshot, folder, tokenizers, pipeline_of_version(opened))
        return pipeline_of(load)
    pipeline = pipeline_of(tokenizer_of(opened, tokenizers))
    if pipeline is None:
        print_note(
            "printing token IDs, because neither the cache nor the store has the tokenizer. "
            "Pass --tokenizer FOLDER to see text.",
        )
    return pipeline
