"""files: one file of a version, as it will lie in the store.

Data files are cut at packs of their split and read from the gathered shards that hold these;
records and quarantine are read from the shards. A job writes one file, so that files of a version
are written side by side, and one that is there already is not written again.

Same packs, same bytes: files and row groups are cut at row numbers computed from totals, never by
how the rows happened to arrive. Parquet of packs is zstd-1 without dictionaries (token ids do not
repeat enough to pay for one: 2.56 bytes per token with labels against 2.63 with pyarrow's defaults,
and twice as fast to write); all has page checksums, which catch a flipped bit that readers pass on.

Exports (files in the formats of other trainers) are made from the written data files, not from the
packs: so they have the very bytes that `packhouse export` writes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packhouse.pack.layout import preference_names, published_schema, to_layout
from packhouse.recipe import PublishConfig, Recipe
from packhouse.recipe.settings import ExportConfig
from packhouse.records.tables import read_table, write_batches
from packhouse.registry import function_of_addon
from packhouse.run.cache import Receipt
from packhouse.run.step import AnyJob, Job, Step, Work
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.gather import GATHER, PackRange
from packhouse.run.steps.pack import (
    PACK,
    RECORDS,
    PackFacts,
    PackParameters,
    PlannedSide,
    Side,
    read_placed,
)
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import VALIDATE, may_drop
from packhouse.store.manifest import FileKind
from packhouse.store.publish import LocalFile
from packhouse.system.fingerprint import digest
from packhouse.system.progress import advance

FILE_SETTINGS = ("file_format", "layout", "max_file_mb", "position_ids")
"""Publish settings that affect file contents; the others say where the files go."""

_FORMAT_KEYS = {"megatron": "megatron.2", "msgpack": "msgpack.2"}
"""Name in the keys of a run of an export format whose bytes changed."""

_TOKENS_PER_GROUP = 2**21
_BYTES_PER_TOKEN = {"labels": 8, "compact": 4}
_RECORDS_PER_FILE = 2**23  # at 64 bytes a record, 512 MiB are read for a file
_ROWS_PER_GROUP = 2**20  # of records; pyarrow's own
_BAD_ROWS_PER_GROUP = 2**14  # each holds up to 64 KiB of raw bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCut:
    """Which packs of a split one file holds."""

    split: str
    number: int
    """Of the file in its split."""
    first: int
    last: int
    """Packs [first, last) of the split."""
    rows_per_group: int
    """Packs of a row group."""
    source: str | None = None
    """The source of all its rows, where eval is published by source."""

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON; without a source that it has not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParameters:
    """A file of packs."""

    cut: FileCut
    publish: PublishConfig
    with_label: bool
    """True if a row of the split has a label."""
    with_weights: bool = False
    """True if a record of the version has a loss weight other than 0 and 1."""
    of_preferences: bool = False
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
    if recipe.publish.exports:
        function_of_addon("check_published_exports")(recipe.publish.exports, packed)
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
        packs = [(job.parameters.first, job.parameters.last, job.ref) for job in gathered]
        yield FILES.job(
            parameters,
            inputs=[ref for first, last, ref in packs if first < cut.last and cut.first < last],
            label=f"{side} file {cut.number}",
            size=4 * planned.num_tokens * (cut.last - cut.first) // planned.num_packs,
        )


def cut_files(split: str, num_packs: int, num_tokens: int, config: PublishConfig) -> list[FileCut]:
    """Cut a split into files of at most `config.max_file_mb` MiB of token data each, about.

    Example:
        >>> cuts = cut_files("train", 10, 2**19, PublishConfig(max_file_mb=1))
        >>> [(cut.number, cut.first, cut.last) for cut in cuts]
        [(0, 0, 3), (1, 3, 6), (2, 6, 9), (3, 9, 10)]
    """
    if not num_packs:
        return []
    # 1 MiB at 8 bytes a token: 131,072 tokens a file. 2**19 in 10 packs take 4: 3, 3, 3 and 1.
    limit = config.max_file_mb * 2**20 // _BYTES_PER_TOKEN[config.layout]
    rows_per_file = -(-num_packs // max(1, -(-num_tokens // limit)))
    rows_per_group = max(1, num_packs * _TOKENS_PER_GROUP // num_tokens)
    return [
        FileCut(
            split=split,
            number=number,
            first=first,
            last=min(first + rows_per_file, num_packs),
            rows_per_group=rows_per_group,
        )
        for number, first in enumerate(range(0, num_packs, rows_per_file))
    ]


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


def compute(work: Work[FilesParameters], folder: Path) -> FilesFacts:
    """Write the file that the job says; of an export, all files of one format."""
    match work.parameters:
        case DataParameters() as parameters:
            return _write_data(work, parameters, folder)
        case ExportParameters() as parameters:
            written: FilesFacts = function_of_addon("write_published_export")(
                work, parameters, folder
            )
            return written
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
    return write_data_file(pa.concat_tables(parts), parameters, folder)


def write_data_file(rows: pa.Table, parameters: DataParameters, folder: Path) -> FilesFacts:
    """Write one file of a split, `<split>-<number>.<ending>`.

    Args:
        rows: the packs of its cut, schema `tables.PACKED`; mapped from disk, and read a row group
            at a time.
        parameters: which file it is, its layout and format.
        folder: where to write it.
    """
    cut, config = parameters.cut, parameters.publish
    described = config.layout, config.position_ids, parameters.with_label, parameters.with_weights
    layout = published_schema(*described)
    schema = published_schema(*described, of_preferences=parameters.of_preferences)
    content = hashlib.sha256()

    def groups() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows.num_rows, cut.rows_per_group):
            group = rows.slice(start, cut.rows_per_group).combine_chunks()
            advance(group.num_rows / rows.num_rows)
            batch = to_layout(group.to_batches()[0], layout)
            batch = preference_names(batch) if parameters.of_preferences else batch
            content.update(f"{cut.split}:{batch.num_rows}".encode())
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                content.update(name.encode())
                for part in _flat(column):
                    content.update(part)
            yield batch

    path = folder / f"{cut.split}-{cut.number:05d}.{config.file_format}"
    match config.file_format:
        case "parquet":
            _write_parquet(path, schema, groups(), use_dictionary=False, write_statistics=False)
        case "arrow":
            write_batches(path, schema, groups())
        case "jsonl":
            with path.open("wb") as file:
                for batch in groups():
                    for row in batch.to_pylist():
                        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    written = WrittenFile(
        name=path.name,
        kind="data",
        rows=rows.num_rows,
        split=cut.split,
        tokens=pc.sum(pc.list_value_length(rows["input_ids"])).as_py() or 0,
        source=cut.source,
    )
    return FilesFacts(files=(written,), content=content.hexdigest())


def _flat(column: pa.Array) -> Iterator[bytes]:
    """Logical content of a column as bytes: lengths of lists, then values, without padding.

    Example:
        >>> lists = pa.array([[7], [8, 9]], pa.list_(pa.int32()))
        >>> [part.tolist() for part in _flat(lists)]  # memory views
        [[1, 2], [7, 8, 9]]
    """
    if pa.types.is_list(column.type):
        yield from _flat(column.value_lengths())
        yield from _flat(column.flatten())
    elif pa.types.is_struct(column.type):
        for child in column.flatten():
            yield from _flat(child)
    elif pa.types.is_string(column.type):
        yield "\x00".join(column.to_pylist()).encode()
    elif pa.types.is_floating(column.type):
        yield column.to_numpy(zero_copy_only=False).data  # loss weights, never null
    else:
        yield column.fill_null(-(2**31)).to_numpy(zero_copy_only=False).data


def _write_records(
    work: Work[FilesParameters], parameters: RecordsParameters, folder: Path
) -> FilesFacts:
    """Write lineage: a row for each record, with its raw row, its outcome and its place."""
    packed, rows = work.input(PACK), (parameters.first, parameters.last)
    name = f"records-{parameters.number:05d}.parquet"
    batches = read_placed(packed, work.workspace, rows, _ROWS_PER_GROUP)
    _write_parquet(folder / name, RECORDS, batches)
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
    _write_parquet(path, table.schema, (group.to_batches()[0] for group in groups))
    return FilesFacts(files=(WrittenFile(name=path.name, kind=of, rows=table.num_rows),))


def _write_parquet(
    path: Path, schema: pa.Schema, groups: Iterable[pa.RecordBatch], **options: Any
) -> None:
    """Write a row group per batch: bytes do not depend on how its rows lay in shards."""
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, write_page_checksum=True, **options
    ) as writer:
        for group in groups:
            writer.write_batch(group, row_group_size=group.num_rows)


FILES = Step(
    name="files",
    title="Write files of the version, as they will lie in the store.",
    version="1",
    libraries=("orjson", "pyarrow"),
    facts=FilesFacts,
    compute=compute,
)
