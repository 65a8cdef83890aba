"""Some packs of a published version, and some records of a sample, to be looked at by people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.errors import ConfigError, IntegrityError
from packhouse.packing.layout import trained_tokens
from packhouse.records.lists import list_offsets
from packhouse.report.tokens import trained_ranges
from packhouse.runtime.confine import run_confined
from packhouse.runtime.disks import temporary_folder
from packhouse.store import OpenVersion
from packhouse.store.contracts import check_rows, read_batches
from packhouse.store.manifest import Manifest

__all__ = [
    "MAX_RECORD_TOKENS",
    "first_split",
    "page_record",
    "read_pack",
    "read_packs",
    "record_bounds",
    "rows_with_masks",
    "weight_runs",
]

MAX_RECORD_TOKENS = 3_000
"""Tokens of a record that a page shows."""


def first_split(opened: OpenVersion) -> str:
    """Return `train`, else the first split there is."""
    splits = opened.manifest.splits()
    return "train" if "train" in splits or not splits else splits[0]


def read_packs(
    opened: OpenVersion, split: str, skip: int, count: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of `count` packs behind `skip`; fetches only the files that hold them.

    A row has `trained`, a mask of its tokens, whichever layout the files have.

    Raises:
        ConfigError: there is no such split.
        ContractError: the rows of a file are no packs.
        IntegrityError: a file is damaged.
    """
    rules = replace(opened.manifest, files=())  # all that rows are checked with
    entries = opened.files("data", split)
    if not entries:
        splits = ", ".join(opened.manifest.splits())
        raise ConfigError(
            f"no split '{split}' in {opened.dataset} {opened.version}; it has {splits}"
        )
    first = 0
    for entry in entries:
        low, high = max(skip, first), min(skip + count, first + entry.rows)
        if low < high:
            with temporary_folder("inspect") as folder:  # gone before a reader may stop listening
                path = opened.fetch(entry, folder / Path(entry.key).name)
                rows = run_confined(  # some kilobytes of a file may stand for gigabytes
                    partial(_read_rows, path, rules, low - first, high - low),
                    what=f"file '{entry.key}'",
                    blames=IntegrityError,
                    num_bytes=entry.size,
                )
            yield from zip(range(low, high), rows, strict=True)
        first += entry.rows


def read_pack(opened: OpenVersion, split: str, number: int) -> dict[str, Any]:
    """Return the row of one pack, by its number in the split, from 0.

    Raises:
        ConfigError: there is no such split or pack.
        IntegrityError: a file is damaged.
    """
    for _, row in read_packs(opened, split, number, 1):
        return row
    total = sum(entry.rows for entry in opened.files("data", split))
    raise ConfigError(f"{split} has no pack {number:,}: its last pack is {total - 1:,}")


def _read_rows(path: Path, rules: Manifest, start: int, count: int) -> list[dict[str, Any]]:
    """In a child: rows [start, start + count) of a file."""
    rows: list[dict[str, Any]] = []
    first = 0
    for batch in read_batches(path):
        low, high = max(start - first, 0), min(start + count - first, batch.num_rows)
        if low < high:
            check_rows(batch, first, rules)
            rows += rows_with_masks(batch.slice(low, high - low))
        first += batch.num_rows
        if first >= start + count:
            break
    return rows


def rows_with_masks(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return packed or tokenized rows as plain Python, with `trained`: a mask of their tokens.

    Example:
        >>> batch = pa.record_batch({"input_ids": [[7, 8], [9]], "labels": [[-100, 8], [-100]]})
        >>> rows_with_masks(batch)
        [{'input_ids': [7, 8], 'trained': [False, True]}, {'input_ids': [9], 'trained': [False]}]
    """
    offsets = list_offsets(rows["input_ids"])
    offsets = offsets - offsets[0]
    trained = trained_tokens(rows, offsets).tolist()
    names = {"labels", "trained_ranges", "position_ids"}
    others = rows.select([name for name in rows.schema.names if name not in names])
    return [
        {**row, "trained": trained[start:end]}
        for row, start, end in zip(others.to_pylist(), offsets, offsets[1:], strict=False)
    ]


def record_bounds(row: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the id of each record of a pack, and its first token and its end in the pack.

    Example:
        >>> list(record_bounds({"seq_lengths": [3, 2], "record_ids": ["x", "y"]}))
        [('x', 0, 3), ('y', 3, 5)]
    """
    edges = np.cumsum([0, *row["seq_lengths"]]).tolist()
    names = row.get("record_ids") or [""] * len(row["seq_lengths"])
    yield from zip(names, edges, edges[1:], strict=False)


def weight_runs(weights: Sequence[float]) -> list[list[float]]:
    """Return `[start, end, weight]` of each run of tokens that share a weight in the loss, not 0.

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
    """Return a record as the page's script takes it, without its texts; a long one is cut.

    Args:
        name: its id.
        ids: its tokens.
        trained: which of them are trained.
        start: where it begins in its pack.
        max_tokens: of it that the page shows, at most.
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
