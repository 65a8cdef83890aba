"""files: write the files of a version, one job per file.

A data file gathers the tokens of its packs from the input shards, checks and audits them, and
writes them, one row group at a time. With one job per file, the files of a version are written in
parallel, and a file that is already in the cache is not written again.

The same packs give the same bytes: files and row groups end at row numbers computed from totals,
never where a batch happened to end.

Exports (files for other trainers) are made from the written data files, not from the packs, so they
have the same bytes that `packhouse export` writes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse import auditing, pack
from packhouse.auditing.shard_audit import audit_packs
from packhouse.auditing.token_checks import blank_tokens
from packhouse.pack.gather_tokens import GatherTally
from packhouse.pack.pack_columns import preference_names, published_schema, to_layout
from packhouse.recipe import PublishConfig, Recipe
from packhouse.records.table_schemas import RECORDS, read_table, write_batches
from packhouse.registry import function_of_addon
from packhouse.run.packs_and_records import read_packs, read_placed
from packhouse.run.step import AnyJob, Job, JobContext, Step
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.pack import PACK, SIDES, PackFacts, PackParameters, PlannedSide, Side
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import QUARANTINE, VALIDATE, ValidateParameters, may_drop
from packhouse.store.commit import LocalFile
from packhouse.store.manifest import FileKind
from packhouse.system.fingerprint import digest
from packhouse.system.progress import advance
from packhouse.tokenize.encoders import read_pipeline

# Publish settings that affect file contents; the others affect only where files go.
FILE_SETTINGS = ("file_format", "layout", "max_file_mb", "position_ids")

# About 8 MB of ids and labels: a stream holds a row group for each of its lanes, decoded.
_TOKENS_PER_GROUP = 2**21
_BYTES_PER_TOKEN = {"labels": 8, "compact": 4}
_RECORDS_PER_FILE = 2**23  # at 64 bytes per record, writing a file reads 512 MiB
_ROWS_PER_GROUP = 2**20  # row group of records; pyarrow's default
_BAD_ROWS_PER_GROUP = 2**14  # small, because a bad row has up to 64 KiB of raw bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCut:
    """Packs of a split that go into one file."""

    split: Side
    number: int
    """Number of the file within its split."""
    first: int
    last: int
    """Packs [first, last) of the split."""
    rows_per_group: int
    """Packs per row group."""
    source: str | None = None
    """Source of all rows, if eval is published by source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParameters:
    """Parameters of a data file."""

    cut: FileCut
    publish: PublishConfig
    with_label: bool
    """True if a row of the split has a label."""
    with_weights: bool = False
    """True if a record of the version has a loss weight other than 0 and 1."""
    of_preferences: bool = False
    """True for preference data, whose columns have names that no SFT trainer reads: a bad answer
    must not be trained by accident."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key; `cut` already reflects `max_file_mb`."""
        settings = set(FILE_SETTINGS) - {"max_file_mb"}
        return {
            "of": "data",
            "cut": {name: value for name, value in asdict(self.cut).items() if value is not None},
            "publish": self.publish.model_dump(mode="json", include=settings),
            "with_label": self.with_label,
            "with_weights": self.with_weights,
            **({"of_preferences": True} if self.of_preferences else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportParameters:
    """Parameters of an export: all data in the format of another trainer."""

    format: str
    by_source: bool
    """True if eval has a separate set per source."""
    shards: int = 1
    """Number of files per set."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        return {
            "of": "exports",
            "format": self.format,
            **({"by_source": True} if self.by_source else {}),
            **({"shards": self.shards} if self.shards > 1 else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsParameters:
    """Parameters of a records file: lineage of the records [first, last)."""

    number: int
    first: int
    last: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        rows = {"first": self.first, "last": self.last}
        return {"of": "records", "number": self.number, "rows": rows}


LeftOut = Literal["quarantine", "dropped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOutParameters:
    """Parameters of the quarantine file, or of the file of rows dropped before they are records."""

    of: LeftOut
    shards: str
    """Digest of the keys of all tokenized shards (quarantine) or validated shards (dropped)."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        return asdict(self)


FilesParameters = DataParameters | ExportParameters | RecordsParameters | LeftOutParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """Entry of one file for the manifest."""

    name: str
    """File name in the folder of the step."""
    kind: FileKind
    rows: int
    split: str = "all"
    tokens: int = 0
    path: str | None = None
    """Path under `exports/`, for an export."""
    source: str | None = None
    """Source of a data file, if eval is published by source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesFacts:
    """Files that a job wrote."""

    files: tuple[WrittenFile, ...]
    content: str | None = None
    """sha256 of the logical rows, for a data file."""
    tally: GatherTally | None = None
    """Counts of the packs of a data file."""
    audit: Mapping[str, int] = field(default_factory=dict)
    """Findings in these packs; see `audit_packs`."""


def jobs(
    recipe: Recipe,
    validate: Sequence[Job[ValidateParameters]],
    format_: Sequence[AnyJob],
    tokenize: Sequence[AnyJob],
    pack: Job[PackParameters],
    packed: PackFacts,
) -> tuple[Job[FilesParameters], ...]:
    """Return one job per file, in the order of the manifest.

    Args:
        recipe: recipe; reads `publish`.
        validate: jobs that read the shards.
        format_: jobs that render them.
        tokenize: jobs that tokenize them.
        pack: pack job.
        packed: facts of the pack job.

    Raises:
        ConfigError: an export has more shards than a set has packs.
    """
    if recipe.publish.exports:
        function_of_addon("check_published_exports")(recipe.publish.exports, packed)
    files: list[Job[FilesParameters]] = []
    for side in SIDES:
        files += data_jobs(recipe, side, packed.sides[side], pack)
    data = [job.ref for job in files]
    for export in recipe.publish.exports:
        parameters = ExportParameters(
            format=export.format, by_source=recipe.split.eval_by_source, shards=export.shards
        )
        files.append(FILES.job(parameters, inputs=data, label=f"export {export.format}"))
    for number, first in enumerate(range(0, packed.rows_in, _RECORDS_PER_FILE)):
        last = min(first + _RECORDS_PER_FILE, packed.rows_in)
        records = RecordsParameters(number=number, first=first, last=last)
        label, size = f"records file {number}", 64 * (last - first)
        files.append(FILES.job(records, inputs=[pack.ref], label=label, size=size))
    files.append(_left_out("quarantine", tokenize, [*validate, *format_, *tokenize]))
    if any(may_drop(job.parameters) for job in validate):
        files.append(_left_out("dropped", validate, validate))
    return tuple(files)


def _left_out(
    of: LeftOut, decide: Sequence[AnyJob], reads: Sequence[AnyJob]
) -> Job[FilesParameters]:
    parameters = LeftOutParameters(of=of, shards=digest([job.key for job in decide]))
    refs = [job.ref for job in reads]
    return FILES.job(parameters, inputs=[], label=f"{of} file", also_reads=refs)


def data_jobs(
    recipe: Recipe, side: Side, planned: PlannedSide, pack: Job[PackParameters]
) -> Iterator[Job[FilesParameters]]:
    """Yield the jobs of the data files of a side, numbered consecutively."""
    publish = recipe.publish
    # With strategy `none` a row is one record, for padding collators, which expect no position_ids.
    if recipe.pack.strategy == "none":
        publish = publish.model_copy(update={"position_ids": False})
    # No file mixes two sources if eval is published by source. Source a has 10 packs, b has 4,
    # files hold 3: a is in files 0 to 3 (packs [0, 3) to [9, 10)), b in files 4 and 5 (packs
    # [10, 13) and [13, 14)).
    whole = {"packs": planned.num_packs, "tokens": planned.num_tokens}
    first = number = 0
    for source, own in planned.by_source.items() or [(None, whole)]:
        for part in cut_files(side, own["packs"], own["tokens"], publish):
            cut = replace(
                part,
                number=number,
                first=first + part.first,
                last=first + part.last,
                source=source,
            )
            yield FILES.job(
                DataParameters(
                    cut=cut,
                    publish=publish,
                    with_label=planned.with_label,
                    with_weights=planned.with_weights,
                    of_preferences=recipe.preferences is not None,
                ),
                inputs=[pack.ref],
                label=f"{side} file {number}",
                size=4 * planned.num_tokens * (cut.last - cut.first) // planned.num_packs,
            )
            number += 1
        first += own["packs"]


def cut_files(split: Side, num_packs: int, num_tokens: int, config: PublishConfig) -> list[FileCut]:
    """Cut a split into files of about `config.max_file_mb` MiB of token data at most.

    Example:
        >>> cuts = cut_files("train", 10, 2**19, PublishConfig(max_file_mb=1))
        >>> [(cut.number, cut.first, cut.last) for cut in cuts]
        [(0, 0, 3), (1, 3, 6), (2, 6, 9), (3, 9, 10)]
    """
    if not num_packs:
        return []
    # 1 MiB at 8 bytes a token is 131,072 tokens per file, so 2**19 tokens take 4 files. With 10
    # packs, that is 3 packs per file: 3, 3, 3 and 1.
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


def local_files(work: JobContext[Any]) -> list[LocalFile]:
    """Return the files that the publish job reads, in the order of the manifest."""
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
        for written in work.inputs(FILES)
        for file in written.facts.files
    ]


def compute(work: JobContext[FilesParameters], folder: Path) -> FilesFacts:
    """Write the file of the job, or all files of one export format.

    A records file has one row per record with its raw row, outcome and place in the packs. The
    quarantine file has the raw bytes of the bad rows; it is not written if there are none.
    """
    match work.parameters:
        case DataParameters() as parameters:
            return _write_packs(work, parameters, folder)
        case ExportParameters() as parameters:
            write = function_of_addon("write_published_export")
            return cast("FilesFacts", write(work, parameters, folder))
        case RecordsParameters(number=number, first=first, last=last):
            name, rows = f"records-{number:05d}.parquet", last - first
            batches = read_placed(work.input(PACK), work.workspace, (first, last), _ROWS_PER_GROUP)
            _write_parquet(folder / name, RECORDS, batches)
            return FilesFacts(files=(WrittenFile(name=name, kind="records", rows=rows),))
        case LeftOutParameters(of=of):
            receipts = [*work.inputs(VALIDATE), *work.inputs(FORMAT), *work.inputs(TOKENIZE)]
            name = QUARANTINE if of == "quarantine" else "dropped.arrow"
            parts = [read_table(each.path(name)) for each in receipts if name in each.files]
            if not parts:
                return FilesFacts(files=())
            table, path = pa.concat_tables(parts), folder / f"{of}.parquet"
            size = _BAD_ROWS_PER_GROUP if of == "quarantine" else _ROWS_PER_GROUP
            # Row groups end where the totals say, not where a shard's part ended.
            starts = range(0, table.num_rows, size)
            groups = (table.slice(start, size).combine_chunks() for start in starts)
            _write_parquet(path, table.schema, (group.to_batches()[0] for group in groups))
            return FilesFacts(files=(WrittenFile(name=path.name, kind=of, rows=table.num_rows),))


def _write_packs(
    work: JobContext[FilesParameters], parameters: DataParameters, folder: Path
) -> FilesFacts:
    """Gather, check and audit the packs of a data file, and write it."""
    cut, tally, counts = parameters.cut, GatherTally(), Counter[str]()
    pipeline = read_pipeline(work.load_tokenizer().backend)
    is_control, is_blank = pipeline.is_control, blank_tokens(pipeline)

    def audited() -> Iterator[pa.RecordBatch]:
        packs = cut.first, cut.last
        for batch in read_packs(work, cut.split, packs, cut.rows_per_group, tally):
            advance(batch.num_rows / (cut.last - cut.first))
            counts.update(audit_packs(batch, is_control, is_blank))
            yield batch

    written = write_data_file(audited(), parameters, folder)
    return replace(written, tally=tally, audit=dict(counts))


def write_data_file(
    packs: Iterable[pa.RecordBatch], parameters: DataParameters, folder: Path
) -> FilesFacts:
    """Write one file of a split, `<split>-<number>.<ending>`.

    Args:
        packs: one batch per row group, schema `table_schemas.PACKED`.
        parameters: the file, its layout and format.
        folder: output folder.
    """
    cut, config = parameters.cut, parameters.publish
    described = config.layout, config.position_ids, parameters.with_label, parameters.with_weights
    layout = published_schema(*described)
    schema = published_schema(*described, of_preferences=parameters.of_preferences)
    content, num_tokens = hashlib.sha256(), 0

    def groups() -> Iterator[pa.RecordBatch]:
        nonlocal num_tokens
        for group in packs:
            num_tokens += len(group["input_ids"].flatten())
            batch = to_layout(group, layout)
            batch = preference_names(batch) if parameters.of_preferences else batch
            # Not over the bytes of the file: each release of pyarrow writes its own `created_by`
            # into it.
            content.update(f"{cut.split}:{batch.num_rows}".encode())
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                content.update(name.encode())
                for part in _flat(column):
                    content.update(part)
            yield batch

    path = folder / f"{cut.split}-{cut.number:05d}.{config.file_format}"
    match config.file_format:
        case "parquet":
            # Token ids repeat too little for dictionaries: 2.56 bytes per token with labels instead
            # of 2.63 with pyarrow's defaults, at twice the speed.
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
        rows=cut.last - cut.first,
        split=cut.split,
        tokens=num_tokens,
        source=cut.source,
    )
    return FilesFacts(files=(written,), content=content.hexdigest())


def _flat(column: pa.Array) -> Iterator[bytes]:
    """Yield the logical content of a column as bytes: list lengths, then values, no padding.

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
        # Record ids are hex digits, so none contains the separator.
        yield "\x00".join(column.to_pylist()).encode()
    else:  # loss weights are never null
        column = column.fill_null(-(2**31)) if column.null_count else column
        yield column.to_numpy(zero_copy_only=False).data


def _write_parquet(
    path: Path, schema: pa.Schema, groups: Iterable[pa.RecordBatch], **options: Any
) -> None:
    """Write one row group per batch, so that the bytes do not depend on shard boundaries."""
    # Levels -1 to -5 take 3 to 14% less time, but 2.8 to 3.4 bytes per token instead of 2.56.
    # BYTE_STREAM_SPLIT is 22% faster to write, but needs readers from 2024.
    # Without page checksums, readers would not notice a flipped bit.
    # By default, pyarrow encodes 1,024 values at a time, which takes 12% longer.
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
        write_batch_size=2**16,
        **options,
    ) as writer:
        for group in groups:
            writer.write_batch(group, row_group_size=group.num_rows)


FILES = Step(
    name="files",
    title="Write the files of the version.",
    version=f"2.{pack.VERSION}.{auditing.VERSION}",
    libraries=("numpy", "orjson", "pyarrow"),
    facts=FilesFacts,
    compute=compute,
)
