"""Read versions: resolve a name, fetch files with their digests checked, verify everything.

A reader asks for the ref, the manifest and the files, each by key; it never lists, so it cannot
see a version that is still being written. Every file is hashed as it arrives; a file with another
digest is fetched once more and then reported, never used.
"""

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from packhouse.errors import (
    ConfigError,
    ContractError,
    IntegrityError,
    TransientError,
    VersionNotFoundError,
)
from packhouse.runtime.confine import run_confined
from packhouse.runtime.disks import temporary_folder, write_whole
from packhouse.runtime.fingerprint import file_sha256
from packhouse.store.accounts import Tally, manifest_problems, tally_file, tally_problems
from packhouse.store.contracts import check_data_file
from packhouse.store.layout import check_name, file_key, is_version, tokenizer_key
from packhouse.store.manifest import TABLES, FileEntry, Manifest, parse_slot
from packhouse.store.objects import ObjectNotFoundError, ObjectStore, open_store
from packhouse.store.protocol import MAX_READS, Retry, Steps, in_parallel, run
from packhouse.store.publish import find_slot_steps
from packhouse.store.refs import (
    changed_manifest,
    committed_steps,
    explaining,
    read_ref_steps,
    scan_refs,
)
from packhouse.store.tokenizers import fetch_tokenizer

__all__ = [
    "OpenVersion",
    "VerifyReport",
    "open_version",
    "pull_version",
    "scan_versions",
    "verify_version",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVersion:
    """A committed version and the store it lies in."""

    store: ObjectStore
    dataset: str
    version: str
    manifest: Manifest

    def files(self, kind: str = "data", split: str | None = None) -> list[FileEntry]:
        """Entries of one kind, in published order; all splits, or one."""
        wanted = [e for e in self.manifest.files if e.kind == kind]
        return [e for e in wanted if split is None or e.split == split]

    def key(self, entry: FileEntry) -> str:
        """Key of a file under the store's root."""
        return file_key(self.dataset, self.version, entry.key)

    def uri(self, entry: FileEntry) -> str:
        """Address of a file, for readers with their own client."""
        return f"{self.store.uri}/{self.key(entry)}"

    def fetch(self, entry: FileEntry, path: str | Path) -> Path:
        """Download one file, resume what is there, and check its digest.

        Raises:
            IntegrityError: the store's bytes are not the published ones.
        """
        path = Path(path)
        if _holds(path, entry):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{entry.sha256[:12]}.partial")
        try:
            with _alone(partial):
                if not _holds(path, entry):
                    _fetch_alone(self, entry, path, partial)
                return path
        except OSError as error:
            raise ConfigError(
                f"cannot write '{partial}': {error.strerror or error}; make room there, or give "
                "another folder. What has come is kept, and the next try goes on there"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What `verify_version` found."""

    version: str
    num_files: int
    num_bytes: int
    num_rows: int
    num_tokens: int
    problems: tuple[str, ...]
    """One sentence each, with the file's name; empty if all is well."""

    @property
    def is_intact(self) -> bool:
        """True if nothing was found."""
        return not self.problems


def open_version(
    root: str | ObjectStore, dataset: str, ref_or_version: str = "latest"
) -> OpenVersion:
    """Resolve a ref, a version (`<vid>.g<N>`) or a bare version id to a committed version.

    Raises:
        VersionNotFoundError: none of these is there.
        IntegrityError: the ref or manifest is damaged.
    """
    store = open_store(root) if isinstance(root, str) else root
    check_name("dataset", dataset)
    with explaining(store, dataset):
        manifest = run(store, resolve_steps(dataset, ref_or_version))
    return OpenVersion(store=store, dataset=dataset, version=manifest.version, manifest=manifest)


def resolve_steps(dataset: str, name: str) -> Steps[Manifest]:
    """Name -> manifest; a ref wins over a version id of the same letters."""
    if is_version(name):
        return (yield from committed_steps(dataset, name))
    found = yield from read_ref_steps(dataset, check_name("ref", name))
    if found is not None:
        return (yield from committed_steps(dataset, found[0].version, found[0].manifest_id))
    if name.isalnum():
        manifest, _ = yield from find_slot_steps(dataset, name)
        if manifest is not None:
            return manifest
    raise VersionNotFoundError(f"'{dataset}' has no ref or version '{name}'")


def scan_versions(store: ObjectStore, dataset: str) -> tuple[list[Manifest], list[IntegrityError]]:
    """Every committed version that can be read, by name, and what is wrong with the others."""
    check_name("dataset", dataset)
    versions, damaged = [], []
    for version in store.list_folders(f"{dataset}/v/"):
        if is_version(version):
            try:
                versions.append(run(store, committed_steps(dataset, version)))
            except IntegrityError as error:
                damaged.append(error)
            except VersionNotFoundError:
                continue  # not committed (yet), or collected
    return versions, damaged


def pull_version(
    opened: OpenVersion, dest: str | Path, *, num_threads: int = 8, kinds: Sequence[str] = ()
) -> Path:
    """Copy a version to a local folder, in parallel; resumes and re-checks what is there.

    `manifest.json` is written last, so a folder that has one is whole. The folder can be given to
    `datasets.load_dataset`.

    Args:
        opened: what to pull.
        dest: folder, made if need be.
        num_threads: files in flight.
        kinds: only these kinds of files; all by default.

    Raises:
        ConfigError: the folder holds another version.
        IntegrityError: the store's bytes are not the published ones.
    """
    dest = Path(dest)
    try:
        dest.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make folder '{dest}' to pull to: {error.strerror}; give another folder"
        ) from None
    marker = dest / "manifest.json"
    if marker.exists():
        _check_same_version(marker, opened)
    wanted = [e for e in opened.manifest.files if not kinds or e.kind in kinds]
    in_parallel(lambda e: opened.fetch(e, dest / e.path), wanted, num_threads)
    if not kinds:
        _pull_tokenizer(opened, dest / "tokenizer")
    staged = dest / ".manifest.json.partial"
    with _alone(staged):
        staged.write_bytes(opened.manifest.to_bytes())
        os.replace(staged, marker)
    return dest


def _pull_tokenizer(opened: OpenVersion, folder: Path) -> None:
    """Write the tokenizer's files, for `AutoTokenizer.from_pretrained`, if the store keeps it."""
    for name, content in (fetch_tokenizer(opened.store, _fingerprint(opened)) or {}).items():
        folder.mkdir(exist_ok=True)
        write_whole(folder / name, content)


def _fingerprint(opened: OpenVersion) -> str:
    return str(opened.manifest.lineage.get("tokenizer", {}).get("fingerprint", ""))


def _tokenizer_problems(opened: OpenVersion) -> list[str]:
    try:
        found = fetch_tokenizer(opened.store, _fingerprint(opened))
    except IntegrityError as error:
        return [str(error)]
    if found is None and opened.manifest.provenance.get("keeps_tokenizer") is True:
        key = tokenizer_key(_fingerprint(opened))
        return [f"the tokenizer '{key}' is gone; publish the version again"]
    return []


def verify_version(opened: OpenVersion, *, num_threads: int = 4) -> VerifyReport:
    """Check all bytes, schemas, counts and value contracts of a version, from its store alone.

    The manifest is compared with itself and with its files (`packhouse.store.accounts`), and its id
    with what every ref recorded that points or once pointed to the version. Each file is fetched to
    a temporary folder, so the disk needs room for `num_threads` files.
    """
    manifest = opened.manifest
    refs, _ = scan_refs(opened.store, opened.dataset)
    moves = [move for ref in refs for move in ref.moves]
    recorded = {move.manifest_id for move in moves if move.version == opened.version}
    problems = manifest_problems(manifest)
    for manifest_id in sorted(recorded - {"", manifest.manifest_id}):
        problems.append(str(changed_manifest(manifest, manifest_id)))
    problems += _tokenizer_problems(opened)
    rules = replace(manifest, files=())  # all that a file is checked with; files may be 200,000
    with temporary_folder("verify") as folder:
        found = in_parallel(
            lambda e: _fetch_and_check(opened, e, rules, folder), manifest.files, num_threads
        )
    tally: Tally = Counter()
    for _, of_file in found:
        tally.update(of_file)
    if not any(of_file for of_file, _ in found):
        problems += tally_problems(manifest, tally)
    data = opened.files()
    return VerifyReport(
        version=opened.version,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        num_rows=sum(entry.rows for entry in data),
        num_tokens=sum(entry.tokens for entry in data),
        problems=(*problems, *(problem for of_file, _ in found for problem in of_file)),
    )


def _fetch_and_check(
    opened: OpenVersion, entry: FileEntry, rules: Manifest, folder: Path
) -> tuple[list[str], Tally]:
    path = folder / entry.key
    try:
        opened.fetch(entry, path)
        if entry.kind not in TABLES:
            return [], Counter()
        tally = run_confined(  # some kilobytes of a file may stand for gigabytes
            partial(_check_file, path, entry, rules),
            what=f"file '{entry.key}'",
            blames=IntegrityError,
            num_bytes=entry.size,
        )
        return [], Counter({(place, outcome): number for place, outcome, number in tally})
    except (IntegrityError, ContractError, VersionNotFoundError) as error:
        return [f"{entry.key}: {error}"], Counter()
    finally:
        path.unlink(missing_ok=True)


def _check_file(path: Path, entry: FileEntry, rules: Manifest) -> list[tuple[str, str, int]]:
    """In a child: check a file's rows; return its tally, as JSON can say it."""
    check_data_file(path, entry, rules)
    return [(*name, number) for name, number in tally_file(path, entry).items()]


def _check_same_version(marker: Path, opened: OpenVersion) -> None:
    try:
        there = parse_slot(marker.read_bytes(), str(marker))
    except IntegrityError:
        raise IntegrityError(
            f"'{marker}' is damaged; remove it and pull again: the files beside it are checked, "
            "and fetched where they differ"
        ) from None
    if isinstance(there, Manifest) and there.manifest_id == opened.manifest.manifest_id:
        return
    raise ConfigError(
        f"'{marker.parent}' holds another version already; pull {opened.version} to a new folder"
    )


def _fetch_alone(opened: OpenVersion, entry: FileEntry, path: Path, partial: Path) -> None:
    for _ in range(MAX_READS):
        run(opened.store, _download_steps(opened, entry, partial))
        if file_sha256(partial) == entry.sha256:
            os.replace(partial, path)
            return
        os.truncate(partial, 0)
    raise IntegrityError(
        f"'{opened.uri(entry)}' does not hold the published bytes (sha256 {entry.sha256}), "
        f"{MAX_READS} times in a row: the object is damaged. Restore it, or publish the version "
        "again elsewhere",
        key=entry.key,
    )


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Lock `partial` against others who pull the same file to the same place.

    Two of them would append to one file, one even after the other found it complete. The file is
    made if it is missing. The kernel frees the lock of a killed holder. Some filesystems have no
    locks; there it is not locked.
    """
    while True:
        with partial.open("ab") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            held = os.fstat(file.fileno())
            try:
                if not os.path.samestat(held, partial.stat()):
                    continue
            except FileNotFoundError:  # it was whole and got its name while we waited
                continue
            try:
                yield
            finally:
                with suppress(FileNotFoundError):  # it has got its name
                    now = partial.stat()
                    if os.path.samestat(held, now) and not now.st_size:
                        partial.unlink()
            return


def _holds(path: Path, entry: FileEntry) -> bool:
    return path.exists() and file_sha256(path) == entry.sha256


def _download_steps(opened: OpenVersion, entry: FileEntry, partial: Path) -> Steps[None]:
    """Append what is missing; a connection lost in between goes on from where it broke."""
    key, retry = opened.key(entry), Retry()
    while True:
        have = partial.stat().st_size if partial.exists() else 0
        if have > entry.size:  # what was there is larger than what was published
            os.truncate(partial, 0)
            have = 0
        if have == entry.size and partial.exists():
            return
        try:
            opened.store.download(key, partial, offset=have, end=entry.size + 1)
            return  # too short or damaged shows in the digest
        except ObjectNotFoundError:
            raise VersionNotFoundError(
                f"'{opened.uri(entry)}' is gone: someone removed it by hand. Put it back from a "
                "pulled copy, or publish the version again elsewhere",
                key=key,
            ) from None
        except TransientError as error:
            yield from retry.wait(error)
