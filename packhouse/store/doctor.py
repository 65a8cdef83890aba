"""Qualify a store by trying it: can it guard a publication?

Object stores that speak S3 differ in what they do with conditions: some ignore `If-None-Match`,
some answer 501, one let two of sixteen racing writers win, one wants `If-Match` unquoted. None
says so. `examine` tries everything that publication relies on, in a folder of its own under the
root, and removes it; about 15 s on a local S3 server. `require_guarded` is the quick form: some
fifteen small requests, once per process and store, before the first publication. `check_usable`
is for the start of a run: one request (two at the first run ever), nothing left behind in a folder.
"""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from packhouse.errors import (
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store.layout import PROBES
from packhouse.store.objects import (
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.protocol import RetryPolicy, ask, read, run
from packhouse.system.disks import temporary_folder

_MAX_SKEW_S = 15 * 60.0
"""S3 refuses requests that are signed more than this from its own time."""


Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Status
    """`warn`: publication works, and something that would be good to have is missing."""
    detail: str


def examine(store: ObjectStore, *, num_races: int = 50, num_racers: int = 16) -> list[Check]:
    """Try everything that publication relies on.

    Args:
        store: what to examine; objects are written under `_doctor-<random>/` and removed.
        num_races: races for one key, create-only, and as many by compare-and-swap.
        num_racers: threads in each race.

    Returns:
        Checks in a fixed order; the store is fit if none is `fail`.

    Raises:
        StoreError: it cannot be tried at all: no such bucket, wrong credentials.
        TransientError: not reached within 10 s.
    """
    run(store, ask(ObjectStore.clock), retry=_PROBE_RETRY)
    folder = f"{PROBES}{uuid.uuid4().hex[:12]}"
    trials: dict[str, Callable[[ObjectStore, str], str]] = {
        "create-only": _create_only,
        "compare-and-swap": _compare_and_swap,
        "create races": partial(_create_races, num_races=num_races, num_racers=num_racers),
        "swap races": partial(_swap_races, num_swaps=num_races, num_racers=num_racers),
        "read after write": _read_after_write,
        "list after write": _list_after_write,
        "ranged reads": _ranges,
        "damaged upload": _damaged_upload,
        "clock": _clock,
    }
    if store.uri.startswith("s3://"):  # the others have no upload in parts
        trials["aborted upload"] = _aborted_upload
    checks = []
    try:
        for name, trial in trials.items():
            try:
                status: Status = "pass"
                detail = trial(store, f"{folder}/{name.replace(' ', '-')}")
            except _WarningError as warning:
                status, detail = "warn", str(warning)
            except (_FailedCheckError, StoreRefusedError) as failure:
                status, detail = "fail", str(failure)
            except (StoreError, TransientError) as error:
                status, detail = "fail", f"{type(error).__name__}: {error}"
            checks.append(Check(name, status, detail))
    finally:
        with suppress(PackhouseError):  # what stays is for `packhouse gc`
            for info in run(store, ask(ObjectStore.list, f"{folder}/")):
                run(store, ask(ObjectStore.delete, info.key))
    return checks


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
    from packhouse.store.local import LocalStore

    store = open_store(uri)
    if isinstance(store, LocalStore):
        store.check_usable()
        return
    for _ in range(2):
        try:
            write = ask(ObjectStore.put_create, _PROBE, b"packhouse\n")
            run(store, write, retry=_PROBE_RETRY)
        except PreconditionFailedError:
            return
    raise StoreRefusedError(
        f"{store.uri} cannot guard a publication: a second create-only write of one key was "
        "accepted. Use another store; `packhouse doctor storage` shows all checks"
    )


_PROBE = ".packhouse/probe"
_PROBE_RETRY = RetryPolicy(deadline_s=10)


def require_guarded(store: ObjectStore) -> None:
    """Refuse a store that ignores conditions; asked once per process and root.

    Raises:
        StoreRefusedError: a condition was ignored or is not supported.
        TransientError: collections removed every check while it ran.
    """
    if store.uri in _GUARDED:
        return
    for _ in range(_MOST_TRIALS):
        if _try_conditions(store, f"{PROBES}{uuid.uuid4().hex[:12]}"):
            _GUARDED.add(store.uri)
            return
    raise TransientError(
        f"{store.uri}: `packhouse gc` removed {_MOST_TRIALS} checks of the store while they "
        "ran. Run it with a longer grace, then publish again"
    )


_GUARDED: set[str] = set()
_MOST_TRIALS = 20


def _try_conditions(store: ObjectStore, folder: str) -> bool:
    """Return True if the store keeps to conditions, False if a collection removed what was tried.

    A collection with a grace near zero takes a running check for a killed one and deletes its
    objects. Writes are then accepted or refused wrongly, which says nothing about the store. A
    collection deletes in the order of keys, so `alive` goes first: while it is there, nobody has
    touched the others.

    Raises:
        StoreRefusedError: a condition was ignored or is not supported.
    """
    has_begun = False
    try:
        _write(store, f"{folder}/alive", b"alive")
        has_begun = True
        _create_only(store, f"{folder}/create")
        _compare_and_swap(store, f"{folder}/swap")
    except (_FailedCheckError, ObjectNotFoundError) as error:
        if has_begun and run(store, read(f"{folder}/alive")) is None:
            return False
        raise StoreRefusedError(
            f"{store.uri} cannot guard a publication: {error}. Use another store; "
            "`packhouse doctor storage` shows all checks"
        ) from None
    finally:
        for name in ("alive", "create", "swap", "swap-absent"):
            with suppress(PackhouseError):  # what stays is for `packhouse gc`
                run(store, ask(ObjectStore.delete, f"{folder}/{name}"))
    return True


class _FailedCheckError(Exception):
    """The store did not do what publication relies on."""


class _WarningError(Exception):
    """The store lacks something that publication can do without."""


def _expect(is_so: bool, problem: str) -> None:
    if not is_so:
        raise _FailedCheckError(problem)


def _try_write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str | None:
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


def _write(store: ObjectStore, key: str, body: bytes, etag: str = "") -> str:
    tag = _try_write(store, key, body, etag)
    _expect(tag is not None, f"the store refused a write of '{key}' that it must accept")
    return str(tag)


def _bytes(store: ObjectStore, key: str) -> bytes:
    return run(store, ask(ObjectStore.get, key)).data


def _create_only(store: ObjectStore, key: str) -> str:
    _write(store, key, b"first")
    second = _try_write(store, key, b"second")
    _expect(second is None, "a second create-only write of one key was accepted")
    is_first = _bytes(store, key) == b"first"
    _expect(is_first, "a refused create-only write changed the object")
    return "a second writer is refused, and the first one's bytes stay"


def _compare_and_swap(store: ObjectStore, key: str) -> str:
    first = _write(store, key, b"1")
    second = _write(store, key, b"2", first)
    _expect(first != second, "two bodies have one ETag")
    outdated = _try_write(store, key, b"3", first)
    _expect(outdated is None, "a swap with an outdated ETag was accepted")
    _write(store, key, b"4", second)
    _expect(_bytes(store, key) == b"4", "swaps do not leave the last accepted bytes")
    absent = _try_write(store, f"{key}-absent", b"5", second)
    _expect(absent is None, "a swap of an absent key was accepted")
    return "outdated and absent ETags are refused"


def _create_races(store: ObjectStore, key: str, num_races: int, num_racers: int) -> str:
    """Writers of one key start together, with bytes of their own; one of them must win."""

    def wins(place: str, body: bytes, start: threading.Barrier) -> bool:
        start.wait(timeout=60)
        for _ in range(100):
            try:
                store.put_create(place, body)
            except PreconditionFailedError:
                return bool(store.get(place).data == body)  # our own lost success counts
            except TransientError:
                time.sleep(0.02)  # lets the other writers go first
            else:
                return True
        raise _FailedCheckError("a race was not decided in 100 tries")

    counts = []
    with ThreadPoolExecutor(num_racers) as pool:
        for race in range(num_races):
            place, start = f"{key}-{race}", threading.Barrier(num_racers)
            bodies = [f"racer {n} of race {race}".encode() for n in range(num_racers)]
            won = list(pool.map(partial(wins, place, start=start), bodies))
            counts.append(sum(won))
            is_winners = sum(won) != 1 or store.get(place).data == bodies[won.index(True)]
            _expect(is_winners, f"race {race}: the loser's bytes are in the store")
    wrong = [count for count in counts if count != 1]
    _expect(not wrong, f"{len(wrong)} of {num_races} races had {max(wrong, default=1)} winners")
    return f"{num_races} races of {num_racers} writers, one winner each"


def _swap_races(store: ObjectStore, key: str, num_swaps: int, num_racers: int) -> str:
    """Every racer adds 1 to a counter, again and again; no addition may get lost."""
    each = -(-num_swaps // num_racers)

    def count_up() -> None:
        num_added = 0
        while num_added < each:
            blob = store.get(key)
            # A fresh name in each body: equal bodies would have equal tags.
            body = f"{int(blob.data.split()[0]) + 1} {uuid.uuid4().hex}".encode()
            try:
                store.put_if_match(key, body, blob.etag)
            except PreconditionFailedError:
                continue
            except TransientError:
                if store.get(key).data != body:
                    continue
            num_added += 1

    store.put_create(key, b"0 start")
    with ThreadPoolExecutor(num_racers) as pool:
        for future in [pool.submit(count_up) for _ in range(num_racers)]:
            future.result()
    total = int(store.get(key).data.split()[0])
    accepted = each * num_racers
    _expect(total == accepted, f"{accepted} swaps were accepted and {total} took place")
    return f"{total} swaps by {num_racers} writers, none lost"


def _read_after_write(store: ObjectStore, key: str, times: int = 50) -> str:
    tag = _write(store, key, b"0")
    for number in range(1, times):
        body = str(number).encode()
        tag = _write(store, key, body, tag)
        is_new = _bytes(store, key) == body
        _expect(is_new, f"write {number} was acknowledged and an older one was read")
    run(store, read(f"{key}-new"))  # some stores remember for a while that it is absent
    _write(store, f"{key}-new", b"here")
    is_there = _bytes(store, f"{key}-new") == b"here"
    _expect(is_there, "an object that was absent is still absent after its write")
    return f"{times} writes, each read at once"


def _list_after_write(store: ObjectStore, key: str, times: int = 20) -> str:
    for number in range(times):
        _write(store, f"{key}/{number:03d}", b"x")
        is_listed = len(store.list(f"{key}/")) == number + 1
        _expect(is_listed, f"object {number} was acknowledged and is not listed")
    for number in range(times):
        store.delete(f"{key}/{number:03d}")
    _expect(not store.list(f"{key}/"), "deleted objects are listed")
    return f"{times} writes and deletions, each listed at once"


def _ranges(store: ObjectStore, key: str) -> str:
    _write(store, key, bytes(range(200)))
    with temporary_folder("doctor") as folder:
        path = folder / "part"
        path.write_bytes(bytes(range(100)))
        store.download(key, path, offset=100)
        _expect(path.read_bytes() == bytes(range(200)), "a download does not resume")
    return "a range is that range, and downloads resume"


def _damaged_upload(store: ObjectStore, key: str) -> str:
    """Send bytes that are not those of their checksum, as a damaged request would."""
    with temporary_folder("doctor") as folder:
        path = folder / "body"
        path.write_bytes(b"as hashed")
        body = file_body(path)
        _ = body.md5  # made now, of the first bytes: S3 is sent it
        path.write_bytes(b"otherwise")
        try:
            store.put_create(key, body)
        except (IntegrityError, TransientError):
            return "bytes that differ from their checksum are refused"
    raise _WarningError("damaged uploads are accepted; publishing compares ETags instead")


def _aborted_upload(store: ObjectStore, key: str) -> str:
    """An upload in parts that is not completed must be invisible to readers."""
    from packhouse.store.s3 import S3Store

    assert isinstance(store, S3Store)
    where = {"Bucket": store.bucket, "Key": store.prefix + key}
    with store._request(key):
        upload = store._client.create_multipart_upload(**where)["UploadId"]
        store._client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x" * 5 * 2**20)
    _expect(not store.list(key), "an upload that is not complete is listed")
    _expect(run(store, read(key)) is None, "an upload that is not complete can be read")
    with store._request(key):
        store._client.abort_multipart_upload(**where, UploadId=upload)
    return "unfinished and aborted uploads are invisible"


def _clock(store: ObjectStore, _: str) -> str:
    skew = run(store, ask(ObjectStore.clock)) - time.time()
    text = f"its clock is {skew:+,.0f} s from ours"
    _expect(abs(skew) <= _MAX_SKEW_S, f"{text}, over {_MAX_SKEW_S:.0f} s")
    if abs(skew) > 60:
        raise _WarningError(text)
    return f"{skew:+.1f} s from ours"
