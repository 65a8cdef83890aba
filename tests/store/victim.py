"""Child processes of the chaos tests: publishers that die at a named point, and readers.

A child is forked from a server that has imported everything, so starting one costs about 20 ms.
It sends SIGKILL to itself: no cleanup, no exception, as if the machine lost power.
"""

import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from botocore import loaders

from packhouse.addons.gc import collect_garbage
from packhouse.errors import IntegrityError, VersionNotFoundError
from packhouse.store import (
    local_folder,
    open_store,
    open_version,
    publish_version,
    s3,
    verify_version,
)
from packhouse.store.conditional_writes import require_guarded
from packhouse.store.object_store import ObjectStore
from tests.store.versions import FACTS, pack_file, pack_table

# Reading botocore's models would take each child 0.4 s, and importing pandas, as pyarrow does for
# the first table, 0.6 s, so both happen before the fork.
loaders.create_loader = functools.lru_cache(loaders.create_loader)
s3.make_client()
pack_table()

# Between the requests of a publication: what is before one is after another.
REQUEST_POINTS = ["before data", "after data", "after manifest", "before ref-create"]
REQUEST_POINTS += ["after ref-create", "after ref-swap"]
# Inside a write to a folder, and inside an upload to S3.
FOLDER_POINTS = ["half staged", "staged", "linked", "locked", "replaced"]
S3_POINTS = ["half sent"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashingStore:
    """Wrap a store and die before or after one kind of write."""

    def __init__(self, store: ObjectStore, point: str) -> None:
        self._store = store
        self._when, self._what = point.split(" ", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_create(self, key: str, body: Any) -> str:
        return self._guarded(key, lambda: self._store.put_create(key, body), "ref-create")

    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        return self._guarded(key, lambda: self._store.put_if_match(key, body, etag), "ref-swap")

    def _guarded(self, key: str, write: Any, ref_kind: str) -> str:
        what = ref_kind if "/refs/" in key else "data"
        if key.endswith("manifest.json"):
            what = "manifest"
        is_it = what == self._what and "doctor-" not in key
        if is_it and self._when == "before":
            die()
        tag = write()
        if is_it and self._when == "after":
            die()
        return tag


class LingeringStore(CrashingStore):
    """Wait before each commit, so that collections overtake it."""

    def __init__(self, store: ObjectStore, linger_s: float) -> None:
        self._store, self._linger_s = store, linger_s

    def _guarded(self, key: str, write: Any, ref_kind: str) -> str:
        if key.endswith("manifest.json"):
            time.sleep(random.uniform(0, self._linger_s))
        tag = write()
        return tag


def arm(store: ObjectStore, point: str) -> Any:
    """Make this process die at a point."""
    if point in FOLDER_POINTS:
        _arm_folder(point)
    elif point in S3_POINTS:
        _arm_s3()
    elif point:
        return CrashingStore(store, point)
    return store


def _arm_folder(point: str) -> None:
    """Replace the system calls of a write to a folder."""
    link, replace = os.link, os.replace

    def half_staged(body: Any) -> Any:
        yield b"PAR1 and no more"
        die()

    def dying_link(source: Any, target: Any) -> None:
        if "/data/" not in str(target):
            return link(source, target)
        if point == "linked":
            link(source, target)
        die()

    def dying_replace(source: Any, target: Any) -> None:
        if point == "replaced":
            replace(source, target)
        die()

    if point == "half staged":
        local_folder.FileBody.chunks = half_staged  # type: ignore[method-assign]  # dies while it writes
    elif point in ("staged", "linked"):
        local_folder.os.link = dying_link  # type: ignore[assignment]  # the same
    else:
        local_folder.os.replace = dying_replace  # type: ignore[assignment]  # the same


def _arm_s3() -> None:
    send = s3.S3Store._put

    class Half:
        def __init__(self, file: Any) -> None:
            self.file, self.reads = file, 0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def read(self, size: int = -1) -> bytes:
            self.reads += 1
            if self.reads > 4 and self.file.tell() > 100:  # hashing is over, sending has begun
                die()
            data = self.file.read(200)
            return data

    def dying_send(store: Any, key: str, body: Any, **condition: str) -> str:
        if isinstance(body, s3.FileBody):
            _ = body.md5  # reads all of it
            whole = body.open()
            vars(body)["open"] = lambda: Half(whole)
        return send(store, key, body, **condition)

    s3.S3Store._put = dying_send  # type: ignore[method-assign]  # dies while it sends


def publish_one(
    environment: dict[str, str], root: str, folder: str, vid: str, ref: str | None, point: str
) -> None:
    """Publish version `vid` of dataset `tiny`; record acknowledgements in `folder`."""
    os.environ.update(environment)
    store = open_store(root)
    require_guarded(store)
    store = arm(store, point)
    publish_version(store, "tiny", vid, [pack_file(Path(folder) / vid, 9)], FACTS, ref)
    acknowledge(folder, vid)


def publish_many(
    environment: dict[str, str],
    root: str,
    folder: str,
    vids: list[str],
    ref: str | None,
    ready: Any = None,
    linger_s: float = 0,
) -> None:
    """Publish versions one after another; after a kill, run it again to continue."""
    os.environ.update(environment)
    store = open_store(root)
    if linger_s:
        store = LingeringStore(store, linger_s)
    if ready is not None:
        ready.set()
    for vid in vids:
        file = pack_file(Path(folder) / f"{vid}-{os.getpid()}", number_of(vid))
        publish_version(store, "tiny", vid, [file], FACTS, ref)
        acknowledge(folder, vid)


def number_of(vid: str) -> int:
    return 1 + int(vid.removeprefix("v"), 16) % 10_000 if vid.startswith("v") else 1


def acknowledge(folder: str, vid: str) -> None:
    """Record that the publisher was told of success, before anything else can happen."""
    handle = os.open(f"{folder}/acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{vid}\n".encode())
    os.fsync(handle)
    os.close(handle)


def acknowledged(folder: str | Path) -> list[str]:
    path = Path(folder) / "acknowledged"
    return sorted(set(path.read_text().split())) if path.exists() else []


def read_forever(environment: dict[str, str], root: str, folder: str) -> None:
    """Resolve and verify every byte, repeatedly; record errors, and the number of reads."""
    os.environ.update(environment)
    store = open_store(root)
    reads, problems, stop = 0, [], Path(folder) / "stop"
    while not stop.exists():
        try:
            report = verify_version(open_version(store, "tiny", "latest"), num_threads=1)
            problems += report.problems
            reads += 1
        except VersionNotFoundError as error:
            if reads:
                problems.append(str(error))
        except IntegrityError as error:
            problems.append(str(error))
    (Path(folder) / f"reader-{os.getpid()}").write_text("\n".join([str(reads), *problems]))


def collect_forever(environment: dict[str, str], root: str, folder: str, grace_s: float) -> None:
    """Collect garbage with a grace period far too short, so that it meets live publishers."""
    os.environ.update(environment)
    store, deleted, stop = open_store(root), 0, Path(folder) / "stop"
    while not stop.exists():
        report = collect_garbage(store, "tiny", grace_s=grace_s, dry_run=False)
        deleted += report.num_deleted
        time.sleep(0.02)
    (Path(folder) / f"collector-{os.getpid()}").write_text(str(deleted))


def readings(folder: str | Path) -> tuple[int, list[str]]:
    """Return the number of verified reads of all readers, and the errors found."""
    lines = [path.read_text().splitlines() for path in Path(folder).glob("reader-*")]
    return sum(int(line[0]) for line in lines), [p for line in lines for p in line[1:]]
