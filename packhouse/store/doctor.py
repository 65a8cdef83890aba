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
from packhouse.runtime.disks import temporary_folder
from packhouse.store.layout import PROBES
from packhouse.store.objects import (
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.protocol import (
    Clock,
    Create,
    Delete,
    ListAll,
    Read,
    RetryPolicy,
    Swap,
    read,
    request,
    run,
)

__all__ = ["Check", "check_usable", "examine", "require_guarded"]

_MAX_SKEW_S = 15 * 60.0
"""S3 refuses requests that are signed more than this from its own time."""


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Literal["pass", "warn", "fail"]
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
    run(store, request(Clock()), retry=_PROBE_RETRY)
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
    try:
        return [
            _judged(name, partial(trial, store, f"{folder}/{name.replace(' ', '-')}"))
            for name, trial in trials.items()
        ]
    finally:
        with suppress(PackhouseError):  # what stays is for `packhouse gc`
            for info in run(store, request(ListAll(f"{folder}/"))):
                run(store, request(Delete(info.key)))


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
            run(store, request(Create(_PROBE, b"packhouse\n")), retry=_PROBE_RETRY)
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
    with _GUARDED_LOCK:
        if store.uri in _GUARDED:
            return
    for _ in range(_MOST_TRIALS):
        if _try_conditions(store, f"{PROBES}{uuid.uuid4().hex[:12]}"):
            with _GUARDED_LOCK:
                _GUARDED.add(store.uri)
            return
    raise TransientError(
        f"{store.uri}: `packhouse gc` removed {_MOST_TRIALS} checks of the store while they "
        "ran. Run it with a longer grace, then publish again"
    )


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
        _must_write(store, Create(f"{folder}/alive", b"alive"))
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
                run(store, request(Delete(f"{folder}/{name}")))
    return True


_GUARDED: set[str] = set()
_GUARDED_LOCK = threading.Lock()


class _FailedCheckError(Exception):
    """The store did not do what publication relies on."""


class _WarningError(Exception):
    """The store lacks something that publication can do without."""


def _judged(name: str, trial: Callable[[], str]) -> Check:
    try:
        return Check(name, "pass", trial())
    except _WarningError as warning:
        return Check(name, "warn", str(warning))
    except (_FailedCheckError, StoreRefusedError) as failure:
        return Check(name, "fail", str(failure))
    except (StoreError, TransientError) as error:
        return Check(name, "fail", f"{type(error).__name__}: {error}")


def _write(store: ObjectStore, wanted: Create | Swap) -> str | None:
    """Write a key that nobody else knows; return its tag, or None if the store refused.

    A write whose answer was lost is sent again and then meets its own success: a 412 alone says
    nothing, so the bytes decide.
    """
    try:
        tag: str = run(store, request(wanted))
    except PreconditionFailedError:
        found = run(store, read(wanted.key))
        return found.etag if found and found.data == wanted.body else None
    return tag


def _must_write(store: ObjectStore, wanted: Create | Swap) -> str:
    tag = _write(store, wanted)
    if tag is None:
        raise _FailedCheckError(f"the store refused a write of '{wanted.key}' that it must accept")
    return tag


def _create_only(store: ObjectStore, key: str) -> str:
    _must_write(store, Create(key, b"first"))
    if _write(store, Create(key, b"second")) is not None:
        raise _FailedCheckError("a second create-only write of one key was accepted")
    if run(store, request(Read(key))).data != b"first":
        raise _FailedCheckError("a refused create-only write changed the object")
    return "a second writer is refused, and the first one's bytes stay"


def _compare_and_swap(store: ObjectStore, key: str) -> str:
    first = _must_write(store, Create(key, b"1"))
    second = _must_write(store, Swap(key, b"2", first))
    if first == second:
        raise _FailedCheckError("two bodies have one ETag")
    if _write(store, Swap(key, b"3", first)) is not None:
        raise _FailedCheckError("a swap with an outdated ETag was accepted")
    _must_write(store, Swap(key, b"4", second))
    if run(store, request(Read(key))).data != b"4":
        raise _FailedCheckError("swaps do not leave the last accepted bytes")
    if _write(store, Swap(f"{key}-absent", b"5", second)) is not None:
        raise _FailedCheckError("a swap of an absent key was accepted")
    return "outdated and absent ETags are refused"


def _create_races(store: ObjectStore, key: str, num_races: int, num_racers: int) -> str:
    counts = []
    with ThreadPoolExecutor(num_racers) as pool:
        for race in range(num_races):
            start = threading.Barrier(num_racers)
            place = f"{key}-{race}"
            bodies = [f"racer {n} of race {race}".encode() for n in range(num_racers)]
            won = list(pool.map(lambda body: _races(store, place, body, start), bodies))  # noqa: B023
            counts.append(sum(won))
            left = store.get(place).data
            if sum(won) == 1 and left != bodies[won.index(True)]:
                raise _FailedCheckError(f"race {race}: the loser's bytes are in the store")
    wrong = [count for count in counts if count != 1]
    if wrong:
        raise _FailedCheckError(f"{len(wrong)} of {num_races} races had {max(wrong)} winners")
    return f"{num_races} races of {num_racers} writers, one winner each"


def _races(store: ObjectStore, key: str, body: bytes, start: threading.Barrier) -> bool:
    start.wait(timeout=60)
    for _ in range(100):
        try:
            store.put_create(key, body)
        except PreconditionFailedError:
            return bool(store.get(key).data == body)  # our own lost success counts
        except TransientError:
            time.sleep(0.02)
        else:
            return True
    raise _FailedCheckError("a race was not decided in 100 tries")


def _swap_races(store: ObjectStore, key: str, num_swaps: int, num_racers: int) -> str:
    """Every racer adds 1 to a counter, again and again; no addition may get lost."""
    each = -(-num_swaps // num_racers)

    def count_up() -> None:
        done = 0
        while done < each:
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
            done += 1

    store.put_create(key, b"0 start")
    with ThreadPoolExecutor(num_racers) as pool:
        for future in [pool.submit(count_up) for _ in range(num_racers)]:
            future.result()
    total = int(store.get(key).data.split()[0])
    if total != each * num_racers:
        raise _FailedCheckError(f"{each * num_racers} swaps were accepted and {total} took place")
    return f"{total} swaps by {num_racers} writers, none lost"


def _read_after_write(store: ObjectStore, key: str, times: int = 50) -> str:
    tag = _must_write(store, Create(key, b"0"))
    for number in range(1, times):
        body = str(number).encode()
        tag = _must_write(store, Swap(key, body, tag))
        if run(store, request(Read(key))).data != body:
            raise _FailedCheckError(f"write {number} was acknowledged and an older one was read")
    run(store, read(f"{key}-new"))  # some stores remember for a while that it is absent
    _must_write(store, Create(f"{key}-new", b"here"))
    if run(store, request(Read(f"{key}-new"))).data != b"here":
        raise _FailedCheckError("an object that was absent is still absent after its write")
    return f"{times} writes, each read at once"


def _list_after_write(store: ObjectStore, key: str, times: int = 20) -> str:
    for number in range(times):
        _must_write(store, Create(f"{key}/{number:03d}", b"x"))
        if sum(1 for _ in store.list(f"{key}/")) != number + 1:
            raise _FailedCheckError(f"object {number} was acknowledged and is not listed")
    for number in range(times):
        store.delete(f"{key}/{number:03d}")
    if any(True for _ in store.list(f"{key}/")):
        raise _FailedCheckError("deleted objects are listed")
    return f"{times} writes and deletions, each listed at once"


def _ranges(store: ObjectStore, key: str) -> str:
    _must_write(store, Create(key, bytes(range(200))))
    if store.get_range(key, 10, 5) != bytes(range(10, 15)):
        raise _FailedCheckError("a ranged read returns other bytes")
    with temporary_folder("doctor") as folder:
        path = folder / "part"
        path.write_bytes(bytes(range(100)))
        store.download(key, path, offset=100)
        if path.read_bytes() != bytes(range(200)):
            raise _FailedCheckError("a download does not resume")
    return "a range is that range, and downloads resume"


def _damaged_upload(store: ObjectStore, key: str) -> str:
    """Send bytes that are not those of their checksum, as a damaged request would."""
    with temporary_folder("doctor") as folder:
        path = folder / "body"
        path.write_bytes(b"as hashed")
        body = file_body(path)
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
    if any(True for _ in store.list(key)):
        raise _FailedCheckError("an upload that is not complete is listed")
    if run(store, read(key)) is not None:
        raise _FailedCheckError("an upload that is not complete can be read")
    with store._request(key):
        store._client.abort_multipart_upload(**where, UploadId=upload)
    return "unfinished and aborted uploads are invisible"


def _clock(store: ObjectStore, _: str) -> str:
    skew = run(store, request(Clock())) - time.time()
    if abs(skew) > _MAX_SKEW_S:
        raise _FailedCheckError(f"its clock is {skew:+,.0f} s from ours, over {_MAX_SKEW_S:.0f} s")
    if abs(skew) > 60:
        raise _WarningError(f"its clock is {skew:+,.0f} s from ours")
    return f"{skew:+.1f} s from ours"
