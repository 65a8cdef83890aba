"""Reclaim what crashed or late publishers left behind, without ever touching what is committed.

Age alone cannot tell a dead publisher from a slow one: a version that is committed between the
listing and the deletion would be lost. So collection first takes the commit slot itself,
create-only, with a tombstone. From then on nobody can commit there: a late publisher finds the
tombstone and starts over in the next generation. Only then are objects deleted. The grace period
spares slow publishers that work; safety does not depend on it. Ages are by the store's clock.

Tombstones stay for ever (about 100 bytes each): removing one would open its slot to a publisher
that uploaded before the deletion.

That takes a store that honours conditions, as publication does. Object stores that speak S3 differ
in what they do with conditions: some ignore `If-None-Match`, some answer 501, one let two of
sixteen racing writers win, one wants `If-Match` unquoted. None says so, so each is tried.
`check_usable` is for the start of a run: one request (two at the first run ever), nothing left
behind in a folder. `require_guarded` is for publications: some fifteen small requests, once per
process and store. `packhouse doctor storage` tries more.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from packhouse.errors import IntegrityError, PackhouseError, StoreRefusedError
from packhouse.store.layout import (
    PROBES,
    check_name,
    file_key,
    is_version,
    manifest_key,
    version_folder,
)
from packhouse.store.local import LocalStore
from packhouse.store.manifest import Manifest, Tombstone, read_slot_steps
from packhouse.store.objects import ObjectInfo, ObjectStore, PreconditionFailedError, open_store
from packhouse.store.protocol import RetryPolicy, Steps, ask, read, run

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


DEFAULT_GRACE_S = 24 * 3600.0
"""Seconds since the last sign of life after which an uncommitted attempt counts as abandoned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Objects of one version folder that no reader can reach."""

    dataset: str
    version: str
    reason: Literal["abandoned", "collected", "stray", "damaged"]
    """`abandoned`: never committed; `collected`: behind a tombstone, from a late upload or a gc
    that was stopped; `stray`: beside a committed version, but not one of its files; `damaged`: its
    manifest cannot be read, so nobody can tell, and nothing there is touched."""
    objects: tuple[ObjectInfo, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all objects together."""
        return sum(info.size for info in self.objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class GcReport:
    """What a collection found, and what it deleted (nothing, in a dry run)."""

    garbage: tuple[Garbage, ...]
    num_deleted: int
    num_unfinished_uploads: int
    num_probes: int
    """Objects that checks of the store left when they were killed; of the whole store."""
    dry_run: bool

    @property
    def num_bytes(self) -> int:
        """Size of all garbage found."""
        return sum(garbage.num_bytes for garbage in self.garbage)


def collect_garbage(
    store: ObjectStore, dataset: str, *, grace_s: float = DEFAULT_GRACE_S, dry_run: bool = True
) -> GcReport:
    """Find garbage of a dataset and, unless it is a dry run, delete it behind tombstones.

    Safe beside any number of publishers, readers and other collections, and may be killed anywhere.
    """
    garbage = run(store, find_garbage_steps(dataset, grace_s))
    deleted = 0 if dry_run else sum(run(store, collect_steps(item)) for item in garbage)
    uploads = store.abort_uploads(grace_s, dry_run=dry_run)
    return GcReport(
        garbage=tuple(garbage),
        num_deleted=deleted,
        num_unfinished_uploads=uploads,
        num_probes=run(store, collect_probes_steps(grace_s, dry_run=dry_run)),
        dry_run=dry_run,
    )


def collect_probes_steps(grace_s: float, *, dry_run: bool) -> Steps[int]:
    """Delete what killed checks of the store left; return how many objects that is.

    A check takes seconds, so one that is younger than an hour may be at work, whatever the grace.
    """
    now = yield from ask(ObjectStore.clock)
    folders = yield from ask(ObjectStore.list_folders, "")
    found = 0
    for folder in folders:
        if not folder.startswith(PROBES):
            continue
        objects = yield from ask(ObjectStore.list, f"{folder}/")
        if any(info.last_modified >= now - max(grace_s, 3600) for info in objects):
            continue
        found += len(objects)
        for info in () if dry_run else objects:
            yield from ask(ObjectStore.delete, info.key)
    return found


def find_garbage(
    store: ObjectStore, dataset: str, *, grace_s: float = DEFAULT_GRACE_S
) -> list[Garbage]:
    """What a collection would delete now."""
    return run(store, find_garbage_steps(dataset, grace_s))


def find_garbage_steps(dataset: str, grace_s: float) -> Steps[list[Garbage]]:
    """List once, then look at the commit slot of each version folder."""
    now = yield from ask(ObjectStore.clock)
    listed = yield from ask(ObjectStore.list, f"{check_name('dataset', dataset)}/v/")
    found = []
    for version, group in groupby(listed, key=lambda info: info.key.split("/")[2]):
        if not is_version(version):
            continue
        try:
            slot = yield from read_slot_steps(dataset, version)
        except IntegrityError:
            found.append(Garbage(dataset=dataset, version=version, reason="damaged", objects=()))
            continue
        reason, dead = _judge(dataset, version, slot, list(group), now - grace_s)
        if dead:
            item = Garbage(dataset=dataset, version=version, reason=reason, objects=tuple(dead))
            found.append(item)
    return found


def _judge(
    dataset: str,
    version: str,
    slot: Manifest | Tombstone | None,
    objects: Sequence[ObjectInfo],
    before: float,
) -> tuple[Literal["abandoned", "collected", "stray"], list[ObjectInfo]]:
    """Why objects of a version folder are dead, and which."""
    others = [info for info in objects if info.key != manifest_key(dataset, version)]
    if isinstance(slot, Tombstone):
        return "collected", others
    if isinstance(slot, Manifest):
        named = {file_key(dataset, version, entry.key) for entry in slot.files}
        old = [info for info in others if info.last_modified < before]
        return "stray", [info for info in old if info.key not in named]
    is_alive = any(info.last_modified >= before for info in others)
    return "abandoned", [] if is_alive else others


def collect_steps(garbage: Garbage) -> Steps[int]:
    """Fence the folder if it is not committed, then delete. Returns the number of deletions."""
    objects: Sequence[ObjectInfo] = garbage.objects
    if garbage.reason == "abandoned":
        if not (yield from fence_steps(garbage.dataset, garbage.version)):
            return 0  # committed since we looked
        folder = version_folder(garbage.dataset, garbage.version)
        objects = yield from ask(ObjectStore.list, f"{folder}/")  # with what arrived since
    doomed = [i for i in objects if i.key != manifest_key(garbage.dataset, garbage.version)]
    for info in doomed:
        yield from ask(ObjectStore.delete, info.key)
    return len(doomed)


def fence_steps(dataset: str, version: str) -> Steps[bool]:
    """Take the commit slot with a tombstone; False if a manifest has it."""
    tombstone = Tombstone(dataset=dataset, version=version)
    try:
        key = manifest_key(dataset, version)
        yield from ask(ObjectStore.put_create, key, tombstone.to_bytes())
    except PreconditionFailedError:  # a manifest, another collection, or our own lost success
        slot = yield from read_slot_steps(dataset, version)
        return isinstance(slot, Tombstone)
    return True
