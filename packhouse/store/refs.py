"""Refs: names such as `latest` or `prod` that move from version to version by compare-and-swap.

A ref is one small JSON object. It counts its moves in `seq`, identifies the write in `write_id` (so
that no two bodies, and no two ETags, are equal), and keeps earlier moves in `past`. A publisher
whose response was lost reads back: if its `write_id` is the current one or in `past`, its move is
done, even if others moved the ref since. Publishing never moves a ref to a version that it pointed
to before, because a late retry must not turn it back. `set` and `rollback` may.

Each move records the `manifest_id` of the version, so readers of the ref notice if the manifest was
changed afterwards; and its time, the person or run that made it, and the reason.
"""

import getpass
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from packhouse.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    PackhouseError,
    TransientError,
    VersionNotFoundError,
)
from packhouse.store import object_keys
from packhouse.store.manifest import Manifest, committed_steps
from packhouse.store.object_store import ObjectStore, PreconditionFailedError
from packhouse.store.store_requests import Call, NewId, Pause, Steps, ask, read, read_checked, run
from packhouse.system.fingerprint import canonical_json, digest
from packhouse.system.wording import counted

MAX_PAST = 500
"""Number of moves kept in a ref (about 200 bytes each), far more than writers can race one
write."""

_MOST_NOTED = 200
"""Maximum length of a reason or a name in a ref, in characters."""


_Noted = Annotated[str, Field(max_length=_MOST_NOTED)]
_TIME = r"^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)?\z"
_Version = Annotated[
    str, AfterValidator(lambda name: object_keys.version_name(*object_keys.split_version(name)))
]
_Seq = Annotated[int, Field(gt=0, lt=2**63)]
_WriteId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}\z")]
_ManifestId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


@dataclass(frozen=True, slots=True)
class MoveNote:
    """When a ref was moved, by whom and why; empty in refs written before notes existed."""

    time: Annotated[str, Field(pattern=_TIME)] = ""
    """Time in UTC, such as `2026-11-27T11:50:00Z`."""
    by: _Noted = ""
    """A person (`user@machine`) or a run."""
    reason: _Noted = ""


def note_move(reason: str, by: str | None = None) -> MoveNote:
    """Return the note of a move that is made now.

    Args:
        reason: Reason of the move.
        by: The run that moves the ref; default: the user of this process.
    """
    if by is None:
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
        except (KeyError, OSError):  # users in containers may have no name
            by = socket.gethostname()
    # An argument of a shell may have bytes that are not UTF-8, which JSON cannot hold.
    texts = (text.encode("utf-8", "replace").decode()[:_MOST_NOTED] for text in (by, reason))
    return MoveNote(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), *texts)


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a ref."""

    version: _Version
    seq: _Seq
    """Number of the move, from 1."""
    write_id: _WriteId
    """Unique ID of the write that moved the ref."""
    manifest_id: _ManifestId
    """Manifest ID of the version at that time."""
    note: MoveNote = MoveNote()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """The current version of a ref, and its earlier ones."""

    name: str
    version: _Version
    seq: _Seq
    write_id: _WriteId
    manifest_id: _ManifestId
    """Manifest ID of the version."""
    parent: _Version | None
    """Version before the last move."""
    past: Annotated[tuple[Move, ...], Field(max_length=MAX_PAST)]
    """Earlier moves, newest first."""
    note: MoveNote = MoveNote()

    @property
    def moves(self) -> tuple[Move, ...]:
        """All recorded moves, newest first."""
        now = Move(self.version, self.seq, self.write_id, self.manifest_id, self.note)
        return (now, *self.past)

    def was_moved_by(self, write_id: str) -> bool:
        """Return True if this write is among the recorded moves."""
        return any(move.write_id == write_id for move in self.moves)

    def has_pointed_to(self, version: str) -> bool:
        """Return True if the ref points or ever pointed to this version."""
        return any(move.version == version for move in self.moves)

    def to_bytes(self) -> bytes:
        """Return canonical JSON with its own digest."""
        # An ETag is a hash of these bytes. With `seq` and `write_id`, no two moves have the same.
        document: dict[str, object] = {
            "version": self.version,
            "seq": self.seq,
            "write_id": self.write_id,
            "parent": self.parent,
            "manifest_id": self.manifest_id,
            "past": [
                (*astuple(move)[:4], *filter(None, [_note_json(move.note)])) for move in self.past
            ],
        }
        if note := _note_json(self.note):
            document["note"] = note
        return canonical_json(document | {"sha256": digest(document)})


def _note_json(note: MoveNote) -> dict[str, str]:
    return {name: text for name, text in asdict(note).items() if text}


def next_ref(
    name: str,
    version: str,
    manifest_id: str,
    write_id: str,
    current: Ref | None,
    note: MoveNote = MoveNote(),
) -> Ref:
    """Return the ref after a move to `version`.

    Example:
        >>> first = next_ref("latest", "aaaa.g0", "0" * 64, "w1", None)
        >>> second = next_ref("latest", "bbbb.g0", "1" * 64, "w2", first)
        >>> second.seq, second.parent, second.has_pointed_to("aaaa.g0"), second.was_moved_by("w1")
        (2, 'aaaa.g0', True, True)
    """
    return Ref(
        name=name,
        version=version,
        seq=current.seq + 1 if current else 1,
        write_id=write_id,
        manifest_id=manifest_id,
        parent=current.version if current else None,
        past=current.moves[:MAX_PAST] if current else (),
        note=note,
    )


_REF = TypeAdapter(Ref)


def parse_ref(name: str, data: bytes, where: str) -> Ref:
    """Parse a ref; its bytes must be exactly those that `Ref.to_bytes` writes.

    Raises:
        IntegrityError: The ref is damaged; the message has the command that repairs it.
    """
    try:
        document = json.loads(data)
        names = [field.name for field in fields(Move)]
        past = [dict(zip(names, move, strict=False)) for move in document["past"]]
        ref = _REF.validate_python({**document, "name": name, "past": past})
        # Equal bytes prove the digest, and that nothing was converted or left out above.
        problem = "" if ref.to_bytes() == data else "its digest or a field is wrong"
    except (ConfigError, ValidationError):
        problem = "its digest or a field is wrong"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"not the JSON of a ref ({type(error).__name__})"
    if problem:
        dataset = where.partition("/refs/")[0]
        raise IntegrityError(
            f"ref '{where}' is damaged ({problem}). Set it again: "
            f"packhouse ref set STORE/{dataset} {name} VERSION --force",
            key=where,
        )
    return ref


def read_ref_steps(
    dataset: str, name: str, *, even_damaged: bool = False
) -> Steps[tuple[Ref | None, str]]:
    """Read a ref and its tag; None and an empty tag if it does not exist.

    With `even_damaged`, a damaged ref is returned as None with its tag. The last read decides, so
    that a ref that was repaired meanwhile is used, and no move is lost.
    """
    key = object_keys.ref_key(dataset, object_keys.check_name("ref", name))
    parse = partial(parse_ref, name)
    try:
        return (yield from read_checked(key, parse)) or (None, "")
    except IntegrityError:
        if not even_damaged:
            raise
    blob = yield from read(key)
    if blob is None:
        return None, ""
    with suppress(IntegrityError):
        return parse(blob.data, key), blob.etag
    return None, blob.etag


def move_ref_steps(
    target: Manifest,
    name: str,
    *,
    once: bool,
    note: MoveNote = MoveNote(),
    expected: str | None = None,
    force: bool = False,
    may_move: Callable[[Ref | None], Steps[bool]] | None = None,
) -> Steps[Ref | None]:
    """Point a ref to a committed version.

    Args:
        target: Manifest of the version.
        name: Name of the ref.
        once: Do nothing if the ref ever pointed there (for publishing).
        note: Note to record with the move.
        expected: Move only from this version.
        force: Replace a damaged ref too; this loses its history.
        may_move: Called with the current ref before every attempt; can hold the ref back.

    Returns:
        The ref with our move, or the ref that made it unnecessary; None if it was held back.

    Raises:
        ConflictError: The ref does not point to `expected`.
    """
    # Chosen before the first attempt: a write whose response was lost is found by this ID in the
    # ref or in its past, even if others have moved the ref since.
    write_id: str = yield NewId()
    dataset, started = target.dataset, None
    for attempt in itertools.count():
        current, tag = yield from read_ref_steps(dataset, name, even_damaged=force)
        if current is not None and _is_done(current, target, write_id, once, attempt):
            return current
        points = current.version if current else None
        if expected is not None and points != expected:
            raise ConflictError(
                f"ref '{name}' of '{dataset}' points to {points}, not to {expected}. Check the ref "
                "and try again",
                current=points,
            )
        if may_move is not None and not (yield from may_move(current)):
            return None
        moved = next_ref(name, target.version, target.manifest_id, write_id, current, note)
        key, body = object_keys.ref_key(dataset, name), moved.to_bytes()
        try:
            if tag:
                yield Call(ObjectStore.put_if_match, key, body, tag)
            else:
                yield Call(ObjectStore.put_create, key, body)
            return moved
        except PreconditionFailedError as error:  # moved by others, or by us with a lost response
            cause: PackhouseError = ConflictError(f"too many writers move ref '{name}': {error}")
        except TransientError as error:
            cause = error
        started = yield Pause(cause, attempt, started)
    raise AssertionError("unreachable: a pause raises after the deadline")


def _is_done(current: Ref, target: Manifest, write_id: str, once: bool, attempt: int) -> bool:
    if current.was_moved_by(write_id):
        return True
    # Publishing uses `has_pointed_to`: if latest moved a -> b, a late retry of a must not turn it
    # back, as it did in 161 of 5,000 simulated schedules. `ref set` means now: it stops only if the
    # ref points there at the first read.
    if current.version == target.version and current.manifest_id != target.manifest_id:
        return False  # the version was deleted by hand and published again with another card
    if once:
        return current.has_pointed_to(target.version)
    return attempt == 0 and current.version == target.version


def set_ref_steps(
    dataset: str,
    name: str,
    version: str,
    *,
    note: MoveNote = MoveNote(),
    expected: str | None = None,
    force: bool = False,
    manifest_id: str = "",
) -> Steps[Ref]:
    """Point a ref to a committed version, and check afterwards that it is still committed.

    Collection first takes the slot of an unreferenced version and then reads the refs. We first
    move the ref and then read the slot. So at least one of the two notices the other.
    """
    object_keys.split_version(version)
    target = yield from committed_steps(dataset, version, manifest_id)
    ref = yield from move_ref_steps(
        target, name, once=False, note=note, expected=expected, force=force
    )
    assert ref is not None, "without may_move, nothing holds the ref back"
    yield from committed_steps(dataset, version)
    return ref


@contextmanager
def explaining(store: ObjectStore, dataset: str) -> Iterator[None]:
    """Improve a "not found" error: name what is missing (store, dataset or version) and the fix.

    Lists the store, which readers otherwise never do, and only after a failure.
    """
    try:
        yield
    except VersionNotFoundError as error:
        problem, remedy = str(error), f"Run `packhouse ls {store.uri}/{dataset}`"
        with suppress(PackhouseError):  # without permission to list, keep the plain message
            folders = set(store.list_folders(""))
            if not folders:
                problem = f"store '{store.uri}' has no datasets"
                remedy = "Pass STORE/DATASET, where STORE is the recipe's publish.store"
            elif dataset not in folders:
                problem = f"store '{store.uri}' has no dataset '{dataset}'"
                remedy = f"Run `packhouse ls {store.uri}`"
        raise VersionNotFoundError(f"{problem}. {remedy}", **error.facts) from None


def load_ref(store: ObjectStore, dataset: str, name: str) -> Ref | None:
    """Return a ref, or None if it does not exist."""
    ref, _ = run(store, read_ref_steps(dataset, name))
    return ref


def set_ref(
    store: ObjectStore,
    dataset: str,
    name: str,
    version: str,
    *,
    expected: str | None = None,
    force: bool = False,
    manifest_id: str = "",
    reason: str = "set",
    by: str | None = None,
) -> Ref:
    """Point ref `name` to `version`; with `expected`, only if it currently points to that version.

    With `manifest_id`, the version must have that manifest ID. The ref records the time, the reason
    and `by` (a run; default: `user@machine`).

    With `force`, a damaged ref is replaced too, by compare-and-swap with the damaged bytes. Its
    history is lost, so a publisher that was killed before the damage may move it once more.

    Raises:
        VersionNotFoundError: The version is not committed.
        ConflictError: The ref does not point to `expected`.
        IntegrityError: The manifest is damaged; or the ref is, and `force` is not set.
    """
    note = note_move(reason, by)
    steps = set_ref_steps(
        dataset, name, version, note=note, expected=expected, force=force, manifest_id=manifest_id
    )
    with explaining(store, dataset):
        return run(store, steps)


def earlier_move(store: ObjectStore, dataset: str, name: str, steps_back: int) -> tuple[Ref, Move]:
    """Return a ref, and the move that it made `steps_back` moves before its last one.

    Raises:
        VersionNotFoundError: the ref does not exist, or has fewer moves.
    """
    current = load_ref(store, dataset, name)
    if current is None:
        with explaining(store, dataset):
            raise VersionNotFoundError(f"'{dataset}' has no ref '{name}'")
    assert current is not None
    if not 1 <= steps_back <= len(current.past):
        raise VersionNotFoundError(
            f"cannot roll back ref '{name}' of '{dataset}' by {counted(steps_back, 'move')}: it "
            f"has {counted(len(current.past), 'earlier version')}. List them with `packhouse ref "
            f"log {store.uri}/{dataset} {name}`"
        )
    return current, current.past[steps_back - 1]


def rollback_ref(
    store: ObjectStore, dataset: str, name: str, steps_back: int = 1, reason: str = ""
) -> Ref:
    """Point ref `name` to the version of `steps_back` moves ago. Recorded as a new move.

    Raises:
        VersionNotFoundError: The ref does not exist, or has fewer moves.
        ConflictError: Someone else moved the ref meanwhile.
    """
    current, to = earlier_move(store, dataset, name, steps_back)
    return set_ref(
        store,
        dataset,
        name,
        to.version,
        expected=current.version,
        manifest_id=to.manifest_id,
        reason=reason or f"rolled back {counted(steps_back, 'move')}",
    )


def scan_refs(store: ObjectStore, dataset: str) -> tuple[list[Ref], list[IntegrityError]]:
    """Return all readable refs of a dataset, sorted by name, and the errors of the others."""
    refs, damaged = [], []
    folder = f"{object_keys.check_name('dataset', dataset)}/refs/"
    for info in run(store, ask(ObjectStore.list, folder)):
        name = info.key.removeprefix(folder).removesuffix(".json")
        is_valid = object_keys.is_name(name) and not object_keys.is_version(name)
        if not is_valid or not info.key.endswith(".json"):  # nobody can open it
            continue
        try:
            ref = load_ref(store, dataset, name)
        except IntegrityError as error:
            damaged.append(error)
        else:
            refs += [ref] if ref else []
    return refs, damaged
