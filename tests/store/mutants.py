"""Protocol mutants: each changes one line of production code, a mistake that other tools made.

`mutated` compiles the changed function in its own module and replaces it wherever the store's
modules imported it. A mutant whose old line is no longer in the production code fails, so the list
stays up to date.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from packhouse.addons import gc
from packhouse.store import commit, refs, store_requests


@dataclass(frozen=True)
class Mutant:
    name: str
    module: ModuleType
    function: str
    old: str
    new: str
    seed: int = 0
    """Seed of the first schedule that found it, to avoid searching again."""


UPLOADS = "yield All(tuple(put_data(_key(ours, entry), body) for entry, body in uploads))"

# fmt: off
MUTANTS = [
    Mutant("collection by age alone, without a tombstone", gc, "fence_steps",
        "tombstone = Tombstone(", "return True\n    tombstone = Tombstone("),
    Mutant("collection takes any full commit slot for its tombstone", gc, "fence_steps",
        "return isinstance(slot, Tombstone)", "return True"),
    Mutant(
        "collection deletes before the tombstone",
        gc,
        "collect_steps",
        'if garbage.reason == "abandoned":',
        "for info in objects:\n        yield from ask(ObjectStore.delete, info.key)\n"
        '    if garbage.reason == "abandoned":',
    ),
    Mutant("collection takes all files next to a manifest for strays", gc, "_judge",
        "if info.key not in named", "if True"),
    Mutant("collection leaves what comes late after a tombstone", gc, "_judge",
        'return "collected", others', 'return "collected", []', seed=2898),
    Mutant("manifest before data", commit, "publish_steps",
        f"{UPLOADS}\n        manifest, created = yield from _commit_steps(ours)",
        f"manifest, created = yield from _commit_steps(ours)\n        {UPLOADS}"),
    Mutant("a refused commit is taken for our own", commit, "_commit_steps",
        "slot = yield from read_slot_steps(ours.dataset, ours.version)", "slot = ours"),
    Mutant("tombstones are ignored", commit, "find_slot_steps",
        "if not isinstance(slot, Tombstone):\n            return slot, generation",
        "return (slot if isinstance(slot, Manifest) else None), generation", seed=433),
    Mutant(
        "other bytes at the same version ID do not raise an alarm",
        commit,
        "_check_same",
        "if ours.manifest_id == theirs.manifest_id or "
        "_without_pages(ours) == _without_pages(theirs):",
        "if True:",
    ),
    Mutant("collection leaves strays next to a manifest", gc, "_judge",
        'return "stray", [info for info in old if info.key not in named]', 'return "stray", []'),
    Mutant("the ref moves before the commit", commit, "publish_steps", UPLOADS,
        f"yield from move_ref_steps(ours, 'latest', once=True)\n        {UPLOADS}"),
    Mutant("a publisher does not look at the past of the ref", refs, "_is_done",
        "return current.has_pointed_to(target.version)",
        "return current.version == target.version"),
    Mutant("a move does not know itself again", refs, "_is_done",
        "if current.was_moved_by(write_id):", "if False:", seed=1357),
    Mutant("a lost answer counts as done", refs, "move_ref_steps", "cause = error", "return moved"),
    Mutant("a refused swap counts as done", refs, "move_ref_steps",
        "cause: PackhouseError = ConflictError(f\"too many writers move ref '{name}': {error}\")",
        "return moved"),
    Mutant("the ref forgets its past", refs, "next_ref",
        "past=current.moves[:MAX_PAST] if current else ()", "past=()"),
    Mutant("the count of moves stands still", refs, "next_ref",
        "seq=current.seq + 1 if current else 1", "seq=current.seq if current else 1"),
    Mutant("a file that was there and vanishes is an error", store_requests, "put_data",
        "except ObjectNotFoundError:\n            continue", "finally:\n            pass",
        seed=9041),
    Mutant(
        "a lost answer of a write counts as done",
        store_requests,
        "ask",
        "started = yield Pause(error, attempt, started)",
        "if method is ObjectStore.put_create:\n                return ''\n"
        "            started = yield Pause(error, attempt, started)",
    ),
]
# fmt: on


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    original = getattr(mutant.module, mutant.function)
    source = inspect.getsource(original)
    assert source.count(mutant.old) >= 1, f"'{mutant.name}': the production text has changed"
    namespace = vars(mutant.module)
    changed = {}
    code = compile(source.replace(mutant.old, mutant.new), mutant.name, "exec")
    exec(code, namespace, changed)
    places = [
        module
        for name, module in sys.modules.items()
        if name.startswith("packhouse.") and getattr(module, mutant.function, None) is original
    ]
    for module in places:
        setattr(module, mutant.function, changed[mutant.function])
    try:
        yield
    finally:
        for module in places:
            setattr(module, mutant.function, original)
