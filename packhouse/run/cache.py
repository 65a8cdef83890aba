"""The cache of finished steps: a folder per key, with what the step wrote and a receipt.

Losing it costs time, never data.

```
<root>/<step>/<key>/validated.arrow ...     what the step wrote
<root>/<step>/<key>/receipt.json            names, sizes, sha256, counts; its presence is "done"
<root>/tmp/<step>-<random>/                 a step at work; renamed as a whole when it is done
<root>/tmp/<step>-<random>/.lock            locked by the process at work, with `flock`
```

A hit is trusted only after the receipt's own digest, and every file's size and sha256, were
compared with what is there: deleted or altered files mean the step is done again. A killed step
leaves a folder under `tmp/` and nothing else; the next step removes it: the operating system frees
the lock of a process that ends, and no clock is asked. Two processes that compute the same key both
finish; one rename wins and the other process uses what won. Hashing runs at about 1.8 GB/s, so
checking a hit of 100 MB costs 60 ms.
"""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, cast

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter

from packhouse.errors import IntegrityError
from packhouse.records import tables
from packhouse.registry import function_of_addon
from packhouse.store.objects import ObjectStore
from packhouse.system.disks import CachePlace, check_cache, default_cache, disk_errors
from packhouse.system.fingerprint import canonical_json, digest, file_sha256
from packhouse.system.wording import first_line

LOCK = ".lock"
"""In a work folder; away as soon as the folder is a step."""

# Names of files that steps write, such as `train-00000.parquet`: no folder, no dot in front.
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
    """What a step did: enough to find its files, to check them and to add up the ledger."""

    step: str
    key: str
    folder: str
    files: Mapping[str, FileFact]
    facts: F
    """Counts of the step, part of what the files say: rows, tokens, reasons."""
    seconds: float = 0.0
    """Wall time it took to compute; not part of any key or published hash."""
    cached: bool = field(default=False, compare=False)
    """True if this run found it done."""

    @property
    def ref(self) -> tuple[str, str]:
        """Name of its step, and its key."""
        return self.step, self.key

    def path(self, name: str) -> Path:
        """Return where one of its files lies."""
        return Path(self.folder) / name


AnyReceipt = Receipt[Any]
ReadFacts = Callable[[dict[str, Any]], Any]
"""Makes facts of their JSON; raises ValueError if they are of another release."""


class StepStore:
    """Steps that are done, by key.

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
        """Return the receipt if the step is done and every byte of it is as it was written.

        A step whose facts `read` refuses counts as not done.
        """
        receipt = self.peek(step, key, read)
        return receipt if receipt is not None and is_intact(receipt) else None

    def peek(self, step: str, key: str, read: ReadFacts = dict) -> AnyReceipt | None:
        """Return the receipt if there is one, without reading the files it lists."""
        folder = self.root / step / key
        try:
            return parse_receipt((folder / "receipt.json").read_bytes(), step, key, folder, read)
        except (OSError, IntegrityError):
            return None  # not there, or not as it was written

    def run(
        self,
        step: str,
        key: str,
        compute: Callable[[Path], Mapping[str, Any]],
        read: ReadFacts = dict,
    ) -> AnyReceipt:
        """Return the step's receipt, computing it first where it is not done.

        `compute` writes files into the folder that it is given and returns its facts as JSON. If
        it raises, nothing becomes visible. For `read` see `find`.

        Raises:
            DiskError: the cache cannot take the step.
        """
        found = self.find(step, key, read)
        if found is not None:
            with suppress(OSError):  # a cache that is only read, or a step that goes just now
                os.utime(found.path("receipt.json"))  # `packhouse cache gc` takes the rest first
            return found
        with self.work_folder(step) as work:
            self.sweep()
            start = time.perf_counter()
            facts = compute(work)
            _write_receipt(work, step, key, facts, time.perf_counter() - start)
            return self._commit(work, step, key, read)

    @contextmanager
    def work_folder(self, name: str) -> Iterator[Path]:
        """A locked folder to work in, which is removed at the end if it is still there.

        Raises:
            DiskError: the cache cannot take it, or what the block writes.
        """
        work = self.root / "tmp" / f"{name}-{uuid.uuid4().hex[:12]}"
        try:
            with disk_errors(self.root):
                work.mkdir(parents=True)
                lock = (work / ".new").open("xb")
            with lock, disk_errors(self.root):  # looks at the disk before anything is removed
                with suppress(OSError):  # no locks there: then nothing is ever swept
                    fcntl.flock(lock, fcntl.LOCK_EX)
                (work / ".new").rename(work / LOCK)  # it is never seen unlocked
                yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what killed processes left at work; returns how many folders."""
        tmp = self.root / "tmp"
        dead = [lock.parent for lock in tmp.glob(f"*/{LOCK}") if has_ended(lock)]
        dead += tmp.glob("gone-*")  # steps that someone was removing
        for folder in dead:
            shutil.rmtree(folder, ignore_errors=True)
        return len(dead)

    def _commit(self, work: Path, step: str, key: str, read: ReadFacts) -> AnyReceipt:
        folder = self.root / step / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                work.rename(folder)
            except OSError:
                winner = self.find(step, key, read)
                if winner is not None:
                    return winner
                # damaged, or of another release: take it out of the way
                shutil.rmtree(folder, ignore_errors=True)
                continue
            (folder / LOCK).unlink(missing_ok=True)  # till now, sweeps take what kills leave
            receipt = self.peek(step, key, read)
            assert receipt is not None, f"facts of '{step}' cannot be read as they were written"
            return replace(receipt, cached=False)
        raise OSError(f"could not move '{work}' to '{folder}'")


def _write_receipt(
    work: Path, step: str, key: str, facts: Mapping[str, Any], seconds: float
) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(work.iterdir())
        if path.name != LOCK
    }
    about = {"step": step, "key": key, "seconds": round(seconds, 3)}
    receipt = {**about, "files": files, "facts": dict(facts)}
    (work / "receipt.json").write_bytes(canonical_json({**receipt, "digest": digest(receipt)}))


def parse_receipt(
    data: bytes, step: str, key: str, folder: Path, read: ReadFacts = dict
) -> AnyReceipt:
    """Read a receipt that lies, or shall lie, in `folder`; its file names are safe to join to it.

    Raises:
        IntegrityError: not the receipt of this step and key as it was written, it names a file
            that no step writes, or `read` does not know its facts.
    """
    try:
        raw = json.loads(data)
        if raw.pop("digest") != digest(raw) or (raw["step"], raw["key"]) != (step, key):
            raise ValueError("the receipt of another step, or altered")
        files = _FILES.validate_json(canonical_json(raw["files"]), strict=True)
        for name in files:
            if not _FILE_NAME.fullmatch(name) or name == "receipt.json":
                raise ValueError(f"no step writes a file {name[:80]!r}")
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
        raise IntegrityError(f"'{step}/{key}/receipt.json' is no receipt: {problem}") from None


def is_intact(receipt: AnyReceipt) -> bool:
    """Return True if every file of a receipt is as it was written: reads all of them."""
    try:
        return all(
            receipt.path(name).stat().st_size == fact.size
            and file_sha256(receipt.path(name)) == fact.sha256
            for name, fact in receipt.files.items()
        )
    except OSError:  # gone, or no file any more
        return False


def has_ended(path: Path) -> bool:
    """Return True if the process that locked a file is gone; False where that cannot be told."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


class Mirror(Protocol):
    """Shares finished steps with machines that have another cache: `packhouse.addons.mirrors`."""

    store: ObjectStore
    notes: list[str]
    """What went wrong with it; each costs time only."""

    def sharing(self, names: Sequence[tuple[str, str]]) -> AbstractContextManager[None]:
        """Fetch what is missing of some steps, as (step, key); write what the block computes."""

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of the steps, as (step, key), it has."""


def open_mirror(place: CachePlace) -> Mirror | None:
    """Open the mirror of a cache; None where it has none.

    Raises:
        ConfigError: no such kind of store, no credentials.
    """
    if place.mirror is None:
        return None
    return cast("Mirror", function_of_addon("open_step_mirror")(place.mirror, place.folder))


Check = Callable[[str, pa.Table], None]
"""Called with an artefact's name and its table; raises ContractError."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The folder of a run and its contract checks."""

    cache: Path = field(default_factory=default_cache)
    """Steps that are done lie under it; deleting it loses time, never data."""
    check: Check = tables.check
    """Contract of every table, called before its step counts as done."""
    moved_by: str | None = None
    """The run that a ref names as its mover; by default the person whose process this is."""

    def __post_init__(self) -> None:
        check_cache(self.cache)

    @property
    def steps(self) -> StepStore:
        """The step store of this workspace."""
        return StepStore(self.cache / "steps")

    @property
    def tokenizers(self) -> Path:
        """Folder of tokenizer snapshots."""
        return self.cache / "tokenizers"
