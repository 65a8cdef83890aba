"""Some packs of a published version, to be looked at by people."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packhouse.errors import ConfigError, IntegrityError
from packhouse.packing.layout import IGNORE_INDEX
from packhouse.runtime.confine import run_confined
from packhouse.runtime.disks import temporary_folder
from packhouse.store import OpenVersion
from packhouse.store.contracts import read_batches

__all__ = ["first_split", "read_pack", "read_packs", "trained_mask_of"]


def first_split(opened: OpenVersion) -> str:
    """Return `train`, else the first split there is."""
    splits = opened.manifest.splits()
    return "train" if "train" in splits or not splits else splits[0]


def read_packs(
    opened: OpenVersion, split: str, skip: int, count: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of `count` packs behind `skip`; fetches only the files that hold them.

    Raises:
        ConfigError: there is no such split.
        IntegrityError: a file is damaged.
    """
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


def trained_mask_of(row: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a pack are trained, whichever layout it has."""
    trained = np.zeros(len(row["input_ids"]), dtype=bool)
    if "labels" in row:
        trained[:] = np.asarray(row["labels"]) != IGNORE_INDEX
    for span in row.get("trained_ranges") or ():
        trained[span["start"] : span["end"]] = True
    return trained
