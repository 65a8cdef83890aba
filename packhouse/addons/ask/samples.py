"""Read packs of a published version, and format packs and sampled records for display.

A pack is read by fetching the one file that contains it and decoding it in a worker process. To
read many packs, use the tables in `packhouse.addons.ask.files`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.ask.files import TABLES, FileTable, VersionFiles
from packhouse.cli.tokens import trained_ranges
from packhouse.errors import ConfigError, IntegrityError
from packhouse.recipe import Recipe, SourceConfig
from packhouse.store import OpenVersion
from packhouse.store.manifest import Manifest
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.worker import run_in_worker

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
                files = VersionFiles(
                    files={"data": [(path, split)]},
                    manifest=replace(opened.manifest, files=()),
                )
                rows = run_in_worker(  # a few compressed KB may expand to GB
                    partial(_read_rows, files, low - first, high - low),
                    what=f"file '{entry.key}'",
                    blames=IntegrityError,
                    num_bytes=entry.size,
                )
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
    if manifest.preferences == "kto":
        return ["bad", "good"]
    given = {shard.settings.label_names for shard in manifest.facts.lineage.sources}
    names = given.pop() if len(given) == 1 else None
    return [for_terminal(name) for name in names or ()]


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
    if recipe.preferences == "kto":
        return ["bad", "good"]
    return [for_terminal(name) for name in source.label_names or ()]


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
    return {
        "id": name,
        "start": start,
        "length": len(ids),
        "num_trained": sum(trained),
        "ids": list(ids[:size]),
        "trained": trained_ranges(np.asarray(trained[:size], np.bool_)),
    }
