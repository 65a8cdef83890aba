"""Publish a version: data first, manifest last, then the ref.

    tokenizer                                 create-only, shared by all versions of the store
    data, records, quarantine, card, report   create-only, named by content
    manifest.json                             create-only: this is the commit
    refs/<name>.json                          compare-and-swap

Any number of publishers may do this at the same time, be killed at any point and start again. The
version ID is known before the first byte is written, so a retry uses the same keys and finds its
earlier work. Publishing a version twice gives one version; files that somebody deleted from it are
restored. If garbage collection took the commit slot, the publisher starts again in the next
generation. Costs three requests in addition to the uploads, and one listing if the version exists.

A store keeps one copy of each tokenizer, so that a version can be read anywhere. The object has
exactly the bytes whose sha256 is the tokenizer's fingerprint, compressed:

    transformers=5.1.0
    tokenizers=0.22.1
    merges.txt 1671839
    <1,671,839 bytes>tokenizer_config.json 7305
    <7,305 bytes>...

So its name is its digest: `zcat <fingerprint>.gz | sha256sum` prints it, and the fingerprint in the
manifest protects the files. Qwen 2.5 takes 2.1 MB. Garbage collection never deletes these objects,
because a publisher of any dataset may be about to use one.
"""

import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import (
    ConfigError,
    ConflictError,
    ContractError,
    IntegrityError,
    StoreRefusedError,
    VersionNotFoundError,
)
from packhouse.recipe import PublishConfig
from packhouse.records.ledger import sum_by_reason
from packhouse.store import object_keys
from packhouse.store.conditional_writes import require_guarded
from packhouse.store.manifest import (
    FACTS,
    PULLED_NAMES,
    FileEntry,
    FileKind,
    Manifest,
    Tombstone,
    committed_steps,
    read_slot_steps,
    schema_to_json,
)
from packhouse.store.object_store import (
    MAX_GET_BYTES,
    FileBody,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
)
from packhouse.store.refs import MoveNote, Ref, move_ref_steps, note_move, read_ref_steps
from packhouse.store.schema_drift import RefChange
from packhouse.store.store_requests import All, Steps, ask, put_data, read_checked, run
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_markdown, markdown_code, markdown_table
from packhouse.system.fingerprint import canonical_json, digest
from packhouse.system.wording import by_name, counted, rows_and_records

_MAX_BYTES = 2**27
"""Maximum total size of a tokenizer's files. Gemma 3 has 38 MB."""
# A tokenizer has a handful of files; a false object must not fill a folder.
_MAX_FILES = 32
_HEADER = re.compile(rb"transformers=[^\n]{1,64}\ntokenizers=[^\n]{1,64}\n")
_ENTRY = re.compile(rb"([A-Za-z0-9_][A-Za-z0-9._-]{0,99}) (0|[1-9][0-9]{0,9})\n")


def keep_tokenizer(store: ObjectStore, fingerprint: str, read: Callable[[], bytes]) -> bool:
    """Write a tokenizer to the store unless it is there; return False if it is too large.

    An existing object is not compared, because compressed bytes depend on the version of zlib.
    Readers check its content.

    Args:
        store: Target store.
        fingerprint: Fingerprint of the tokenizer.
        read: Returns the bytes with that fingerprint as their sha256.
    """
    key = object_keys.tokenizer_key(fingerprint)
    # After the first version it is there: one small request, and its files are not read.
    try:
        run(store, ask(ObjectStore.head, key))
        return True
    except ObjectNotFoundError:
        document = read()
    assert hashlib.sha256(document).hexdigest() == fingerprint, "the caller compared it"
    # Qwen's 4.5 MB: 2.07 MB in 0.13 s at level 1, 1.78 MB in 1.6 s at level 9. Without a time, so
    # that two publishers write the same bytes.
    body = gzip.compress(document, compresslevel=1, mtime=0)
    if len(document) > _MAX_BYTES or len(body) > MAX_GET_BYTES:
        return False
    with suppress(PreconditionFailedError):  # another publisher, or our own lost success
        run(store, ask(ObjectStore.put_create, key, body))
    return True


def fetch_tokenizer(store: ObjectStore, fingerprint: str) -> dict[str, bytes] | None:
    """Return the files of a tokenizer by name, or None if the store does not have it.

    Raises:
        IntegrityError: The object does not match the fingerprint.
    """
    if not re.fullmatch("[0-9a-f]{64}", fingerprint):
        return None
    parse = partial(_parse, fingerprint=fingerprint)
    found = run(store, read_checked(object_keys.tokenizer_key(fingerprint), parse))
    return found[0] if found else None


def _parse(data: bytes, key: str, fingerprint: str) -> dict[str, bytes]:
    """Parse untrusted bytes into files, in memory."""
    unpacker = zlib.decompressobj(wbits=31)  # gzip only
    try:
        # One byte over the limit is enough to refuse it; the rest could be gigabytes.
        document = unpacker.decompress(data, _MAX_BYTES + 1)
    except zlib.error:
        document = b""
    if hashlib.sha256(document).hexdigest() != fingerprint:
        raise IntegrityError(
            f"the tokenizer at '{key}' is damaged: its digest differs from its name. Delete that "
            "object and publish the version again",
            key=key,
        )
    files: dict[str, bytes] = {}
    header = _HEADER.match(document)
    at = header.end() if header else len(document)
    while at < len(document) and len(files) < _MAX_FILES:
        entry = _ENTRY.match(document, at)
        if entry is None or entry[1].decode() in files:
            break
        start, size = entry.end(), int(entry[2])
        files[entry[1].decode()] = document[start : start + size]
        at = start + size
    if header is None or at != len(document):
        raise IntegrityError(
            f"'{key}' does not contain tokenizer files. Delete that object and publish the "
            "version again",
            key=key,
        )
    return files


_HASHING_THREADS = 4  # hashlib releases the GIL

# Each file's entry in the manifest, with the local file.
Uploads = tuple[tuple[FileEntry, FileBody], ...]


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A finished local file that becomes part of a version."""

    path: str | Path
    split: str
    rows: int = 0
    tokens: int = 0
    sha256: str | None = None
    """Expected sha256; checked when the file is read."""
    kind: FileKind = "data"
    """Also the folder of its key. A `card` is pulled as README.md, a `report` as report.html."""
    name: str | None = None
    """Path in that folder, for readers that expect a name; default: a name made from its
    content."""
    source: str | None = None
    """Source of all its rows, if the split has files by source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersion:
    """A committed version."""

    dataset: str
    version: str
    """`<vid>.g<N>`."""
    manifest: Manifest
    created: bool
    """False if the version already existed."""
    ref: Ref | None = None
    """The ref after the call; None if none was given or it was held back."""
    ref_before: str | None = None
    """Version that the ref pointed to before the call."""
    change: RefChange | None = None
    """Difference from the ref's version; None if there is no other version to compare with."""
    held_back: tuple[str, ...] = ()
    """Why the ref was not moved, one sentence each."""


def publish_version(
    store: ObjectStore,
    dataset: str,
    vid: str,
    files: Sequence[LocalFile],
    facts: Mapping[str, object],
    ref: str | None = None,
    limits: PublishConfig = PublishConfig(),  # noqa: B008 - frozen, so calls can share it
    tokenizer: Callable[[], bytes] | None = None,
    by: str | None = None,
) -> PublishedVersion:
    """Publish local files as a version, with a dataset card, and move a ref to it.

    Args:
        store: Target store.
        dataset: Name of the dataset.
        vid: Version ID, made from all inputs; equal inputs must have equal IDs.
        files: Files in the order of shards within each split and kind.
        facts: Plain JSON under `content_id`, `counts`, `audit`, `lineage`, `configuration`,
            `engines`, `libraries`, and `provenance` (not hashed). `schema` is a pyarrow Schema;
            default: the schema of the first Parquet or Arrow data file.
        ref: Ref to move. It does not move if it ever pointed to this version.
        limits: Settings that limit when the ref moves: breaking schema changes and drift.
        tokenizer: Returns the bytes whose sha256 is `lineage.tokenizer.fingerprint`. The store
            keeps one copy for all versions, which `provenance.keeps_tokenizer` records.
        by: The run that moves the ref; default: the user of this process.

    Returns:
        The version. `created` is False if the same bytes were already published. If the drift from
        the ref's current version exceeds a limit, or another publisher meanwhile moved the ref to a
        version whose readers would break, the ref stays and `held_back` has the reasons.

    Raises:
        ConfigError: There is no data file, or a name, file or fact is not valid.
        ContractError: The schema breaks readers of the ref's current version; nothing was written.
        ConflictError: `vid` was published with other bytes, so some step is not deterministic.
        IntegrityError: A local file does not match its sha256.
        StoreRefusedError: The store does not support safe concurrent publishing.
    """
    object_keys.check_name("dataset", dataset)
    object_keys.check_vid(vid)
    if not any(file.kind == "data" for file in files):
        raise ConfigError("nothing to publish: no data files")
    require_guarded(store)
    with temporary_folder("card") as folder:
        uploads = name_files(files)
        try:
            draft = draft_manifest(dataset, vid, uploads, facts)
        except (OSError, ValueError):  # a file cannot be read; check() names it if it was changed
            for _, body in uploads:
                body.check()
            raise
        if not any(file.kind == "card" for file in files):
            card = folder / "README.md"
            card.write_text(dataset_card(draft), encoding="utf-8")
            uploads += name_files([LocalFile(card, "all", kind="card")])
            draft = replace(draft, files=tuple(entry for entry, _ in uploads))
        # Before the upload, so that a version that is refused leaves nothing in the store.
        keeper = _Gatekeeper(draft, limits)
        held_back = ref is not None and not run(store, keeper.first_look(ref))
        if tokenizer is not None and draft.tokenizer_fingerprint:
            kept = keep_tokenizer(store, draft.tokenizer_fingerprint, tokenizer)
            draft = replace(draft, provenance={**draft.provenance, "keeps_tokenizer": kept})
        note = note_move("published", by)
        steps = publish_steps(draft, uploads, None if held_back else ref, keeper.may_move, note)
        result = run(store, steps)
    return replace(
        result, ref_before=keeper.ref_before, change=keeper.change, held_back=keeper.held_back
    )


@dataclass(slots=True)
class _Gatekeeper:
    """Decides if a ref may move to `draft`.

    Other publishers may move the ref between our check and our move, so each version that the ref
    is found at is compared. If a comparison fails after the commit, the ref stays.
    """

    draft: Manifest
    limits: PublishConfig
    change: RefChange | None = None
    ref_before: str | None = None
    _seen: str | None = None

    @property
    def held_back(self) -> tuple[str, ...]:
        """Why the ref may not move, one sentence each."""
        return self.change.reasons(self.limits) if self.change else ()

    def first_look(self, ref: str) -> Steps[bool]:
        """Call `may_move` before anything is written.

        Raises:
            ContractError: Readers of the ref's current version would break.
        """
        current, _ = yield from read_ref_steps(self.draft.dataset, ref)
        self.ref_before = current.version if current else None
        may = yield from self.may_move(current)
        broken = self.change.breaking if self.change else ()
        if broken and not self.limits.allow_breaking_schema:
            raise ContractError(
                f"readers of '{self.draft.dataset}' at ref '{ref}' ({self._seen}) would break: "
                f"{'; '.join(broken)}. Publish to another ref, then move '{ref}' with "
                "`packhouse ref set` when its readers are ready",
                changes=list(broken),
            )
        return may

    def may_move(self, current: Ref | None) -> Steps[bool]:
        """Return True if the ref may move from its current version to the draft."""
        if current is None or current.version == self._seen:
            return not self.held_back
        self._seen, self.change = current.version, None
        # A ref that ever pointed to our version does not move, so there is nothing to compare. If
        # its current version was deleted, there are no readers to break.
        if self.draft.vid in (object_keys.split_version(m.version)[0] for m in current.moves):
            return True
        there = committed_steps(self.draft.dataset, current.version, current.manifest_id)
        try:
            self.change = RefChange.of((yield from there), self.draft)
        except VersionNotFoundError:
            return True
        return not self.held_back


def publish_steps(
    draft: Manifest,
    uploads: Uploads,
    ref: str | None,
    may_move: Callable[[Ref | None], Steps[bool]] | None = None,
    note: MoveNote = MoveNote(),  # noqa: B008 - frozen
) -> Steps[PublishedVersion]:
    """Run the protocol of `publish_version`, from the first read of the slot to the moved ref."""
    manifest, generation = yield from find_slot_steps(draft.dataset, draft.vid)
    created = False
    if manifest is not None:
        try:
            _check_same(replace(draft, generation=generation), manifest)
        # A file that was changed after its step would look like a step that is not deterministic.
        except ConflictError:
            for _, body in uploads:
                body.check()
            raise
        # Restore files that somebody deleted from the version. Otherwise we would report success
        # for a version that nobody can read. Costs one listing if nothing is missing.
        folder = object_keys.version_folder(manifest.dataset, manifest.version)
        listed = yield from ask(ObjectStore.list, f"{folder}/")
        present, named = {info.key for info in listed}, {entry.key for entry in manifest.files}
        missing = tuple(
            put_data(_key(manifest, entry), body)
            for entry, body in uploads
            if entry.key in named and _key(manifest, entry) not in present
        )
        if missing:
            yield All(missing)
    while manifest is None:
        ours = replace(draft, generation=generation)
        # Data comes first: readers find it through the manifest, which is the commit.
        yield All(tuple(put_data(_key(ours, entry), body) for entry, body in uploads))
        manifest, created = yield from _commit_steps(ours)
        if manifest is None:  # garbage collection took the slot during the upload
            manifest, generation = yield from find_slot_steps(draft.dataset, draft.vid)
    _check_same(replace(draft, generation=manifest.generation), manifest)
    moved = None
    if ref is not None:
        moved = yield from move_ref_steps(manifest, ref, once=True, note=note, may_move=may_move)
    name, version = draft.dataset, manifest.version
    return PublishedVersion(
        dataset=name, version=version, manifest=manifest, created=created, ref=moved
    )


def find_slot_steps(dataset: str, vid: str) -> Steps[tuple[Manifest | None, int]]:
    """Return the committed manifest of `vid` (or None) and its generation, or the first free one.

    A new generation starts only after a tombstone, so the first slot without a tombstone decides.
    """
    for generation in itertools.count():
        slot = yield from read_slot_steps(dataset, object_keys.version_name(vid, generation))
        if not isinstance(slot, Tombstone):
            return slot, generation
    raise AssertionError("unreachable: generations do not end")


def _key(manifest: Manifest, entry: FileEntry) -> str:
    return object_keys.file_key(manifest.dataset, manifest.version, entry.key)


def _commit_steps(ours: Manifest) -> Steps[tuple[Manifest | None, bool]]:
    """Take the commit slot. Return its manifest (None for a tombstone), and True if we wrote it.

    The slot is read back even after a success: for one request, this detects a manifest that was
    damaged in transit before anybody reads it.
    """
    key, created = object_keys.manifest_key(ours.dataset, ours.version), True
    try:
        yield from ask(ObjectStore.put_create, key, ours.to_bytes())
    except PreconditionFailedError:  # another publisher, a tombstone, or our own lost success
        created = False
    slot = yield from read_slot_steps(ours.dataset, ours.version)
    if slot is None:
        raise StoreRefusedError(
            f"the store accepted the manifest of '{ours.dataset}' {ours.version}, but does not "
            "return it, so it is not read-after-write consistent. Use another store"
        )
    return (slot if isinstance(slot, Manifest) else None), created


def _check_same(ours: Manifest, theirs: Manifest) -> None:
    if ours.manifest_id == theirs.manifest_id or _without_pages(ours) == _without_pages(theirs):
        return
    same_rows = bool(ours.content_id) and ours.content_id == theirs.content_id
    names = ("files", "schema", *FACTS)
    parts = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    reason = (
        "The packs are equal (content_id), so their encoding or another file differs, such as the "
        "quarantine. Code or a library may have changed without its version in the version ID."
        if same_rows
        else "A step is not deterministic, or an input is not part of the version ID."
    )
    raise ConflictError(
        f"version {theirs.version} of '{ours.dataset}' was published with manifest "
        f"{theirs.manifest_id[:12]}, but this run produced {ours.manifest_id[:12]}. {reason} "
        f"Differences: {', '.join(parts)}",
        ours=ours.manifest_id,
        theirs=theirs.manifest_id,
    )


def _without_pages(manifest: Manifest) -> str:
    """Return the ID without card and report, which other releases may write differently."""
    files = tuple(entry for entry in manifest.files if entry.kind not in PULLED_NAMES)
    return replace(manifest, files=files).manifest_id


def name_files(files: Sequence[LocalFile]) -> Uploads:
    """Give each file a key with its digest, e.g. `data/train-00000-of-00002-0a1b2c3d4e5f.parquet`.

    Files by source are named `data/eval-chats-00000-of-00002-...`, numbered across all sources of
    the split. A file with a given sha256 is not read here; the store checks it during the upload.

    Raises:
        ConfigError: A file does not exist, or the name of a split is not allowed.
    """
    totals = Counter((file.kind, file.split) for file in files)
    numbers: Counter[tuple[str, str]] = Counter()
    with ThreadPoolExecutor(_HASHING_THREADS, "packhouse-hash") as pool:
        bodies = list(pool.map(lambda file: file_body(file.path, file.sha256), files))
    uploads = []
    for file, body in zip(files, bodies, strict=True):
        group = (file.kind, file.split)
        # 48 bits tell the files of a version apart; readers compare the whole digest.
        short = body.sha256[:12]
        if file.kind in PULLED_NAMES:
            name, _, ending = PULLED_NAMES[file.kind].partition(".")
            name = f"{name}-{short}.{ending}"
        elif file.name is not None:
            name = file.name
        else:
            of = f"{file.split}-{file.source}" if file.source else file.split
            shard = f"{of}-{numbers[group]:05d}-of-{totals[group]:05d}-{short}"
            name = shard + body.path.suffix
        entry = FileEntry(
            key=f"{file.kind}/{name}",
            kind=file.kind,
            split=file.split,
            size=body.size,
            sha256=body.sha256,
            rows=file.rows,
            tokens=file.tokens,
            source=file.source,
        )
        numbers[group] += 1
        uploads.append((entry, body))
    return tuple(uploads)


def draft_manifest(
    dataset: str, vid: str, uploads: Uploads, facts: Mapping[str, object]
) -> Manifest:
    """Return the manifest of generation 0.

    Raises:
        ConfigError: A fact contains a credential.
    """
    plain = {**facts}
    schema: Any = plain.pop("schema", None)
    plain = json.loads(canonical_json(plain))  # as a reader will see it: lists, string keys
    _refuse_secrets(plain)
    for path in (body.path for entry, body in uploads if entry.kind == "data"):
        if schema is None and path.suffix == ".parquet":
            schema = pq.read_schema(path)
        elif schema is None and path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                schema = reader.schema
    described = schema_to_json(schema) if schema is not None else {}
    return Manifest(
        dataset=dataset,
        vid=vid,
        generation=0,
        files=tuple(entry for entry, _ in uploads),
        schema=described,
        schema_fingerprint=digest(described),
        **plain,
    )


# A password in a URI, a signed URL of S3, an access key of AWS, a token of the Hub.
_SECRET = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|X-Amz-Signature=|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{30,}"
)


def _refuse_secrets(value: object, where: str = "the manifest") -> None:
    """Refuse values that contain a credential.

    Raises:
        ConfigError: A string has a password in a URI, a signed URL, or a key of a known form.
    """
    if isinstance(value, str) and _SECRET.search(value):
        raise ConfigError(f"{where} contains a credential. Move it to the environment")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_secrets(key, where)
            _refuse_secrets(item, f"{where}, key '{key}'")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_secrets(item, where)


def dataset_card(manifest: Manifest) -> str:
    """Return the dataset card as Markdown.

    Example:
        >>> manifest = Manifest(dataset="tiny", vid="abcd", generation=0, files=())
        >>> print(dataset_card(manifest).splitlines()[6])
        # tiny
    """
    splits, ledger = manifest.splits(), manifest.facts.counts.ledger
    # The header makes `datasets.load_dataset` read `data/` only, not records and quarantine.
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {split}", f"    path: data/{split}-*"]
    lines += ["---", "", f"# {for_markdown(manifest.dataset)}", ""]
    content = markdown_code(manifest.content_id[:16])
    # The digest of the manifest cannot be here, because it covers this card.
    lines += [
        f"Packed token data, written by packhouse. Content ID: {content}. `packhouse show "
        "STORE/DATASET` prints its address, with a digest that only this version matches.",
        "",
    ]
    sizes = []
    for split in splits:
        files = [e for e in manifest.files if e.kind == "data" and e.split == split]
        sums = (sum(getattr(e, name) for e in files) for name in ("rows", "tokens", "size"))
        sizes.append((split, *sums))
    lines += [*markdown_table(("split", "packs", "tokens", "bytes"), sizes), ""]
    if ledger:
        found = numbers_of(manifest)
        lines += [f"- {for_markdown(name)}: {for_markdown(said)}" for name, said in found]
        for split, side in manifest.facts.counts.splits().items():
            if bars := _bars(side.length_histogram):
                lines += ["", f"Record lengths in {for_markdown(split)}:", "", *bars]
        lines.append("")
    form, pack = manifest.facts.configuration.format, manifest.facts.configuration.pack
    found_settings = {
        "format.template": form.template,
        "format.train_on": form.train_on,
        "pack.seq_len": pack.seq_len,
        "pack.strategy": pack.strategy,
    }
    settings = [f"- `{k}`: {for_markdown(str(v))}" for k, v in found_settings.items() if v]
    if tokenizer := manifest.tokenizer_fingerprint:
        settings.append(f"- tokenizer: {markdown_code(tokenizer[:16])}")
    settings += [
        f"- column {markdown_code(column.name)}: {for_markdown(column.type)}"
        for column in manifest.facts.schema.fields
    ]
    lines += [*settings, ""] if settings else []
    if rows := sorted(manifest.rows_by_file().items()):
        lines += [*markdown_table(("source", "rows"), rows), ""]
    for each in manifest.filters():
        cut = f"{each.filtered:,} of {counted(each.rows, 'row')} of {for_markdown(each.source)}"
        lines += [f"`where` dropped {cut}, which do not match {markdown_code(each.where)}.", ""]
    quality = manifest.facts.audit.quality
    counters = sorted(quality.dataset.items()) if quality else ()
    if rows := [(name, number) for name, number in counters if name != "rows" and number]:
        lines += [*markdown_table(("quality", "rows"), rows), ""]
    return "\n".join([*lines, _usage(manifest)])


def _usage(manifest: Manifest) -> str:
    """Return how to load the version, and what its rows contain."""
    split = (*manifest.splits(), "train")[0]
    ends = (
        "Labels are not shifted. `seq_lengths` gives the lengths of the sequences in each row. "
        "With most collators, these sequences attend to each other. To prevent this, call "
        "packhouse's `enable_packing(model)`, and use `PackedCollator` or TRL's "
        "`SFTConfig(padding_free=True, max_length=None)`."
    )
    if manifest.preferences is None:
        load = f'from datasets import load_dataset\nrows = load_dataset("FOLDER", split="{split}")'
        return f"```python\n{load}\n```\n\n{ends}\n"
    of = {
        "pairs": "Each record is a pair, counted once. Of its two sequences with the same "
        "`record_id`, the first has the chosen answer and the second the rejected one.",
        "kto": "Each row is an answer; `label` is 1 if it is good and 0 if it is bad.",
    }[manifest.preferences]
    load = (
        'from packhouse import load_preferences\nrows = load_preferences("FOLDER", '
        f'split="{split}")  # the columns that TRL expects'
    )
    return (
        f"```python\n{load}\n```\n\n{of} Bad answers have labels too, so do not use the rows for "
        f"supervised training. {ends}\n"
    )


def _bars(histogram: Sequence[Sequence[int]]) -> list[str]:
    """Return a histogram of record lengths as text, with one bar per power of two.

    Example:
        >>> _bars([(20, 2), (24, 2), (40, 1)])[1:-1]
        ['    17 to     32 tokens  ######################## 4', '    33 to     64 tokens  ###### 1']
    """
    sums: Counter[int] = Counter()
    for length, records in histogram:
        sums[1 << max(length - 1, 0).bit_length()] += records
    if not sums:
        return []
    most = max(sums.values())
    rows = [
        f"{top // 2 + 1:>6,} to {top:>6,} tokens  {'#' * -(-24 * records // most)} {records:,}"
        for top, records in sorted(sums.items())
    ]
    return ["```text", *rows, "```"]


def numbers_of(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the numbers of rows and splits in a manifest, as names and values."""
    ledger = manifest.facts.counts.ledger
    lines = [("rows read", f"{ledger[0].rows_in:,}" if ledger else "0")]
    bad, dropped = (sum_by_reason(ledger, kind) for kind in ("quarantined", "dropped"))
    rows = rows_and_records(sum(line.num_bad_rows for line in ledger), bad.total())
    lines.append(("quarantined", f"{rows}: {by_name(bad)}" if bad else "0"))
    lines.append(("dropped", f"{dropped.total():,} ({by_name(dropped)})" if dropped else "0"))
    for name, side in manifest.facts.counts.splits().items():
        share = side.num_trained / max(side.num_tokens, 1)
        said = (
            f"{counted(side.num_packs, 'pack')} of {side.seq_len:,} tokens, {side.fill:.2%} full; "
            f"{counted(side.num_sequences, 'record')}, {counted(side.num_tokens, 'token')}, "
            f"{share:.1%} trained"
        )
        lines.append((name, said))
    return lines
