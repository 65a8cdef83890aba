"""Share finished steps between machines that have no disk in common, such as runs of a CI.

A mirror lies beside the local cache, in any object store:

```
<mirror>/<step>/<key>/tokenized.arrow ...   what the step wrote, create-only
<mirror>/<step>/<key>/receipt.json          written last: without it the folder is not there
```

What is missing here is fetched before a step, and what was computed is written after it. A fetched
step is believed as little as a local one: the receipt's own digest and every file's size and sha256
are compared, and files of other kinds than Arrow, Parquet and JSON are not fetched at all; nothing
is ever unpickled. Whoever may write to the mirror can still put a consistent lie there, so only
trusted runs may: give others a key that reads. Nothing is ever removed from a mirror: let the
bucket expire objects (a lifecycle rule).

A mirror that hiccups, or that takes nothing from this key, costs time, never a run: it counts as a
miss, and is said in `notes`. Costs one request for each step that is not here, and the transfer of
every step's files once.
"""

import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhouse.errors import IntegrityError, StoreError, TransientError
from packhouse.jobs import Job
from packhouse.step_store import LOCK, Receipt, StepStore, parse_receipt
from packhouse.store.objects import (
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.steps import Create, Now, Pause, Read, RetryPolicy, Stat, Steps, request, run
from packhouse.workspace import CachePlace

__all__ = ["StepMirror", "open_mirror"]

_SUFFIXES = (".arrow", ".parquet", ".json", ".jsonl", ".zst", ".md", ".mds", ".msgpack")
_RECEIPT = "receipt.json"
_RETRY = RetryPolicy(deadline_s=2)  # a mirror saves time: it may not cost much of it
_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class StepMirror:
    """Finished steps in an object store, for a local step store."""

    store: ObjectStore
    steps: StepStore
    notes: list[str] = field(default_factory=list)
    """What went wrong and cost time only."""
    fetched: list[str] = field(default_factory=list)
    """Steps that were taken from the mirror, as `step/key`."""
    written: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """The step that the mirror would not take; no other is tried after it."""
    silent: list[str] = field(default_factory=list)
    """Steps about which the mirror could not be asked; no other is asked about after them."""

    def fetch(self, step: str, key: str) -> bool:
        """Bring a step here if the mirror has it whole; returns whether it is here now.

        Raises:
            DiskError: the local cache cannot take it.
        """
        if self.steps.peek(step, key) is not None:
            return True
        try:
            with self.steps.work_folder("mirror") as work:
                return self._fetch(step, key, work)
        except (TransientError, IntegrityError, ObjectNotFoundError) as error:
            self.notes.append(f"{step}/{key[:12]} was not taken from the mirror: {error}")
            return False

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of the steps, as (step, key), lie there; one request for each."""
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            asked = list(steps)
            held = pool.map(self._answers, asked)
            return {step for step, is_held in zip(asked, held, strict=True) if is_held}

    def _answers(self, step: tuple[str, str]) -> bool:
        if self.silent:
            return False
        try:
            return self._has("/".join((*step, _RECEIPT)))
        except (TransientError, StoreError) as error:
            self.silent.append(step[0])
            self.notes.append(f"what the mirror holds is not known: {error}")
            return False

    def write(self, receipt: Receipt) -> None:
        """Put a step there, its receipt last; one that is there already is left alone."""
        folder = f"{receipt.step}/{receipt.key}"
        if self.refused:
            return
        try:
            if self._has(f"{folder}/{_RECEIPT}"):
                return
            for name in sorted(receipt.files):
                body = file_body(receipt.path(name))
                _create(self.store, f"{folder}/{name}", body)
            body = file_body(receipt.path(_RECEIPT))
            _create(self.store, f"{folder}/{_RECEIPT}", body)
            self.written.append(folder)
        except TransientError as error:
            self.notes.append(f"{folder[:20]} was not written to the mirror: {error}")
        except StoreError as error:  # a key that reads and may not write, as untrusted jobs have
            self.refused.append(folder)
            self.notes.append(f"nothing is written to the mirror: {error}")

    @contextmanager
    def sharing(self, jobs: Iterable[Job]) -> Iterator[None]:
        """Fetch what is missing of some jobs, and write what the block computes of them."""
        names = [(job.step, job.key) for job in jobs]
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            list(pool.map(lambda name: self.fetch(*name), names))
            yield
            taken = set(self.fetched)
            new = [self.steps.peek(*name) for name in names if "/".join(name) not in taken]
            list(pool.map(self.write, [receipt for receipt in new if receipt is not None]))

    def _has(self, key: str) -> bool:
        try:
            run(self.store, request(Stat(key)), retry=_RETRY)
        except ObjectNotFoundError:
            return False
        return True

    def _fetch(self, step: str, key: str, work: Path) -> bool:
        folder = f"{step}/{key}"
        try:
            raw = run(self.store, request(Read(f"{folder}/{_RECEIPT}")), retry=_RETRY).data
        except ObjectNotFoundError:
            return False
        names = sorted(parse_receipt(raw, step, key, work).files)
        if other := [name for name in names if not name.endswith(_SUFFIXES)]:
            raise IntegrityError(f"'{folder}' lists '{other[0]}', which no step writes")
        for name in names:
            steps = _download_steps(self.store, f"{folder}/{name}", work / name)
            run(self.store, steps, retry=_RETRY)
        (work / _RECEIPT).write_bytes(raw)
        place = self.steps.root / step / key
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            work.rename(place)
        except OSError:  # another process brought or computed it meanwhile
            return self.steps.find(step, key) is not None
        (place / LOCK).unlink(missing_ok=True)
        if self.steps.find(step, key) is None:
            shutil.rmtree(place, ignore_errors=True)
            raise IntegrityError("its files are not those of its receipt")
        self.fetched.append(folder)
        return True


def open_mirror(cache: CachePlace) -> StepMirror | None:
    """Open what shares the steps of a cache with other machines, if its setting names a mirror.

    Raises:
        ConfigError: no such kind of store, no credentials.
    """
    if cache.mirror is None:
        return None
    return StepMirror(store=open_store(cache.mirror), steps=StepStore(cache.folder / "steps"))


def _create(store: ObjectStore, key: str, body: Any) -> None:
    try:
        run(store, request(Create(key, body)), retry=_RETRY)
    except PreconditionFailedError:
        return  # there already, or our own lost success: a key has one content


def _download_steps(store: ObjectStore, key: str, path: Path) -> Steps[None]:
    attempt, started = 0, None
    while True:
        path.unlink(missing_ok=True)
        try:
            return store.download(key, path)
        except TransientError as error:
            if started is None:
                started = yield Now()
            yield Pause(attempt, started, error)
            attempt += 1
