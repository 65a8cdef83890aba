"""Refs: names such as `latest` or `prod` that move from version to version by compare-and-swap.

A ref is one small JSON object. It counts its moves in `seq`, names its writer's try in `write_id`
(so that two bodies, and with them two ETags, are never equal), and keeps the moves before it in
`past`. A publisher whose answer was lost reads back: if its `write_id` is the current one or in
`past`, its move is done, whoever moved the ref since. Publishing never moves a ref to a version
that it pointed to before: a late retry must not turn it back. `set` and `rollback` may.

Each move keeps the `manifest_id` that the version had, so whoever reads the ref finds out if the
manifest was changed afterwards; and its time, the person or run that made it, and the reason.
"""

import getpass
import itertools
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from functools import partial

from packhouse.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    PackhouseError,
    TransientError,
    VersionNotFoundError,
)
from packhouse.store.layout import (
    check_name,
    is_name,
    is_version,
    ref_key,
    split_version,
)
from packhouse.store.manifest import Manifest, committed_steps
from packhouse.store.objects import ObjectStore, PreconditionFailedError
from packhouse.store.protocol import (
    Call,
    NewId,
    Pause,
    Steps,
    ask,
    read,
    read_checked,
    run,
)
from packhouse.system.fingerprint import canonical_json, digest
from packhouse.system.wording import counted

MAX_PAST = 500
"""Moves kept in a ref (about 200 bytes each); far more than writers that can race one write."""

_MOST_NOTED = 200
"""Characters of a reason, or of a name, that a ref keeps."""


@dataclass(frozen=True, slots=True)
class MoveNote:
    """When a ref was moved, by whom and why; empty in a ref that was written before notes were."""

    time: str = ""
    """In UTC, such as `2026-11-27T11:50:00Z`."""
    by: str = ""
    """A person, as `user@machine`, or a run."""
    reason: str = ""

    @property
    def is_sound(self) -> bool:
        """False if no `note_move` wrote it."""
        return re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?", self.time) is not None and all(
            type(text) is str and len(text) <= _MOST_NOTED for text in (self.by, self.reason)
        )


def note_move(reason: str, by: str | None = None) -> MoveNote:
    """Return the note of a move that is made now.

    Args:
        reason: why the ref moves.
        by: the run that moves it; by default the person whose process this is.
    """
    if by is None:
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
        except (KeyError, OSError):  # a container's user need not have a name
            by = socket.gethostname()
    texts = (text.encode("utf-8", "replace").decode()[:_MOST_NOTED] for text in (by, reason))
    return MoveNote(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), *texts)


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a ref."""

    version: str
    seq: int
    """1 for the first move, then one more each."""
    write_id: str
    """Unique to the try that moved it."""
    manifest_id: str
    """Of the version."""
    note: MoveNote = MoveNote()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """Where a ref points, and where it pointed before."""

    name: str
    version: str
    seq: int
    write_id: str
    manifest_id: str
    """Of the version."""
    parent: str | None
    """Version before this move."""
    past: tuple[Move, ...]
    """Moves before this one, newest first."""
    note: MoveNote = MoveNote()

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves that are kept, newest first."""
        now = Move(self.version, self.seq, self.write_id, self.manifest_id, self.note)
        return (now, *self.past)

    def was_moved_by(self, write_id: str) -> bool:
        """Return True if this try moved the ref, now or at any time before."""
        return any(move.write_id == write_id for move in self.moves)

    def has_pointed_to(self, version: str) -> bool:
        """Return True if the ref points or once pointed to this version."""
        return any(move.version == version for move in self.moves)

    def to_bytes(self) -> bytes:
        """Canonical JSON with a digest of itself."""
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
    """The ref after a move to `version`.

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


def parse_ref(name: str, data: bytes, where: str) -> Ref:
    """Read a ref; its bytes must be exactly those that `Ref.to_bytes` writes.

    Raises:
        IntegrityError: damaged; says how to point it to a version again.
    """
    try:
        document = json.loads(data)
        past = tuple(
            Move(*move[:4], *(MoveNote(**note) for note in move[4:])) for move in document["past"]
        )
        del document["sha256"]  # compared below
        note = MoveNote(**document.pop("note", {}))
        ref = Ref(name=name, note=note, **(document | {"past": past}))
        is_sound = (
            len(past) <= MAX_PAST
            and all(map(_is_sound, ref.moves))
            and (ref.parent is None or is_version(ref.parent))
            and ref.to_bytes() == data
        )
        problem = "" if is_sound else "its digest or a field does not fit"
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"not the JSON of a ref ({type(error).__name__})"
    if problem:
        dataset = where.partition("/refs/")[0]
        raise IntegrityError(
            f"ref '{where}' is damaged ({problem}); point it to a version again: "
            f"packhouse ref set STORE/{dataset} {name} VERSION --force",
            key=where,
        )
    return ref


def _is_sound(move: Move) -> bool:
    return (
        is_version(move.version)
        and type(move.seq) is int
        and 0 < move.seq < 2**63
        and re.fullmatch(r"[a-z0-9-]{1,64}", move.write_id) is not None
        and re.fullmatch(r"[0-9a-f]{64}", move.manifest_id) is not None
        and move.note.is_sound
    )


def read_ref_steps(
    dataset: str, name: str, *, even_damaged: bool = False
) -> Steps[tuple[Ref | None, str]]:
    """The ref and its tag; None and an empty tag where there is none.

    With `even_damaged`, a damaged ref is None and its tag. The last look decides, so that a ref
    mended meanwhile is taken as it is: nobody's move is lost.
    """
    key, parse = ref_key(dataset, check_name("ref", name)), partial(parse_ref, name)
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
    """Point a ref to a version that is committed.

    Args:
        target: where to point.
        name: name of the ref.
        once: stop if the ref ever pointed there (publishing); else point there now.
        note: kept with the move.
        expected: move only from this version.
        force: replace a damaged ref too, which loses its past.
        may_move: asked before every try of the ref as it is then; it may hold the ref back.

    Returns:
        The ref that holds our move, or that shows it to be unnecessary; None if it was held back.

    Raises:
        ConflictError: the ref does not point to `expected`.
    """
    # Named before the first try: a try whose answer was lost is found by it, in the ref or in its
    # past, even where others have moved the ref since.
    write_id: str = yield NewId()
    dataset, started = target.dataset, None
    for attempt in itertools.count():
        current, tag = yield from read_ref_steps(dataset, name, even_damaged=force)
        if current is not None and _is_done(current, target, write_id, once, attempt):
            return current
        points = current.version if current else None
        if expected is not None and points != expected:
            raise ConflictError(
                f"ref '{name}' of '{dataset}' points to {points}, not to {expected}; look again "
                "and repeat",
                current=points,
            )
        if may_move is not None and not (yield from may_move(current)):
            return None
        moved = next_ref(name, target.version, target.manifest_id, write_id, current, note)
        key, body = ref_key(dataset, name), moved.to_bytes()
        try:
            if tag:
                yield Call(ObjectStore.put_if_match, key, body, tag)
            else:
                yield Call(ObjectStore.put_create, key, body)
            return moved
        except PreconditionFailedError as error:  # another moved it, or a lost success of ours
            cause: PackhouseError = ConflictError(f"ref '{name}' is too contended: {error}")
        except TransientError as error:
            cause = error
        started = yield Pause(cause, attempt, started)
    raise AssertionError("unreachable: a pause raises when the time is over")


def _is_done(current: Ref, target: Manifest, write_id: str, once: bool, attempt: int) -> bool:
    if current.was_moved_by(write_id):
        return True
    # Publishing goes by `has_pointed_to`: latest went a -> b, and a late retry of a must not turn
    # it back. `ref set` means now: it stops only if the ref points there at the first look.
    if current.version == target.version and current.manifest_id != target.manifest_id:
        return False  # removed by hand and published again, with another card
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
    """Point a ref to a committed version, and see that it still is committed afterwards.

    Collection takes the slot of an unreferenced version first and looks at the refs then; we move
    the ref first and look at the slot then. So at least one of the two sees the other.
    """
    split_version(version)
    target = yield from committed_steps(dataset, version, manifest_id)
    ref = yield from move_ref_steps(
        target, name, once=False, note=note, expected=expected, force=force
    )
    assert ref is not None, "nothing holds it back"
    yield from committed_steps(dataset, version)
    return ref


@contextmanager
def explaining(store: ObjectStore, dataset: str) -> Iterator[None]:
    """Make "not found" say what is missing - store, dataset or name - and what to do.

    This lists, which readers otherwise never do, and only after the failure.
    """
    try:
        yield
    except VersionNotFoundError as error:
        problem, remedy = str(error), f"see `packhouse ls {store.uri}/{dataset}`"
        with suppress(PackhouseError):  # who may not list gets the plain message
            folders = set(store.list_folders(""))
            if not folders:
                problem = f"no dataset lies in store '{store.uri}'"
                remedy = "give ROOT/DATASET, where ROOT is the recipe's publish.store"
            elif dataset not in folders:
                problem = f"store '{store.uri}' has no dataset '{dataset}'"
                remedy = f"see `packhouse ls {store.uri}`"
        raise VersionNotFoundError(f"{problem}; {remedy}", **error.facts) from None


def load_ref(store: ObjectStore, dataset: str, name: str) -> Ref | None:
    """Where a ref points, or None if it was never set."""
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
    """Point `name` to `version`; with `expected`, only if it points there now.

    With `manifest_id`, only if the version has it. The ref keeps the time, the reason and `by`: a
    run, or by default `user@machine`.

    With `force`, a damaged ref is replaced as well, by compare-and-swap with the damaged bytes.
    Its past is lost with it: a publisher that was killed before the damage may move it once more.

    Raises:
        VersionNotFoundError: the version is not committed.
        ConflictError: the ref does not point to `expected`.
        IntegrityError: the ref is damaged, and `force` was not given; or the manifest is.
    """
    steps = set_ref_steps(
        dataset,
        name,
        version,
        note=note_move(reason, by),
        expected=expected,
        force=force,
        manifest_id=manifest_id,
    )
    with explaining(store, dataset):
        return run(store, steps)


def rollback_ref(
    store: ObjectStore, dataset: str, name: str, steps_back: int = 1, reason: str = ""
) -> Ref:
    """Point `name` to where it pointed `steps_back` moves ago; this is a move like any other.

    Raises:
        VersionNotFoundError: the ref has no such past.
        ConflictError: someone moved the ref meanwhile.
    """
    current = load_ref(store, dataset, name)
    if current is None:
        with explaining(store, dataset):
            raise VersionNotFoundError(f"'{dataset}' has no ref '{name}'")
    assert current is not None
    if not 1 <= steps_back <= len(current.past):
        raise VersionNotFoundError(
            f"ref '{name}' of '{dataset}' has {len(current.past)} moves behind it, cannot go "
            f"back {steps_back}"
        )
    to, now = current.past[steps_back - 1], current.version
    return set_ref(
        store,
        dataset,
        name,
        to.version,
        expected=now,
        manifest_id=to.manifest_id,
        reason=reason or f"rolled back {counted(steps_back, 'move')}",
    )


def scan_refs(store: ObjectStore, dataset: str) -> tuple[list[Ref], list[IntegrityError]]:
    """All refs of a dataset that can be read, by name, and what is wrong with the others."""
    refs, damaged = [], []
    for info in run(store, ask(ObjectStore.list, f"{check_name('dataset', dataset)}/refs/")):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        if not is_name(name) or is_version(name) or info.key != ref_key(dataset, name):
            continue  # no ref of ours: nobody can ask for it
        try:
            ref = load_ref(store, dataset, name)
        except IntegrityError as error:
            damaged.append(error)
        else:
            refs += [ref] if ref else []
    return refs, damaged
