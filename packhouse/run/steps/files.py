"""files: one file of a version, as it will lie in the store.

Data files are cut at packs of their split and read from the gathered shards that hold these;
records and quarantine are read from the shards. A job writes one file, so that files of a version
are written side by side, and one that is there already is not written again.

Exports (files in the formats of other trainers) are made from the written data files, not from the
packs: so they have the very bytes that `packhouse export` writes.
"""

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import ConfigError
from packhouse.load.copies import read_rows
from packhouse.recipe import PublishConfig, Recipe
from packhouse.recipe.publish import ExportConfig
from packhouse.records.tables import read_table
from packhouse.registry import function_of_addon
from packhouse.run.cache.steps import Receipt
from packhouse.run.step import AnyJob, Job, Step, Work
from packhouse.run.steps.data_files import ContentHash, FileCut, cut_files, write_data_file
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.gather import GATHER, PackRange
from packhouse.run.steps.pack import PACK, PackFacts, PackParameters, PlannedSide, Side
from packhouse.run.steps.records import RECORDS, read_placed
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import VALIDATE, may_drop
from packhouse.store.manifest import FileKind
from packhouse.store.publish import LocalFile
from packhouse.system.fingerprint import digest

FILE_SETTINGS = ("file_format", "layout", "max_file_mb", "position_ids")
"""Publish settings that affect file contents; the others say where the files go."""

_FORMAT_KEYS = {"megatron": "megatron.2", "msgpack": "msgpack.2"}
"""Name in the keys of a run of an export format whose bytes changed."""

_RECORDS_PER_FILE = 2**23
_ROWS_PER_GROUP = 2**20  # of records; pyarrow's own
_BAD_ROWS_PER_GROUP = 2**14  # each holds up to 64 KiB of raw bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParameters:
    """A file of packs."""

    cut: FileCut
    publish: PublishConfig
    with_label: bool
    with_weights: bool
    of_preferences: bool
    """True if some answers are bad, and columns have names by which none is trained."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key; the cut has the size of the file."""
        settings = set(FILE_SETTINGS) - {"max_file_mb"}
        key = {
            "of": "data",
            "cut": self.cut.to_json(),
            "publish": self.publish.model_dump(mode="json", include=settings),
            "with_label": self.with_label,
            "with_weights": self.with_weights,
        }
        return key | ({"of_preferences": True} if self.of_preferences else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportParameters:
    """All data in the format of another trainer."""

    format: str
    by_source: bool
    """True if a side has sets by source."""
    shards: int = 1
    """Files of each set."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        return {
            "of": "exports",
            "format": _FORMAT_KEYS.get(self.format, self.format),
            **({"by_source": True} if self.by_source else {}),
            **({"shards": self.shards} if self.shards > 1 else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsParameters:
    """A file of lineage: the records [first, last)."""

    number: int
    first: int
    last: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        rows = {"first": self.first, "last": self.last}
        return {"of": "records", "number": self.number, "rows": rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOutParameters:
    """The file of all bad rows, or of all that the recipe leaves out before they are records."""

    of: Literal["quarantine", "dropped"]
    shards: str
    """Digest of the keys of all tokenized shards; of all validated ones."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        return asdict(self)


FilesParameters = DataParameters | ExportParameters | RecordsParameters | LeftOutParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """What the manifest will say of one file."""

    name: str
    """In the folder of the step."""
    kind: FileKind
    rows: int
    split: str = "all"
    tokens: int = 0
    path: str | None = None
    """Of an export, under `exports/`."""
    source: str | None = None
    """Of a data file, where eval is published by source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesFacts:
    """The files that a job wrote."""

    files: tuple[WrittenFile, ...]
    content: str | None = None
    """Of a data file: sha256 of what its rows say."""


def jobs(
    recipe: Recipe,
    shards: Mapping[str, Sequence[AnyJob]],
    pack: Job[PackParameters],
    packed: PackFacts,
    gathered: Mapping[Side, Sequence[Job[PackRange]]],
) -> tuple[Job[FilesParameters], ...]:
    """Return a job for each file, in the order of the manifest.

    Args:
        recipe: `publish` is read.
        shards: the jobs of validate, format and tokenize.
        pack: the job that planned the packs.
        packed: its facts.
        gathered: the jobs of gather, by side.

    Raises:
        ConfigError: an export has more shards than a set has packs.
    """
    for side, planned in packed.sides.items():
        sets = {set_name(side, name): own["packs"] for name, own in planned.by_source.items()}
        for name, num_packs in (sets or {side: planned.num_packs}).items():
            for export in recipe.publish.exports:
                check_shards(name, num_packs, export.shards)
    data = [job for side in gathered for job in _data_jobs(recipe, side, packed, gathered[side])]
    files: list[Job[FilesParameters]] = [*data]
    files += [
        FILES.job(
            ExportParameters(
                format=export.format,
                by_source=recipe.split.eval_by_source,
                shards=export.shards,
            ),
            inputs=[job.ref for job in data],
            label=f"export {export.format}",
        )
        for export in recipe.publish.exports
    ]
    for number, first in enumerate(range(0, packed.rows_in, _RECORDS_PER_FILE)):
        last = min(first + _RECORDS_PER_FILE, packed.rows_in)
        files.append(
            FILES.job(
                RecordsParameters(number=number, first=first, last=last),
                inputs=[pack.ref],
                label=f"records file {number}",
                size=64 * (last - first),
            )
        )
    everything = [job for jobs in shards.values() for job in jobs]
    files.append(_left_out("quarantine", shards["tokenize"], everything))
    if any(may_drop(job.parameters) for job in shards["validate"]):
        files.append(_left_out("dropped", shards["validate"], shards["validate"]))
    return tuple(files)


def _left_out(
    of: Literal["quarantine", "dropped"], decide: Sequence[AnyJob], reads: Sequence[AnyJob]
) -> Job[FilesParameters]:
    parameters = LeftOutParameters(of=of, shards=digest([job.key for job in decide]))
    refs = [job.ref for job in reads]
    return FILES.job(parameters, inputs=[], label=f"{of} file", also_reads=refs)


def _data_jobs(
    recipe: Recipe, side: Side, packed: PackFacts, gathered: Sequence[Job[PackRange]]
) -> Iterator[Job[FilesParameters]]:
    planned = packed.sides[side]
    publish = recipe.publish
    if recipe.pack.strategy == "none":  # a row is a record: padding collators know no such column
        publish = publish.model_copy(update={"position_ids": False})
    for cut in _cuts(side, planned, publish):
        parameters = DataParameters(
            cut=cut,
            publish=publish,
            with_label=planned.with_label,
            with_weights=planned.with_weights,
            of_preferences=recipe.preferences is not None,
        )
        reads = [(job.parameters, job.ref) for job in gathered]
        yield FILES.job(
            parameters,
            inputs=[ref for each, ref in reads if each.first < cut.last and cut.first < each.last],
            label=f"{side} file {cut.number}",
            size=4 * planned.num_tokens * (cut.last - cut.first) // planned.num_packs,
        )


def _cuts(side: Side, planned: PlannedSide, publish: PublishConfig) -> Iterator[FileCut]:
    """Yield the files of a side, numbered through; those of a source hold no other."""
    # Sources a of 10 packs and b of 4, files of 3 each: a in files 0 to 3, packs [0, 3) to [9, 10),
    # b in files 4 and 5, packs [10, 13) and [13, 14).
    parts: list[tuple[str | None, Mapping[str, int]]] = [*planned.by_source.items()]
    whole = {"packs": planned.num_packs, "tokens": planned.num_tokens}
    first = number = 0
    for source, own in parts or [(None, whole)]:
        for cut in cut_files(side, own["packs"], own["tokens"], publish):
            first_pack, last = first + cut.first, first + cut.last
            yield replace(cut, number=number, first=first_pack, last=last, source=source)
            number += 1
        first += own["packs"]


def local_files(receipts: Iterable[Receipt[FilesFacts]]) -> list[LocalFile]:
    """Return the files of a version, in the order of the manifest."""
    return [
        LocalFile(
            path=written.path(file.name),
            split=file.split,
            rows=file.rows,
            tokens=file.tokens,
            sha256=written.files[file.name].sha256,
            kind=file.kind,
            name=file.path,
            source=file.source,
        )
        for written in receipts
        for file in written.facts.files
    ]


def export_key(export: ExportConfig) -> object:
    """Return the JSON of an export in the keys of a run: its name, where it has no other setting.

    Example:
        >>> [export_key(ExportConfig(format="megatron", shards=n)) for n in (1, 2)]
        ['megatron.2', {'format': 'megatron.2', 'shards': 2}]
    """
    name = _FORMAT_KEYS.get(export.format, export.format)
    return name if export.shards == 1 else {"format": name, "shards": export.shards}


def check_shards(name: str, num_rows: int, num_shards: int) -> None:
    """Refuse more files than a set has rows.

    Raises:
        ConfigError: says how many rows the set has.

    Example:
        >>> check_shards("eval", num_rows=3, num_shards=3)
    """
    if num_shards > max(num_rows, 1):
        raise ConfigError(
            f"'{name}' has {num_rows:,} rows, which make at most as many shards, not "
            f"{num_shards:,}; take fewer, or cut one split alone: `packhouse export --split train "
            "--shards N`"
        )


def set_name(split: str, source: str | None) -> str:
    """Name of an export's files: those of a source have its name where eval is by source.

    Example:
        >>> set_name("train", None), set_name("eval", "chats")
        ('train', 'eval-chats')
    """
    return split if source is None else f"{split}-{source}"


def compute(work: Work[FilesParameters], folder: Path) -> FilesFacts:
    """Write the file that the job says; of an export, all files of one format."""
    match work.parameters:
        case DataParameters() as parameters:
            return _write_data(work, parameters, folder)
        case ExportParameters() as parameters:
            return _write_exports(work, parameters, folder)
        case RecordsParameters() as parameters:
            return _write_records(work, parameters, folder)
        case LeftOutParameters(of=of):
            return _write_left_out(work, of, folder)


def _write_data(
    work: Work[FilesParameters], parameters: DataParameters, folder: Path
) -> FilesFacts:
    cut, parts = parameters.cut, []
    for receipt in work.inputs(GATHER):
        packs = receipt.facts.packs
        low, high = max(cut.first, packs.first), min(cut.last, packs.last)
        table = read_table(receipt.path("packs.arrow"))
        parts.append(table.slice(low - packs.first, high - low))
    content = ContentHash()
    file = write_data_file(
        pa.concat_tables(parts),
        cut,
        folder,
        parameters.publish,
        content,
        with_label=parameters.with_label,
        with_weights=parameters.with_weights,
        of_preferences=parameters.of_preferences,
    )
    written = WrittenFile(
        name=file.path.name,
        kind="data",
        rows=file.rows,
        split=file.split,
        tokens=file.tokens,
        source=cut.source,
    )
    return FilesFacts(files=(written,), content=content.hexdigest())


def _write_exports(
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
    pack, write_export = work.recipe.pack, function_of_addon("write_export")
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


def _write_records(
    work: Work[FilesParameters], parameters: RecordsParameters, folder: Path
) -> FilesFacts:
    """Write lineage: a row for each record, with its raw row, its outcome and its place."""
    packed, rows = work.input(PACK), (parameters.first, parameters.last)
    name = f"records-{parameters.number:05d}.parquet"
    batches = read_placed(packed, work.workspace, rows, _ROWS_PER_GROUP)
    tables = (pa.Table.from_batches([batch]) for batch in batches)
    _write_parquet(folder / name, RECORDS, tables, _ROWS_PER_GROUP)
    return FilesFacts(
        files=(WrittenFile(name=name, kind="records", rows=parameters.last - parameters.first),)
    )


def _write_left_out(
    work: Work[FilesParameters], of: Literal["quarantine", "dropped"], folder: Path
) -> FilesFacts:
    """Write bad rows with their raw bytes, or what the recipe leaves out; none: no file."""
    receipts = [*work.inputs(VALIDATE), *work.inputs(FORMAT), *work.inputs(TOKENIZE)]
    name, rows_per_group = {
        "quarantine": ("quarantined.arrow", _BAD_ROWS_PER_GROUP),
        "dropped": ("dropped.arrow", _ROWS_PER_GROUP),
    }[of]
    parts = [read_table(receipt.path(name)) for receipt in receipts if name in receipt.files]
    if not parts:
        return FilesFacts(files=())
    table, path = pa.concat_tables(parts), folder / f"{of}.parquet"
    starts = range(0, table.num_rows, rows_per_group)
    groups = (table.slice(start, rows_per_group).combine_chunks() for start in starts)
    _write_parquet(path, table.schema, groups, rows_per_group)
    return FilesFacts(files=(WrittenFile(name=path.name, kind=of, rows=table.num_rows),))


def _write_parquet(
    path: Path, schema: pa.Schema, groups: Iterable[pa.Table], rows_per_group: int
) -> None:
    """Write a row group per table: bytes do not depend on how its rows lay in shards."""
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, write_page_checksum=True
    ) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=rows_per_group)


FILES = Step(
    name="files",
    title="Write files of the version, as they will lie in the store.",
    version="1",
    libraries=("orjson", "pyarrow"),
    facts=FilesFacts,
    compute=compute,
)
