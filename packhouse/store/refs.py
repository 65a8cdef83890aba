"""Refs: names such as `latest` or `prod` that move from version to version by compare-and-swap.

A ref is one small JSON object. It counts its moves in `seq`, names its writer's try in `write_id`
(so that two bodies, and with them two ETags, are never equal), and keeps the moves before it in
`past`. A publisher whose answer was lost reads back: if its `write_id` is the current one or in
`past`, its move is done, whoever moved the ref since. Publishing never moves a ref to a version
that it pointed to before: a late retry must not turn it back. `set` and `rollback` may.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from packhouse.errors import (
    ConflictError,
    IntegrityError,
    PackhouseError,
    TransientError,
    VersionNotFoundError,
)
from packhouse.store.layout import check_name, manifest_key, ref_key, split_version
from packhouse.store.manifest import Manifest, Tombstone, canonical_json, parse_slot
from packhouse.store.objects import ObjectStore, PreconditionFailedError
from packhouse.store.steps import (
    Create,
    ListAll,
    NewId,
    Now,
    Pause,
    Steps,
    Swap,
    read,
    read_checked,
    request,
    run,
)

__all__ = ["Move", "Ref", "list_refs", "load_ref", "rollback_ref", "scan_refs", "set_ref"]

MAX_PAST = 500
"""Moves kept in a ref (about 100 bytes each); far more than writers that can race one write."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a ref."""

    version: str
    seq: int
    """1 for the first move, then one more each."""
    write_id: str
    """Unique to the try that moved it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """Where a ref points, and where it pointed before."""

    name: str
    version: str
    seq: int
    write_id: str
    parent: str | None
    """Version before this move."""
    past: tuple[Move, ...]
    """Moves before this one, newest first."""

    def made(self, write_id: str) -> bool:
        """Whether this try moved the ref, now or at any time before."""
        return self.write_id == write_id or any(move.write_id == write_id for move in self.past)

    def held(self, version: str) -> bool:
        """Whether the ref points or once pointed to this version."""
        return self.version == version or any(move.version == version for move in self.past)

    def to_bytes(self) -> bytes:
        """Canonical JSON with a digest of itself."""
        document = {
            "version": self.version,
            "seq": self.seq,
            "write_id": self.write_id,
            "parent": self.parent,
            "past": [[move.version, move.seq, move.write_id] for move in self.past],
        }
        return canonical_json(document | {"sha256": _digest(document)})


def next_ref(name: str, version: str, write_id: str, current: Ref | None) -> Ref:
    """The ref after a move to `version`.

    Example:
        >>> first = next_ref("latest", "aaaa.g0", "w1", None)
        >>> second = next_ref("latest", "bbbb.g0", "w2", first)
        >>> second.seq, second.parent, second.held("aaaa.g0"), second.made("w1")
        (2, 'aaaa.g0', True, True)
    """
    if current is None:
        return Ref(name=name, version=version, seq=1, write_id=write_id, parent=None, past=())
    left = Move(current.version, current.seq, current.write_id)
    return Ref(
        name=name,
        version=version,
        seq=current.seq + 1,
        write_id=write_id,
        parent=current.version,
        past=(left, *current.past)[:MAX_PAST],
    )


def parse_ref(name: str, data: bytes, where: str) -> Ref:
    """Read a ref and check it against its own digest.

    Raises:
        IntegrityError: damaged; says how to point it to a version again.
    """
    try:
        document: dict[str, Any] = json.loads(data)
        stated = document.pop("sha256")
        past = tuple(Move(*move) for move in document["past"])
        ref = Ref(name=name, **(document | {"past": past}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(name, where, str(error) or type(error).__name__) from None
    if stated != _digest(document):
        raise _damaged(name, where, "its digest does not fit")
    return ref


def _damaged(name: str, where: str, problem: str) -> IntegrityError:
    dataset = where.partition("/refs/")[0]
    return IntegrityError(
        f"ref '{where}' is damaged ({problem}); point it to a version again: "
        f"packhouse ref set STORE/{dataset} {name} VERSION --force",
        key=where,
    )


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(document)).hexdigest()


def read_ref_steps(dataset: str, name: str) -> Steps[tuple[Ref, str] | None]:
    """The ref and its tag, or None."""
    key = ref_key(dataset, check_name("ref", name))
    return (yield from read_checked(key, lambda data, where: parse_ref(name, data, where)))


def _read_even_damaged_steps(dataset: str, name: str) -> Steps[tuple[Ref | None, str] | None]:
    """The ref, or None if it is damaged, and its tag.

    The last look decides, so that a ref mended meanwhile is taken as it is: nobody's move is lost.
    """
    try:
        return (yield from read_ref_steps(dataset, name))
    except IntegrityError:
        key = ref_key(dataset, name)
        blob = yield from read(key)
        if blob is None:
            return None
        with suppress(IntegrityError):
            return parse_ref(name, blob.data, key), blob.etag
        return None, blob.etag


def move_ref_steps(
    dataset: str,
    name: str,
    version: str,
    *,
    once: bool,
    expected: str | None = None,
    force: bool = False,
    may_move: Callable[[Ref | None], Steps[bool]] | None = None,
) -> Steps[Ref | None]:
    """Point a ref to a version that is committed.

    Args:
        dataset: name of the dataset.
        name: name of the ref.
        version: where to point.
        once: stop if the ref ever pointed there (publishing); else point there now.
        expected: move only from this version.
        force: replace a damaged ref too, which loses its past.
        may_move: asked before every try of the ref as it is then; it may hold the ref back.

    Returns:
        The ref that holds our move, or that shows it to be unnecessary; None if it was held back.

    Raises:
        ConflictError: the ref does not point to `expected`.
    """
    write_id: str = yield NewId()
    attempt, started = 0, None
    while True:
        look = _read_even_damaged_steps if force else read_ref_steps
        found = yield from look(dataset, name)
        current, tag = found or (None, "")
        if current is not None and _is_done(current, version, write_id, once, attempt):
            return current
        _check_expected(dataset, name, current, expected)
        if may_move is not None and not (yield from may_move(current)):
            return None
        moved = next_ref(name, version, write_id, current)
        try:
            yield _write(ref_key(dataset, name), moved, tag)
        except PreconditionFailedError as error:  # another moved it, or a lost success of ours
            cause: PackhouseError = ConflictError(f"ref '{name}' is too contended: {error}")
        except TransientError as error:
            cause = error
        else:
            return moved
        if started is None:
            started = yield Now()
        yield Pause(attempt, started, cause)
        attempt += 1


def _is_done(current: Ref, version: str, write_id: str, once: bool, attempt: int) -> bool:
    if current.made(write_id):
        return True
    if once:
        return current.held(version)
    return attempt == 0 and current.version == version


def _check_expected(dataset: str, name: str, current: Ref | None, expected: str | None) -> None:
    points = current.version if current else None
    if expected is not None and points != expected:
        raise ConflictError(
            f"ref '{name}' of '{dataset}' points to {points}, not to {expected}; look again and "
            "repeat",
            current=points,
        )


def _write(key: str, ref: Ref, tag: str) -> Create | Swap:
    return Swap(key, ref.to_bytes(), tag) if tag else Create(key, ref.to_bytes())


def read_slot_steps(dataset: str, version: str) -> Steps[Manifest | Tombstone | None]:
    """What lies in a commit slot."""
    found = yield from read_checked(manifest_key(dataset, version), parse_slot)
    return found[0] if found else None


def committed_steps(dataset: str, version: str) -> Steps[Manifest]:
    """The manifest of a version that must be committed.

    Raises:
        VersionNotFoundError: never committed, or collected.
    """
    slot = yield from read_slot_steps(dataset, version)
    if isinstance(slot, Manifest):
        return slot
    state = "does not exist" if slot is None else "was removed by garbage collection"
    raise VersionNotFoundError(f"version '{version}' of '{dataset}' {state}")


def set_ref_steps(
    dataset: str, name: str, version: str, *, expected: str | None = None, force: bool = False
) -> Steps[Ref]:
    """Point a ref to a committed version, and see that it still is committed afterwards.

    Collection of an unreferenced version takes its slot first and looks at the refs then; we move
    the ref first and look at the slot then. So at least one of the two sees the other.
    """
    split_version(version)
    yield from committed_steps(dataset, version)
    ref = yield from move_ref_steps(
        dataset, name, version, once=False, expected=expected, force=force
    )
    assert ref is not None, "nothing holds it back"
    yield from committed_steps(dataset, version)
    return ref


@contextmanager
def explaining(store: ObjectStore, dataset: str) -> Iterator[None]:
    """Say of a version that is not found what is missing - store, dataset or name - and a remedy.

    Lists, which a reader does not, but only once all is lost.
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
    check_name("dataset", dataset)
    found = run(store, read_ref_steps(dataset, name))
    return found[0] if found else None


def set_ref(
    store: ObjectStore,
    dataset: str,
    name: str,
    version: str,
    *,
    expected: str | None = None,
    force: bool = False,
) -> Ref:
    """Point `name` to `version`; with `expected`, only if it points there now.

    With `force`, a damaged ref is replaced as well, by compare-and-swap with the damaged bytes.
    Its past is lost with it: a publisher that was killed before the damage may move it once more.

    Raises:
        VersionNotFoundError: the version is not committed.
        ConflictError: the ref does not point to `expected`.
        IntegrityError: the ref is damaged, and `force` was not given.
    """
    check_name("dataset", dataset)
    with explaining(store, dataset):
        return run(store, set_ref_steps(dataset, name, version, expected=expected, force=force))


def rollback_ref(store: ObjectStore, dataset: str, name: str, steps_back: int = 1) -> Ref:
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
    target = current.past[steps_back - 1].version
    return set_ref(store, dataset, name, target, expected=current.version)


def list_refs_steps(dataset: str) -> Steps[list[Ref]]:
    """All refs of a dataset, by name."""
    refs = []
    for info in (yield from request(ListAll(f"{dataset}/refs/"))):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        found = yield from read_ref_steps(dataset, name)
        if found:
            refs.append(found[0])
    return refs


def list_refs(store: ObjectStore, dataset: str) -> list[Ref]:
    """All refs of a dataset, by name."""
    return run(store, list_refs_steps(check_name("dataset", dataset)))


def scan_refs(store: ObjectStore, dataset: str) -> tuple[list[Ref], list[IntegrityError]]:
    """All refs of a dataset that can be read, by name, and what is wrong with the others.

    For people who look; `list_refs` stops at a damaged ref.
    """
    check_name("dataset", dataset)
    refs, damaged = [], []
    for info in run(store, request(ListAll(f"{dataset}/refs/"))):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        try:
            found = run(store, read_ref_steps(dataset, name))
        except IntegrityError as error:
            damaged.append(error)
        else:
            refs += [found[0]] if found else []
    return refs, damaged
