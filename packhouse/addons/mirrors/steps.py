"""Share finished steps between machines without a common disk, such as CI runners.

A mirror complements the local cache, in any object store:

```
<mirror>/<step>/<key>/tokenized.arrow ...   files of the step, create-only
<mirror>/<step>/<key>/receipt.json          written last: without it the step does not exist
```

Missing steps are fetched before they would run, and computed steps are written afterwards. Fetched
steps are verified like local ones: the receipt's digest, and size and sha256 of every file. Only
Arrow, Parquet, JSON and export files are fetched, and nothing is unpickled. Anyone who can write to
the mirror can still store consistent wrong data, so give write access to trusted runs only, and
read-only keys to others. Nothing is ever deleted from a mirror: use a lifecycle rule of the bucket.

A mirror only saves time, so it never fails a run. After its first failure (no response within 2
seconds of retries, missing bucket, access denied), the run continues without it. A read-only mirror
is still read. `notes` reports this once. Cost: one request per step that is missing locally, and
one transfer of its files.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from packhouse.errors import ConfigError, IntegrityError, PackhouseError, StoreError, TransientError
from packhouse.run.cache import LOCK, AnyReceipt, StepStore, is_intact, parse_receipt
from packhouse.store.objects import (
    FileBody,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.protocol import RetryPolicy, ask, download, run

_SUFFIXES = (".arrow", ".parquet", ".json", ".jsonl", ".zst", ".md", ".html", ".mds", ".msgpack")
_RECEIPT = "receipt.json"
# Keep retries short, because a mirror only saves time. Its notes report what it skipped.
_RETRY = RetryPolicy(deadline_s=2, is_logged=False)
_READ_TIMEOUT_S = 10
_THREADS = 8
_FAILURES = (StoreError, TransientError, ConfigError)  # ConfigError: missing credentials


@dataclass(kw_only=True)
class StepMirror:
    """Finished steps in an object store, for a local step store."""

    store: ObjectStore
    steps: StepStore
    notes: list[str] = field(default_factory=list)
    """Problems with the mirror; each of them only costs time."""
    fetched: list[str] = field(default_factory=list)
    """Steps fetched from the mirror, as `step/key`."""
    written: list[str] = field(default_factory=list)
    is_used: bool = True
    """False after a failure: the mirror is neither read nor written any more."""
    is_written: bool = True
    """False after the mirror rejected a write."""
    _lock: Lock = field(default_factory=Lock, repr=False)

    def fetch(self, step: str, key: str) -> bool:
        """Fetch a step if the mirror has all of it; return True if it is now in the local cache.

        Raises:
            DiskError: the local cache cannot store it.
        """
        if self.steps.peek(step, key) is not None:
            return True
        if not self.is_used:
            return False
        try:
            with self.steps.work_folder("mirror") as work:
                return self._fetch(step, key, work)
        except (IntegrityError, ObjectNotFoundError) as error:  # affects this step only
            self.notes.append(f"{step}/{key[:12]} was not taken from the mirror: {error}")
        except _FAILURES as error:
            self._stop_using(error)
        return False

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of the (step, key) pairs the mirror has; one request each."""
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            asked = list(steps)
            held = pool.map(self._holds, asked)
            return {step for step, is_held in zip(asked, held, strict=True) if is_held}

    def _holds(self, step: tuple[str, str]) -> bool:
        try:
            return self.is_used and self._has("/".join((*step, _RECEIPT)))
        except _FAILURES as error:
            self._stop_using(error)
            return False

    def write(self, receipt: AnyReceipt) -> None:
        """Write a step to the mirror, its receipt last, unless the mirror already has it."""
        folder = f"{receipt.step}/{receipt.key}"
        try:
            if not self.is_used or not self.is_written or self._has(f"{folder}/{_RECEIPT}"):
                return
            for name in sorted(receipt.files):
                body = file_body(receipt.path(name))
                _create(self.store, f"{folder}/{name}", body)
            body = file_body(receipt.path(_RECEIPT))
            _create(self.store, f"{folder}/{_RECEIPT}", body)
            self.written.append(folder)
        except StoreError as error:  # a read-only key, as untrusted jobs have
            with self._lock:
                if self.is_written and self.is_used:
                    self.is_written = False
                    self.notes.append(
                        f"nothing more is written to the step mirror in this run: {error}. "
                        "Where this run should share its steps, give it a key that may write"
                    )
        except _FAILURES as error:
            self._stop_using(error)

    def _stop_using(self, error: PackhouseError) -> None:
        """Stop using the mirror, with a single note even if 8 threads fail at once."""
        with self._lock:
            if self.is_used:
                self.is_used = False
                self.notes.append(
                    f"the step mirror failed, and the rest of this run does not use it: {error}. "
                    "Its steps are computed here instead. `packhouse doctor cache` checks the "
                    "mirror; unset PACKHOUSE_CACHE_MIRROR, or give --cache a folder, to run "
                    "without one"
                )

    @contextmanager
    def sharing(self, names: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Fetch missing steps, given as (step, key), then write those that the block computed."""
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            list(pool.map(lambda name: self.fetch(*name), names))
            yield
            taken = set(self.fetched)
            new = [self.steps.peek(*name) for name in names if "/".join(name) not in taken]
            list(pool.map(self.write, [receipt for receipt in new if receipt is not None]))

    def _has(self, key: str) -> bool:
        try:
            run(self.store, ask(ObjectStore.head, key), retry=_RETRY)
        except ObjectNotFoundError:
            return False
        return True

    def _fetch(self, step: str, key: str, work: Path) -> bool:
        """Download and verify a step, then move it into the local store."""
        folder = f"{step}/{key}"
        try:
            raw = run(self.store, ask(ObjectStore.get, f"{folder}/{_RECEIPT}"), retry=_RETRY).data
        except ObjectNotFoundError:
            return False
        receipt = parse_receipt(raw, step, key, work)
        names = sorted(receipt.files)
        if other := [name for name in names if not name.endswith(_SUFFIXES)]:
            raise IntegrityError(f"'{folder}' lists '{other[0]}', which no step writes")
        for name in names:
            steps = download(f"{folder}/{name}", work / name, receipt.files[name].size)
            run(self.store, steps, retry=_RETRY)
        if not is_intact(receipt):  # checked before other processes can see it
            raise IntegrityError("its files are not those of its receipt")
        (work / _RECEIPT).write_bytes(raw)
        place = self.steps.root / step / key
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            work.rename(place)
        except OSError:  # another process fetched or computed it
            return self.steps.find(step, key) is not None
        # The lock of the work folder moved along with it.
        (place / LOCK).unlink(missing_ok=True)
        self.fetched.append(folder)
        return True


def open_step_mirror(uri: str, cache: Path) -> StepMirror:
    """Open the mirror for the steps in a cache folder.

    Raises:
        ConfigError: unknown kind of store, or missing credentials.
    """
    store = open_store(uri, read_timeout_s=_READ_TIMEOUT_S)
    return StepMirror(store=store, steps=StepStore(cache / "steps"))


def _create(store: ObjectStore, key: str, body: FileBody) -> None:
    try:
        run(store, ask(ObjectStore.put_create, key, body), retry=_RETRY)
    except PreconditionFailedError:
        return  # there already: content is the same for the same key
