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

`load_preferences` gives preferences as TRL trains them: prompts and answers as ids, in columns that
it pads and masks. TRL's collators train whatever follows `prompt_ids`, so a row has its prompt,
which is not trained, and its answers, which are, to the last token. The published packs have the
same tokens with labels and bounds, for trainers that take packs.
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

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    ContractError,
    EmptyDatasetError,
    IntegrityError,
    VersionNotFoundError,
)
from packhouse.load.boundaries import first_packs, watch_packs
from packhouse.pack.layout import IGNORE_INDEX, preference_names, published_schema, to_layout
from packhouse.records.lists import count_up, flat_list, list_array, one_chunk, zero_based
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

    | `form` | of `format: pairs` | of `format: kto` |
    |---|---|---|
    | `trl` | `prompt_ids`, `chosen_ids`, `rejected_ids` | `prompt_ids`, `completion_ids`, `label` |
    | `reward` | `chosen_ids`, `rejected_ids`, each with its prompt | none |
    | `packed` | packs, with the columns of the files | the same, one answer each |

    `trl` and `reward` also have `record_id`, and a row for each pair or answer. Of a pair in a
    pack, the chosen sequence stands before the rejected one, with the same record id. Answers are
    trained to their last token, which ends the turn; prompts are not. Of a pair both sides have
    the same `prompt_ids`.

    Args:
        uri: `<store>/<dataset>`, as `load_packed` takes it.
        version: a ref, a version (`<vid>.g<N>`) or a version id.
        split: `train` or `eval`.
        form: which columns.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: as for `load_packed`.

    Raises:
        ConfigError: the version holds no preferences, or none of that form.
        VersionNotFoundError: no such dataset, version or split.
        EmptyDatasetError: the split holds no row.
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
        raise ConfigError(f"form {form!r:.40} is none of a version of `format: {kind}`")
    folder = cache_folder(cache)
    convert = preference_names if form == "packed" else _CONVERT[kind, form]
    paths = [mapped_file(opened, entry, folder, verify, convert) for entry in entries]
    return map_rows(paths, f"packhouse {opened.dataset} {opened.version} {split}")


def preference_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of pairs or of answers, with the columns of TRL's DPOTrainer and KTOTrainer.

    Args:
        batch: published rows with `labels`; those with a `label` are single answers.

    Raises:
        ContractError: a row is neither.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [5, 6, 7, 8, 5, 6, 9],
        ...     "labels": [-100, -100, 7, 8, -100, -100, 9], "seq_lengths": [4, 3],
        ...     "record_ids": ["a", "a"]}])
        >>> preference_columns(batch).to_pylist()
        [{'prompt_ids': [5, 6], 'chosen_ids': [7, 8], 'rejected_ids': [9], 'record_id': 'a'}]
    """
    found = _Sequences(batch)
    # Sequences of 2 + 2 and of 2 + 1 tokens -> pieces from 0, 2, 4, 6: prompt, answer, prompt, ...
    starts = np.stack([found.starts, found.starts + found.num_prompt], axis=1).ravel()
    pieces = list_array(
        pa.array(found.ids, pa.int32()), np.append(starts, len(found.ids)), pa.int32()
    )
    if found.is_paired:
        columns = {
            "prompt_ids": _every(pieces, 0, 4),
            "chosen_ids": _every(pieces, 1, 4),
            "rejected_ids": _every(pieces, 3, 4),
            "record_id": _every(found.names, 0, 2),
        }
    else:
        columns = {
            "prompt_ids": _every(pieces, 0, 2),
            "completion_ids": _every(pieces, 1, 2),
            "label": one_chunk(batch["label"]).cast(pa.bool_()),
            "record_id": found.names,
        }
    return pa.RecordBatch.from_pydict(columns)


def reward_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Pairs with the prompt in both sides, as TRL's RewardTrainer takes them.

    Args:
        batch: published rows of pairs, with `labels`.
    """
    found = _Sequences(batch)
    whole = list_array(
        pa.array(found.ids, pa.int32()), np.append(found.starts, len(found.ids)), pa.int32()
    )
    columns = {"chosen_ids": _every(whole, 0, 2), "rejected_ids": _every(whole, 1, 2)}
    return pa.RecordBatch.from_pydict(columns | {"record_id": _every(found.names, 0, 2)})


class _Sequences:
    """All sequences of rows, each a prompt and a trained answer."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.is_paired = "label" not in batch.schema.names
        self.ids, _ = zero_based(*flat_list(batch["input_ids"]))
        lengths, _ = zero_based(*flat_list(batch["seq_lengths"]))
        self.names = one_chunk(batch["record_ids"]).flatten()
        labels, _ = zero_based(*flat_list(batch["labels"]))
        self.starts = np.cumsum(lengths, dtype=np.int64) - lengths
        is_prompt = labels == IGNORE_INDEX
        # Sequences of 4 and 3 tokens with 2 of prompt each: what is not trained must be places 0 1
        # of 0 1 2 3 and of 0 1 2, and something must follow it.
        self.num_prompt = np.add.reduceat(is_prompt, self.starts, dtype=np.int64)
        is_due = count_up(lengths) < np.repeat(self.num_prompt, lengths)
        is_whole = (0 < self.num_prompt) & (self.num_prompt < lengths)
        is_bad = not is_whole.all() or not np.array_equal(is_due, is_prompt)
        if self.is_paired and not is_bad:
            chosen, rejected = _every(self.names, 0, 2), _every(self.names, 1, 2)
            is_bad = not chosen.equals(rejected)
        if is_bad:
            raise ContractError(
                "a row is not made of prompts and the answers to them: it holds no preferences"
            )


def _every(values: pa.Array, first: int, step: int) -> pa.Array:
    return values.take(pa.array(np.arange(first, len(values), step)))


_CONVERT = {
    ("pairs", "trl"): preference_columns,
    ("pairs", "reward"): reward_columns,
    ("kto", "trl"): preference_columns,
}
