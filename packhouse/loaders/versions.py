"""From a published version to files on this machine that are verified and can be mapped.

Every process compares the sha256 of a file, published or cached, before it first reads from it:
disks change bits without touching size or time. What differs in the cache is made again; what
differs in a store's folder is an error. With `verify=False`, a copy that was verified once is
trusted while its size and time of change stay as its receipt says. The cache is keyed by content:
versions share files, and ranks that start at once do the work once, behind a file lock that the
kernel frees if its holder is killed. Needs no torch.

Cost: hashing 1-2 GB/s, in each process; turning Parquet into Arrow about 60 M tokens/s, once; 12
bytes a token of disk, of which 4 are `position_ids`.
"""

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from packhouse.disks import disk_errors
from packhouse.errors import (
    ConfigError,
    EmptyDatasetError,
    IntegrityError,
    VersionNotFoundError,
)
from packhouse.fingerprint import file_sha256
from packhouse.packing.layout import Layout, expand_labels, position_ids, published_schema
from packhouse.packing.lists import flat_list, list_array, zero_based
from packhouse.store import FileEntry, OpenVersion, open_store, open_version
from packhouse.store.address import parse_address
from packhouse.store.contracts import read_batches
from packhouse.store.local import LocalStore
from packhouse.store.manifest import Manifest, parse_slot
from packhouse.workspace import check_cache, default_cache

__all__ = [
    "cache_folder",
    "check_verify",
    "expand_rows",
    "load_packed",
    "mapped_file",
    "open_split",
    "read_rows",
    "verified_file",
]


def load_packed(
    uri: str | Path,
    version: str = "latest",
    split: str = "train",
    *,
    cache: str | Path | None = None,
    verify: bool = True,
) -> Any:
    """Load a split of a published version as a memory-mapped `datasets.Dataset`.

    Rows have `input_ids`, `labels` (made from the ranges where the layout is `compact`),
    `seq_lengths`, `record_ids`, `position_ids`, for classification `label`, and `loss_weights`
    where some tokens weigh other than 1. They carry
    `position_ids` even if the files do not: the one mark of record boundaries that
    `transformers.Trainer` does not drop.

    Args:
        uri: `<store>/<dataset>`, a folder or `s3://bucket/prefix/<dataset>`, may end in `@<ref>`;
            or a folder that `packhouse pull` wrote.
        version: a ref, a version (`<vid>.g<N>`) or a version id.
        split: `train` or `eval`.
        cache: folder of local copies; by default PACKHOUSE_CACHE, else `.packhouse`.
        verify: compare each file's sha256 before this process first reads it (1-2 GB/s); if False,
            trust copies that were verified before, while size and time of change stay the same.

    Returns:
        A `datasets.Dataset`; its `info.version` is unset and `info.description` names the version.

    Raises:
        ConfigError: `uri` ends in another name than `version`, `verify` is no bool, or a file is in
            the place of the cache.
        DiskError: the cache cannot be written: no room, no right.
        VersionNotFoundError: no such dataset, version or split.
        EmptyDatasetError: the split holds no row.
        IntegrityError: the store's bytes are not the published ones.
    """
    from datasets import Dataset, DatasetInfo, concatenate_datasets

    check_verify(verify)
    folder = cache_folder(cache)
    opened, entries = open_split(uri, version, split)
    paths = [mapped_file(opened, entry, folder, verify) for entry in entries]
    info = DatasetInfo(description=f"packhouse {opened.dataset} {opened.version} {split}")
    return concatenate_datasets([Dataset.from_file(str(path)) for path in paths], info=info)


def check_verify(verify: bool) -> bool:
    """Return `verify` if it is a bool; 'first' and 'always' of earlier releases are refused."""
    if not isinstance(verify, bool):
        raise ConfigError(
            f"verify is {verify!r}; use True to compare sha256, or False to trust size and time"
        )
    return verify


def cache_folder(cache: str | Path | None) -> Path:
    """The folder of local copies: the one given, else PACKHOUSE_CACHE, else `.packhouse`.

    Raises:
        ConfigError: a file stands there or above it.
    """
    return check_cache(Path(cache) if cache is not None else default_cache())


def open_split(uri: str | Path, version: str, split: str) -> tuple[OpenVersion, list[FileEntry]]:
    """Resolve a version and the data files of one of its splits, in published order.

    Raises:
        ConfigError: `uri` ends in another name than `version`.
        VersionNotFoundError: no such dataset, version or split.
    """
    uri = str(uri)
    opened = _open_pulled(uri, version)
    if opened is None:
        address = parse_address(uri)
        if "latest" not in (address.name, version) and address.name != version:
            raise ConfigError(
                f"'{uri}' names '{address.name}' and version is '{version}'; give one of them"
            )
        name = version if address.name == "latest" else address.name
        opened = open_version(address.root, address.dataset, name)
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
    if version not in ("latest", manifest.version, manifest.vid):
        raise VersionNotFoundError(
            f"'{folder}' is a copy of {manifest.version}, not of '{version}'; leave `version` out "
            "or load from the store"
        )
    return _Pulled(
        store=open_store(str(folder)),
        dataset=manifest.dataset,
        version=manifest.version,
        manifest=manifest,
    )


def verified_file(opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool = True) -> Path:
    """A local path to the published bytes of a file: in place for a folder, else downloaded.

    Raises:
        IntegrityError: the store's bytes are not the published ones.
    """
    if isinstance(opened.store, LocalStore):
        path = opened.store.path(opened.key(entry))
        receipt = cache / "loaded" / f"{entry.sha256}-{_name_hash(path)}.json"
        return _proven(path, entry.sha256, receipt, verify, lambda: _gone_bad(opened, entry))
    path = cache / "loaded" / f"{entry.sha256}{Path(entry.key).suffix}"
    receipt = path.with_suffix(".json")

    def download() -> None:
        path.unlink(missing_ok=True)
        opened.fetch(entry, path)

    return _proven(path, entry.sha256, receipt, verify, download)


def mapped_file(opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool = True) -> Path:
    """A local Arrow stream file with the rows of a published file, to be mapped.

    Raises:
        IntegrityError: the store's bytes are not the published ones.
    """
    path = cache / "loaded" / f"{entry.sha256}-rows{_FORM}.arrow"

    def convert() -> None:
        source = verified_file(opened, entry, cache, verify)
        staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write_rows(source, staged)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        if not isinstance(opened.store, LocalStore):
            source.unlink()  # kept: the mapped rows
            source.with_suffix(".json").unlink(missing_ok=True)

    return _proven(path, None, path.with_suffix(".json"), verify, convert)


_FORM = 1
"""Of the cached rows; part of their name, so that another form is another file."""


_State = tuple[int, int, int, int, int]

_verified: dict[tuple[str, str], _State] = {}
"""Files whose sha256 this process has compared, as (path, sha256), and how they were then."""


def _proven(
    path: Path, sha256: str | None, receipt: Path, verify: bool, make: Callable[[], None]
) -> Path:
    """Return `path` once its bytes are verified, calling `make` where they are not there or bad.

    `sha256` is what the bytes must have, or None for a file made here: then the receipt says.
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
        staged = receipt.with_name(f".{receipt.name}.{uuid.uuid4().hex}")
        facts = {"sha256": found, "size": before[2], "mtime_ns": before[3]}
        staged.write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")
        os.replace(staged, receipt)
        _verified[str(path), found] = before
    return path


def _is_trusted(path: Path, sha256: str | None, receipt: Path, verify: bool) -> bool:
    state = _state(path)
    known = _receipt(receipt)
    digest = sha256 or known.get("sha256")
    if state is None or not isinstance(digest, str):
        return False
    if not verify:
        return (known.get("size"), known.get("mtime_ns")) == (state[2], state[3])
    if _verified.get((str(path), digest)) != state:
        if file_sha256(path) != digest:
            return False
        _verified[str(path), digest] = state
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


def _receipt(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@contextmanager
def _locked(receipt: Path) -> Iterator[None]:
    import fcntl

    receipt.parent.mkdir(parents=True, exist_ok=True)
    with receipt.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _gone_bad(opened: OpenVersion, entry: FileEntry) -> None:
    raise IntegrityError(
        f"'{opened.uri(entry)}' does not hold the published bytes (sha256 {entry.sha256}); restore "
        "it, or publish the version again elsewhere",
        key=entry.key,
    )


def _name_hash(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


def _write_rows(source: Path, path: Path) -> None:
    writer = None
    with pa.OSFile(str(path), "wb") as sink:
        for rows in read_rows(source):
            writer = writer or pa.ipc.new_stream(sink, rows.schema)
            writer.write_batch(rows)
        if writer is None:
            raise IntegrityError(f"'{source}' holds no row, though its version counts some")
        writer.close()


def read_rows(path: Path) -> Iterator[pa.RecordBatch]:
    """Rows of a published file of any format, expanded.

    Raises:
        IntegrityError: the file is damaged.
    """
    batches = _jsonl_batches(path) if path.suffix == ".jsonl" else read_batches(path)
    return map(expand_rows, batches)


def expand_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Published rows of either layout with `labels` and `position_ids`.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1], "record_ids": ["a", "b"]}])
        >>> expand_rows(batch)["position_ids"].to_pylist()
        [[0, 1, 0]]
    """
    names = batch.schema.names
    schema = published_schema("labels", True, "label" in names, "loss_weights" in names)
    kept = ("record_ids", "label")
    columns = {name: batch[name] for name in kept if name in schema.names}
    _, offsets = flat_list(batch["input_ids"])
    flat: dict[str, tuple[Any, Any]] = {}
    for name in ("input_ids", "labels", "seq_lengths", "position_ids"):
        if name in batch.schema.names:
            flat[name] = zero_based(*flat_list(batch[name]))
    if "labels" not in batch.schema.names:
        flat["labels"] = expand_labels(batch), offsets - offsets[0]
    if "position_ids" not in batch.schema.names:
        flat["position_ids"] = position_ids(flat["seq_lengths"][0]), offsets - offsets[0]
    for name, (values, starts) in flat.items():
        columns[name] = list_array(pa.array(values, pa.int32()), starts, pa.int32())
    if "loss_weights" in batch.schema.names:
        weights, starts = zero_based(*flat_list(batch["loss_weights"]))
        columns["loss_weights"] = list_array(pa.array(weights), starts, pa.float32())
    arrays = [columns[name].cast(schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _jsonl_batches(path: Path) -> Iterator[pa.RecordBatch]:
    from pyarrow import json as pa_json

    with path.open("rb") as file:
        present = json.loads(file.readline())
    layout: Layout = "labels" if "labels" in present else "compact"
    schema = published_schema(
        layout, "position_ids" in present, "label" in present, "loss_weights" in present
    )
    parse = pa_json.ParseOptions(explicit_schema=schema)
    yield from pa_json.open_json(path, parse_options=parse)
