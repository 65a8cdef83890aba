"""Test that a store honors conditional writes, before a run and before the first publication.

S3-compatible stores differ in how they treat conditions: some ignore `If-None-Match`, some answer
501, one let two of sixteen concurrent writers win, one expects `If-Match` without quotes. None of
them announces it, so every store is tested. `check_usable` runs at the start of a run: one request
(two in the very first run), and it leaves no files in a folder. `require_guarded` runs before a
publication: about fifteen small requests, once per process and store. `packhouse doctor storage`
tests more.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from packhouse.errors import PackhouseError, StoreRefusedError
from packhouse.store.local_folder import LocalStore
from packhouse.store.object_keys import PROBES
from packhouse.store.object_store import ObjectStore, PreconditionFailedError, open_store
from packhouse.store.store_requests import RetryPolicy, ask, read, run

PROBE_RETRY = RetryPolicy(deadline_s=10)
"""Retry policy of the first request to a store; short, so that a wrong address fails quickly."""

_PROBE = ".packhouse/probe"
_ACCEPTED_TWICE = "a second create-only write of one key was accepted"
_GUARDED: set[str] = set()


class FailedCheckError(StoreRefusedError):
    """The store does not behave as publication requires."""


def check_usable(uri: str) -> None:
    """Fail early if a store cannot be published to.

    Makes a create-only write of `.packhouse/probe`, a key that stays in the store. If it is
    refused, the store exists, credentials work and the condition is honored.

    Raises:
        ConfigError: The kind of store is unknown, or credentials are missing.
        StoreError: The bucket or folder does not exist, or may not be written to.
        StoreRefusedError: The store has no create-only writes.
        TransientError: The store did not answer within 10 s.
    """
    store = open_store(uri)
    if isinstance(store, LocalStore):
        store.check_usable()
        return
    for _ in range(2):  # the very first run creates the probe; the second write must be refused
        try:
            run(store, ask(ObjectStore.put_create, _PROBE, b"packhouse\n"), retry=PROBE_RETRY)
        except PreconditionFailedError:
            return
    raise _refusal(store, _ACCEPTED_TWICE)


def require_guarded(store: ObjectStore) -> None:
    """Refuse a store that ignores conditions. Tested once per process and root.

    Raises:
        StoreRefusedError: A condition was ignored or is not supported.
    """
    # Fifteen requests, so once per process.
    if store.uri in _GUARDED:
        return
    try:
        with probe_folder(store) as folder:
            check_create_only(store, f"{folder}/create")
            check_compare_and_swap(store, f"{folder}/swap")
    except FailedCheckError as error:
        raise _refusal(store, str(error)) from None
    _GUARDED.add(store.uri)


def _refusal(store: ObjectStore, problem: str) -> StoreRefusedError:
    return StoreRefusedError(
        f"{store.uri} does not support safe concurrent publishing: {problem}. Use another store, "
        "and check it with `packhouse doctor storage`"
    )


@contextmanager
def probe_folder(store: ObjectStore) -> Iterator[str]:
    """Yield a temporary folder and empty it afterwards; `packhouse gc` removes leftovers."""
    folder = f"{PROBES}{uuid.uuid4().hex[:12]}"
    try:
        yield folder
    finally:
        with suppress(PackhouseError):
            for info in run(store, ask(ObjectStore.list, f"{folder}/")):
                run(store, ask(ObjectStore.delete, info.key))


def check_create_only(store: ObjectStore, key: str) -> str:
    """Check that a second create-only write is refused; return what was proven.

    Raises:
        FailedCheckError: The check failed.
    """
    write(store, key, b"first")
    expect(try_write(store, key, b"second") is None, _ACCEPTED_TWICE)
    expect(stored(store, key) == b"first", "a refused create-only write changed the object")
    return "a second writer is rejected, and the first writer's bytes remain"


def check_compare_and_swap(store: ObjectStore, key: str) -> str:
    """Check compare-and-swap with a current ETag, an outdated one and an absent key."""
    first = write(store, key, b"1")
    second = write(store, key, b"2", first)
    expect(first != second, "two different bodies have the same ETag")
    outdated = try_write(store, key, b"3", first)
    expect(outdated is None, "a swap with an outdated ETag was accepted")
    write(store, key, b"4", second)
    is_last = stored(store, key) == b"4"
    expect(is_last, "after the swaps, the object does not have the last accepted bytes")
    # A store that creates the object would bring a deleted ref back.
    absent = try_write(store, f"{key}-absent", b"5", second)
    expect(absent is None, "a swap of an absent key was accepted")
    return "outdated and absent ETags are refused"


def expect(is_so: bool, problem: str) -> None:
    """Raise `FailedCheckError` with `problem` unless `is_so`."""
    if not is_so:
        raise FailedCheckError(problem)


def try_write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str | None:
    """Create or swap a key that nobody else uses; return its tag, or None if refused.

    After a lost response the write is repeated and may be refused because of its own success, so a
    412 proves nothing. The stored bytes decide.
    """
    try:
        if etag:
            return run(store, ask(ObjectStore.put_if_match, key, body, etag))
        return run(store, ask(ObjectStore.put_create, key, body))
    except PreconditionFailedError:
        # Without this, 7 of 27 publications failed when responses were lost.
        found = run(store, read(key))
        return found.etag if found and found.data == body else None


def write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str:
    """Call `try_write` and require that it succeeds."""
    tag = try_write(store, key, body, etag)
    expect(tag is not None, f"the store refused a write of '{key}' that it must accept")
    return str(tag)


def stored(store: ObjectStore, key: str) -> bytes | None:
    """Return the bytes of an object; None if it is absent."""
    found = run(store, read(key))
    return found.data if found else None
