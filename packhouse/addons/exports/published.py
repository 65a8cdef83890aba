"""Exports that a version carries: made by its run, from the data files that it publishes."""

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from packhouse.addons.exports.writing import check_shards, set_name, write_export
from packhouse.load.copies import read_rows
from packhouse.recipe.publish import ExportConfig
from packhouse.run.step import Work
from packhouse.run.steps.files import (
    FILES,
    ExportParameters,
    FilesFacts,
    FilesParameters,
    WrittenFile,
)
from packhouse.run.steps.pack import PackFacts


def check_published_exports(exports: Sequence[ExportConfig], packed: PackFacts) -> None:
    """Refuse an export of more shards than a set has packs.

    Raises:
        ConfigError: says how many packs the set has.
    """
    for side, planned in packed.sides.items():
        sets = {set_name(side, name): own["packs"] for name, own in planned.by_source.items()}
        for name, num_packs in (sets or {side: planned.num_packs}).items():
            for export in exports:
                check_shards(name, num_packs, export.shards)


def write_published_export(
    work: Work[FilesParameters], parameters: ExportParameters, folder: Path
) -> FilesFacts:
    """Write each set in the format, flat in the folder, as the files of a step must lie.

    Raises:
        ConfigError: the format cannot hold the rows' class.
    """
    data = [(receipt.facts.files[0], receipt) for receipt in work.inputs(FILES)]
    staged = folder / ".export"
    staged.mkdir()
    written = []
    pack = work.recipe.pack
    by_set = itertools.groupby(data, key=lambda pair: (pair[0].split, pair[0].source))
    for (split, source), files in by_set:
        own = list(files)
        paths = [receipt.path(file.name) for file, receipt in own]
        for path in write_export(
            itertools.chain.from_iterable(map(read_rows, paths)),
            parameters.format,
            set_name(split, source),
            staged,
            pack.pad_record_to_multiple_of,
            pack.seq_len,
            preferences=work.recipe.preferences,
            num_shards=parameters.shards,
            num_rows=sum(file.rows for file, _ in own),
        ):
            inner = path.relative_to(staged).as_posix()
            name = f"{parameters.format}-{inner.replace('/', '-')}"
            os.replace(path, folder / name)
            home = f"{parameters.format}/{inner}"  # rows and tokens are counted with the data files
            written.append(WrittenFile(name=name, kind="exports", rows=0, split=split, path=home))
    shutil.rmtree(staged)
    return FilesFacts(files=tuple(written))
