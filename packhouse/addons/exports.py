"""Write versions in the formats of trainers, each with the label shift that its reader expects.

| format | for | labels |
|---|---|---|
| `trl` | TRL, transformers | unshifted, -100; `seq_lengths` and `position_ids` |
| `trl`, for preferences | TRL's DPO and KTO | `prompt_ids`, `chosen_ids`, `rejected_ids` |
| `axolotl` | Axolotl, pretokenized | unshifted, -100; one record per row, packed by Axolotl |
| `megatron` | Megatron-Bridge, packed Parquet | `loss_mask` at the predicting token |
| `mds` | MosaicML Streaming | unshifted, -100 |
| `msgpack`, `jsonl` | small collate tools, one input file | unshifted, -100; `position_ids` |
| `arrow` | `datasets.Dataset.from_file` | unshifted, -100; all columns |

If a version has a split by source (`split.eval_by_source`), each source becomes a separate set in
every format: `eval-chats.parquet`, `eval-mmlu.parquet`.

An export is written next to its destination and then moved, so it is complete or absent. Its
`.packhouse.json` records the version and the sha256 of each file. A version published with
`publish.exports` already contains these files, and its export is a verified copy of them.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.cli import cache_option, json_option, number_option
from packhouse.errors import ConfigError, IntegrityError, VersionNotFoundError
from packhouse.load.mapped_rows import cache_folder, preference_columns, read_rows, verified_file
from packhouse.pack.pack_columns import IGNORE_INDEX, preference_names
from packhouse.pack.strategies import round_up
from packhouse.recipe.sections import ExportConfig, ExportFormat
from packhouse.records.arrays import count_up, flat_list, list_array
from packhouse.run.step import JobContext
from packhouse.run.steps.files import (
    FILES,
    ExportParameters,
    FilesFacts,
    FilesParameters,
    WrittenFile,
)
from packhouse.run.steps.pack import PackFacts
from packhouse.store import OpenVersion
from packhouse.store.manifest import ExportSettings, FileEntry
from packhouse.store.version_reader import open_address
from packhouse.system.fingerprint import file_sha256
from packhouse.system.plugins import import_extra
from packhouse.system.terminal import echo
from packhouse.system.wording import near_name
from packhouse.system.worker import at, run_in_worker

FORMATS: tuple[str, ...] = get_args(ExportFormat)
"""Format names that `export_version` accepts."""

MARKER = ".packhouse.json"
"""Hidden, so that `datasets.load_dataset(folder)` does not read it as data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Files that an export wrote.

    Example:
        >>> Export(folder=Path("out"), export_format="trl", dataset="demo", version="0f", splits=(),
        ...     files={"train.parquet": "5c"}).files["train.parquet"]
        '5c'
    """

    folder: Path
    export_format: str
    dataset: str
    version: str
    splits: tuple[str, ...]
    files: Mapping[str, str]
    """Path within the folder -> sha256."""


def export_version(
    opened: OpenVersion,
    export_format: str,
    dest: str | Path,
    *,
    splits: Sequence[str] = (),
    num_shards: int = 1,
    cache: str | Path | None = None,
) -> Export:
    """Write a version in a trainer's format, verifying the bytes of every row.

    The same version gives the same bytes, equal to the ones it contains if it was published with
    this format. Holds 1,024 rows in memory (`mds`: a shard of 64 MiB).

    Args:
        opened: the version.
        export_format: one of `FORMATS`.
        dest: a folder that does not exist yet or is empty.
        splits: splits to write. Default: all.
        num_shards: files per set, `train-00000-of-00004.parquet` ...: rows stay in order, and sizes
            differ by at most one row. `mds` has its own shards.
        cache: folder of verified copies, as for `load_packed`.

    Raises:
        ConfigError: the format does not exist or cannot represent the labels of the rows, there are
            more shards than rows, `dest` is not empty, or a folder cannot be written.
        VersionNotFoundError: the split does not exist.
        IntegrityError: the store's bytes differ from the published ones.

    Example:
        >>> from packhouse import prepare
        >>> from packhouse.store.version_reader import open_address
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", store=folder / "store",
        ...     dataset="numbers", cache=folder, format={"template": "alpaca"}, progress=False)
        >>> opened = open_address(f"{folder}/store/numbers")
        >>> sorted(export_version(opened, "trl", folder / "out", cache=folder).files)
        ['train.parquet']
    """
    if export_format not in FORMATS:
        near = near_name(export_format, FORMATS) or f"; known: {', '.join(FORMATS)}"
        raise ConfigError(f"unknown export format '{export_format}'{near}")
    if num_shards < 1 or (num_shards > 1 and export_format == "mds"):
        raise ConfigError(
            f"num_shards is {num_shards}, but must be at least 1, and exactly 1 for mds, "
            "which makes its own shards."
        )
    dest = Path(os.path.abspath(dest))  # noqa: PTH100 - Path.resolve would follow links
    _check_place(opened, dest)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"'{dest}' is not empty. Export to a new folder, or delete it first.")
    folder = cache_folder(cache)
    wanted = tuple(dict.fromkeys(splits)) or tuple(opened.manifest.splits())
    # In the same folder, so that the final move stays within one file system.
    staged = dest.with_name(f".{dest.name}.{uuid.uuid4().hex}")
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write in '{dest.parent}': {error.strerror}") from error
    try:
        for split in wanted:
            _write_split(opened, export_format, split, staged, folder, num_shards)
        paths = sorted(path for path in staged.rglob("*") if path.is_file())
        files = {path.relative_to(staged).as_posix(): file_sha256(path) for path in paths}
        made = Export(
            folder=dest,
            export_format=export_format,
            dataset=opened.dataset,
            version=opened.version,
            splits=wanted,
            files=files,
        )
        marker = _facts(made) | {"content_id": opened.manifest.content_id}
        text = json.dumps(marker, sort_keys=True, indent=2)
        (staged / MARKER).write_text(text + "\n", encoding="utf-8")
        os.replace(staged, dest)  # fails if `dest` has files by now
    except OSError as error:
        raise ConfigError(
            f"cannot write the export to '{dest}': {error.strerror or error}. Free space, or "
            "choose another folder."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return made


def _facts(made: Export) -> dict[str, object]:
    """Return what does not depend on the folder, for `.packhouse.json` and `--json`."""
    facts = {"dataset": made.dataset, "version": made.version, "format": made.export_format}
    return {**facts, "splits": made.splits, "files": made.files}


def _write_split(
    opened: OpenVersion, export_format: str, split: str, folder: Path, cache: Path, num_shards: int
) -> None:
    """Copy the files of this export from the version if it has them; otherwise write them."""
    home = f"exports/{export_format}/"
    configuration = opened.manifest.facts.configuration
    as_asked: str | ExportSettings = export_format
    if num_shards > 1:
        as_asked = ExportSettings(format=export_format, shards=num_shards)
    if as_asked in configuration.publish.exports:
        carried = [each for each in opened.files("exports", split) if each.key.startswith(home)]
        for entry in carried:
            opened.fetch(entry, folder / entry.key.removeprefix(home))
        if carried:
            return
    entries = opened.files(split=split)
    if not entries:
        raise VersionNotFoundError(
            f"{opened.dataset} {opened.version} has no split '{split}'. Use one of: "
            f"{', '.join(opened.manifest.splits())}."
        )
    pack = configuration.pack
    for source, group in groupby(entries, key=lambda entry: entry.source):
        own = [(verified_file(opened, entry, cache), entry) for entry in group]
        name = set_name(split, source)
        layout = pack.pad_record_to_multiple_of, pack.seq_len or None
        write = partial(_write_files, own, export_format, name, folder, *layout)
        run_in_worker(  # a few kilobytes may decode to gigabytes
            partial(write, preferences=opened.manifest.preferences, num_shards=num_shards),
            what=f"the files of '{name}'",
            blames=IntegrityError,
            num_bytes=sum(entry.size for _, entry in own),
        )


def _write_files(files: Sequence[tuple[Path, FileEntry]], *args: Any, **options: Any) -> None:
    """Write files of a version with `write_export`. Runs in a worker."""

    def batches() -> Iterator[pa.RecordBatch]:
        for path, entry in files:
            for number, batch in enumerate(read_rows(path, entry)):
                at(f"batch {number:,} of '{entry.key}'")
                yield batch

    write_export(batches(), *args, num_rows=sum(entry.rows for _, entry in files), **options)


def check_shards(name: str, num_rows: int, num_shards: int) -> None:
    """Reject more files than a set has rows.

    Raises:
        ConfigError: gives the number of rows in the set.

    Example:
        >>> check_shards("eval", num_rows=3, num_shards=3)
    """
    if num_shards > max(num_rows, 1):
        raise ConfigError(
            f"'{name}' has {num_rows:,} rows, too few for {num_shards:,} shards. Use fewer "
            "shards, or shard one split: `packhouse export --split train --shards N`"
        )


def set_name(split: str, source: str | None) -> str:
    """Return the base name of an export's files; sets by source include the source's name.

    Example:
        >>> set_name("train", None), set_name("eval", "chats")
        ('train', 'eval-chats')
    """
    return split if source is None else f"{split}-{source}"


def _parts(
    batches: Iterator[pa.RecordBatch], num_rows: int, num_parts: int
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Yield the rows in order in parts of about equal size; read each part before the next."""
    left: pa.RecordBatch | None = None

    def take(count: int) -> Iterator[pa.RecordBatch]:
        nonlocal left
        while count and (batch := next(batches, None) if left is None else left) is not None:
            left = batch.slice(count) if batch.num_rows > count else None
            yield batch.slice(0, count)
            count -= min(count, batch.num_rows)

    # 10 rows in 4 parts start at rows 0, 2, 5 and 7; the last part takes all remaining rows.
    for number in range(num_parts - 1):
        yield take((number + 1) * num_rows // num_parts - number * num_rows // num_parts)
    yield take(sys.maxsize)


def write_export(
    batches: Iterator[pa.RecordBatch],
    export_format: str,
    split: str,
    folder: Path,
    multiple: int = 1,
    seq_len: int | None = None,
    *,
    preferences: str | None = None,
    num_shards: int = 1,
    num_rows: int = 0,
) -> None:
    """Write one split of expanded rows in a trainer's format to an existing folder.

    Args:
        batches: batches from `read_rows`.
        export_format: one of `FORMATS`.
        split: base name from `set_name`.
        folder: output folder.
        multiple: `pack.pad_record_to_multiple_of`; `megatron` pads records to it, other formats
            have no padding.
        seq_len: `pack.seq_len` for the metadata of `megatron`; None for the length of the longest
            pack.
        preferences: `Recipe.preferences`. `trl` then has the columns of its preference trainers and
            `arrow` all columns; other formats are rejected, as they would train bad answers.
        num_shards: number of files, `train-00000-of-00004` and so on: rows stay in order, and sizes
            differ by at most one row.
        num_rows: total rows of all batches, needed for several shards.

    Raises:
        ConfigError: the format cannot represent labels or preferences of the rows, or there are
            more shards than rows.
    """
    check_shards(split, num_rows, num_shards)
    if preferences and export_format not in ("arrow", "trl"):
        raise ConfigError(
            f"format '{export_format}' would train the rejected answers of `format: "
            f"{preferences}` like chosen ones. Export to 'trl'."
        )
    write = _WRITERS[export_format]
    settings = {"multiple": multiple, "seq_len": seq_len} if export_format == "megatron" else {}
    if preferences:
        batches = map(preference_columns if export_format == "trl" else preference_names, batches)
    else:
        batches = _refuse_lossy(batches, export_format)
    parts = _parts(batches, num_rows, num_shards)
    for name, part in zip(shard_names(split, num_shards), parts, strict=True):
        write(part, name, folder, **settings)


def shard_names(name: str, num_shards: int) -> list[str]:
    """Return the names of a set's files, without endings.

    Example:
        >>> shard_names("eval", 1), shard_names("train", 2)
        (['eval'], ['train-00000-of-00002', 'train-00001-of-00002'])
    """
    if num_shards == 1:
        return [name]
    return [f"{name}-{number:05d}-of-{num_shards:05d}" for number in range(num_shards)]


def _check_place(opened: OpenVersion, dest: Path) -> None:
    """Reject a destination that an export must not replace."""
    if dest.is_symlink():
        raise ConfigError(f"'{dest}' is a symbolic link. Export to a new folder.")
    if dest == Path.cwd() or dest.parent == dest:
        raise ConfigError(f"'{dest}' cannot be replaced. Export to a new folder inside it.")
    if "://" not in opened.store.uri:
        store = Path(opened.store.uri).resolve()
        if dest.resolve().is_relative_to(store):
            raise ConfigError(
                f"'{dest}' is inside the store '{store}'. Export to a folder outside of it."
            )


_WITHOUT_WEIGHTS = {
    "axolotl": "all trained tokens would have equal weight",
    "megatron": "Megatron-Bridge reads loss_mask as integers, so 0.5 would become 0",
}


def _refuse_lossy(rows: Iterator[pa.RecordBatch], export_format: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows, unless they have labels or loss weights that the format cannot represent."""
    for batch in rows:
        if export_format != "arrow" and "label" in batch.schema.names:
            raise ConfigError(
                f"format '{export_format}' cannot store the class of classification rows. "
                "Export to 'arrow'."
            )
        if export_format in _WITHOUT_WEIGHTS and "loss_weights" in batch.schema.names:
            raise ConfigError(
                f"format '{export_format}' cannot store loss weights: "
                f"{_WITHOUT_WEIGHTS[export_format]}. Export to 'trl', 'arrow', 'mds' or "
                "'jsonl'."
            )
        yield batch


def check_published_exports(exports: Sequence[ExportConfig], packed: PackFacts) -> None:
    """Reject exports with more shards than a set has packs.

    Raises:
        ConfigError: an export has too many shards; the message gives the number of packs.
    """
    for side, planned in packed.sides.items():
        sets = {set_name(side, name): own["packs"] for name, own in planned.by_source.items()}
        for name, num_packs in (sets or {side: planned.num_packs}).items():
            for export in exports:
                check_shards(name, num_packs, export.shards)


def write_published_export(
    work: JobContext[FilesParameters], parameters: ExportParameters, folder: Path
) -> FilesFacts:
    """Write each set in the format, without subfolders, as required for the files of a step.

    Raises:
        ConfigError: the format cannot represent the labels of the rows.
    """
    data = [(receipt.facts.files[0], receipt) for receipt in work.inputs(FILES)]
    staged = folder / ".export"
    staged.mkdir()
    written = []
    pack = work.recipe.pack
    by_set = groupby(data, key=lambda pair: (pair[0].split, pair[0].source))
    for (split, source), files in by_set:
        own = list(files)
        write_export(
            chain.from_iterable(read_rows(receipt.path(file.name)) for file, receipt in own),
            parameters.format,
            set_name(split, source),
            staged,
            pack.pad_record_to_multiple_of,
            pack.seq_len,
            preferences=work.recipe.preferences,
            num_shards=parameters.shards,
            num_rows=sum(file.rows for file, _ in own),
        )
        for path in sorted(path for path in staged.rglob("*") if path.is_file()):
            inner = path.relative_to(staged).as_posix()
            name = f"{parameters.format}-{inner.replace('/', '-')}"
            os.replace(path, folder / name)
            home = f"{parameters.format}/{inner}"  # rows and tokens are counted with the data files
            written.append(WrittenFile(name=name, kind="exports", rows=0, split=split, path=home))
    shutil.rmtree(staged)
    return FilesFacts(files=tuple(written))


@click.command()
@click.argument("addresses", metavar="STORE/DATASET[@REF]...", nargs=-1, required=True)
@click.argument("dest", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "export_format",
    required=True,
    metavar="FORMAT",  # no `Choice`: `export_version` has a better error message
    help=f"One of {', '.join(FORMATS)}.",
)
@click.option("--split", "splits", multiple=True, help="Export only this split. May be repeated.")
@number_option("--shards", "Number of files per split.", default=1, least=1)
@cache_option("Folder for verified copies.")
@json_option()
def export(
    addresses: tuple[str, ...],
    dest: Path,
    export_format: str,
    splits: tuple[str, ...],
    shards: int,
    cache: Path,
    as_json: bool,
) -> None:
    """Export a version in a trainer's format, with labels shifted as that trainer expects.

    If you pass several versions, each is exported to a folder in DEST named after its dataset.

    \b
    Example:
      $ packhouse export ./store/demo out --to trl
      demo 0bc8b616aa87002e.g0 as trl:
        out/eval.parquet
        out/train.parquet

    \b
    Formats:
      trl             TRL and transformers
      axolotl         pre-tokenized records
      megatron        packed Parquet for Megatron-Bridge
      mds             MosaicML Streaming
      msgpack, jsonl  your own collator
      arrow           datasets.Dataset.from_file
    """
    opened = [open_address(address) for address in addresses]
    folders = [dest / each.dataset if len(opened) > 1 else dest for each in opened]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise ConfigError(f"'{folder}' would hold two versions. Export them in separate calls.")
    exports = [
        export_version(each, export_format, folder, splits=splits, num_shards=shards, cache=cache)
        for each, folder in zip(opened, folders, strict=True)
    ]
    if as_json:
        facts = [_facts(each) | {"folder": str(each.folder)} for each in exports]
        echo(json.dumps(facts if len(facts) > 1 else facts[0], sort_keys=True))
        return
    for exported in exports:
        echo(f"{exported.dataset} {exported.version} as {exported.export_format}:")
        for name in exported.files:
            echo(f"  {exported.folder / name}")


Batches = Iterator[pa.RecordBatch]


_OF_TRL = (
    *("input_ids", "labels", "seq_lengths", "position_ids", "loss_weights"),
    *("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "label", "record_id"),
)


def to_trl(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert packs for TRL and transformers: lengths and positions, and unshifted labels.

    There is no `attention_mask`: a mask of ones would undo packing. Preferences have the columns of
    `load_preferences`.
    """
    return batch.select([name for name in _OF_TRL if name in batch.schema.names])


def write_arrow(batches: Batches, split: str, folder: Path) -> None:
    """Write all columns to `<split>.arrow`, a stream that `datasets.Dataset.from_file` maps."""
    writer = None
    with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def write_jsonl(batches: Batches, split: str, folder: Path) -> None:
    """Write `input_ids`, `labels`, `position_ids` and any `loss_weights` to `<split>.jsonl`."""
    import orjson

    option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    with (folder / f"{split}.jsonl").open("wb") as file:
        for row in split_rows(batches, _SMALL):
            file.write(orjson.dumps(row, option=option))


def write_msgpack(batches: Batches, split: str, folder: Path) -> None:
    """Write maps of the `jsonl` columns to `<split>.msgpack`, for a streaming unpacker.

    Raises:
        ConfigError: the msgpack package is not installed.
    """
    msgpack = import_extra("msgpack", "msgpack", "export format 'msgpack'")
    # Loss weights are float32: 5 bytes each instead of the 9 of a double.
    packer = msgpack.Packer(use_single_float=True)
    with (folder / f"{split}.msgpack").open("wb") as file:
        for row in split_rows(batches, _SMALL):
            file.write(packer.pack({name: values.tolist() for name, values in row.items()}))


_SMALL = ("input_ids", "labels", "position_ids", "loss_weights")


def split_rows(batches: Batches, columns: tuple[str, ...]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield each row as a dictionary of the columns that exist, as views of the batch."""
    for batch in batches:
        names = [name for name in columns if name in batch.schema.names]
        flat = {name: flat_list(batch[name]) for name in names}
        for row in range(batch.num_rows):
            yield {
                name: values[offsets[row] : offsets[row + 1]]
                for name, (values, offsets) in flat.items()
            }


def to_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert packs to one record per row for Axolotl, which packs records itself.

    Its pretokenized rows need an `attention_mask`, which may be all ones for a single record.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1]}])
        >>> to_records(batch).to_pylist()[0]
        {'input_ids': [7, 8], 'attention_mask': [1, 1], 'labels': [-100, 8]}
    """
    ids, labels, lengths = (
        flat_list(batch[name])[0] for name in ("input_ids", "labels", "seq_lengths")
    )
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # Over a whole pack, this mask would let its records see each other.
    ones = pa.array(np.ones(len(ids), dtype=np.int8))
    columns = {
        "input_ids": list_array(pa.array(ids, pa.int32()), offsets, pa.int32()),
        "attention_mask": list_array(ones, offsets, pa.int8()),
        "labels": list_array(pa.array(labels, pa.int32()), offsets, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def write_parquet(
    batches: Batches,
    split: str,
    folder: Path,
    convert: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> None:
    """Write `<split>.parquet`, a row group per batch, with the settings of published files."""
    writer = None
    for batch in batches:
        rows = convert(batch)
        writer = writer or pq.ParquetWriter(
            folder / f"{split}.parquet",
            rows.schema,
            # 2.56 bytes per token, read at 60 million tokens per second. pyarrow's defaults take
            # 2.63 bytes and are read at 20 million.
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_page_checksum=True,
        )
        writer.write_batch(rows, row_group_size=rows.num_rows)
    if writer is not None:
        writer.close()


_COLUMNS = ("input_ids", "labels", "loss_weights", "position_ids", "seq_lengths")  # sorted by name
_SHARD_BYTES = 64 * 2**20


def write_mds(batches: Iterator[pa.RecordBatch], split: str, folder: Path) -> None:
    """Write `<split>/shard.00000.mds`, ... and `<split>/index.json`."""
    place = folder / split
    place.mkdir()
    first = next(batches, None)
    columns = () if first is None else first.schema.names
    names = [name for name in _COLUMNS if name in columns]
    kinds = ["float32" if name == "loss_weights" else "int32" for name in names]
    settings = {
        **{"version": 2, "format": "mds", "compression": None, "hashes": []},
        **{"size_limit": _SHARD_BYTES, "column_names": names},
        "column_encodings": [f"ndarray:{kind}" for kind in kinds],
        "column_sizes": [None] * len(names),
    }
    shards: list[dict[str, object]] = []
    samples: list[bytes] = []
    num_bytes = 0
    for row in split_rows(chain([] if first is None else [first], batches), _COLUMNS):
        coded = [_encode(values) for values in row.values()]
        # MDS puts the sizes of all columns of variable size before their values.
        sizes = np.array([len(each) for each in coded], dtype="<u4")
        sample = sizes.tobytes() + b"".join(coded)
        if samples and num_bytes + len(sample) > _SHARD_BYTES:
            shards.append(_write_shard(place, len(shards), samples, settings))
            samples, num_bytes = [], 0
        samples.append(sample)
        # The 4 bytes are its offset in the head of the shard.
        num_bytes += len(sample) + 4
    if samples:
        shards.append(_write_shard(place, len(shards), samples, settings))
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    (place / "index.json").write_text(index, encoding="utf-8")


def _encode(values: npt.NDArray[Any]) -> bytes:
    """Encode an array: dimensions, its length in the smallest of uint8, uint16, uint32, values."""
    # [7, 8] as int32: 04 (1 dimension, length in 1 byte), 02, 07 00 00 00, 08 00 00 00.
    code = 0 if len(values) < 2**8 else 1 if len(values) < 2**16 else 2
    length = len(values).to_bytes(1 << code, "little")
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return bytes([1 << 2 | code]) + length + little.tobytes()


def _write_shard(
    folder: Path, number: int, samples: list[bytes], settings: dict[str, object]
) -> dict[str, object]:
    header = json.dumps(settings, sort_keys=True).encode()
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    # Offsets count from the file's start: after the number of samples, the offsets and the header.
    offsets += 4 + 4 * len(offsets) + len(header)
    parts = [len(samples).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), header, *samples]
    name, data = f"shard.{number:05d}.mds", b"".join(parts)
    (folder / name).write_bytes(data)
    raw = {"basename": name, "bytes": len(data), "hashes": {}}
    return settings | {"samples": len(samples), "raw_data": raw, "zip_data": None}


def write_megatron(
    batches: Batches, split: str, folder: Path, *, multiple: int = 1, seq_len: int | None = None
) -> None:
    """Write `<split>.idx.parquet` (the suffix marks packed data) and `<split>.metadata.json`.

    The metadata is a list of one object, with the keys and rounding of Megatron-Bridge. It reads
    the longest record, the maximum number of records per pack and the shortest pack from it, in
    inputs.
    """
    records, packs, in_pack = ([np.zeros(0, np.int64)] for _ in range(3))

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = to_megatron(batch, multiple=multiple)
        starts, offsets = flat_list(rows["seq_start_id"])
        num_ids = np.diff(flat_list(rows["input_ids"])[1]).astype(np.int64)
        # Starts [0, 3 | 0] in packs of 5 and 4 ids: ends [3, 5 | 4], inputs [2, 1 | 3].
        ends = np.append(starts[1:], 0)
        ends[offsets[1:] - 1] = num_ids
        records.append((ends - starts - 1).astype(np.int64))
        in_pack.append(np.diff(offsets).astype(np.int64))
        packs.append(num_ids - in_pack[-1])
        return rows

    write_parquet(batches, f"{split}.idx", folder, convert)
    lengths, sizes, counts = (np.concatenate(each) for each in (records, packs, in_pack))
    pack_size = int(sizes.max(initial=0)) if seq_len is None else seq_len
    metadata = {
        "dataset_max_seqlen": int(lengths.max(initial=0)),
        "max_samples_per_bin": int(counts.max(initial=0)),
        "packing_factor": round(len(lengths) / max(1, len(sizes)), 2),
        "packing_efficiency": round(100 * float(sizes.sum()) / max(1, len(sizes) * pack_size), 2),
        "pack_size": pack_size,
        "min_packed_seqlen": int(sizes.min(initial=pack_size)),
    }
    path = folder / f"{split}.metadata.json"
    path.write_text(json.dumps([metadata], indent=2) + "\n", encoding="utf-8")


def to_megatron(batch: pa.RecordBatch, *, multiple: int = 1) -> pa.RecordBatch:
    """Convert packs for Megatron-Bridge: unshifted ids, and a loss mask at the predicting tokens.

    With `multiple`, each record is padded until its inputs are a multiple, that is, to `k *
    multiple + 1` ids. The padding repeats its last trained token, which ends an answer, because the
    reader treats all EOS tokens at the end of a record as padding. `seq_start_id` then counts
    padded records, and `cu_seqlens` and `cu_seqlens_padded` are the boundaries of inputs without
    and with padding.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9, 5, 6],
        ...     "labels": [-100, 8, 9, -100, 6], "seq_lengths": [3, 2]}])
        >>> to_megatron(batch).to_pylist()[0]
        {'input_ids': [7, 8, 9, 5, 6], 'loss_mask': [1, 1, 0, 1, 0], 'seq_start_id': [0, 3]}
    """
    labels, offsets = flat_list(batch["labels"])
    lengths, pack_offsets = flat_list(batch["seq_lengths"])
    # A record's last token gets the mask of the next record's first token, which is never trained.
    mask = np.append(labels[1:] != IGNORE_INDEX, False).astype(np.uint8)
    ids, _ = flat_list(batch["input_ids"])
    real = lengths
    if multiple > 1 and len(real):
        # Multiple 4, lengths 3 2: inputs of 2 and 1 tokens become 4, so both records get 5 ids:
        # 7 8 9 5 6 -> 7 8 9 9 9 5 6 6 6 6.
        lengths = round_up(real - 1, multiple) + 1
        first = np.cumsum(real, dtype=np.int64) - real
        # Source of each id: the record's own tokens, then its last trained one (else its last).
        # Not always its last token: many chat templates end with a newline, which is not trained,
        # and which the reader would not take for padding.
        trained = np.where(labels == IGNORE_INDEX, -1, np.arange(len(ids)))
        pad = np.maximum.reduceat(trained, first)
        pad = np.where(pad < 0, first + real - 1, pad)
        place = count_up(lengths)
        is_pad = place >= np.repeat(real, lengths)
        token = np.where(is_pad, np.repeat(pad, lengths), np.repeat(first, lengths) + place)
        ids, mask = ids[token], np.where(is_pad, np.uint8(0), mask[token])
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        offsets = ends[pack_offsets]
    # Starts within a pack: lengths [3, 2 | 4] -> [0, 3, 5], minus the pack's start [0, 0, 5].
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    starts -= np.repeat(offsets[:-1], np.diff(pack_offsets))
    columns = {
        "input_ids": list_array(pa.array(ids, pa.int32()), offsets, pa.int32()),
        "loss_mask": list_array(pa.array(mask), offsets, pa.uint8()),
        "seq_start_id": list_array(pa.array(starts.astype(np.int32)), pack_offsets, pa.int32()),
    }
    if multiple > 1:
        columns["cu_seqlens"] = _input_bounds(real, pack_offsets)
        columns["cu_seqlens_padded"] = _input_bounds(lengths, pack_offsets)
    return pa.RecordBatch.from_pydict(columns)


def _input_bounds(lengths: npt.NDArray[Any], pack_offsets: npt.NDArray[Any]) -> pa.Array:
    """Return the boundaries of the inputs (one less than the ids) of each pack's records, from 0.

    Lengths [3, 2 | 4] in packs [0, 2, 3] -> [0, 2, 3], [0, 3].
    """
    packs = np.split(lengths - 1, pack_offsets[1:-1])
    return pa.array([[0, *np.cumsum(pack).tolist()] for pack in packs], pa.list_(pa.int32()))


_WRITERS: Mapping[str, Callable[..., None]] = {
    "trl": partial(write_parquet, convert=to_trl),
    "axolotl": partial(write_parquet, convert=to_records),
    **{"megatron": write_megatron, "mds": write_mds},
    **{"msgpack": write_msgpack, "jsonl": write_jsonl, "arrow": write_arrow},
}
