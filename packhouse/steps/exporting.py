"""Other trainers' formats as files of a version, in the very bytes that `packhouse export` writes.

They are made from the written data files, not from the packs, because both ways then read the same
batches. Costs another write of all tokens for each format; see `packhouse.exports`.
"""

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packhouse.data_files import DataFile
from packhouse.exports import write_export

__all__ = ["write_exports"]


def write_exports(
    files: Sequence[DataFile], formats: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Write the splits of data files in each format, flat in `folder`, as a step's files must lie.

    Args:
        files: data files, in order of rows within each split.
        formats: of `packhouse.exports.FORMATS`.
        folder: the folder of the step.

    Returns:
        What the version says of each: `name` in `folder`, and `path` under `exports/`.

    Raises:
        ConfigError: a format cannot hold the rows' class.
    """
    from packhouse.loaders.versions import read_rows

    entries = []
    for each in formats:
        staged = folder / f".{each}"
        staged.mkdir()
        for split, parts in itertools.groupby(files, key=lambda file: file.split):
            rows = itertools.chain.from_iterable(read_rows(part.path) for part in parts)
            for path in write_export(rows, each, split, staged):
                inner = path.relative_to(staged).as_posix()
                name = f"{each}-{inner.replace('/', '-')}"
                os.replace(path, folder / name)
                entries.append(_entry(name, f"{each}/{inner}", split))
        shutil.rmtree(staged)
    return entries


def _entry(name: str, path: str, split: str) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "exports",
        "path": path,
        "split": split,
        "rows": 0,  # counted once, with the data files
        "tokens": 0,
    }
