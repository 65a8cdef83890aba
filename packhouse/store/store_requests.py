"""Protocols as generators of store requests, so that tests simulate the same code that runs.

A protocol yields a request and receives the response, or the store's error is raised at the
`yield`. `run` performs the requests on a real store. The simulation in the tests runs the same
generators on a store in memory: it chooses which one continues, and drops, repeats or delays
responses at every request. So there is no separate model that could differ from the code.

    def first_ref() -> Steps[str]:
        blob = yield from ask(ObjectStore.get, "alpaca/refs/latest.json")
        return blob.etag

    run(open_store("s3://bucket/store"), first_ref())

All retries are here: only for transient errors, with full jitter, until a deadline. A retried
conditional write may fail because of its own earlier success whose response was lost. So a 412
alone never means "someone else": the caller reads back and compares.
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
from packhouse.store.object_store import (
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

# In a soak with 1,000 faults, two reads in a row came with flipped bits.
MAX_READS = 4
"""Number of reads after which bytes with a wrong digest count as damaged in the store."""


class Call:
    """Request one attempt of a store method; the response is its return value.

    Args:
        method: Method of `ObjectStore`; the store calls its own implementation.
        args: Arguments of the method, the key or prefix first.
    """

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        self.method, self.args = method, args


@dataclass(frozen=True, slots=True)
class NewId:
    """Request a unique name; the response is a string."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next attempt, or raise `cause` after the deadline; returns `started`."""

    cause: PackhouseError
    attempt: int
    """Number of earlier failed attempts: 0, 1, ..."""
    started: float | None
    """Time of the first failure by the local monotonic clock; None for now."""


@dataclass(frozen=True, slots=True)
class All:
    """Protocols that may run in parallel; the response is the list of their results, in order."""

    parts: tuple["Steps[Any]", ...]


Request = Call | NewId | Pause | All
Steps = Generator[Request, Any, T]


def ask(method: Callable[[ObjectStore, *Ts], T], *args: *Ts) -> Steps[T]:
    """Call a store method; retry if the store is busy or the response is lost."""
    started = None
    for attempt in itertools.count():
        try:
            answer: T = yield Call(method, *args)
            return answer
        except TransientError as error:
            started = yield Pause(error, attempt, started)
    raise AssertionError("unreachable: a pause raises after the deadline")


def read(key: str) -> Steps[Blob | None]:
    """Read an object; None if it does not exist."""
    try:
        return (yield from ask(ObjectStore.get, key))
    except ObjectNotFoundError:
        return None


def read_checked(key: str, parse: Callable[[bytes, str], T]) -> Steps[tuple[T, str] | None]:
    """Read and parse an object; return it with its tag, or None if it does not exist.

    Bytes damaged in transit are read again, up to `MAX_READS` times.

    Raises:
        IntegrityError: All reads were damaged, so the object itself is.
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
    """Write a data file create-only; an existing file must have the same bytes.

    If the file disappears before we can check it, garbage collection deleted it after writing a
    tombstone. We write it again, and find the tombstone when we commit.

    Raises:
        IntegrityError: The key has other bytes than its name says.
    """
    while True:
        try:
            try:
                tag = yield from ask(ObjectStore.put_create, key, body)
            except PreconditionFailedError:
                body.check()  # the store may have refused before it read the file
                info = yield from ask(ObjectStore.head, key)
                # An existing object of another size is read below, whatever its tag says.
                tag = info.etag if info.size == body.size else ""
            if body.has_tag(tag) or (yield from ask(ObjectStore.sha256, key)) == body.sha256:
                return
        except ObjectNotFoundError:
            continue
        # Its name is its digest, so nothing that packhouse wrote can be there instead.
        raise IntegrityError(
            f"'{key}' in the store differs from '{body.path}' (sha256 {body.sha256}): it was "
            "damaged or was not written by packhouse. Delete that object and publish again",
            key=key,
        )


def download(key: str, path: Path, size: int) -> Steps[None]:
    """Download the rest of an object to a local file; resume after a lost connection.

    The caller compares the digest of the file.

    Args:
        key: Key of the object.
        path: Path of the file. If it has more than `size` bytes, the download starts over.
        size: Expected bytes of the object. One more is written if the object is larger, so that the
            caller notices.
    """
    started = None
    for attempt in itertools.count():
        have = path.stat().st_size if path.exists() else None
        if have == size:
            return
        if have is not None and have > size:
            os.truncate(path, 0)  # not deleted, because others wait for its lock
            have = None
        try:
            yield Call(ObjectStore.download, key, path, have or 0, size + 1)
            return
        except TransientError as error:
            started = yield Pause(error, attempt, started)


_RETRIED = "store '%s' does not respond (%s): attempt %d in %.1f s, giving up %.0f s after that"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long to retry after a transient error."""

    deadline_s: float = 120.0
    """Seconds after the first failure at which the error is raised."""
    base_s: float = 0.1
    """The first wait is in [0, base_s); the range doubles with each attempt (full jitter)."""
    cap_s: float = 8.0
    """Maximum of the range, in seconds."""
    is_logged: bool = True
    """Log each failed attempt, so that users see why they wait."""

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after failed attempt number `attempt` (0, 1, ...)."""
        # The exponent is limited, because 2**1024 does not fit a float.
        return random.uniform(0, min(self.cap_s, self.base_s * 2 ** min(attempt, 16)))


def run(
    store: ObjectStore, steps: Steps[T], *, retry: RetryPolicy | None = None, num_threads: int = 8
) -> T:
    """Run a protocol on a store and return its result.

    Raises:
        PackhouseError: Any error that the protocol raises.
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
                case Pause(cause, attempt, started):
                    # Waits are up to 0.1, 0.2, 0.4, ... 8 s, on average half of that, for 120 s in
                    # total.
                    started = time.monotonic() if started is None else started
                    delay = retry.delay_s(attempt)
                    left = started + retry.deadline_s - time.monotonic() - delay
                    if left < 0:
                        raise cause
                    if retry.is_logged and isinstance(cause, TransientError):
                        log.warning(_RETRIED, store.uri, cause, attempt + 2, delay, left)
                    time.sleep(delay)  # a store that is overloaded needs time to recover
                    answer = started
                case All(parts):
                    # Parts already run in parallel, so a part with parts of its own runs alone.
                    one = partial(run, store, retry=retry, num_threads=1)
                    answer = in_parallel(one, parts, num_threads)
        except PackhouseError as raised:
            error = raised


def in_parallel(do: Callable[[S], T], items: Sequence[S], num_threads: int) -> list[T]:
    """Call `do` for all items in threads; return results in order, stop at the first error."""
    if len(items) < 2 or num_threads < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), "packhouse-store") as pool:
        return list(pool.map(do, items))  # after an error, `map` cancels those not yet started
