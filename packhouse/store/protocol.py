"""Protocols as generators of store requests, so that the same code runs, is simulated and mutated.

A protocol yields a request and gets the answer, or the store's error is raised at the `yield`.
`run` performs requests against a real store. The simulation in the tests performs the same
generators against a store in memory: it chooses who moves next, and drops, doubles or delays
answers at every request. So there is no second model that could differ.

    def first_ref() -> Steps[str]:
        blob = yield from ask(ObjectStore.get, "alpaca/refs/latest.json")
        return blob.etag

    run(open_store("s3://bucket/store"), first_ref())

Retries are here and nowhere else: transient errors only, with full jitter, until a deadline. A
retried conditional write may meet its own lost success, so a 412 never means "someone else" by
itself: the caller reads back and compares.
"""

import itertools
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from packhouse.errors import IntegrityError, PackhouseError, TransientError
from packhouse.store.objects import (
    Blob,
    FileBody,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
)

log = logging.getLogger("packhouse.store")
S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_READS = 4
"""Reads after which bytes that differ from their digest are taken for damaged in the store."""


class Call:
    """One attempt at a method of the store -> what it returns.

    Args:
        method: of `ObjectStore`; the store that performs it answers with its own.
        args: its arguments, the key or prefix first.
    """

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        self.method, self.args = method, args


@dataclass(frozen=True, slots=True)
class NewId:
    """A name that nobody else has -> str."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next try, or give up with `cause` when the time is over -> `started`."""

    cause: PackhouseError
    attempt: int
    """Tries that failed before: 0, 1, ..."""
    started: float | None
    """When the first try failed, by this machine's monotonic clock; None: just now."""


@dataclass(frozen=True, slots=True)
class All:
    """Protocols that may run side by side -> list of their results, in order."""

    parts: tuple["Steps[Any]", ...]


Request = Call | NewId | Pause | All
Steps = Generator[Request, Any, T]


def ask(method: Callable[[ObjectStore, *Ts], T], *args: *Ts) -> Steps[T]:
    """Call a method of the store, again while it is busy or its answer is lost."""
    started = None
    for attempt in itertools.count():
        try:
            answer: T = yield Call(method, *args)
            return answer
        except TransientError as error:
            started = yield Pause(error, attempt, started)
    raise AssertionError("unreachable: a pause raises when the time is over")


def read(key: str) -> Steps[Blob | None]:
    """An object, or None if there is none."""
    try:
        return (yield from ask(ObjectStore.get, key))
    except ObjectNotFoundError:
        return None


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
                tag = yield from ask(ObjectStore.put_create, key, body)
            except PreconditionFailedError:
                body.check()  # the store may have refused before it read the file
                info = yield from ask(ObjectStore.head, key)
                tag = info.etag if info.size == body.size else ""
            if body.has_tag(tag) or (yield from ask(ObjectStore.sha256, key)) == body.sha256:
                return
        except ObjectNotFoundError:
            continue
        raise IntegrityError(
            f"'{key}' holds other bytes than '{body.path}' (sha256 {body.sha256}); the store "
            "damaged it, or it was written by hand. Remove that object and publish again",
            key=key,
        )


def download(key: str, path: Path, size: int) -> Steps[None]:
    """Append to a local file what it lacks of an object; a lost connection goes on where it broke.

    What is wrong shows in the file's digest, which the caller compares.

    Args:
        key: of the object.
        path: the file; one that holds more than `size` bytes begins anew.
        size: bytes of the object; if it has more, one of them is written.
    """
    started = None
    for attempt in itertools.count():
        have = path.stat().st_size if path.exists() else None
        if have == size:
            return
        if have is not None and have > size:
            os.truncate(path, 0)  # and not removed: others wait for its lock
            have = None
        try:
            yield Call(ObjectStore.download, key, path, have or 0, size + 1)
            return
        except TransientError as error:
            started = yield Pause(error, attempt, started)


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
            match wanted:
                case Call():
                    answer = getattr(store, wanted.method.__name__)(*wanted.args)
                case NewId():
                    answer = uuid.uuid4().hex
                case Pause():
                    answer = _pause(store, wanted, retry)
                case All(parts):
                    one = partial(run, store, retry=retry, num_threads=1)
                    answer = in_parallel(one, parts, num_threads)
        except PackhouseError as raised:
            error = raised


def _pause(store: ObjectStore, wanted: Pause, retry: RetryPolicy) -> float:
    # Tries wait up to 0.1 0.2 0.4 ... 8 s, half of that on average, for 120 s in all.
    started = time.monotonic() if wanted.started is None else wanted.started
    delay = retry.delay_s(wanted.attempt)
    left = started + retry.deadline_s - time.monotonic() - delay
    if left < 0:
        raise wanted.cause
    if retry.is_logged and isinstance(wanted.cause, TransientError):
        text = "store '%s' does not answer (%s): attempt %d in %.1f s, giving up %.0f s later"
        log.warning(text, store.uri, wanted.cause, wanted.attempt + 2, delay, left)
    time.sleep(delay)
    return started


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
