"""Give the files of a version their keys and write its manifest, before anything is published.

Keys are made of content, so the same files get the same keys whoever publishes them.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhouse.errors import ConfigError
from packhouse.runtime.fingerprint import canonical_json
from packhouse.store.card import dataset_card
from packhouse.store.layout import check_name
from packhouse.store.manifest import (
    FACTS,
    PULLED_NAMES,
    FileEntry,
    FileKind,
    Manifest,
    refuse_secrets,
    schema_fingerprint,
    schema_to_json,
)
from packhouse.store.objects import FileBody, changed_file, file_body

__all__ = ["LocalFile", "Uploads", "card_file", "draft_manifest", "name_files"]

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


def name_files(files: Sequence[LocalFile], *, with_md5: bool = True) -> Uploads:
    """Hash the files and give each its content-hashed key, e.g. `data/train-00000-of-00002-...`.

    Where uploads carry no MD5 the store compares sha256 as it writes, so a file whose sha256 is
    given is not read here.

    Raises:
        ConfigError: no such file, or a split with a name that is not allowed.
        IntegrityError: a file is not what its sha256 says.
    """
    totals = Counter((file.kind, file.split) for file in files)
    numbers: Counter[tuple[str, str]] = Counter()
    uploads = []
    with ThreadPoolExecutor(_HASHING_THREADS, "packhouse-hash") as pool:
        bodies = list(pool.map(lambda file: _body(file, with_md5), files))
    for file, body in zip(files, bodies, strict=True):
        check_name("split", file.split)
        group = (file.kind, file.split)
        entry = FileEntry(
            key=_key(file, body, numbers[group], totals[group]),
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


def _body(file: LocalFile, with_md5: bool) -> FileBody:
    path = Path(file.path)
    if file.sha256 is not None and not with_md5 and path.is_file():
        return FileBody(path, path.stat().st_size, file.sha256)
    body = file_body(path, with_md5=with_md5)
    if file.sha256 is not None and body.sha256 != file.sha256:
        raise changed_file(replace(body, sha256=file.sha256), body.sha256)
    return body


def _key(file: LocalFile, body: FileBody, number: int, total: int) -> str:
    if file.kind in PULLED_NAMES:
        name, ending = PULLED_NAMES[file.kind].split(".")
        return f"{file.kind}/{name}-{body.sha256[:12]}.{ending}"
    if file.name is not None:
        return f"{file.kind}/{file.name}"
    ending = "".join(Path(file.path).suffixes[-1:])
    shard = f"{file.split}-{number:05d}-of-{total:05d}-{body.sha256[:12]}"
    return f"{file.kind}/{shard}{ending}"


def draft_manifest(
    dataset: str,
    vid: str,
    entries: Sequence[FileEntry],
    facts: Mapping[str, Any],
    files: Sequence[LocalFile],
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
    refuse_secrets(plain)
    schema = facts.get("schema")
    if schema is None:
        schema = _schema_of(files)
    described = schema_to_json(schema) if schema is not None else {}
    return Manifest(
        dataset=dataset,
        vid=vid,
        generation=0,
        files=tuple(entries),
        schema=described,
        schema_fingerprint=schema_fingerprint(described),
        **plain,
    )


def _schema_of(files: Sequence[LocalFile]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (Path(file.path) for file in files if file.kind == "data"):
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
