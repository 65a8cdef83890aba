"""Local copies of the files of versions, verified, and made so that they can be mapped.

    s3://.../data/train-0000-<sha>.parquet    published; in a folder it is read where it lies
      -> <cache>/loaded/<sha256>.parquet      the verified download, for streaming
      -> <cache>/loaded/<sha256>-rows1.arrow  its rows with labels and position_ids, to be mapped

Every process compares the sha256 of a file, published or cached, before it first reads from it:
disks change bits without touching size or time. What differs in the cache is made again; what
differs in a store's folder is an error. With `verify=False`, a copy that was verified once is
trusted while its size and time of change stay as its receipt says. The cache is keyed by content:
versions share files, and ranks that start at once do the work once, behind a file lock that the
kernel frees if its holder is killed. Needs no torch.

Cost: hashing 1-2 GB/s, in each process; turning Parquet into Arrow about 60 M tokens/s, once; 12
bytes a token of disk, of which 4 are `position_ids`.
"""

import fcntl
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import IntegrityError
from packhouse.pack.layout import published_schema, to_layout
from packhouse.store import FileEntry, OpenVersion
from packhouse.store.contracts import check_footer, read_batches
from packhouse.store.local import LocalStore
from packhouse.system.disks import disk_errors, write_whole
from packhouse.system.fingerprint import file_sha256
from packhouse.system.worker import at, run_in_worker


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
