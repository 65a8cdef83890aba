"""Find a published version, and load a split of it as rows that are mapped, not read.

Needs no torch. Files are copied to this machine, verified:

    s3://.../data/train-0000-<sha>.parquet    published; in a folder it is read where it lies
      -> <cache>/loaded/<sha256>.parquet      the verified download, for streaming
      -> <cache>/loaded/<sha256>-rows1.arrow  its rows with labels and position_ids, to be mapped

Every process compares the sha256 of a file, published or cached, before it first reads from it:
disks change bits without touching size or time. What differs in the cache is made again; what
differs in a store's folder is an error. With `verify=False`, a copy that was verified once is
trusted while its size and time of change stay as its receipt says. The cache is keyed by content:
versions share files, and ranks that start at once do the work once, behind a file lock that the
kernel frees if its holder is killed.

Cost: hashing 1-2 GB/s, in each process; turning Parquet into Arrow about 60 M tokens/s, once; 12
bytes a token of disk, of which 4 are `position_ids`.
"""

import fcntl
import hashlib
import json
import os
import stat
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    EmptyDatasetError,
    IntegrityError,
    VersionNotFoundError,
)
from packhouse.load.rows import first_packs, watch_packs
from packhouse.pack.layout import published_schema, to_layout
from packhouse.store import FileEntry, OpenVersion, open_store
from packhouse.store.contracts import check_footer, read_batches
from packhouse.store.layout import split_pinned
from packhouse.store.local import LocalStore
from packhouse.store.manifest import Manifest, changed_manifest, parse_slot
from packhouse.store.read import open_address
from packhouse.system.disks import check_cache, default_cache, disk_errors, write_whole
from packhouse.system.fingerprint import file_sha256
from packhouse.system.worker import at, run_in_worker

if TYPE_CHECKING:
    from datasets import Dataset


@overload
def load_packed(
    uri: str | Path,
    version: str = ...,
    split: str = ...,
    *,
    by_source: Literal[False] = ...,
    cache: str | Path | None = ...,
    verify: bool = ...,
) -> "Dataset": ...
@overload
def load_packed(
    uri: str | Path,
    version: str = ...,
    split: str = ...,
    *,
    by_source: Literal[True],
    cache: str | Path | None = ...,
    verify: bool = ...,
) -> "dict[str, Dataset]": ...
def load_packed(
    uri: str | Path,
    version: str = "latest",
    split: str = "train",
    *,
    by_source: bool = False,
    cache: str | Path | None = None,
    verify: bool = True,
) -> "Dataset | dict[str, Dataset]":
    """Load a split of a published version as a memory-mapped `datasets.Dataset`.

    Rows have `input_ids`, `labels` (made from the ranges where the layout is `compact`),
    `seq_lengths`, `record_ids`, `position_ids`, for classification `label`, and `loss_weights`
    where some tokens weigh other than 1. They carry
    `position_ids` even if the files do not: the one mark of record boundaries that
    `transformers.Trainer` does not drop.

    Args:
        uri: `<store>/<dataset>`, a folder or `s3://bucket/prefix/<dataset>`, may end in `@<ref>` or
            `@<version>#<digest>`; or a folder that `packhouse pull` wrote.
        version: a ref, a version (`<vid>.g<N>`) or a version id; best `<version>#<digest>`.
        split: `train` or `eval`.
        by_source: return a dict of one dataset for each source, as `Trainer(eval_dataset=...)`
            takes it; of a version with `split.eval_by_source`.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: compare each file's sha256 before this process first reads it (1-2 GB/s); if False,
            trust copies that were verified before, while size and time of change stay the same.

    Returns:
        A `datasets.Dataset`, or a dict of such by source; its `info.version` is unset and
        `info.description` names the version.

    Raises:
        ConfigError: `uri` ends in another name than `version`, a file is in the place of the
            cache, or `by_source` of a split that has no files by source.
        DiskError: the cache cannot be written: no room, no right.
        VersionNotFoundError: no such dataset, version or split.
        EmptyDatasetError: the split holds no row.
        IntegrityError: the store's bytes are not the published ones.

    Example:
        >>> from packhouse import prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(9)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=folder, progress=False, cache=folder / "cache")
        >>> packs = load_packed(folder / "numbers", cache=folder / "cache")
        >>> packs.num_rows, sum(packs[0]["seq_lengths"]) == len(packs[0]["input_ids"])
        (1, True)
    """
    folder = cache_folder(cache)
    opened, entries = open_split(uri, version, split)
    paths: dict[str | None, list[Path]] = {}
    for entry in entries:
        source = entry.source if by_source else None
        if by_source and source is None:
            raise ConfigError(
                f"split '{split}' of {opened.dataset} {opened.version} has no files by source; "
                "prepare with split.eval_by_source: true, and load split='eval'"
            )
        paths.setdefault(source, []).append(mapped_file(opened, entry, folder, verify))
    about = f"packhouse {opened.dataset} {opened.version} {split}"
    rows = {name: map_rows(own, f"{about} {name or ''}".strip()) for name, own in paths.items()}
    for each in rows.values():
        watch_packs(first_packs(each))
    if "transformers.trainer" in sys.modules and any(
        "loss_weights" in each.column_names for each in rows.values()
    ):
        warnings.warn(
            "rows have loss_weights, which transformers.Trainer drops and other collators leave "
            "out. Set remove_unused_columns=False and apply them (docs/how-to/own-loop.md)",
            stacklevel=2,
        )
    return {str(name): each for name, each in rows.items()} if by_source else rows[None]


def map_rows(paths: Sequence[Path], description: str) -> "Dataset":
    """Map files that `mapped_file` gave, one behind another, as a dataset."""
    from datasets import Dataset, DatasetInfo, concatenate_datasets

    info = DatasetInfo(description=description)
    return concatenate_datasets([Dataset.from_file(str(path)) for path in paths], info=info)


def cache_folder(cache: str | Path | None) -> Path:
    """The folder of local copies: the one given, else as `find_cache` says.

    Raises:
        ConfigError: a file stands there or above it.
    """
    return check_cache(Path(cache) if cache is not None else default_cache())


def open_split(
    uri: str | Path, version: str, split: str, *, preferences: bool = False
) -> tuple[OpenVersion, list[FileEntry]]:
    """Resolve a version and the data files of one of its splits, in published order.

    Raises:
        ConfigError: `uri` ends in another name than `version`, or the version holds preferences
            where others are wanted, whose rejected answers would be trained like any: or none.
        VersionNotFoundError: no such dataset, version or split.
    """
    uri = str(uri)
    opened = _open_pulled(uri, version)
    if opened is None:
        opened = open_address(uri, version)
    if preferences != (opened.manifest.preferences is not None):
        raise ConfigError(
            f"{opened.dataset} {opened.version} holds no preferences: load it with load_packed"
            if preferences
            else f"{opened.dataset} {opened.version} holds preferences, and its bad answers would "
            "be trained like good ones: load it with load_preferences"
        )
    entries = opened.files(split=split)
    if not entries:
        raise VersionNotFoundError(
            f"{opened.dataset} {opened.version} has no split '{split}'; it has "
            f"{', '.join(opened.manifest.splits()) or 'none'}"
        )
    filled = [entry for entry in entries if entry.rows]
    if not filled:
        raise EmptyDatasetError(
            f"split '{split}' of {opened.dataset} {opened.version} holds no row; load another one"
        )
    return opened, filled


class _Pulled(OpenVersion):
    """A version whose files lie under their own names in one folder, as `packhouse pull` wrote."""

    __slots__ = ()

    @override
    def key(self, entry: FileEntry) -> str:
        return entry.path


def _open_pulled(uri: str, version: str) -> OpenVersion | None:
    """Open a folder that `packhouse pull` wrote; None where `uri` is no such folder."""
    folder = Path(uri).expanduser()
    if "://" in uri or not (folder / "manifest.json").is_file():
        return None
    manifest = parse_slot((folder / "manifest.json").read_bytes(), f"'{folder / 'manifest.json'}'")
    if not isinstance(manifest, Manifest):
        raise VersionNotFoundError(f"'{folder}' holds a removed version; pull another one")
    version, recorded = split_pinned(version)
    if version not in ("latest", manifest.version, manifest.vid):
        raise VersionNotFoundError(
            f"'{folder}' is a copy of {manifest.version}, not of '{version}'; leave `version` out "
            "or load from the store"
        )
    if not manifest.manifest_id.startswith(recorded):
        raise changed_manifest(manifest, recorded, "the address")
    return _Pulled(
        store=open_store(str(folder)),
        dataset=manifest.dataset,
        version=manifest.version,
        manifest=manifest,
    )


def verified_file(opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool = True) -> Path:
    """Return a local path to the published bytes of a file: in place, or downloaded to the cache.

    Raises:
        IntegrityError: the store's bytes are not the published ones.
    """
    path = cache / "loaded" / f"{entry.sha256}{Path(entry.key).suffix}"
    receipt = path.with_suffix(".json")
    if isinstance(opened.store, LocalStore):
        path = opened.store.path(opened.key(entry))
        where = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        receipt = receipt.with_stem(f"{entry.sha256}-{where}")

    def fetch() -> None:
        if isinstance(opened.store, LocalStore):
            raise IntegrityError(
                f"'{opened.uri(entry)}' does not hold the published bytes (sha256 {entry.sha256}); "
                "restore it, or publish the version again elsewhere",
                key=entry.key,
            )
        path.unlink(missing_ok=True)
        opened.fetch(entry, path)

    return _verified(path, entry.sha256, receipt, verify, fetch)


_MAX_GROUP_BYTES = 2**28
"""Of a decoded row group, of which a stream holds one for each lane; ours have about 2**24."""
_FORM = 1
"""Of the cached rows; part of their name, so that another form is another file."""


def mapped_file(
    opened: OpenVersion,
    entry: FileEntry,
    cache: Path,
    verify: bool = True,
    columns: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None,
) -> Path:
    """Return a local Arrow stream file with the rows of a published file, to be mapped.

    Args:
        opened: the version.
        entry: one of its files.
        cache: folder of local copies.
        verify: compare its sha256 once in this process.
        columns: makes other rows of those that `read_rows` gives; its name is part of the file's.

    Raises:
        IntegrityError: the store's bytes are not the published ones.
    """
    form = "rows" if columns is None else columns.__name__
    path = cache / "loaded" / f"{entry.sha256}-{form}{_FORM}.arrow"

    def convert() -> None:
        source = verified_file(opened, entry, cache, verify)
        for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed: large
            left.unlink(missing_ok=True)
        staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _decode(partial(_write_rows, source, entry, columns, staged), source, entry)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        if not isinstance(opened.store, LocalStore):  # the mapped rows are kept in its place
            source.unlink()
            source.with_suffix(".json").unlink(missing_ok=True)

    return _verified(path, None, path.with_suffix(".json"), verify, convert)


def _write_rows(
    source: Path,
    entry: FileEntry,
    columns: Callable[[pa.RecordBatch], pa.RecordBatch] | None,
    dest: Path,
) -> None:
    writer, found = None, read_rows(source, entry)
    with pa.OSFile(str(dest), "wb") as sink:
        for number, rows in enumerate(map(columns, found) if columns else found):
            at(f"batch {number}")
            writer = writer or pa.ipc.new_stream(sink, rows.schema)
            writer.write_batch(rows)
        if writer is None:
            raise IntegrityError(f"'{source}' holds no row, though its version counts some")
        writer.close()


def check_row_groups(path: Path, entry: FileEntry, cache: Path) -> None:
    """Decode the row groups of a Parquet file in a worker, once, before a trainer does.

    Raises:
        IntegrityError: one of them takes too much memory, or cannot be read.
    """
    proof = cache / "loaded" / f"{entry.sha256}.bounded"
    with disk_errors(proof.parent), _locked(proof):
        if not proof.exists():
            _decode(partial(_read_row_groups, path, entry), path, entry)
            write_whole(proof, b"")


def _read_row_groups(path: Path, entry: FileEntry) -> None:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_footer(file.metadata, entry)
            for number in range(file.num_row_groups):
                at(f"row group {number}")
                size = file.read_row_group(number).nbytes
                if size > _MAX_GROUP_BYTES:
                    raise IntegrityError(
                        f"row group {number} of '{entry.key}' decodes to {size:,} bytes; a stream "
                        f"takes up to {_MAX_GROUP_BYTES:,}. Use load_packed, or publish it again",
                        key=entry.key,
                    )
    except MemoryError:  # of Arrow, too
        raise
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{entry.key}' cannot be read: {error}", key=entry.key) from None


def _decode(call: Callable[[], None], path: Path, entry: FileEntry) -> None:
    """Decode a file in a worker: some kilobytes of Parquet or Arrow may stand for gigabytes."""
    size = path.stat().st_size
    run_in_worker(call, what=f"'{entry.key}'", blames=IntegrityError, num_bytes=size)


_State = tuple[int, int, int, int, int]

_hashed: dict[tuple[str, str], _State] = {}
"""Files whose sha256 this process has compared, as (path, sha256), and how they were then."""


def _verified(
    path: Path, sha256: str | None, receipt: Path, verify: bool, make: Callable[[], None]
) -> Path:
    """Return `path` once its bytes are verified, calling `make` where they are missing or bad.

    Args:
        path: the file.
        sha256: what its bytes must have; None for a file made here: then the receipt says.
        receipt: a JSON file with the sha256, size and time of change of the verified bytes.
        verify: compare the sha256 once in this process; if False, size and time are enough.
        make: makes the file.
    """
    if _is_trusted(path, sha256, receipt, verify):
        return path
    with disk_errors(receipt.parent), _locked(receipt):
        if _is_trusted(path, sha256, receipt, verify):
            return path
        if not _is_trusted(path, sha256, receipt, verify=True):
            make()
        before, found = _state(path), file_sha256(path)
        if before is None or before != _state(path) or found != (sha256 or found):
            raise IntegrityError(f"'{path}' changed while it was read; load again")
        verified = {"sha256": found, "size": before[2], "mtime_ns": before[3]}
        write_whole(receipt, json.dumps(verified, sort_keys=True).encode())
        _hashed[str(path), found] = before
    return path


def _is_trusted(path: Path, sha256: str | None, receipt: Path, verify: bool) -> bool:
    state = _state(path)
    try:
        verified = orjson.loads(receipt.read_bytes())
    except (FileNotFoundError, ValueError):
        verified = {}
    verified = verified if isinstance(verified, dict) else {}
    digest = sha256 or verified.get("sha256")
    if state is None or not isinstance(digest, str):
        return False
    if not verify:
        return (verified.get("size"), verified.get("mtime_ns")) == (state[2], state[3])
    if _hashed.get((str(path), digest)) != state:
        if file_sha256(path) != digest:
            return False
        _hashed[str(path), digest] = state
    return True


def _state(path: Path) -> _State | None:
    """What changes when somebody writes to a file (a rotting disk does not); None: no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextmanager
def _locked(receipt: Path) -> Iterator[None]:
    receipt.parent.mkdir(parents=True, exist_ok=True)
    with receipt.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_rows(path: Path, entry: FileEntry | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a published file of any format, with `labels` and `position_ids`.

    Args:
        path: the file.
        entry: its entry in the manifest; None: a run has just made it.

    Raises:
        IntegrityError: the file is damaged, or holds no tokens.
    """
    for batch in read_batches(path, entry=entry):
        names = batch.schema.names
        if "input_ids" not in names:
            raise IntegrityError(f"'{path.name}' holds no input_ids: its columns are {names}")
        schema = published_schema("labels", True, "label" in names, "loss_weights" in names)
        yield to_layout(batch, schema)
