"""Read versions: resolve a name, fetch files and check their digests, verify everything.

A reader gets the ref, the manifest and the files by key. It never lists objects, so it cannot see a
version that is still being written. Every file is hashed after the download. A file with a wrong
digest is fetched again and then reported, never used.

`verify_version` also checks the values of data files with `pack_columns.check_packed`, which a run
uses before it publishes. Data files are read in batches, so memory is bounded by one row group.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from packhouse.errors import (
    ConfigError,
    ContractError,
    DiskError,
    IntegrityError,
    VersionNotFoundError,
)
from packhouse.pack import pack_columns
from packhouse.pack.pack_columns import PREFERENCE_NAMES, Layout, published_schema
from packhouse.store import object_keys
from packhouse.store.commit import fetch_tokenizer, find_slot_steps
from packhouse.store.manifest import (
    FileEntry,
    Manifest,
    changed_manifest,
    committed_steps,
    parse_slot,
    schema_to_json,
)
from packhouse.store.object_store import ObjectNotFoundError, ObjectStore, open_store
from packhouse.store.refs import explaining, read_ref_steps, scan_refs
from packhouse.store.store_requests import MAX_READS, Steps, download, in_parallel, run
from packhouse.system.disks import OF_DISKS, temporary_folder, write_whole
from packhouse.system.fingerprint import digest, file_sha256
from packhouse.system.worker import at, run_in_worker

log = logging.getLogger(__name__)

# 1,024 packs of 2,048 tokens are 2 M tokens, one row group of ours.
_BATCH_ROWS = 1024
_JSON_BLOCK_BYTES = 2**20  # larger if a row is: pyarrow refuses rows longer than a block
_ANY = 2**31 - 1  # IDs and lengths are int32; used if the manifest states no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVersion:
    """A committed version and its store."""

    store: ObjectStore
    dataset: str
    version: str
    manifest: Manifest

    @property
    def pinned(self) -> str:
        """`<version>#<digest>`, which only this manifest matches."""
        return object_keys.pinned(self.version, self.manifest.manifest_id)

    @property
    def address(self) -> str:
        """`<store>/<dataset>@<version>#<digest>`."""
        return f"{self.store.uri}/{self.dataset}@{self.pinned}"

    def files(self, kind: str = "data", split: str | None = None) -> list[FileEntry]:
        """Return the entries of one kind and of one or all splits, in published order."""
        wanted = [e for e in self.manifest.files if e.kind == kind]
        return [e for e in wanted if split is None or e.split == split]

    def key(self, entry: FileEntry) -> str:
        """Return the key of a file under the store's root."""
        return object_keys.file_key(self.dataset, self.version, entry.key)

    def uri(self, entry: FileEntry) -> str:
        """Return the address of a file, for readers with their own client."""
        return f"{self.store.uri}/{self.key(entry)}"

    def fetch(self, entry: FileEntry, path: str | Path) -> Path:
        """Download one file, or resume its download, and check its digest.

        Raises:
            DiskError: The disk is full or read-only.
            ConfigError: The folder cannot be written to: it is a file, or belongs to another user.
            VersionNotFoundError: The file was deleted from the store.
            IntegrityError: The bytes in the store differ from the published ones.
        """
        path = Path(path)
        # An earlier pull may have left the file, complete or not.
        if _holds(path, entry):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{entry.sha256[:12]}.partial")
        try:
            with _alone(partial):
                if _holds(path, entry):  # another process downloaded it while we waited
                    return path
                for _ in range(MAX_READS):
                    run(self.store, download(self.key(entry), partial, entry.size))
                    if file_sha256(partial) == entry.sha256:
                        return partial.replace(path)
                    os.truncate(partial, 0)  # not deleted, because others wait for its lock
        except ObjectNotFoundError:
            raise self.gone(entry) from None
        except OSError as error:
            raise (DiskError if error.errno in OF_DISKS else ConfigError)(
                f"cannot write '{partial}': {error.strerror or error}. Free some space there or "
                "use another folder (set TMPDIR if you passed none), then run again to resume"
            ) from error
        raise IntegrityError(
            f"'{self.uri(entry)}' is damaged: the SHA-256 of {MAX_READS} reads differs from the "
            f"published {entry.sha256}. Restore it, or publish the version to another store",
            key=entry.key,
        )

    def gone(self, entry: FileEntry) -> VersionNotFoundError:
        """Return the error for a file that is in the manifest but not in the store."""
        return VersionNotFoundError(
            f"'{self.uri(entry)}' is missing: it was deleted outside packhouse. Restore it from a "
            "copy made with `packhouse pull`, or publish the version again",
            key=self.key(entry),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Result of `verify_version`."""

    version: str
    num_files: int
    num_bytes: int
    num_rows: int
    num_tokens: int
    problems: tuple[str, ...]
    """One sentence per problem, with the file's name."""

    @property
    def is_intact(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def open_version(
    root: str | ObjectStore, dataset: str, ref_or_version: str = "latest"
) -> OpenVersion:
    """Resolve a ref, a version (`<vid>.g<N>`) or a version ID to a committed version.

    A version may be pinned (`<vid>.g<N>#<digest>`): its manifest must then have that digest.

    Raises:
        VersionNotFoundError: There is no ref or version of that name.
        IntegrityError: The ref or manifest is damaged.
    """
    store = open_store(root) if isinstance(root, str) else root
    with explaining(store, dataset):
        manifest = run(store, resolve_steps(dataset, ref_or_version))
    return OpenVersion(store=store, dataset=dataset, version=manifest.version, manifest=manifest)


def open_address(text: str, name: str = "latest") -> OpenVersion:
    """Open the version of an address; `name` is the version if the address has none.

    Logs a warning for a version that is not pinned, because anyone with write access to the store
    could have changed its manifest; a ref or a digest would reveal that.

    Raises:
        ConfigError: The address is a file of rows, or its version differs from `name`.
        VersionNotFoundError: The version does not exist.
    """
    if Path(text).is_file():
        raise ConfigError(
            f"'{text}' is a file, not a version. Run `packhouse init {text} --tokenizer NAME` to "
            "write a recipe for it; `packhouse inspect` of the recipe shows its rows"
        )
    address = object_keys.parse_address(text)
    if "latest" not in (address.name, name) and address.name != name:
        raise ConfigError(
            f"'{text}' has version '{address.name}', but version is '{name}'. Pass only one"
        )
    name = name if address.name == "latest" else address.name
    opened = open_version(address.root, address.dataset, name)
    if name in (opened.version, opened.manifest.vid):
        said = (
            "'%s' was opened without the digest of its manifest, so a changed manifest would go "
            "unnoticed. Use %s"
        )
        log.warning(said, name, opened.address)
    return opened


def open_relative(opened: OpenVersion, text: str) -> OpenVersion:
    """Open another version, from an address or from a name in the same dataset.

    Raises:
        VersionNotFoundError: The version does not exist.
    """
    if "/" in text:
        return open_address(text)
    return open_version(opened.store, opened.dataset, text.removeprefix("@"))


def open_dataset(text: str) -> tuple[ObjectStore, str]:
    """Open the store of `STORE/DATASET`; return it with the name of the dataset.

    Raises:
        ConfigError: The address includes a version.
    """
    address = object_keys.parse_address(text)
    if "@" in text.rpartition("/")[2]:
        raise ConfigError(f"'{text}' is the address of a version. Use STORE/DATASET")
    return open_store(address.root), address.dataset


def resolve_steps(dataset: str, name: str) -> Steps[Manifest]:
    """Resolve a name to a manifest. Unless pinned, refs win over version IDs of the same name."""
    name, recorded = object_keys.split_pinned(name)
    manifest = None
    if object_keys.is_version(name):
        manifest = yield from committed_steps(dataset, name)
    elif not recorded:
        ref, _ = yield from read_ref_steps(dataset, name)
        if ref is not None:
            return (yield from committed_steps(dataset, ref.version, ref.manifest_id))
    if manifest is None and name.isalnum():
        manifest, _ = yield from find_slot_steps(dataset, name)
    if manifest is None:
        what = "version" if recorded else "ref or version"
        raise VersionNotFoundError(f"'{dataset}' has no {what} '{name}'")
    if not manifest.manifest_id.startswith(recorded):
        raise changed_manifest(manifest, recorded, "the address")
    return manifest


def scan_versions(store: ObjectStore, dataset: str) -> tuple[list[Manifest], list[IntegrityError]]:
    """Return all readable committed versions, sorted by name, and the errors of the others."""
    # Only listings show a dataset as a whole; readers of a version never list.
    versions, damaged = [], []
    for version in store.list_folders(f"{object_keys.check_name('dataset', dataset)}/v/"):
        if object_keys.is_version(version):
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
    """Copy a version to a local folder in parallel; resume, and check existing files.

    `manifest.json` is written last, so a folder with one is complete. `datasets.load_dataset` can
    load the folder.

    Args:
        opened: Version to copy.
        dest: Target folder; created if it is missing.
        num_threads: Number of files to download at the same time.
        kinds: Kinds of files to copy; default: all.

    Raises:
        ConfigError: The folder has another version.
        IntegrityError: The bytes in the store differ from the published ones.
    """
    dest = Path(dest)
    try:
        dest.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create folder '{dest}': {error.strerror}. Use another folder"
        ) from None
    marker = dest / "manifest.json"
    if marker.exists():
        try:
            there = parse_slot(marker.read_bytes(), str(marker))
        except IntegrityError:
            raise IntegrityError(
                f"'{marker}' is damaged. Delete it and pull again; the other files are checked and "
                "fetched only if they differ"
            ) from None
        if not isinstance(there, Manifest) or there.manifest_id != opened.manifest.manifest_id:
            raise ConfigError(
                f"'{dest}' already has another version. Pull {opened.version} to a new folder"
            )
    wanted = [e for e in opened.manifest.files if not kinds or e.kind in kinds]
    in_parallel(lambda e: opened.fetch(e, dest / e.path), wanted, num_threads)
    if not kinds:  # for `AutoTokenizer.from_pretrained`, if the store has the tokenizer
        tokenizer = fetch_tokenizer(opened.store, opened.manifest.tokenizer_fingerprint) or {}
        for name, content in tokenizer.items():
            write_whole(dest / "tokenizer" / name, content)
    # Last, so that a folder with a manifest is complete.
    staged = dest / ".manifest.json.partial"
    with _alone(staged):
        staged.write_bytes(opened.manifest.to_bytes())
        os.replace(staged, marker)
    return dest


def verify_version(opened: OpenVersion, *, num_threads: int = 4) -> VerifyReport:
    """Check all bytes of a version, and the schema and contract of its data files.

    The manifest's ID is compared with the records of all refs that ever pointed to the version.
    Each file is fetched to a temporary folder, so the disk needs room for `num_threads` files.
    """
    manifest = opened.manifest
    refs, _ = scan_refs(opened.store, opened.dataset)
    moves = [move for ref in refs for move in ref.moves]
    recorded = {move.manifest_id for move in moves if move.version == opened.version}
    other_ids = sorted(recorded - {manifest.manifest_id})
    problems = [str(changed_manifest(manifest, manifest_id)) for manifest_id in other_ids]
    fingerprint = manifest.tokenizer_fingerprint
    try:
        kept = fetch_tokenizer(opened.store, fingerprint)
        if kept is None and manifest.facts.provenance.keeps_tokenizer:
            key = object_keys.tokenizer_key(fingerprint)
            problems.append(f"the tokenizer '{key}' is missing. Publish the version again")
    except IntegrityError as error:
        problems.append(str(error))
    with temporary_folder("verify") as folder:

        def check(entry: FileEntry) -> str:
            """Return the problem of a file, or an empty string."""
            path = folder / entry.key
            try:
                opened.fetch(entry, path)
                if entry.kind == "data":
                    read = partial(check_data_file, path, entry, manifest)
                    decode_in_worker(read, path, entry.key)
            except (IntegrityError, ContractError, VersionNotFoundError) as error:
                return f"{entry.key}: {error}"
            finally:
                path.unlink(missing_ok=True)
            return ""

        problems += filter(None, in_parallel(check, manifest.files, num_threads))
    data = opened.files()
    return VerifyReport(
        version=opened.version,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        num_rows=sum(entry.rows for entry in data),
        num_tokens=sum(entry.tokens for entry in data),
        problems=tuple(problems),
    )


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Lock `partial` against other processes that pull the same file to the same path.

    Otherwise two processes would append to the same file, one even after the other found it
    complete. Creates the file if it is missing. The kernel releases the lock of a killed process.
    Does nothing on filesystems without locks.
    """
    while True:
        with partial.open("ab") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            held = os.fstat(file.fileno())
            try:
                if not os.path.samestat(held, partial.stat()):
                    continue
            except FileNotFoundError:  # completed and renamed while we waited
                continue
            try:
                yield
            finally:
                with suppress(FileNotFoundError):  # completed and renamed by us
                    now = partial.stat()
                    if os.path.samestat(held, now) and not now.st_size:
                        partial.unlink()
            return


def _holds(path: Path, entry: FileEntry) -> bool:
    return path.exists() and file_sha256(path) == entry.sha256


def decode_in_worker(call: Callable[[], Any], path: Path, key: str) -> Any:
    """Run a call that decodes a file in a worker: a few kilobytes may decode to gigabytes."""
    # Also because damaged offsets of an Arrow file, and JSON with 100,000 nested lists, crashed
    # Arrow.
    size = path.stat().st_size  # not the manifest's, which may be forged to allow years of CPU
    return run_in_worker(call, what=f"'{key}'", blames=IntegrityError, num_bytes=size)


def check_data_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Check schema, row count, token count and values of a data file; ignore other formats.

    Raises:
        ContractError: A rule is broken; names the first one and its row.
        IntegrityError: The file cannot be read.
    """
    if path.suffix not in (".parquet", ".arrow", ".jsonl"):
        return
    rows = tokens = 0
    for batch in _stored_batches(path, entry=entry):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            names = batch.schema.names
            if digest(schema_to_json(batch.schema)) != manifest.schema_fingerprint:
                raise ContractError(f"its schema differs from the manifest; it has columns {names}")
        at(f"row {rows:,}")
        tokens += check_rows(pack_columns.supervised_names(batch), rows, manifest)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"it has {rows:,} rows, but the manifest says {entry.rows:,}")
    columns = {column.name for column in manifest.facts.schema.fields}
    if tokens != entry.tokens and {"input_ids", "preference_ids"} & columns:
        raise ContractError(f"it has {tokens:,} tokens, but the manifest says {entry.tokens:,}")


def read_batches(
    path: Path,
    columns: list[str] | None = None,
    *,
    max_rows: int = _BATCH_ROWS,
    entry: FileEntry | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read a Parquet (with page checksums), Arrow or JSON Lines file in batches of rows.

    Columns of preference data are renamed to those of supervised rows.

    Args:
        path: Path of the file.
        columns: Columns to read from a Parquet file, if it has them; default: all.
        max_rows: Maximum rows per batch of a Parquet file; raise it for short rows.
        entry: The file's entry in the manifest, which limits what is decoded; see `check_footer`.

    Raises:
        IntegrityError: The file is damaged.
    """
    columns = None if columns is None else stored_names(columns)
    return map(pack_columns.supervised_names, _stored_batches(path, columns, max_rows, entry))


def check_footer(footer: pq.FileMetaData, entry: FileEntry) -> None:
    """Compare the row and value counts of a Parquet footer with the manifest before decoding.

    A few kilobytes of Parquet can expand to gigabytes of equal IDs. No column has more values than
    the file has tokens; an empty list counts as one value, hence tokens + rows.

    Raises:
        IntegrityError: The number of rows differs, or a column has too many values.
    """
    if footer.num_rows != entry.rows:
        raise IntegrityError(
            f"'{entry.key}' has {footer.num_rows:,} rows, but the manifest says {entry.rows:,}. "
            "Publish the version again",
            key=entry.key,
        )
    most = entry.tokens + entry.rows
    for number in range(footer.num_columns):
        groups = map(footer.row_group, range(footer.num_row_groups))
        values = sum(group.column(number).num_values for group in groups)
        if values > most:
            raise IntegrityError(
                f"column '{footer.schema.column(number).path}' of '{entry.key}' has {values:,} "
                f"values, but the manifest says {entry.tokens:,} tokens. Publish the version again",
                key=entry.key,
            )


def stored_names(columns: Iterable[str]) -> list[str]:
    """Return the names that these columns may have in a file, including those of preferences."""
    names = [*columns]
    return [*names, *(PREFERENCE_NAMES[name] for name in names if name in PREFERENCE_NAMES)]


def _stored_batches(
    path: Path,
    columns: list[str] | None = None,
    max_rows: int = _BATCH_ROWS,
    entry: FileEntry | None = None,
) -> Iterator[pa.RecordBatch]:
    with reading(path.name):
        if path.suffix == ".parquet":
            # Without page checksums, pyarrow returns the values of a flipped bit silently.
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                if entry is not None:
                    check_footer(file.metadata, entry)
                # Our row groups hold about 2 M tokens each, so that a batch of one is bounded too.
                groups = file.metadata.num_row_groups
                rows = file.metadata.row_group(0).num_rows if groups else 1
                read = 0
                for batch in file.iter_batches(max(1, min(rows, max_rows)), columns=columns):
                    read += batch.num_rows
                    yield batch
                due = file.metadata.num_rows
                if read != due:  # the footer has no checksum, and a flipped bit can hide values
                    raise pa.ArrowInvalid(f"it has {read:,} rows, but its footer says {due:,}")
        elif path.suffix == ".jsonl":
            # Types come from our schema: pyarrow would guess them from the first block.
            with path.open("rb") as lines:
                first = lines.readline()
                longest = max(map(len, lines), default=0)
            present, schema = orjson.loads(first), None
            is_preferences = "preference_ids" in present
            if is_preferences or "input_ids" in present:
                has_labels = {"labels", "preference_labels"} & {*present}
                layout: Layout = "labels" if has_labels else "compact"
                flags = (name in present for name in ("position_ids", "label", "loss_weights"))
                schema = published_schema(layout, *flags, of_preferences=is_preferences)
            block_size = max(_JSON_BLOCK_BYTES, len(first), longest)
            options = pyarrow.json.ReadOptions(block_size=block_size)
            types = pyarrow.json.ParseOptions(explicit_schema=schema)
            yield from pyarrow.json.open_json(path, options, types)
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)


@contextmanager
def reading(name: str, **facts: Any) -> Iterator[None]:
    """Turn errors of reading a file with Arrow into an `IntegrityError`."""
    try:
        yield
    except MemoryError:  # Arrow's out-of-memory error is both a MemoryError and an ArrowException
        raise
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{name}' cannot be read: {error}", **facts) from None


def check_rows(batch: pa.RecordBatch, first_row: int, manifest: Manifest) -> int:
    """Check the values of a batch of a data file and return its number of tokens.

    Raises:
        ContractError: A rule is broken; names the first one and its row.
    """
    names = batch.schema.names
    if "input_ids" not in names or not batch.num_rows:
        return 0
    layout: Layout = "labels" if "labels" in names else "compact"
    due = published_schema(layout).names
    if missing := [name for name in due if name not in names]:
        raise ContractError(f"packed rows lack the columns {', '.join(missing)}")
    facts = manifest.facts
    pack_columns.check_packed(
        batch,
        facts.configuration.pack.seq_len or _ANY,
        facts.lineage.tokenizer.vocab_size or _ANY,
        layout,
        # A piece of a record cut by `concat` may have no trained token; a classifier trains on the
        # label column only.
        allow_untrained=facts.configuration.pack.strategy == "concat" or "label" in names,
        first_row=first_row,
    )
    return int(pc.sum(pc.list_value_length(batch["input_ids"])).as_py())
