"""Prove that a store can guard a publication: before a run, and before the first publication to it.

Object stores that speak S3 differ in what they do with conditions: some ignore `If-None-Match`,
some answer 501, one let two of sixteen racing writers win, one wants `If-Match` unquoted. None
says so, so each is tried. `check_usable` is for the start of a run: one request (two at the first
run ever), nothing left behind in a folder. `require_guarded` is for publications: some fifteen
small requests, once per process and store. `packhouse doctor storage` tries more.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from packhouse.errors import PackhouseError, StoreRefusedError
from packhouse.store.layout import PROBES
from packhouse.store.local import LocalStore
from packhouse.store.objects import ObjectStore, PreconditionFailedError, open_store
from packhouse.store.protocol import RetryPolicy, ask, read, run

PROBE_RETRY = RetryPolicy(deadline_s=10)
"""Of the first request to a store: a wrong address shows soon."""

_PROBE = ".packhouse/probe"
_GUARDED: set[str] = set()


class FailedCheckError(StoreRefusedError):
    """The store did not do what publication relies on."""


def check_usable(uri: str) -> None:
    """Notice a store that cannot take a publication before any work is done for it.

    A create-only write of a key that stays in the store, `.packhouse/probe`: that it is refused
    proves at once that the store is there, lets us write, and honours the condition.

    Raises:
        ConfigError: no such kind of store, no credentials.
        StoreError: no such bucket, no rights, no folder.
        StoreRefusedError: no create-only write.
        TransientError: not reached within 10 s.
    """
    store = open_store(uri)
    if isinstance(store, LocalStore):
        store.check_usable()
        return
    for _ in range(2):
        try:
            write = ask(ObjectStore.put_create, _PROBE, b"packhouse\n")
            run(store, write, retry=PROBE_RETRY)
        except PreconditionFailedError:
            return
    raise _refusal(store, "a second create-only write of one key was accepted")


def require_guarded(store: ObjectStore) -> None:
    """Refuse a store that ignores conditions; asked once per process and root.

    Raises:
        StoreRefusedError: a condition was ignored or is not supported.
    """
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
        f"{store.uri} cannot guard a publication: {problem}. Use another store; "
        "`packhouse doctor storage` shows all checks"
    )


@contextmanager
def probe_folder(store: ObjectStore) -> Iterator[str]:
    """Name a folder for trials and empty it afterwards; what stays is for `packhouse gc`."""
    folder = f"{PROBES}{uuid.uuid4().hex[:12]}"
    try:
        yield folder
    finally:
        with suppress(PackhouseError):
            for info in run(store, ask(ObjectStore.list, f"{folder}/")):
                run(store, ask(ObjectStore.delete, info.key))


def check_create_only(store: ObjectStore, key: str) -> str:
    """Write a key twice, which must be refused; return what was proven, as all checks do.

    Raises:
        FailedCheckError: as all checks do.
    """
    write(store, key, b"first")
    second = try_write(store, key, b"second")
    expect(second is None, "a second create-only write of one key was accepted")
    is_first = stored(store, key) == b"first"
    expect(is_first, "a refused create-only write changed the object")
    return "a second writer is refused, and the first one's bytes stay"


def check_compare_and_swap(store: ObjectStore, key: str) -> str:
    """Swap with tags that are current, outdated, and of no object."""
    first = write(store, key, b"1")
    second = write(store, key, b"2", first)
    expect(first != second, "two bodies have one ETag")
    outdated = try_write(store, key, b"3", first)
    expect(outdated is None, "a swap with an outdated ETag was accepted")
    write(store, key, b"4", second)
    expect(stored(store, key) == b"4", "swaps do not leave the last accepted bytes")
    absent = try_write(store, f"{key}-absent", b"5", second)
    expect(absent is None, "a swap of an absent key was accepted")
    return "outdated and absent ETags are refused"


def expect(is_so: bool, problem: str) -> None:
    """Raise `FailedCheckError` unless it is so."""
    if not is_so:
        raise FailedCheckError(problem)


def try_write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str | None:
    """Create a key that nobody else knows, or swap it; return its tag, or None if it was refused.

    A write whose answer was lost is sent again and then meets its own success: a 412 alone says
    nothing, so the bytes decide.
    """
    try:
        if etag:
            return run(store, ask(ObjectStore.put_if_match, key, body, etag))
        return run(store, ask(ObjectStore.put_create, key, body))
    except PreconditionFailedError:
        found = run(store, read(key))
        return found.etag if found and found.data == body else None


def write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str:
    """Do as `try_write`, and expect that it is accepted."""
    tag = try_write(store, key, body, etag)
    expect(tag is not None, f"the store refused a write of '{key}' that it must accept")
    return str(tag)


def stored(store: ObjectStore, key: str) -> bytes | None:
    """Return the bytes of an object; None if it is absent."""
    found = run(store, read(key))
    return found.data if found else None
