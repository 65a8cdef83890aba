"""Publish a version: data first, manifest last, then the ref.

    tokenizer                                 create-only, once for all versions of the store
    data, records, quarantine, card, report   create-only, named by content
    manifest.json                             create-only: this is the commit
    refs/<name>.json                          compare-and-swap

Any number of publishers may do this at once, die anywhere and start again. The version id is known
before the first byte, so a retry lands on the same keys and finds its own work there; the same
version published twice is one version, and what somebody removed from it is put back. A commit slot
that garbage collection took makes the publisher start over in the next generation. Costs three
requests beside the uploads, and a listing where the version was there already.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packhouse.errors import (
    ConfigError,
    ConflictError,
    ContractError,
    StoreRefusedError,
    VersionNotFoundError,
)
from packhouse.store.draft import LocalFile, Uploads, card_file, draft_manifest, name_files
from packhouse.store.evolution import Drift, Gate, breaking_changes, measure_drift
from packhouse.store.guard import require_guarded
from packhouse.store.layout import (
    check_name,
    check_vid,
    file_key,
    manifest_key,
    split_version,
    version_folder,
    version_name,
)
from packhouse.store.manifest import (
    FACTS,
    PULLED_NAMES,
    FileEntry,
    Manifest,
    Tombstone,
    committed_steps,
    read_slot_steps,
)
from packhouse.store.objects import ObjectStore, PreconditionFailedError
from packhouse.store.protocol import All, Steps, ask, put_data, run
from packhouse.store.refs import Ref, move_ref_steps, read_ref_steps
from packhouse.store.tokenizers import keep_tokenizer
from packhouse.system.disks import temporary_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersion:
    """A committed version."""

    dataset: str
    version: str
    """`<vid>.g<N>`."""
    manifest: Manifest
    created: bool
    """False if it was there before this call looked."""
    ref: Ref | None = None
    """The ref after the call, if one was asked for and nothing held it back."""
    drift: Drift | None = None
    """Distance from the version that the ref pointed to before."""
    breaking: tuple[str, ...] = ()
    """Changes that would break readers of the version that another publisher moved the ref to."""
    held_back: tuple[str, ...] = ()
    """Why the ref was not moved, one sentence each."""


def publish_version(
    store: ObjectStore,
    dataset: str,
    vid: str,
    files: Sequence[LocalFile],
    facts: Mapping[str, object],
    ref: str | None = None,
    gate: Gate = Gate(),  # noqa: B008 - frozen
    tokenizer: Callable[[], bytes] | None = None,
) -> PublishedVersion:
    """Publish local files as a version, with a dataset card, and move a ref to it.

    Args:
        store: where to.
        dataset: name of the dataset.
        vid: address of all inputs; equal inputs must have equal `vid`.
        files: in the order of shards within each split and kind.
        facts: plain JSON under `content_id`, `counts`, `audit`, `lineage`, `configuration`,
            `engines`, `libraries`, and `provenance` (not hashed); `schema` is a pyarrow Schema, by
            default that of the first Parquet or Arrow data file.
        ref: name of the ref to move, unless it already pointed to this version at some time.
        gate: what the move must keep to: readers' schema, and limits of drift.
        tokenizer: returns the bytes whose sha256 is `lineage.tokenizer.fingerprint`; the store
            keeps them once for all versions, and `provenance.keeps_tokenizer` says so.

    Returns:
        The version; `created` is False if the same bytes were published before. If the drift from
        the ref's current version is over a limit, or another publisher moved the ref meanwhile to
        a version whose readers would break, `held_back` says so and the ref stays.

    Raises:
        ConfigError: no data file; a name, file or fact that no version holds.
        ContractError: the schema breaks readers of the ref's current version; nothing was written.
        ConflictError: the same `vid` holds other bytes: some step is not deterministic.
        IntegrityError: a local file is not what its sha256 says.
        StoreRefusedError: the store cannot guard a publication.
    """
    check_name("dataset", dataset)
    check_vid(vid)
    if not any(file.kind == "data" for file in files):
        raise ConfigError("nothing to publish: no data files")
    require_guarded(store)
    with temporary_folder("card") as folder:
        uploads = name_files(files)
        try:
            draft = draft_manifest(dataset, vid, uploads, facts)
        except (OSError, ValueError):  # a file whose schema is looked at is none
            for _, body in uploads:
                body.check()
            raise
        if not any(file.kind == "card" for file in files):
            uploads += (card_file(draft, folder),)
            draft = replace(draft, files=tuple(entry for entry, _ in uploads))
        keeper = _Gatekeeper(draft, gate)
        held_back = ref is not None and not run(store, keeper.first_look(ref))
        if tokenizer is not None and draft.tokenizer_fingerprint:
            kept = keep_tokenizer(store, draft.tokenizer_fingerprint, tokenizer)
            draft = replace(draft, provenance={**draft.provenance, "keeps_tokenizer": kept})
        steps = publish_steps(draft, uploads, None if held_back else ref, keeper.may_move)
        result = run(store, steps)
    return replace(result, drift=keeper.drift, breaking=keeper.broken, held_back=keeper.held_back)


class _Gatekeeper:
    """Decides if a ref may move to `draft`.

    Other publishers may move the ref between our look and our move, so each version that the ref is
    found at is compared. If one of them is refused after the commit, the ref stays.
    """

    def __init__(self, draft: Manifest, gate: Gate) -> None:
        self.draft = draft
        self.gate = gate
        self.drift: Drift | None = None
        self.broken: tuple[str, ...] = ()
        self._seen: str | None = None

    @property
    def held_back(self) -> tuple[str, ...]:
        """Why the ref may not move, one sentence each."""
        drifted = self.drift.beyond(self.gate) if self.drift else ()
        return (*(f"readers of {self._seen} would break: {what}" for what in self.broken), *drifted)

    def first_look(self, ref: str) -> Steps[bool]:
        """`may_move`, before anything is written.

        Raises:
            ContractError: readers of the ref's current version would break.
        """
        current, _ = yield from read_ref_steps(self.draft.dataset, ref)
        may = yield from self.may_move(current)
        if self.broken:
            raise ContractError(
                f"readers of '{self.draft.dataset}' at ref '{ref}' ({self._seen}) would break: "
                f"{'; '.join(self.broken)}. Publish to another ref, and move '{ref}' with "
                "`packhouse ref set` when its readers are ready",
                changes=list(self.broken),
            )
        return may

    def may_move(self, current: Ref | None) -> Steps[bool]:
        """Return True if the ref may move from where it is to the draft."""
        if current is None or current.version == self._seen:
            return not self.held_back
        self._seen, self.drift, self.broken = current.version, None, ()
        # A ref that held our version does not move; one whose version is gone has no readers.
        if any(split_version(move.version)[0] == self.draft.vid for move in current.moves):
            return True
        try:
            there = yield from committed_steps(
                self.draft.dataset, current.version, current.manifest_id
            )
        except VersionNotFoundError:
            return True
        self.drift = measure_drift(there, self.draft)
        if not self.gate.allow_breaking:
            self.broken = tuple(breaking_changes(there, self.draft))
        return not self.held_back


def publish_steps(
    draft: Manifest,
    uploads: Uploads,
    ref: str | None,
    may_move: Callable[[Ref | None], Steps[bool]] | None = None,
) -> Steps[PublishedVersion]:
    """The protocol of `publish_version`, from the first look at the slot to the moved ref."""
    manifest, generation = yield from find_slot_steps(draft.dataset, draft.vid)
    created = False
    if manifest is not None:
        try:
            _check_same(replace(draft, generation=generation), manifest)
        except ConflictError:
            for _, body in uploads:
                body.check()
            raise
        yield from _put_back_steps(manifest, uploads)
    while manifest is None:
        ours = replace(draft, generation=generation)
        yield All(tuple(put_data(_key(ours, entry), body) for entry, body in uploads))
        manifest, created = yield from _commit_steps(ours)
        if manifest is None:  # garbage collection took the slot while we uploaded
            manifest, generation = yield from find_slot_steps(draft.dataset, draft.vid)
    _check_same(replace(draft, generation=manifest.generation), manifest)
    moved = None
    if ref is not None:
        moved = yield from move_ref_steps(manifest, ref, once=True, may_move=may_move)
    return PublishedVersion(
        dataset=draft.dataset,
        version=manifest.version,
        manifest=manifest,
        created=created,
        ref=moved,
    )


def find_slot_steps(dataset: str, vid: str) -> Steps[tuple[Manifest | None, int]]:
    """The committed manifest of `vid`, or None; and its generation, or the first free one.

    Generations follow one another only over tombstones, so the first slot without one decides.
    """
    for generation in itertools.count():
        slot = yield from read_slot_steps(dataset, version_name(vid, generation))
        if not isinstance(slot, Tombstone):
            return slot, generation
    raise AssertionError("unreachable: generations do not end")


def _put_back_steps(there: Manifest, uploads: Uploads) -> Steps[None]:
    """Write files again that somebody removed from a committed version.

    Without this, publishing would report success for a version that nobody can read. Costs one
    listing if nothing is missing.
    """
    folder = version_folder(there.dataset, there.version)
    listed = yield from ask(ObjectStore.list, f"{folder}/")
    present, named = {info.key for info in listed}, {entry.key for entry in there.files}
    ours = {_key(there, entry): body for entry, body in uploads if entry.key in named}
    missing = tuple(put_data(key, body) for key, body in ours.items() if key not in present)
    if missing:
        yield All(missing)


def _key(manifest: Manifest, entry: FileEntry) -> str:
    return file_key(manifest.dataset, manifest.version, entry.key)


def _commit_steps(ours: Manifest) -> Steps[tuple[Manifest | None, bool]]:
    """Take the commit slot. Returns what lies there (None: a tombstone) and if we put it there.

    The slot is read back even after a success: it costs one request and shows a manifest that was
    damaged on its way before anybody reads it.
    """
    created = True
    try:
        key = manifest_key(ours.dataset, ours.version)
        yield from ask(ObjectStore.put_create, key, ours.to_bytes())
    except PreconditionFailedError:  # another publisher, a tombstone, or our own lost success
        created = False
    slot = yield from read_slot_steps(ours.dataset, ours.version)
    if slot is None:
        raise StoreRefusedError(
            f"the store accepted the manifest of '{ours.dataset}' {ours.version} and does not "
            "show it: it is not read-after-write consistent"
        )
    return (slot if isinstance(slot, Manifest) else None), created


def _check_same(ours: Manifest, theirs: Manifest) -> None:
    if ours.manifest_id == theirs.manifest_id or _without_pages(ours) == _without_pages(theirs):
        return
    same_rows = bool(ours.content_id) and ours.content_id == theirs.content_id
    parts = [
        name for name in ("files", "schema", *FACTS) if getattr(ours, name) != getattr(theirs, name)
    ]
    reason = (
        "The rows are equal (content_id), so only the writing of files differs: did a library "
        "change without its version being part of the version id?"
        if same_rows
        else "Some step is not deterministic, or an input is missing in the version id."
    )
    raise ConflictError(
        f"'{ours.dataset}' has version {theirs.version} with manifest {theirs.manifest_id[:12]}, "
        f"and ours is {ours.manifest_id[:12]}. {reason} Differs in: {', '.join(parts)}",
        ours=ours.manifest_id,
        theirs=theirs.manifest_id,
    )


def _without_pages(manifest: Manifest) -> str:
    """Identity of a version without card and report: another packhouse may write others."""
    files = tuple(entry for entry in manifest.files if entry.kind not in PULLED_NAMES)
    return replace(manifest, files=files).manifest_id
