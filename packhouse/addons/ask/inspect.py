"""`packhouse inspect VERSION|RECIPE`: show what a trainer sees, with trained tokens in green.

A pack is read by fetching the one file that contains it and decoding it in a worker process. To
read many packs, use the tables in `packhouse.addons.ask.version_tables`.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import cycle, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from packhouse.addons.ask.duckdb_queries import read
from packhouse.addons.ask.version_tables import TABLES, FileTable, VersionFiles
from packhouse.cli import cache_option, json_option, number_option
from packhouse.cli.token_display import (
    Run,
    coloured,
    pipeline_of,
    pipeline_of_version,
    plain,
    rows_with_masks,
    runs_of,
    token_texts,
    tokenizer_of,
    trained_ranges,
)
from packhouse.errors import ConfigError, IntegrityError
from packhouse.read.source_files import source_name
from packhouse.recipe import Recipe, SourceConfig
from packhouse.recipe.recipe_file import is_recipe_path
from packhouse.registry import function_of_addon
from packhouse.run.step_cache import Workspace
from packhouse.store import OpenVersion
from packhouse.store.manifest import Manifest
from packhouse.store.version_reader import open_address
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import console, echo, page, print_note
from packhouse.system.wording import counted
from packhouse.system.worker import run_in_worker
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
        return
    opened = open_address(target)
    pipeline = _pipeline(opened, tokenizer, cache)
    if chosen.is_any:
        _show_records(_of_version(opened, chosen, split, cache), pipeline, as_json=as_json)
    else:
        split = split or first_split(opened)
        packed = read_packs(opened, split, *((skip, packs) if pack is None else (pack, 1)))
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
            records = counted(row["num_records"], "record")
            yield _rule(f"{split} pack {number:,}", row, f", {records}")
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
            yield _rule(f"{for_terminal(row['source'])} row {row['row']:,}", row)
            yield Text(f"{row['about']}\n", "cyan")
            yield _drawn(_runs(row, pipeline))

    if not as_json:
        page(blocks())
        return
    for row in rows:
        facts = {k: v for k, v in row.items() if k not in ("input_ids", "trained", "about")}
        echo(json.dumps({**facts, "runs": _runs_json(_runs(row, pipeline))}))


def _rule(name: str, row: Mapping[str, Any], more: str = "") -> Rule:
    counts = f"{counted(len(row['input_ids']), 'token')}, {sum(row['trained']):,} trained"
    return Rule(Text(f"{name}: {counts}{more}"))


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
    merged = []
    for is_trained, group in groupby(runs, key=lambda run: run.is_trained):
        own = [*group]
        place = {"start": first + own[0].start, "end": first + own[-1].end}
        text = "".join(run.text for run in own)
        merged.append({**place, "trained": is_trained, "text": text})
    return merged


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
        about += [label_text(row["label"], labels), weights_text(row.pop("loss_weights"))]
        row["about"] = ", ".join(filter(None, about))
    if not rows and wanted.row is not None:
        print_note(
            "no pack contains this row. `packhouse trace VERSION --file F --row N` shows why."
        )
    return [side for row in rows for side in _sides_of(row, opened.manifest.preferences)]


def _sides_of(row: dict[str, Any], preferences: str | None) -> list[dict[str, Any]]:
    """Split a preference pair into its two sides; return any other record as it is.

    Example:
        >>> mask = [False, True, True, False, True]
        >>> row = {"about": "record x", "input_ids": [1, 2, 3, 1, 4], "trained": mask}
        >>> [(side["about"], side["input_ids"]) for side in _sides_of(row, "pairs")]
        [('record x, chosen', [1, 2, 3]), ('record x, rejected', [1, 4])]
    """
    if preferences != "pairs":
        return [row]
    about, ids, trained = (row[name] for name in ("about", "input_ids", "trained"))
    return [
        {**row, "about": f"{about}, {side}", "side": side}
        | {"input_ids": ids[part], "trained": trained[part]}
        for side, part in pair_sides(trained)
    ]


def _of_recipe(
    target: str, wanted: _Wanted, cache: Path
) -> tuple[list[dict[str, Any]], Pipeline | None]:
    """Return the first rows of each source of a recipe, and the pipeline that decodes them."""
    # Imported here because tokenizer libraries are slow to load and not needed with a VERSION.
    from packhouse.run.prepare_arguments import read_recipe
    from packhouse.tokenize import load_snapshot

    recipe = read_recipe(target)
    tokenizers = Workspace(cache=cache).tokenizers
    load = partial(load_snapshot, recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    pipeline = pipeline_of(load)
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
            seq_len = recipe.pack.seq_len
            about = [
                f"record {row['record_id']}",
                f"longer than seq_len {seq_len:,}" if row["num_tokens"] > seq_len else "",
                label_text(row["label"], names),
                weights_text(row.get("range_weights") or []),
            ]
            shown = {name: row[name] for name in _SHOWN} | {"about": "; ".join(filter(None, about))}
            found += _sides_of(shown, recipe.preferences)
        if refused:
            first = refused[0]
            number = len({row["row"] for row in refused})
            are = "is" if number == 1 else "are"
            print_note(
                f"note: {number:,} of the first rows of '{for_terminal(first['source'])}' {are} "
                f"bad; row {first['row']:,}: {first['reason']}: {first['detail']}"
            )
    return found, pipeline


_SHOWN = ("source", "row", "record_id", "label", "input_ids", "trained")


def _pipeline(opened: OpenVersion, folder: str | None, cache: Path) -> Pipeline | None:
    """Return the pipeline that decodes ids, or None (print ids) if the tokenizer is unknown."""
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


MAX_RECORD_TOKENS = 3_000
"""Maximum number of tokens shown of a record."""


def first_split(opened: OpenVersion) -> str:
    """Return `train` if it exists, otherwise the first split."""
    splits = opened.manifest.splits()
    return "train" if "train" in splits or not splits else splits[0]


def check_split(opened: OpenVersion, split: str) -> None:
    """Raise `ConfigError` if the version does not have this split."""
    if not opened.files("data", split):
        splits = ", ".join(opened.manifest.splits())
        raise ConfigError(
            f"{opened.dataset} {opened.version} has no split '{split}'. Use one of: {splits}."
        )


def read_packs(
    opened: OpenVersion, split: str, skip: int, count: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) for `count` packs after the first `skip`, fetching only the files needed.

    A row has the columns of the table `packs`; `trained` is a mask over its tokens in both file
    layouts.

    Raises:
        ConfigError: the split does not exist, or `skip` is after its last pack.
        ContractError: a file's rows are not valid packs.
        IntegrityError: a file is damaged.
    """
    check_split(opened, split)
    first = 0
    for entry in opened.files("data", split):
        low, high = max(skip, first), min(skip + count, first + entry.rows)
        if low < high:
            with temporary_folder("inspect") as folder:  # gone before the caller can stop
                path = opened.fetch(entry, folder / Path(entry.key).name)
                manifest = replace(opened.manifest, files=())
                files = VersionFiles(files={"data": [(path, split)]}, manifest=manifest)
                # In a worker, because a few compressed KB may expand to GB.
                read_part = partial(_read_rows, files, low - first, high - low)
                what, size = f"file '{entry.key}'", entry.size
                rows = run_in_worker(read_part, what=what, blames=IntegrityError, num_bytes=size)
            yield from zip(range(low, high), rows, strict=True)
        first += entry.rows
    if skip >= first:
        raise ConfigError(f"{split} has no pack {skip:,}. Its last pack is {first - 1:,}")


def _read_rows(files: VersionFiles, start: int, count: int) -> list[dict[str, Any]]:
    """Return packs [start, start + count) of a file (in a worker)."""
    rows: list[dict[str, Any]] = []
    first = 0
    for part in each_packs(files):
        low, high = max(start - first, 0), min(start + count - first, part.num_rows)
        if low < high:
            rows += part.slice(low, high - low).to_pylist()
        first += part.num_rows
        if first >= start + count:
            break
    return rows


def each_packs(
    files: VersionFiles, columns: Collection[str] = TABLES["packs"].keys()
) -> Iterator[pa.Table]:
    """Yield packs with columns of the table `packs` and `num_records` (in a worker).

    A part has about 2 million tokens.

    Raises:
        ContractError: packs violate the data contract.
        IntegrityError: a file is damaged.
    """
    num_sides = 2 if files.manifest.preferences == "pairs" else 1
    for batch in FileTable(name="packs", files=files, columns=columns).batches():
        num_records = pa.chunked_array([pc.divide(batch["num_sequences"], num_sides)])
        yield pa.Table.from_batches([batch]).append_column("num_records", num_records)


class PackRecord(NamedTuple):
    """One sequence of a pack."""

    record_id: str
    start: int
    """Position of its first token in the pack."""
    end: int
    side: str
    """`chosen` or `rejected` for preference pairs, otherwise the text from `label_text`."""


def records_in(
    row: Mapping[str, Any], preferences: str | None = None, labels: Sequence[str] = ()
) -> Iterator[PackRecord]:
    """Yield the sequences of a pack in order.

    Args:
        row: a row of the table `packs`.
        preferences: value from the manifest.
        labels: label names from `label_names`.

    Example:
        >>> row = {"seq_lengths": [3, 2], "record_ids": ["x", "x"], "label": None}
        >>> [tuple(record) for record in records_in(row, "pairs")]
        [('x', 0, 3, 'chosen'), ('x', 3, 5, 'rejected')]
    """
    edges = np.cumsum([0, *row["seq_lengths"]]).tolist()
    label = label_text(row["label"], labels)
    sides = cycle(("chosen", "rejected") if preferences == "pairs" else (label,))
    ids = row["record_ids"]
    # Not strict: packs without record ids have fewer ids than sequences, and `sides` is endless.
    yield from map(PackRecord._make, zip(ids, edges, edges[1:], sides, strict=False))


def label_names(manifest: Manifest) -> list[str]:
    """Return the names of labels 0, 1, ...: KTO verdicts, or class names if all sources agree."""
    given = {shard.settings.label_names for shard in manifest.facts.lineage.sources}
    names = given.pop() if len(given) == 1 else None
    return [*map(for_terminal, ("bad", "good") if manifest.preferences == "kto" else names or ())]


def is_of_classes(manifest: Manifest) -> bool:
    """Return True if a classifier is trained on row labels instead of on tokens."""
    return manifest.facts.configuration.format.template == "sequence_classification"


def label_text(label: int | None, names: Sequence[str]) -> str:
    """Return the name of a label, `label N` if it has none, or an empty string for None.

    Example:
        >>> label_text(1, ["bad", "good"]), label_text(3, []), label_text(None, ["bad", "good"])
        ('good', 'label 3', '')
    """
    if label is None:
        return ""
    return names[label] if 0 <= label < len(names) else f"label {label}"


def pair_sides(trained: Sequence[bool]) -> list[tuple[str, slice]]:
    """Split the tokens of a preference pair: the chosen side ends with its only trained span.

    Example:
        >>> pair_sides([False, True, True, False, True])
        [('chosen', slice(None, 3, None)), ('rejected', slice(3, None, None))]
    """
    (_, end), *_ = trained_ranges(np.asarray(trained, np.bool_))
    return [("chosen", slice(end)), ("rejected", slice(end, None))]


def labels_of(recipe: Recipe, source: SourceConfig) -> list[str]:
    """Return the names of labels 0, 1, ... of a source: KTO verdicts, or its own class names."""
    names = ("bad", "good") if recipe.preferences == "kto" else source.label_names
    return [*map(for_terminal, names or ())]


def weights_text(weights: Sequence[float]) -> str:
    """Format the loss weights of trained tokens; an empty string if all are 1.

    Example:
        >>> weights_text([0, 0.5, 0.5, 1.0]), weights_text([0.0, 1.0])
        ('loss weights 0.5, 1', '')
    """
    given = np.unique(np.asarray(weights, np.float64))
    given = given[given > 0]
    if not (given != 1).any():
        return ""
    shown = [f"{weight:g}" for weight in given.tolist()]
    cut = [*shown[:2], "...", shown[-1]] if len(shown) > 4 else shown
    return f"loss weight{'s' * (len(shown) > 1)} {', '.join(cut)}"


def weight_runs(weights: Sequence[float]) -> list[list[float]]:
    """Return `[start, end, weight]` for each run of tokens with the same non-zero loss weight.

    Example:
        >>> weight_runs([0.0, 0.5, 0.5, 1.0, 0.0])
        [[1, 3, 0.5], [3, 4, 1.0]]
    """
    given = np.nan_to_num(np.asarray(weights, np.float64))  # JSON has no infinity
    edges = np.flatnonzero(np.diff(given)) + 1
    bounds = [0, *edges.tolist(), len(given)]
    return [[a, b, float(given[a])] for a, b in pairwise(bounds) if b > a and given[a]]


def page_record(
    name: str, ids: Sequence[int], trained: Sequence[bool], start: int = 0, max_tokens: int = 2**31
) -> dict[str, Any]:
    """Return a record in the form that the page's script reads, without texts, cut if it is long.

    Args:
        name: record id.
        ids: token ids.
        trained: mask of trained tokens.
        start: position of the record in its pack.
        max_tokens: maximum number of tokens to show.
    """
    size = min(len(ids), MAX_RECORD_TOKENS, max_tokens)
    ranges = trained_ranges(np.asarray(trained[:size], np.bool_))
    counts = {"id": name, "start": start, "length": len(ids), "num_trained": sum(trained)}
    return {**counts, "ids": list(ids[:size]), "trained": ranges}
