"""files: one file of a version, as it will lie in the store.

Data files are cut at packs of their split and read from the gathered shards that hold these;
records and quarantine are read from the shards. A job writes one file, so that files of a version
are written side by side, and one that is there already is not written again.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.data_files import ContentHash, DataFile, FileCut, write_data_file
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps.exporting import write_exports
from packhouse.steps.records import RECORDS, read_records
from packhouse.steps.shard_io import inputs_of
from packhouse.tables import QUARANTINED
from packhouse.workspace import Workspace, read_table

__all__ = ["compute"]

_ROWS_PER_GROUP = 2**20  # of records; pyarrow's own
_BAD_ROWS_PER_GROUP = 2**14  # each holds up to 64 KiB of raw bytes


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write the file that the job says; `files` says what the manifest will say of each."""
    return _KINDS[job.parts["of"]](job, recipe, workspace, folder)


def _data(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    cut = FileCut(**job.parts["cut"])
    parts = []
    for receipt in inputs_of(job, workspace, "gather"):
        first, last = receipt.facts["packs"]["first"], receipt.facts["packs"]["last"]
        low, high = max(cut.first, first), min(cut.last, last)
        parts.append(read_table(receipt.path("packs.arrow")).slice(low - first, high - low))
    content = ContentHash()
    rows = pa.concat_tables(parts)
    columns = {name: job.parts[name] for name in ("with_label", "with_weights")}
    file = write_data_file(rows, cut, folder, recipe.publish, content, **columns)
    entry = _entry(file.path, "data", file.rows, split=file.split, tokens=file.tokens)
    return {"files": [entry], "content": content.hexdigest()}


def _exports(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """The rows of the data files in another trainer's format."""
    files = [_data_file(receipt) for receipt in inputs_of(job, workspace, "files")]
    return {"files": write_exports(files, [job.parts["format"]], folder)}


def _data_file(receipt: Receipt) -> DataFile:
    (entry,) = receipt.facts["files"]
    return DataFile(
        path=receipt.path(entry["name"]),
        split=entry["split"],
        rows=entry["rows"],
        tokens=entry["tokens"],
    )


def _records(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Lineage: one row per record, with its raw row, its side and what became of it."""
    (packed,) = inputs_of(job, workspace, "pack")
    rows = job.parts["rows"]["first"], job.parts["rows"]["last"]
    path = folder / f"records-{job.parts['number']:05d}.parquet"
    batches = read_records(packed, workspace, rows, block=_ROWS_PER_GROUP)
    _write_parquet(path, RECORDS, map(_as_table, batches), _ROWS_PER_GROUP)
    return {"files": [_entry(path, "records", rows[1] - rows[0])]}


def _quarantine(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """All bad rows of the run with their raw bytes, so that they can be mended; none: no file."""
    receipts = [r for s in ("validate", "format", "tokenize") for r in inputs_of(job, workspace, s)]
    name = "quarantined.arrow"
    parts = [read_table(r.path(name)) for r in receipts if name in r.files]
    if not parts:
        return {"files": []}
    table = pa.concat_tables(parts)
    path = folder / "quarantine.parquet"
    starts = range(0, table.num_rows, _BAD_ROWS_PER_GROUP)
    groups = (table.slice(start, _BAD_ROWS_PER_GROUP).combine_chunks() for start in starts)
    _write_parquet(path, QUARANTINED, groups, _BAD_ROWS_PER_GROUP)
    return {"files": [_entry(path, "quarantine", table.num_rows)]}


_KINDS: dict[str, Callable[[Job, Recipe, Workspace, Path], dict[str, Any]]] = {
    "data": _data,
    "exports": _exports,
    "records": _records,
    "quarantine": _quarantine,
}


def _as_table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _write_parquet(
    path: Path, schema: pa.Schema, groups: Iterable[pa.Table], rows_per_group: int
) -> None:
    """Write a row group per table: bytes do not depend on how its rows lay in shards."""
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, write_page_checksum=True
    ) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=rows_per_group)


def _entry(
    path: Path, kind: str, rows: int, *, split: str = "all", tokens: int = 0
) -> dict[str, Any]:
    return {"name": path.name, "kind": kind, "split": split, "rows": rows, "tokens": tokens}
