"""Cache finished steps: one folder per key with the step's output and a receipt.

Losing the cache costs time, never data.

```
<root>/<step>/<key>/validated.arrow ...     output of the step
<root>/<step>/<key>/receipt.json            names, sizes, sha256, counts; it marks the step done
<root>/tmp/<step>-<random>/                 a running step; renamed as a whole when done
<root>/tmp/<step>-<random>/.lock            held by the running process, with `flock`
```

A hit counts only if the receipt's own digest and the size and sha256 of every file match; if a file
was deleted or altered, the step runs again. A killed step leaves only a folder under `tmp/`. The
operating system frees its lock, so the next step can remove the folder without relying on clocks.
If two processes compute the same key, both finish, the first rename wins, and the other process
uses that result.

```
<cache>/runs/<dataset>.json              jobs of a dataset's last run; the next one may copy them
<cache>/running/lock                     held while a run pins steps and during deletions
<cache>/running/<version>-<random>.keys  keys that one run has pinned, one per line; locked by it
```

A step that a run has pinned is never deleted. An unlocked file of pins belongs to a run that failed
or was killed: its steps are kept for another week, so that the next run can resume. A successful
run deletes its own file and those of earlier attempts. The add-on `cache` deletes steps.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, TypeVar, cast

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter

from packhouse.errors import IntegrityError
from packhouse.records import table_schemas
from packhouse.registry import function_of_addon
from packhouse.store.object_store import ObjectStore
from packhouse.system.disks import CachePlace, check_cache, default_cache, disk_errors, write_whole
from packhouse.system.fingerprint import canonical_json, digest, file_sha256
from packhouse.system.wording import first_line

if TYPE_CHECKING:
    from packhouse.run.step import AnyJob

CachePins = Callable[[Iterable[str]], None]
"""Pins more steps by key."""

# Errors of `flock` on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Lock file in a work folder, deleted once the folder becomes a finished step.
LOCK = ".lock"

# Names of output files, such as `train-00000.parquet`: no folders and no leading dot, so a receipt
# from a mirror cannot point outside its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


F = TypeVar("F", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFact:
    """Size in bytes and sha256 of one file of a step."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    size: Annotated[int, Field(ge=0)]
    sha256: str


_FILES = TypeAdapter(dict[str, FileFact])


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt(Generic[F]):
    """Record of a finished step: enough to find and check its files and to add up the ledger."""

    step: str
    key: str
    folder: str
    files: Mapping[str, FileFact]
    facts: F
    """Counts of the step: rows, tokens, reasons."""
    seconds: float = 0.0
    """Wall time of the computation; not part of any key or published hash."""
    cached: bool = field(default=False, compare=False)
    """True if this run found it in the cache."""

    @property
    def ref(self) -> tuple[str, str]:
        """Step name and key."""
        return self.step, self.key

    def path(self, name: str) -> Path:
        """Return the path of one of its files."""
        return Path(self.folder) / name


AnyReceipt = Receipt[Any]
ReadFacts = Callable[[dict[str, Any]], Any]
"""Parse facts from JSON; raises ValueError if they come from another release."""


class StepStore:
    """Finished steps by key.

    Example:
        >>> import tempfile
        >>> steps = StepStore(Path(tempfile.mkdtemp()))
        >>> def write(folder: Path) -> dict[str, int]:
        ...     _ = (folder / "a.txt").write_text("hello")
        ...     return {"rows": 1}
        >>> steps.run("demo", "k1", write).cached, steps.run("demo", "k1", write).cached
        (False, True)
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, step: str, key: str, read: ReadFacts = dict) -> AnyReceipt | None:
        """Return the receipt if the step is done and all of its files are unchanged.

        A step counts as not done if `read` rejects its facts.
        """
        receipt = self.peek(step, key, read)
        return receipt if receipt is not None and is_intact(receipt) else None

    def peek(self, step: str, key: str, read: ReadFacts = dict) -> AnyReceipt | None:
        """Return the receipt, if any, without reading the files it lists."""
        folder = self.root / step / key
        try:
            return parse_receipt((folder / "receipt.json").read_bytes(), step, key, folder, read)
        except (OSError, IntegrityError):
            return None  # missing or altered

    def run(
        self,
        step: str,
        key: str,
        compute: Callable[[Path], Mapping[str, Any]],
        read: ReadFacts = dict,
    ) -> AnyReceipt:
        """Return the step's receipt, computing the step first if it is not done.

        `compute` writes files into the given folder and returns the facts as JSON. If it raises,
        nothing becomes visible. For `read`, see `find`.

        Raises:
            DiskError: the cache cannot be written.
        """
        if found := self.find(step, key, read):
            # The cache may be read-only, or the step is being deleted.
            with suppress(OSError):
                # Mark it as used: `packhouse cache gc` deletes the least recently used first.
                os.utime(found.path("receipt.json"))
            return found
        with self.work_folder(step) as work:
            self.sweep()
            start = time.perf_counter()
            facts = compute(work)
            made = [path for path in sorted(work.iterdir()) if path.name != LOCK]
            # Written last, and renamed with the folder: a receipt exists only with all its files.
            receipt = {
                "step": step,
                "key": key,
                "seconds": round(time.perf_counter() - start, 3),
                "files": {
                    p.name: {"size": p.stat().st_size, "sha256": file_sha256(p)} for p in made
                },
                "facts": dict(facts),
            }
            data = canonical_json({**receipt, "digest": digest(receipt)})
            (work / "receipt.json").write_bytes(data)
            folder = self.root / step / key
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Between the deletion of a damaged folder and the next rename, another process may
            # finish the step.
            for _ in range(3):
                try:
                    work.rename(folder)
                    break
                except OSError:
                    if winner := self.find(step, key, read):
                        return winner
                    # It is damaged or from another release: delete it and try again.
                    shutil.rmtree(folder, ignore_errors=True)
            else:
                raise OSError(f"could not move '{work}' to '{folder}'")
            # Only now: if the process had been killed before the rename, a sweep needs the lock.
            (folder / LOCK).unlink(missing_ok=True)
            written = self.peek(step, key, read)
            assert written is not None, f"facts of '{step}' change when they are written and read"
            return replace(written, cached=False)

    @contextmanager
    def work_folder(self, name: str) -> Iterator[Path]:
        """Provide a locked work folder, and remove it at the end if it is still there.

        Raises:
            DiskError: the cache cannot be written.
        """
        work = self.root / "tmp" / f"{name}-{uuid.uuid4().hex[:12]}"
        try:
            # `disk_errors` measures free space, so it must come before the folder is removed.
            with disk_errors(self.root):
                work.mkdir(parents=True)
                with locked_file(work / LOCK):
                    yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def sweep(self) -> int:
        """Delete the work folders of killed processes and return their number."""
        tmp = self.root / "tmp"
        dead = [lock.parent for lock in tmp.glob(f"*/{LOCK}") if has_ended(lock)]
        dead += tmp.glob("gone-*")  # left by an interrupted deletion
        for folder in dead:
            shutil.rmtree(folder, ignore_errors=True)
        return len(dead)


def parse_receipt(
    data: bytes, step: str, key: str, folder: Path, read: ReadFacts = dict
) -> AnyReceipt:
    """Parse a receipt stored in `folder`; its file names are safe to join to the folder.

    Raises:
        IntegrityError: the receipt was altered, belongs to another step or key, has an invalid file
            name, or `read` rejects its facts.
    """
    try:
        raw = json.loads(data)
        # The digest also covers the facts, which no file's sha256 does: a changed count in a
        # receipt would be published in the manifest.
        if raw.pop("digest") != digest(raw) or (raw["step"], raw["key"]) != (step, key):
            raise ValueError("it was changed or belongs to another step")
        files = _FILES.validate_json(canonical_json(raw["files"]), strict=True)
        for name in files:
            if not _FILE_NAME.fullmatch(name) or name == "receipt.json":
                raise ValueError(f"file name {name[:80]!r} is not allowed")
        return Receipt(
            step=step,
            key=key,
            folder=str(folder),
            files=files,
            facts=read(raw["facts"]),
            seconds=float(raw["seconds"]),
            cached=True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = first_line(error)
        raise IntegrityError(f"'{step}/{key}/receipt.json' is invalid: {problem}") from None


def is_intact(receipt: AnyReceipt) -> bool:
    """Read every file of a receipt and return True if all are unchanged."""
    # Hashing runs at about 1.8 GB/s, so checking a hit of 100 MB takes 60 ms.
    try:
        return all(
            receipt.path(name).stat().st_size == fact.size
            and file_sha256(receipt.path(name)) == fact.sha256
            for name, fact in receipt.files.items()
        )
    except OSError:  # deleted, or replaced by a folder
        return False


@contextmanager
def locked_file(path: Path) -> Iterator[FileIO]:
    """Create a file that is locked from the moment it appears, until the block or process ends."""
    staged = path.with_name(f"{path.name}.new")
    # Unbuffered: closing it must not fail on a full disk.
    with staged.open("xb", buffering=0) as file:
        # Without file locks, nothing is ever deleted.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Rename after locking: other processes delete files that are not locked.
        staged.rename(path)
        yield file


def has_ended(path: Path) -> bool:
    """Return True if the process that locked a file is gone, False if it runs or may run."""
    try:
        with path.open("r+") as file:
            # A lock instead of an age: by age, a worker whose clock was a day ahead deleted the
            # live work of other machines.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


@contextmanager
def pin_steps(cache: Path, version_id: str, keys: Iterable[str]) -> Iterator[CachePins]:
    """Pin the steps of a run while the block runs, and for another week if it fails.

    Args:
        cache: folder of finished steps.
        version_id: 16 hex digits; runs of the same version are attempts at the same work.
        keys: steps that the run reads or writes. Call the yielded function to pin more.

    Raises:
        DiskError: the cache cannot be written.
    """
    # Several runs of one version may be active: each has a file of its own.
    path = cache / "running" / f"{version_id}-{uuid.uuid4().hex}.keys"

    def hold(more: Iterable[str]) -> None:
        lines = "".join(f"{key}\n" for key in more).encode()
        with disk_errors(cache), cache_lock(cache):
            while lines:  # an unbuffered write may be short
                lines = lines[file.write(lines) :]

    with ExitStack() as stack:
        with disk_errors(cache):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(locked_file(path))
        try:
            hold(keys)
        except BaseException:
            path.unlink()
            raise
        # The new file includes all keys of earlier attempts.
        forget_tries(cache, version_id)
        yield hold
        path.unlink(missing_ok=True)
    # Someone may have deleted the cache during the run.
    with suppress(FileNotFoundError):
        forget_tries(cache, version_id)


@contextmanager
def cache_lock(cache: Path) -> Iterator[bool]:
    """Hold the lock of the cache during the block, which should take milliseconds.

    Yields False if the file system has no locks; then nothing may be deleted.
    """
    with (cache / "running" / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True


def forget_tries(cache: Path, version_id: str = "*") -> None:
    """Unpin the steps of unsuccessful runs, of one version or of all."""
    with cache_lock(cache):
        for path in (cache / "running").glob(f"{version_id}-*.keys"):
            if has_ended(path):
                path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastJob:
    """A job of a dataset's last run."""

    step: str
    label: str
    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Name of a folder in the cache."""
    parts: dict[str, Any]
    """Everything that went into the key, as plain JSON."""
    shard: dict[str, Any] | None = None
    """The `SourceShard` that it read, as plain JSON; None if it read none."""


_LAST_JOBS = TypeAdapter(list[LastJob])


def save_last_run(cache: Path, dataset: str, executed: Iterable["AnyJob"]) -> None:
    """Save the key and key parts of every job, and the location of its source rows."""
    jobs = [
        LastJob(
            step=job.step.name,
            label=job.label,
            key=job.key,
            parts=dict(job.parts),
            shard=asdict(shard) if (shard := getattr(job.parameters, "shard", None)) else None,
        )
        for job in executed
    ]
    write_whole(_path(cache, dataset), _LAST_JOBS.dump_json(jobs))


def load_last_run(cache: Path, dataset: str) -> dict[tuple[str, str], LastJob]:
    """Return the jobs of the last run by (step, label); empty if there is none or it is damaged."""
    try:
        jobs = _LAST_JOBS.validate_json(_path(cache, dataset).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {(job.step, job.label): job for job in jobs}


def touch_last_run(cache: Path, dataset: str) -> None:
    """Mark the steps of the last run as used now, because a refresh found nothing changed."""
    with suppress(OSError):  # no last run, or a read-only cache
        os.utime(_path(cache, dataset))


def _path(cache: Path, dataset: str) -> Path:
    return cache / "runs" / f"{dataset}.json"


class Mirror(Protocol):
    """Shares finished steps with machines that use another cache: `packhouse.addons.mirrors`."""

    store: ObjectStore
    notes: list[str]
    """Problems with the mirror. They cost time only."""

    def sharing(self, names: Sequence[tuple[str, str]]) -> AbstractContextManager[None]:
        """Download the missing ones of these (step, key); upload those that the block computes."""

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of these (step, key) that the mirror has."""


def open_mirror(place: CachePlace) -> Mirror | None:
    """Open the mirror of a cache, or return None if it has none.

    Raises:
        ConfigError: the kind of store is unknown, or credentials are missing.
    """
    if place.mirror is None:
        return None
    return cast("Mirror", function_of_addon("open_step_mirror")(place.mirror, place.folder))


Check = Callable[[str, pa.Table], None]
"""Checks a table against the contract with the given name; raises ContractError."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Cache folder and contract checks of a run."""

    cache: Path = field(default_factory=default_cache)
    """Folder of finished steps. Deleting it costs time, never data."""
    check: Check = table_schemas.check
    """Contract check, called on every table before its step counts as done."""
    moved_by: str | None = None
    """Name recorded in the ref's history when it moves; by default the user of this process."""

    def __post_init__(self) -> None:
        check_cache(self.cache)

    @property
    def steps(self) -> StepStore:
        """Step store of this workspace."""
        return StepStore(self.cache / "steps")

    @property
    def tokenizers(self) -> Path:
        """Folder of tokenizer snapshots."""
        return self.cache / "tokenizers"
