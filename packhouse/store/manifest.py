"""What a version is: its files with digests, its schema, its counts, and whence it came.

The manifest is the commit point and is compared byte for byte by a second publisher, so it is
canonical JSON (sorted keys, no spaces, UTF-8) and `manifest_id` is the sha256 of everything in it
except `provenance`: what is true of one run only (hosts, interpreter, library versions that cannot
change bytes) goes there, or nowhere. A `digest` over the whole document shows any damaged byte.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from packhouse.errors import ConfigError, IntegrityError
from packhouse.store.layout import version_name

__all__ = [
    "FORMAT",
    "FileEntry",
    "FileKind",
    "Manifest",
    "Tombstone",
    "canonical_json",
    "parse_slot",
    "schema_fingerprint",
    "schema_to_json",
]

FORMAT = 1
"""Version of the manifest's own form."""

FileKind = Literal["data", "records", "quarantine", "card", "exports"]

FACTS = (
    "content_id",
    "counts",
    "audit",
    "lineage",
    "configuration",
    "engines",
    "libraries",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a version."""

    key: str
    """Relative to the version's folder, e.g. `data/train-00000-of-00008-0a1b2c3d4e5f.parquet`."""
    kind: FileKind
    """`data` is what `datasets` loads; `card` is pulled as README.md; `exports` are other forms."""
    split: str
    size: int
    """Bytes."""
    sha256: str
    rows: int
    tokens: int

    @property
    def path(self) -> str:
        """Where `pull` writes the file, relative to the destination."""
        return "README.md" if self.kind == "card" else self.key


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed version. Equal manifests have equal bytes, but for `provenance`.

    Example:
        >>> manifest = Manifest(dataset="tiny", vid="abcd", generation=0, files=())
        >>> manifest.version
        'abcd.g0'
        >>> parse_slot(manifest.to_bytes()) == manifest
        True
    """

    dataset: str
    vid: str
    generation: int
    files: tuple[FileEntry, ...]
    schema: Mapping[str, Any] = field(default_factory=dict)
    """Arrow schema of the data files, as `schema_to_json` writes it."""
    schema_fingerprint: str = ""
    content_id: str = ""
    """Hash of the logical rows: equal across writers whose file bytes differ."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """The ledger: rows and tokens in, out, quarantined and dropped at each step."""
    audit: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    engines: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """`<vid>.g<N>`."""
        return version_name(self.vid, self.generation)

    @cached_property
    def manifest_id(self) -> str:
        """sha256 over everything but `provenance`."""
        return hashlib.sha256(canonical_json(self._hashed())).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    def splits(self) -> list[str]:
        """Names of the splits of the data files, in order of first file."""
        return list(dict.fromkeys(entry.split for entry in self.files if entry.kind == "data"))

    def to_bytes(self) -> bytes:
        """Canonical JSON with `manifest_id`, `provenance`, and a digest of all of it."""
        document = self._hashed() | {
            "manifest_id": self.manifest_id,
            "provenance": dict(self.provenance),
        }
        return canonical_json(document | {"digest": _digest(document)})

    def _hashed(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "format": FORMAT,
            "dataset": self.dataset,
            "vid": self.vid,
            "generation": self.generation,
            "files": [asdict(entry) for entry in self.files],
            "schema": dict(self.schema),
            "schema_fingerprint": self.schema_fingerprint,
        }
        return document | {name: getattr(self, name) for name in FACTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """A commit slot that garbage collection took: nothing may ever be committed there."""

    dataset: str
    version: str

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(
            {
                "format": FORMAT,
                "tombstone": True,
                "dataset": self.dataset,
                "version": self.version,
            }
        )


def parse_slot(data: bytes, where: str = "manifest.json") -> Manifest | Tombstone:
    """Read what lies in a commit slot and check it against its own digest.

    Raises:
        IntegrityError: not JSON, an unknown format, or a digest that does not fit.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise IntegrityError(
                f"{where} has format {document['format']!r}, this packhouse reads {FORMAT}; upgrade"
            )
        if document.get("tombstone") is True:
            return Tombstone(dataset=document["dataset"], version=document["version"])
        stated = document.pop("digest")
        if stated != _digest(document):
            raise IntegrityError(_damaged(where, "its digest does not fit"), key=where)
        return _from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(_damaged(where, str(error)), key=where) from None


def _damaged(where: str, problem: str) -> str:
    return (
        f"{where} is damaged: {problem}. Put back the manifest.json of a pulled copy, or remove "
        "that object and publish the version again"
    )


def _from_document(document: dict[str, Any]) -> Manifest:
    files = tuple(FileEntry(**entry) for entry in document["files"])
    names = ("dataset", "vid", "generation", "schema", "schema_fingerprint", "provenance", *FACTS)
    return Manifest(files=files, **{name: document[name] for name in names})


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(document)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values have equal bytes.

    Raises:
        ConfigError: a value that JSON cannot hold exactly (NaN, bytes, a set, ...).

    Example:
        >>> canonical_json({"b": 1, "a": [0.5, None]})
        b'{"a":[0.5,null],"b":1}'
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a manifest holds plain JSON only: {error}") from None


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """Arrow schema -> JSON: names, types, nullability, children and metadata.

    Example:
        >>> schema_to_json(pa.schema([pa.field("input_ids", pa.list_(pa.int32()))]))["fields"][0]
        {'name': 'input_ids', 'type': 'list<item: int32>', 'nullable': True}
    """
    return {
        "fields": [_field_to_json(field) for field in schema],
        "metadata": _metadata_to_json(schema.metadata),
    }


def schema_fingerprint(schema: Mapping[str, Any]) -> str:
    """sha256 over the JSON of a schema."""
    return hashlib.sha256(canonical_json(schema)).hexdigest()


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    described = {"name": field.name, "type": str(field.type), "nullable": field.nullable}
    metadata = _metadata_to_json(field.metadata)
    return described | ({"metadata": metadata} if metadata else {})


def _metadata_to_json(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    pairs = {k.decode(): v.decode(errors="replace") for k, v in (metadata or {}).items()}
    # Field numbers and the like are written by file formats, not by us.
    return {k: v for k, v in sorted(pairs.items()) if not k.startswith(("ARROW:", "PARQUET:"))}


_SECRET = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|X-Amz-Signature=|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{30,}"
)


def refuse_secrets(value: Any, where: str = "the manifest") -> None:
    """Fail if any string inside holds a credential.

    Raises:
        ConfigError: a password in a URI, a signed URL, or a key with a known form.
    """
    if isinstance(value, str) and _SECRET.search(value):
        raise ConfigError(f"{where} would publish a credential; take it from the environment")
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_secrets(key, where)
            refuse_secrets(item, f"{where}, key '{key}'")
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_secrets(item, where)
