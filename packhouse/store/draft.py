"""Give the files of a version their keys and write its manifest, before anything is published.

Keys are made of content, so the same files get the same keys whoever publishes them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhouse.errors import ConfigError
from packhouse.store.card import dataset_card
from packhouse.store.manifest import (
    FACTS,
    PULLED_NAMES,
    FileEntry,
    FileKind,
    Manifest,
    schema_fingerprint,
    schema_to_json,
)
from packhouse.store.objects import FileBody, file_body
from packhouse.system.fingerprint import canonical_json

if TYPE_CHECKING:
    import pyarrow as pa

_HASHING_THREADS = 4

# Each file's entry in the manifest, and its bytes on this disk.
Uploads = tuple[tuple[FileEntry, FileBody], ...]


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A finished local file that becomes part of a version."""

    path: str | Path
    split: str
    rows: int = 0
    tokens: int = 0
    sha256: str | None = None
    """If given, the file must still have it."""
    kind: FileKind = "data"
    """Also its folder, but that of a `card` (README.md) and a `report` (report.html)."""
    name: str | None = None
    """Path in that folder, for readers that look for a name; by default one made of its content."""
    source: str | None = None
    """The source of all its rows, where a split has files by source."""


def name_files(files: Sequence[LocalFile]) -> Uploads:
    """Give each file its content-hashed key, e.g. `data/train-00000-of-00002-0a1b2c3d4e5f.parquet`.

    A file of one source is `data/eval-chats-00000-of-00002-...`; a split counts on through all its.
    A file whose sha256 is given is not read here: the store compares it as it reads the file.

    Raises:
        ConfigError: no such file, or a split with a name that is not allowed.
    """
    totals = Counter((file.kind, file.split) for file in files)
    numbers: Counter[tuple[str, str]] = Counter()
    with ThreadPoolExecutor(_HASHING_THREADS, "packhouse-hash") as pool:
        bodies = list(pool.map(_body, files))
    uploads = []
    for file, body in zip(files, bodies, strict=True):
        group = (file.kind, file.split)
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


def _body(file: LocalFile) -> FileBody:
    path = Path(file.path)
    if file.sha256 is None or not path.is_file():
        return file_body(path)
    return FileBody(path, path.stat().st_size, file.sha256)


def draft_manifest(
    dataset: str, vid: str, uploads: Uploads, facts: Mapping[str, object]
) -> Manifest:
    """The manifest of generation 0.

    Raises:
        ConfigError: an unknown fact, or a credential in one.
    """
    known = {*FACTS, "provenance", "schema"}
    if unknown := sorted(set(facts) - known):
        raise ConfigError(f"unknown facts {unknown}; known: {sorted(known)}")
    plain = {name: value for name, value in facts.items() if name != "schema"}
    try:
        plain = json.loads(canonical_json(plain))  # as a reader will see it: lists, string keys
    except (TypeError, ValueError) as error:  # NaN, bytes, a set, ...
        raise ConfigError(f"a manifest holds plain JSON only: {error}") from None
    _refuse_secrets(plain)
    schema = facts.get("schema")
    if schema is None:
        schema = _schema_of(uploads)
    described = schema_to_json(schema) if schema is not None else {}
    return Manifest(
        dataset=dataset,
        vid=vid,
        generation=0,
        files=tuple(entry for entry, _ in uploads),
        schema=described,
        schema_fingerprint=schema_fingerprint(described),
        **plain,
    )


_SECRET = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|X-Amz-Signature=|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{30,}"
)


def _refuse_secrets(value: object, where: str = "the manifest") -> None:
    """Fail if any string inside holds a credential.

    Raises:
        ConfigError: a password in a URI, a signed URL, or a key with a known form.
    """
    if isinstance(value, str) and _SECRET.search(value):
        raise ConfigError(f"{where} would publish a credential; take it from the environment")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_secrets(key, where)
            _refuse_secrets(item, f"{where}, key '{key}'")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_secrets(item, where)


def _schema_of(uploads: Uploads) -> "pa.Schema | None":
    """The schema of the first Parquet or Arrow data file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (body.path for entry, body in uploads if entry.kind == "data"):
        if path.suffix == ".parquet":
            return pq.read_schema(path)
        if path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                return reader.schema
    return None


def card_file(draft: Manifest, folder: Path) -> tuple[FileEntry, FileBody]:
    """Write the dataset card of a version."""
    path = folder / "README.md"
    path.write_text(dataset_card(draft), encoding="utf-8")
    ((entry, body),) = name_files([LocalFile(path, "all", kind="card")])
    return entry, body
