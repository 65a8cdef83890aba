"""Open a published version, and load a split of it as memory-mapped rows, without torch.

Files are copied to this machine and verified:

    s3://.../data/train-0000-<sha>.parquet    published file; in a local store it is read in place
      -> <cache>/loaded/<sha256>.parquet      verified download, for streaming
      -> <cache>/loaded/<sha256>-rows1.arrow  rows with labels and position_ids, for mapping

Every process compares the sha256 of a file, published or cached, before it first reads it, because
disks flip bits without changing size or time. A damaged file in the cache is made again; in a local
store it is an error. With `verify=False`, a copy that was verified once is trusted while its size
and modification time match its receipt. The cache is keyed by content, so versions share files, and
ranks that start together do the work once, using a file lock that the kernel frees if its holder is
killed.

Cost: hashing at 1-2 GB/s in each process; converting Parquet to Arrow at about 60 M tokens/s, once;
12 bytes of disk per token, 4 of which are `position_ids`.

`load_preferences` returns preferences as TRL trains them: ids of prompts and answers in columns
that TRL pads and masks. TRL's collators train everything after `prompt_ids`, so a row has a prompt,
which is not trained, and answers, which are trained to their last token. The published packs have
the same tokens with labels and bounds, for trainers that take packs.
"""

import fcntl
import hashlib
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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from packhouse.errors import ConfigError, EmptyDatasetError, IntegrityError, VersionNotFoundError
from packhouse.load.known_packs import users_level, watch_table
from packhouse.pack.pack_columns import IGNORE_INDEX, preference_names, published_schema, to_layout
from packhouse.records.arrays import Int64s, flat_list, list_array, one_chunk
from packhouse.store import FileEntry, OpenVersion, open_store, version_reader
from packhouse.store.local_folder import LocalStore
from packhouse.store.manifest import Manifest, changed_manifest, parse_slot
from packhouse.store.object_keys import split_pinned
from packhouse.system import disks
from packhouse.system.fingerprint import file_sha256
from packhouse.system.worker import at

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

    Rows have `input_ids`, `labels` (computed from the ranges for layout `compact`), `seq_lengths`,
    `record_ids` and `position_ids`, as well as `label` for classification, and `loss_weights` if
    some are not 1. They have `position_ids` even if the files do not, because that is the only mark
    of record boundaries that `transformers.Trainer` does not drop.

    Args:
        uri: `<store>/<dataset>`, a folder or `s3://bucket/prefix/<dataset>`, optionally with
            `@<ref>` or `@<version>#<digest>`; or a folder that `packhouse pull` wrote.
        version: a ref, a version (`<vid>.g<N>`) or a version ID; preferably `<version>#<digest>`.
        split: `train` or `eval`.
        by_source: return a dict with one dataset per source, as `Trainer(eval_dataset=...)` takes
            it; requires a version with `split.eval_by_source`.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: compare each file's sha256 before this process first reads it (1-2 GB/s); if False,
            trust copies that were verified before, as long as size and modification time match.

    Returns:
        A `datasets.Dataset`, or a dict of datasets by source; its `info.version` is unset and
        `info.description` names the version.

    Raises:
        ConfigError: `uri` and `version` name different versions, a file exists where the cache
            folder should be, or the split has no files for `by_source`.
        DiskError: the cache cannot be written, because the disk is full or access is denied.
        VersionNotFoundError: the dataset, version or split does not exist.
        EmptyDatasetError: the split has no rows.
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
                f"split '{split}' of {opened.dataset} {opened.version} has no files by source. "
                "Prepare with split.eval_by_source: true, and load split='eval'."
            )
        paths.setdefault(source, []).append(mapped_file(opened, entry, folder, verify))
    about = f"packhouse {opened.dataset} {opened.version} {split}"
    rows = {name: map_rows(own, f"{about} {name or ''}".strip()) for name, own in paths.items()}
    # So that a model with `enable_packing` notices a collator that loses record boundaries.
    for each in rows.values():
        watch_table(each.data.table)
    # Not imported to find out: that takes over a second.
    if "transformers.trainer" in sys.modules and any(
        "loss_weights" in each.column_names for each in rows.values()
    ):
        warnings.warn(
            "rows have loss_weights, but transformers.Trainer drops them and most collators ignore "
            "them. Set remove_unused_columns=False and apply them (docs/how-to/own-loop.md).",
            stacklevel=users_level(),
        )
    return {str(name): each for name, each in rows.items()} if by_source else rows[None]


def map_rows(paths: Sequence[Path], description: str) -> "Dataset":
    """Map files from `mapped_file` as one dataset, in order."""
    from datasets import Dataset, DatasetInfo, concatenate_datasets

    info = DatasetInfo(description=description)
    return concatenate_datasets([Dataset.from_file(str(path)) for path in paths], info=info)


def cache_folder(cache: str | Path | None) -> Path:
    """Return the folder of local copies: `cache`, or the default.

    Raises:
        ConfigError: a file is in the way of the folder.
    """
    return disks.check_cache(Path(cache) if cache is not None else disks.default_cache())


def open_split(
    uri: str | Path, version: str, split: str, *, preferences: bool = False
) -> tuple[OpenVersion, list[FileEntry]]:
    """Resolve a version and the data files of one of its splits, in published order.

    Raises:
        ConfigError: `uri` and `version` name different versions, or the version has preferences
            and `preferences` is False (rejected answers would be trained), or the reverse.
        VersionNotFoundError: the dataset, version or split does not exist.
    """
    folder, marker = str(uri), Path(uri).expanduser() / "manifest.json"
    if "://" in folder or not marker.is_file():
        opened = version_reader.open_address(folder, version)
    else:  # `packhouse pull` wrote this folder
        folder = str(marker.parent)
        manifest = parse_slot(marker.read_bytes(), f"'{marker}'")
        if not isinstance(manifest, Manifest):
            raise VersionNotFoundError(
                f"'{folder}' contains a version that was removed. Pull another one."
            )
        version, recorded = split_pinned(version)
        if version not in ("latest", manifest.version, manifest.vid):
            raise VersionNotFoundError(
                f"'{folder}' is a copy of {manifest.version}, not of '{version}'. Remove "
                "`version`, or load from the store."
            )
        if not manifest.manifest_id.startswith(recorded):
            raise changed_manifest(manifest, recorded, "the address")
        name, version, store = manifest.dataset, manifest.version, open_store(folder)
        opened = _Pulled(store=store, dataset=name, version=version, manifest=manifest)
    if preferences != (opened.manifest.preferences is not None):
        raise ConfigError(
            f"{opened.dataset} {opened.version} has no preferences. Load it with load_packed."
            if preferences
            else f"{opened.dataset} {opened.version} has preferences, so its bad answers would be "
            "trained as if they were good. Load it with load_preferences."
        )
    entries = opened.files(split=split)
    if not entries:
        raise VersionNotFoundError(
            f"{opened.dataset} {opened.version} has no split '{split}'. Its splits are: "
            f"{', '.join(opened.manifest.splits()) or 'none'}."
        )
    filled = [entry for entry in entries if entry.rows]
    if not filled:
        raise EmptyDatasetError(
            f"split '{split}' of {opened.dataset} {opened.version} has no rows. Load another split."
        )
    return opened, filled


class _Pulled(OpenVersion):
    """A version in a folder that `packhouse pull` wrote, with files under their own names."""

    __slots__ = ()

    @override
    def key(self, entry: FileEntry) -> str:
        return entry.path


def verified_file(opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool = True) -> Path:
    """Return a verified local path of a published file, in place or downloaded to the cache.

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
                f"'{opened.uri(entry)}' does not hold the published bytes (sha256 {entry.sha256}). "
                "Restore it, or publish the version again elsewhere.",
                key=entry.key,
            )
        path.unlink(missing_ok=True)
        opened.fetch(entry, path)

    return _verified(path, entry.sha256, receipt, verify, fetch)


_MAX_GROUP_BYTES = 2**28
"""Maximum size of a decoded row group; a stream holds one per lane. Ours have about 2**24."""
_FORM = 1
"""Version of the cached rows; part of their file name. Raise it when the rows change."""


def mapped_file(
    opened: OpenVersion,
    entry: FileEntry,
    cache: Path,
    verify: bool = True,
    columns: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None,
) -> Path:
    """Return a local Arrow stream file with the rows of a published file, for mapping.

    Args:
        opened: version.
        entry: one of its files.
        cache: folder of local copies.
        verify: compare its sha256 once in this process.
        columns: converts batches from `read_rows`; its name is part of the file name.

    Raises:
        IntegrityError: the store's bytes are not the published ones.
    """
    form = "rows" if columns is None else columns.__name__
    path = cache / "loaded" / f"{entry.sha256}-{form}{_FORM}.arrow"

    def convert() -> None:
        source = verified_file(opened, entry, cache, verify)
        for left in path.parent.glob(f".{path.name}.*"):  # large files of killed processes
            left.unlink(missing_ok=True)
        staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            write = partial(_write_rows, source, entry, columns, staged)
            version_reader.decode_in_worker(write, source, entry.key)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        # The mapped rows replace the download: otherwise each file would be on the disk twice.
        if not isinstance(opened.store, LocalStore):
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
            # A stream instead of a file, because `Dataset.from_file` maps only streams.
            writer = writer or pa.ipc.new_stream(sink, rows.schema)
            writer.write_batch(rows)
        if writer is None:
            raise IntegrityError(f"'{source}' has no rows, but its manifest lists some")
        writer.close()


def check_row_groups(path: Path, entry: FileEntry, cache: Path) -> None:
    """Decode the row groups of a Parquet file once in a worker process, before a trainer does.

    Raises:
        IntegrityError: a row group takes too much memory, or cannot be read.
    """
    # A footer may count less than its pages hold: 575 bytes stood for 200 MB.
    # Once per machine: a trainer must not be killed because a row group needs too much memory.
    proof = cache / "loaded" / f"{entry.sha256}.bounded"
    with disks.disk_errors(proof.parent), locked(proof):
        if not proof.exists():
            read = partial(_read_row_groups, path, entry)
            version_reader.decode_in_worker(read, path, entry.key)
            disks.write_whole(proof, b"")


def _read_row_groups(path: Path, entry: FileEntry) -> None:
    with (
        version_reader.reading(entry.key, key=entry.key),
        pq.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        version_reader.check_footer(file.metadata, entry)
        for number in range(file.num_row_groups):
            at(f"row group {number}")
            size = file.read_row_group(number).nbytes
            if size > _MAX_GROUP_BYTES:
                raise IntegrityError(
                    f"row group {number} of '{entry.key}' decodes to {size:,} bytes; the limit of "
                    f"a stream is {_MAX_GROUP_BYTES:,}. Use load_packed, or publish it again.",
                    key=entry.key,
                )


_State = tuple[int, int, int, int, int]

_hashed: dict[tuple[str, str], _State] = {}
"""(path, sha256) of files that this process has verified -> their state at that time."""


def _verified(
    path: Path, sha256: str | None, receipt: Path, verify: bool, make: Callable[[], None]
) -> Path:
    """Return `path` after verifying its bytes; calls `make` if they are missing or damaged.

    Args:
        path: file.
        sha256: expected sha256; None for a file made here, whose receipt has it.
        receipt: file of `write_checked` with sha256, size and modification time of the verified
            bytes.
        verify: compare the sha256 once in this process; if False, size and time are enough.
        make: makes the file.
    """
    if _is_trusted(path, sha256, receipt, verify):
        return path
    with disks.disk_errors(receipt.parent), locked(receipt):
        # Ranks start together: another one may have made the file while this one waited.
        if _is_trusted(path, sha256, receipt, verify):
            return path
        if not _is_trusted(path, sha256, receipt, verify=True):
            make()
        # Compare the state before and after hashing: a writer in between would go unnoticed.
        before, found = _state(path), file_sha256(path)
        if before is None or before != _state(path) or found != (sha256 or found):
            raise IntegrityError(f"'{path}' changed while it was being read. Load it again.")
        disks.write_checked(receipt, {"sha256": found, "size": before[2], "mtime_ns": before[3]})
        _hashed[str(path), found] = before
    return path


def _is_trusted(path: Path, sha256: str | None, receipt: Path, verify: bool) -> bool:
    state, verified = _state(path), disks.read_checked(receipt) or {}
    digest = sha256 or verified.get("sha256")
    if state is None or digest is None:
        return False
    if not verify:
        return (verified.get("size"), verified.get("mtime_ns")) == (state[2], state[3])
    # Disks flip bits without changing size or time, so each process hashes a file once.
    # With size and time alone, 11 of 25 flipped bits gave wrong values.
    if _hashed.get((str(path), digest)) != state:
        if file_sha256(path) != digest:
            return False
        _hashed[str(path), digest] = state
    return True


def _state(path: Path) -> _State | None:
    """Return values that change when a file is written (unlike by bit rot), or None if missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    # A rename or a write changes at least one of these, even if size and time stay the same.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make a file, with a lock file next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel if the process is killed
        yield


def read_rows(path: Path, entry: FileEntry | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a published file of any format, with `labels` and `position_ids`.

    Args:
        path: file.
        entry: its entry in the manifest; None for a file that a run has just made.

    Raises:
        IntegrityError: the file is damaged, or has no tokens.
    """
    for batch in version_reader.read_batches(path, entry=entry):
        names = batch.schema.names
        if "input_ids" not in names:
            raise IntegrityError(f"'{path.name}' has no input_ids. Its columns are {names}.")
        # position_ids take 4 of 12 bytes per token, but transformers.Trainer drops seq_lengths.
        schema = published_schema("labels", True, "label" in names, "loss_weights" in names)
        yield to_layout(batch, schema)


Form = Literal["trl", "reward", "packed"]


def load_preferences(
    uri: str | Path,
    version: str = "latest",
    split: str = "train",
    *,
    form: Form = "trl",
    cache: str | Path | None = None,
    verify: bool = True,
) -> "Dataset":
    """Load a split of a version of preferences as a memory-mapped `datasets.Dataset`.

    | `form` | with `format: pairs` | with `format: kto` |
    |---|---|---|
    | `trl` | `prompt_ids`, `chosen_ids`, `rejected_ids` | `prompt_ids`, `completion_ids`, `label` |
    | `reward` | `chosen_ids`, `rejected_ids`, each with its prompt | not available |
    | `packed` | packs, with the columns of the files | packs of single answers |

    `trl` and `reward` also have `record_id`, and one row per pair or answer. In packs, the chosen
    sequence of a pair comes directly before the rejected one, with the same record id. Answers are
    trained to their last token, which ends the turn; prompts are not trained. Both sides of a pair
    have the same `prompt_ids`.

    Args:
        uri: `<store>/<dataset>`, as for `load_packed`.
        version: a ref, a version (`<vid>.g<N>`) or a version ID.
        split: `train` or `eval`.
        form: set of columns, as in the table.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: as for `load_packed`.

    Raises:
        ConfigError: the version has no preferences, or not in this form.
        VersionNotFoundError: the dataset, version or split does not exist.
        EmptyDatasetError: the split has no rows.
        IntegrityError: the store's bytes are not the published ones.

    Example:
        >>> import json
        >>> from packhouse import Recipe, prepare
        >>> row = {"prompt": "1 + 1?", "chosen": " 2", "rejected": " 3"}
        >>> folder = getfixture("tmp_path")
        >>> written = (folder / "pairs.jsonl").write_text(json.dumps(row))
        >>> recipe = Recipe.model_validate({"dataset": "pairs",
        ...     "sources": [{"path": str(folder / "pairs.jsonl"), "format": "pairs"}],
        ...     "tokenizer": "deployments/demo/tokenizer", "format": {"template": "alpaca"}})
        >>> version = prepare(recipe, store=folder, progress=False, cache=folder / "cache")
        >>> load_preferences(folder / "pairs", cache=folder / "cache").column_names
        ['prompt_ids', 'chosen_ids', 'rejected_ids', 'record_id']
    """
    opened, entries = open_split(uri, version, split, preferences=True)
    kind = str(opened.manifest.preferences)
    if form not in ("trl", "reward", "packed") or (kind, form) == ("kto", "reward"):
        usable = "'trl' or 'packed'" if kind == "kto" else "'trl', 'reward' or 'packed'"
        raise ConfigError(f"form {form!r:.40} is not available for `format: {kind}`. Use {usable}.")
    folder = cache_folder(cache)
    convert = {"packed": preference_names, "reward": reward_columns}.get(form, preference_columns)
    paths = [mapped_file(opened, entry, folder, verify, convert) for entry in entries]
    return map_rows(paths, f"packhouse {opened.dataset} {opened.version} {split}")


def preference_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows of pairs or answers to the columns of TRL's DPOTrainer and KTOTrainer.

    Args:
        batch: published rows with `labels`; rows with a `label` are single answers.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [5, 6, 7, 8, 5, 6, 9],
        ...     "labels": [-100, -100, 7, 8, -100, -100, 9], "seq_lengths": [4, 3],
        ...     "record_ids": ["a", "a"]}])
        >>> preference_columns(batch).to_pylist()
        [{'prompt_ids': [5, 6], 'chosen_ids': [7, 8], 'rejected_ids': [9], 'record_id': 'a'}]
    """
    found = _Sequences(batch)
    labels = flat_list(batch["labels"])[0]
    num_prompt = np.add.reduceat(labels == IGNORE_INDEX, found.starts, dtype=np.int64)
    # Sequences of 2 + 2 and of 2 + 1 tokens -> pieces from 0, 2, 4, 6: prompt, answer, prompt, ...
    pieces = found.cut(np.stack([found.starts, found.starts + num_prompt], axis=1).ravel())
    if "label" in batch.schema.names:
        columns = {"prompt_ids": pieces[::2], "completion_ids": pieces[1::2]}
        columns["label"] = one_chunk(batch["label"]).cast(pa.bool_())
        return pa.RecordBatch.from_pydict(columns | {"record_id": found.names})
    columns = {"prompt_ids": pieces[::4], "chosen_ids": pieces[1::4], "rejected_ids": pieces[3::4]}
    return pa.RecordBatch.from_pydict(columns | {"record_id": found.names[::2]})


def reward_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert pairs to the columns of TRL's RewardTrainer, with the prompt in both sides.

    Args:
        batch: published rows of pairs, with `labels`.
    """
    found = _Sequences(batch)
    whole = found.cut(found.starts)
    columns = {"chosen_ids": whole[::2], "rejected_ids": whole[1::2]}
    return pa.RecordBatch.from_pydict(columns | {"record_id": found.names[::2]})


class _Sequences:
    """All sequences of rows, each a prompt, which is not trained, and a trained answer."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.ids, _ = flat_list(batch["input_ids"])
        lengths, _ = flat_list(batch["seq_lengths"])
        self.names = one_chunk(batch["record_ids"]).flatten()
        self.starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def cut(self, starts: Int64s) -> pa.ListArray:
        """Return all ids as lists that begin at these tokens."""
        return list_array(
            pa.array(self.ids, pa.int32()), np.append(starts, len(self.ids)), pa.int32()
        )
