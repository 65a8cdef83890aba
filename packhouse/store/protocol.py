"""Protocols as generators of store requests, so that the same code runs, is simulated and mutated.

A protocol yields a request (`Read`, `Create`, `Swap`, ...) and gets the answer, or the store's
error is raised at the `yield`. `run` performs requests against a real store. The simulation in the
tests performs the same generators against a store in memory: it chooses who moves next, and drops,
doubles or delays answers at every request. So there is no second model that could differ.

Retries are here and nowhere else: transient errors only, with full jitter, until a deadline. A
retried conditional write may meet its own lost success, so a 412 never means "someone else" by
itself: the caller reads back and compares.
"""

import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from packhouse.errors import IntegrityError, PackhouseError, TransientError
from packhouse.store.objects import (
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    check_unchanged,
)

__all__ = [
    "MAX_READS",
    "All",
    "Clock",
    "Create",
    "Delete",
    "Fingerprint",
    "ListAll",
    "ListFolders",
    "NewId",
    "Pause",
    "Read",
    "Retry",
    "RetryPolicy",
    "Stat",
    "Steps",
    "Swap",
    "in_parallel",
    "put_data",
    "read",
    "read_checked",
    "request",
    "run",
]

log = logging.getLogger("packhouse.store")
S = TypeVar("S")
T = TypeVar("T")

MAX_READS = 4
"""Reads after which bytes that differ from their digest are taken for damaged in the store."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes and tag of an object -> `Blob`."""

    key: str


@dataclass(frozen=True, slots=True)
class Stat:
    """Size, tag and age -> `ObjectInfo`."""

    key: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256 over an object's bytes -> hex."""

    key: str


@dataclass(frozen=True, slots=True)
class Create:
    """Create-only write -> tag."""

    key: str
    body: bytes | FileBody


@dataclass(frozen=True, slots=True)
class Swap:
    """Compare-and-swap -> tag."""

    key: str
    body: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Removal -> None."""

    key: str


@dataclass(frozen=True, slots=True)
class ListAll:
    """Everything under a prefix -> list[ObjectInfo]."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ListFolders:
    """Folder names under a prefix -> list[str]."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Clock:
    """The store's time -> seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class NewId:
    """A name that nobody else has -> str."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before try number `attempt` + 1, or give up with `cause` when the time is over."""

    attempt: int
    started: float
    cause: PackhouseError


@dataclass(frozen=True, slots=True)
class Now:
    """Monotonic seconds of this machine, only for `Pause`."""


@dataclass(frozen=True, slots=True)
class All:
    """Protocols that may run side by side -> list of their results, in order."""

    parts: tuple["Steps[Any]", ...]


Request = (
    Read | Stat | Fingerprint | Create | Swap | Delete | ListAll | ListFolders | Clock | NewId
    | Pause | Now | All
)  # fmt: skip
Steps = Generator[Request, Any, T]


class Retry:
    """Waits between the tries of one request, from its first failure on; see `request`."""

    def __init__(self) -> None:
        self.attempt = 0
        """Tries that failed."""
        self._started: float | None = None

    def wait(self, cause: PackhouseError) -> Steps[None]:
        """Wait before the next try.

        Raises:
            PackhouseError: `cause`, when the time is over.
        """
        if self._started is None:
            self._started = yield Now()
        yield Pause(self.attempt, self._started, cause)
        self.attempt += 1


def request(wanted: Request) -> Steps[Any]:
    """One request, repeated while the store is busy or its answer is lost."""
    retry = Retry()
    while True:
        try:
            return (yield wanted)
        except TransientError as error:
            yield from retry.wait(error)


def read(key: str) -> Steps[Blob | None]:
    """An object, or None if there is none."""
    try:
        blob: Blob = yield from request(Read(key))
    except ObjectNotFoundError:
        return None
    return blob


def read_checked(key: str, parse: Callable[[bytes, str], T]) -> Steps[tuple[T, str] | None]:
    """A parsed object and its tag, or None; damage on the way is read again, `MAX_READS` times.

    Raises:
        IntegrityError: damaged each time, so it lies damaged in the store.
    """
    for left in reversed(range(MAX_READS)):
        blob = yield from read(key)
        if blob is None:
            return None
        try:
            return parse(blob.data, key), blob.etag
        except IntegrityError:
            if not left:
                raise
    raise AssertionError("unreachable: the last read returns or raises")


def put_data(key: str, body: FileBody) -> Steps[None]:
    """Write a data file create-only; a file that is there already must hold the same bytes.

    A file that vanishes before we could look at it was collected behind a tombstone. It is written
    again, and the tombstone is found at the commit.

    Raises:
        IntegrityError: the key holds other bytes than its name says.
    """
    while True:
        try:
            try:
                tag = yield from request(Create(key, body))
            except PreconditionFailedError:
                check_unchanged(body)  # nothing has read it for this
                info: ObjectInfo = yield from request(Stat(key))
                tag = info.etag if info.size == body.size else ""
            # On most stores the tag of a single PUT is a digest; if not, ask for the bytes.
            if tag and tag in (body.md5, body.sha256):
                return
            if (yield from request(Fingerprint(key))) == body.sha256:
                return
        except ObjectNotFoundError:
            continue
        raise IntegrityError(
            f"'{key}' holds other bytes than '{body.path}' (sha256 {body.sha256}); the store "
            "damaged it, or it was written by hand. Remove that object and publish again",
            key=key,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long and how often a transient error is tried again."""

    deadline_s: float = 120.0
    """Seconds from the first failure after which the error is raised."""
    base_s: float = 0.1
    """First wait is in [0, base_s); it doubles with each try (full jitter)."""
    cap_s: float = 8.0
    """Longest wait."""
    is_logged: bool = True
    """Log each try that failed, so that who waits knows for what."""

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait after failed try number `attempt` (0, 1, ...)."""
        return random.uniform(0, min(self.cap_s, self.base_s * 2 ** min(attempt, 16)))


def run(
    store: ObjectStore, steps: Steps[T], *, retry: RetryPolicy | None = None, num_threads: int = 8
) -> T:
    """Perform a protocol against a store and return its result.

    Raises:
        PackhouseError: whatever the protocol raises.
    """
    retry = retry or RetryPolicy()
    answer: Any = None
    error: PackhouseError | None = None
    while True:
        try:
            wanted = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        answer, error = None, None
        try:
            answer = _perform(store, wanted, retry, num_threads)
        except PackhouseError as raised:
            error = raised


def _perform(store: ObjectStore, wanted: Request, retry: RetryPolicy, num_threads: int) -> Any:
    match wanted:
        case Read(key):
            return store.get(key)
        case Stat(key):
            return store.head(key)
        case Fingerprint(key):
            digest = hashlib.sha256()
            for chunk in store.chunks(key):
                digest.update(chunk)
            return digest.hexdigest()
        case Create(key, body):
            return store.put_create(key, body)
        case Swap(key, body, etag):
            return store.put_if_match(key, body, etag)
        case Delete(key):
            return store.delete(key)
        case ListAll(prefix):
            return list(store.list(prefix))
        case ListFolders(prefix):
            return list(store.list_folders(prefix))
        case Clock():
            return store.clock()
        case NewId():
            return uuid.uuid4().hex
        case Now():
            return time.monotonic()
        case Pause(attempt, started, cause):
            return _pause(store, retry, attempt, started, cause)
        case All(parts):
            one = partial(run, store, retry=retry, num_threads=1)
            return in_parallel(one, parts, num_threads)


def _pause(
    store: ObjectStore, retry: RetryPolicy, attempt: int, started: float, cause: PackhouseError
) -> None:
    delay = retry.delay_s(attempt)
    left = started + retry.deadline_s - time.monotonic() - delay
    if left < 0:
        raise cause
    if retry.is_logged and isinstance(cause, TransientError):
        text = "store '%s' does not answer (%s): attempt %d in %.1f s, giving up %.0f s later"
        log.warning(text, store.uri, cause, attempt + 2, delay, left)
    time.sleep(delay)


def in_parallel(do: Callable[[S], T], items: Sequence[S], num_threads: int) -> list[T]:
    """Do it for all items in threads; the results in order. The first error stops the rest."""
    if len(items) < 2 or num_threads < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), "packhouse-store") as pool:
        futures = [pool.submit(do, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
