"""Deterministic simulation: the production protocols on a store in memory, one request at a time.

A seed decides who moves next and what happens to each request: it is executed; it is lost before
it arrives; it is executed but its answer is lost; it is delayed and executed later, unnoticed by
its caller; or its caller dies and starts again. Time jumps over the grace period, so collections
meet live publishers. After every write, the invariants of the whole store are checked, and at the
end those of everything acknowledged. The generators are the same that
`packhouse.store.store_requests.run` executes on real stores; only the store is a model.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from packhouse.addons import gc
from packhouse.errors import ConflictError, TransientError, VersionNotFoundError
from packhouse.store import commit, manifest, refs, store_requests, version_reader
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.object_keys import file_key
from packhouse.store.object_store import (
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
)

DATASET = "d"
WRITES = (ObjectStore.put_create, ObjectStore.put_if_match, ObjectStore.delete)
GRACE_S = 1000.0
MAX_STEPS = 250  # then faults stop, and everything must finish
_LIVENESS_STEPS = 2000


class Violation(AssertionError):
    """An invariant of publication is violated."""


@dataclass
class SimStore:
    """Objects in memory; each request is atomic, as the real stores are tested to be.

    Tags are the bytes themselves: an ETag is a content hash, so equal bytes have equal tags.
    """

    objects: dict[str, tuple[Any, float]] = field(default_factory=dict)
    now: float = 0.0
    honours_create: bool = True
    honours_match: bool = True

    def perform(self, wanted: store_requests.Call) -> Any:
        return getattr(self, wanted.method.__name__)(*wanted.args)

    def get(self, key: str) -> Blob:
        body = self._get(key)
        return Blob(body, body)

    def put_create(self, key: str, body: Any) -> Any:
        if key in self.objects and self.honours_create:
            raise PreconditionFailedError("exists")
        return self._put(key, body)

    def put_if_match(self, key: str, body: bytes, etag: Any) -> Any:
        if self.honours_match and self.objects.get(key, (None,))[0] != etag:
            raise PreconditionFailedError("changed")
        return self._put(key, body)

    def head(self, key: str) -> ObjectInfo:
        body = self._get(key)
        return ObjectInfo(key, body.size, self.objects[key][1], body.sha256)

    def sha256(self, key: str) -> str:
        digest = self._get(key).sha256
        return digest

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return [self._info(key) for key in sorted(self.objects) if key.startswith(prefix)]

    def clock(self) -> float:
        return self.now

    def slot(self, version: str) -> Any:
        found = self.objects.get(f"{DATASET}/v/{version}/manifest.json")
        return _parse_slot(found[0]) if found else None

    def ref(self, name: str) -> Any:
        found = self.objects.get(f"{DATASET}/refs/{name}.json")
        return _parse_ref(name, found[0], name) if found else None

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, 1, self.objects[key][1])

    def _get(self, key: str) -> Any:
        try:
            return self.objects[key][0]
        except KeyError:
            raise ObjectNotFoundError(key) from None

    def _put(self, key: str, body: Any) -> Any:
        self.objects[key] = (body, self.now)
        return body.sha256 if isinstance(body, FileBody) else body


class SimBody(FileBody):
    """A file that is not on disk and never changes."""

    def check(self) -> None:
        """Do nothing: there is no file."""


# Parsing is pure, and the simulation parses the same few bytes again and again.
_parse_slot = lru_cache(maxsize=4096)(manifest.parse_slot)
_parse_ref = lru_cache(maxsize=4096)(refs.parse_ref)


@lru_cache(maxsize=64)
def _draft(vid: str, num_files: int, flavour: str = "") -> tuple[Manifest, tuple[Any, ...]]:
    entries, bodies = [], []
    for number in range(num_files):
        digest = hashlib.sha256(f"{vid}{number}{flavour}".encode()).hexdigest()
        key = f"data/train-{number:05d}-of-{num_files:05d}-{digest[:12]}.parquet"
        entry = FileEntry(
            key=key, kind="data", split="train", size=1, sha256=digest, rows=1, tokens=1
        )
        entries.append(entry)
        bodies.append(SimBody(Path(digest), 1, digest))
    draft = Manifest(dataset=DATASET, vid=vid, generation=0, files=tuple(entries))
    return draft, tuple(zip(entries, bodies, strict=True))


@dataclass
class Actor:
    """A process: a protocol, the request it waits for, and how to restart it."""

    name: str
    start: Callable[[], Iterator[Any]]
    tries: int
    on_result: Callable[[Any], None]
    on_error: Callable[[Exception], None]
    parent: "Actor | None" = None
    index: int = 0
    frame: Any = None
    wanted: Any = None
    waiting: int = 0
    results: list[Any] = field(default_factory=list)
    children: list["Actor"] = field(default_factory=list)
    is_done: bool = False


class Simulation:
    """One schedule."""

    def __init__(self, seed: int, *, honours_create: bool = True, honours_match: bool = True):
        self.random = random.Random(seed)
        self.store = SimStore(honours_create=honours_create, honours_match=honours_match)
        self.actors: list[Actor] = []
        self.in_flight: list[Any] = []
        self.acked: list[tuple[str, str | None]] = []  # version, ref
        self.flavours: dict[str, set[str]] = {}
        self.ids = 0
        self.num_steps = 0
        self.num_faults = 0
        self.has_setter = False
        self.is_calm = False

    def run(self) -> None:
        self._cast()
        while self.actors:
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                self._calm_down()
            if self.num_steps > _LIVENESS_STEPS:
                raise Violation(f"{[a.name for a in self.actors]} never end")
            self._step()
        self._calm_down()
        self._check_acknowledged()
        self._check_reclaimed()

    def _cast(self) -> None:
        choose = self.random
        vids = ("aaaa", "bbbb", "cccc")[: choose.choice((1, 2, 2, 3))]
        for number in range(choose.choice((2, 2, 3))):
            self._publisher(f"publisher{number}", choose.choice(vids))
        self._collector(choose.choice((1, 2)))
        self._reader(choose.choice((1, 2)))
        if choose.random() < 0.25:
            self.has_setter = True
            self._setter(choose.choice(vids))

    def _publisher(self, name: str, vid: str) -> None:
        # All publishers of a vid have the same bytes, so the number of files depends on the vid.
        # Occasionally one is not deterministic; then all flavours except one must get an error.
        flavour = "x" if self.random.random() < 0.05 else ""
        self.flavours.setdefault(vid, set()).add(flavour)
        draft, uploads = _draft(vid, 1 + (vid == "bbbb"), flavour)
        ref = "latest" if self.random.random() < 0.9 else None

        def acknowledged(result: Any) -> None:
            self._check_published(result, ref)
            if result.manifest.files != draft.files:
                raise Violation(f"{name} was told that other bytes are its version {vid}")
            self.acked.append((result.version, ref))

        self._spawn(name, lambda: commit.publish_steps(draft, uploads, ref), 4, acknowledged)

    def _collector(self, times: int) -> None:
        def start() -> Iterator[Any]:
            for _ in range(times):
                for item in (yield from gc.find_garbage_steps(DATASET, GRACE_S)):
                    yield from gc.collect_steps(item)

        self._spawn("collector", start, 3, lambda _: None)

    def _reader(self, times: int) -> None:
        def start() -> Iterator[Any]:
            for _ in range(times):
                yield from self._read_steps()

        self._spawn("reader", start, 3, lambda _: None)

    def _read_steps(self) -> Iterator[Any]:
        had_ref = self.store.ref("latest") is not None
        try:
            opened = yield from version_reader.resolve_steps(DATASET, "latest")
        except VersionNotFoundError:
            if had_ref:
                raise
            return
        for entry in opened.files:
            key = file_key(DATASET, opened.version, entry.key)
            if (yield from store_requests.ask(ObjectStore.sha256, key)) != entry.sha256:
                raise Violation(f"reader got wrong bytes of {entry.key}")

    def _setter(self, vid: str) -> None:
        def start() -> Iterator[Any]:
            found, _ = yield from commit.find_slot_steps(DATASET, vid)
            if found is not None:
                ref = yield from refs.set_ref_steps(DATASET, "latest", found.version)
                if not ref.has_pointed_to(found.version):
                    raise Violation("ref set was acknowledged and is not in the ref")

        self._spawn("setter", start, 2, lambda _: None)

    def _spawn(
        self, name: str, start: Callable[[], Iterator[Any]], tries: int, on_result: Any
    ) -> None:
        def failed(error: Exception) -> None:
            if isinstance(error, ConflictError) and self._has_flavours():
                self._kill(actor)
                return
            raise Violation(f"{name} failed: {type(error).__name__}: {error}") from error

        actor = Actor(name, start, tries, on_result, failed)
        self.actors.append(actor)
        self._begin(actor)

    def _has_flavours(self) -> bool:
        return any(len(flavours) > 1 for flavours in self.flavours.values())

    def _begin(self, actor: Actor) -> None:
        actor.tries -= 1
        actor.frame = actor.start()
        self._advance(actor, None, None)

    def _step(self) -> None:
        """Execute one request of one actor, or a write that was still in flight."""
        choose = self.random
        self.store.now += 1.0
        if choose.random() < 0.01:
            self.store.now += 2 * GRACE_S
        if self.in_flight and choose.random() < 0.15:
            self._land(self.in_flight.pop(choose.randrange(len(self.in_flight))))
            return
        ready = [a for a in self.actors if not a.waiting]
        actor = ready[choose.randrange(len(ready))] if len(ready) > 1 else ready[0]
        fate = 0.0 if self.is_calm else choose.random()
        if fate < 0.90:
            self._answer(actor)
        else:
            self.num_faults += 1
            self._fault(actor, fate)

    def _fault(self, actor: Actor, fate: float) -> None:
        wanted = actor.wanted
        is_write = wanted.method in WRITES
        if fate < 0.925:  # lost on the way there
            self._advance(actor, None, TransientError("lost before"))
        elif fate < 0.955:  # executed, but the answer is lost
            self._land(wanted)
            self._advance(actor, None, TransientError("lost after"))
        elif fate < 0.975:  # delayed: executed later, unnoticed by the caller
            if is_write:
                self.in_flight.append(wanted)
            self._advance(actor, None, TransientError("delayed"))
        elif fate < 0.99:  # a killed process; the request that it sent may still be executed
            if is_write and self.random.random() < 0.5:
                self.in_flight.append(wanted)
            self._kill(actor)
        else:  # a stall: this process is silent until the grace period is over
            self.store.now += 2 * GRACE_S

    def _land(self, wanted: Any) -> None:
        try:
            self._perform(wanted)
        except (PreconditionFailedError, ObjectNotFoundError):
            pass

    def _answer(self, actor: Actor) -> None:
        try:
            answer = self._perform(actor.wanted)
        except (PreconditionFailedError, ObjectNotFoundError) as error:
            self._advance(actor, None, error)
        else:
            self._advance(actor, answer, None)

    def _perform(self, wanted: Any) -> Any:
        if wanted.method is ObjectStore.delete:
            self._check_delete(wanted.args[0])
        elif wanted.method in WRITES:
            key = wanted.args[0]
            before = self.store.objects.get(key)
            answer = self.store.perform(wanted)
            self._check_write(key, before[0] if before else None)
            return answer
        return self.store.perform(wanted)

    def _advance(self, actor: Actor, answer: Any, error: Exception | None) -> None:
        """Resume an actor until it makes a request to the store."""
        frame = actor.frame
        while True:
            try:
                wanted = frame.send(answer) if error is None else frame.throw(error)
            except StopIteration as stop:
                self._finish(actor, stop.value)
                return
            except TransientError:
                self._give_up(actor)
                return
            except Violation:
                raise
            except Exception as raised:
                actor.on_error(raised)
                return
            answer, error, kind = None, None, type(wanted)
            if kind is store_requests.NewId:
                self.ids += 1
                answer = f"w{self.ids}"
            elif kind is store_requests.Pause:
                answer = 0.0
                if wanted.attempt > 8 and not self.is_calm:
                    error = wanted.cause
            elif kind is store_requests.All:
                self._fork(actor, wanted.parts)
                return
            else:
                assert kind is store_requests.Call
                actor.wanted = wanted
                return

    def _fork(self, actor: Actor, parts: tuple[Any, ...]) -> None:
        actor.waiting = len(parts)
        actor.results = [None] * len(parts)
        for index, part in enumerate(parts):
            child = Actor(actor.name, lambda part=part: part, 1, self._no, self._no, actor, index)
            actor.children.append(child)
            self.actors.append(child)
            child.frame = part
            child.on_error = actor.on_error
            self._advance(child, None, None)

    def _no(self, _: Any) -> None:
        return

    def _finish(self, actor: Actor, result: Any) -> None:
        self._remove(actor)
        parent = actor.parent
        if parent is None:
            actor.on_result(result)
            return
        parent.results[actor.index] = result
        parent.waiting -= 1
        if not parent.waiting and not parent.is_done:
            self._advance(parent, parent.results, None)

    def _give_up(self, actor: Actor) -> None:
        """After a deadline, the process ends with an error, and its caller runs it again."""
        self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        while actor.parent is not None:
            actor = actor.parent
        for dead in (actor, *actor.children):
            self._remove(dead)
            dead.frame.close()
        actor.children, actor.waiting = [], 0
        if actor.tries > 0:
            actor.is_done = False
            self.actors.append(actor)
            self._begin(actor)

    def _remove(self, actor: Actor) -> None:
        actor.is_done = True
        if actor in self.actors:
            self.actors.remove(actor)

    def _calm_down(self) -> None:
        """Stop faults, and let everything in flight arrive."""
        self.is_calm = True
        for wanted in self.in_flight:
            self._land(wanted)
        self.in_flight.clear()

    # -- invariants --

    def _check_write(self, key: str, before: Any) -> None:
        if key.endswith("/manifest.json"):
            self._check_commit(key.split("/")[2], before)
        elif "/refs/" in key:
            self._check_move(before)

    def _check_commit(self, version: str, before: Any) -> None:
        if before is not None:
            raise Violation(f"commit slot of {version} was overwritten")
        slot = self.store.slot(version)
        if isinstance(slot, Manifest):
            self._check_whole(slot)
            rivals = [
                other
                for number in range(slot.generation)
                if isinstance(other := self.store.slot(f"{slot.vid}.g{number}"), Manifest)
            ]
            if rivals:
                raise Violation(f"{version} is committed twice")

    def _check_whole(self, slot: Manifest) -> None:
        for entry in slot.files:
            found = self.store.objects.get(file_key(DATASET, slot.version, entry.key))
            if found is None or found[0].sha256 != entry.sha256:
                raise Violation(f"{slot.version} is committed without {entry.key}")

    def _check_move(self, before: Any) -> None:
        new = self.store.ref("latest")
        old = _parse_ref("latest", before, "latest") if before is not None else None
        if new.seq != (old.seq if old else 0) + 1:
            raise Violation(f"ref went from seq {old and old.seq} to {new.seq}")
        if not isinstance(self.store.slot(new.version), Manifest):
            raise Violation(f"ref points to {new.version}, which is not committed")
        if old is not None and old.was_moved_by(new.write_id):
            raise Violation(f"one move of the ref to {new.version} was made twice")
        if old is not None and not self.has_setter and old.has_pointed_to(new.version):
            raise Violation(f"ref moved back to {new.version}")

    def _check_delete(self, key: str) -> None:
        if key.endswith("/manifest.json") or "/refs/" in key:
            raise Violation(f"{key} was deleted")
        version = key.split("/")[2]
        slot = self.store.slot(version)
        if isinstance(slot, Manifest):
            if key in {file_key(DATASET, version, entry.key) for entry in slot.files}:
                raise Violation(f"live {key} was deleted")

    def _check_published(self, result: Any, ref: str | None) -> None:
        slot = self.store.slot(result.version)
        if not isinstance(slot, Manifest):
            raise Violation(f"{result.version} was acknowledged and is not committed")
        self._check_whole(slot)
        current = self.store.ref("latest")
        if ref and (current is None or not current.has_pointed_to(result.version)):
            raise Violation(f"{result.version} was acknowledged and the ref never held it")

    def _check_acknowledged(self) -> None:
        current = self.store.ref("latest")
        for version, ref in self.acked:
            slot = self.store.slot(version)
            if not isinstance(slot, Manifest):
                raise Violation(f"acknowledged {version} is lost")
            self._check_whole(slot)
            if ref and (current is None or not current.has_pointed_to(version)):
                raise Violation(f"the ref lost acknowledged {version}")

    def _check_reclaimed(self) -> None:
        """Check that one collection leaves no garbage when all is quiet and the grace is over."""
        self.store.now += 2 * GRACE_S
        self._collector(1)
        while self.actors:
            self._step()
        for key in self.store.objects:
            if "/data/" in key:
                version = key.split("/")[2]
                slot = self.store.slot(version)
                named = slot.files if isinstance(slot, Manifest) else ()
                if key not in {file_key(DATASET, version, entry.key) for entry in named}:
                    raise Violation(f"dead {key} was not reclaimed")


def simulate(seeds: range, **store: bool) -> tuple[int, int]:
    """Run schedules and return requests and faults. A violation names its seed."""
    num_steps = num_faults = 0
    with (
        mock.patch.object(manifest, "parse_slot", _parse_slot),
        mock.patch.object(refs, "parse_ref", _parse_ref),
    ):
        for seed in seeds:
            schedule = Simulation(seed, **store)
            try:
                schedule.run()
            except Violation as error:
                raise Violation(f"seed {seed}: {error}") from error
            num_steps += schedule.num_steps
            num_faults += schedule.num_faults
    return num_steps, num_faults
