"""What a version is: its files with digests, its schema, its counts, and its inputs.

The manifest is the commit point and is compared byte for byte by a second publisher, so it is
canonical JSON (sorted keys, no spaces, UTF-8) and `manifest_id` is the sha256 of everything in it
except `provenance`: what is true of one run only (hosts, interpreter, library versions that cannot
change bytes) goes there, or nowhere. A `digest` over the whole document shows any damaged byte.

A manifest is read from a store, so it is checked like any other input, in one place: the fields of
`FileEntry` and `Manifest` are checked when they are made, by a publisher as by `parse_slot`, and
the bytes must be exactly those that the parsed manifest would write. So an added field, a doubled
JSON key, or another `manifest_id` is refused, and readers may join keys to paths. Facts are kept as
they are in the document; `Manifest.facts` has those that the program reads, as typed values.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import pyarrow as pa
from pydantic import Field, TypeAdapter, ValidationError

from packhouse.errors import ConfigError, IntegrityError, VersionNotFoundError
from packhouse.pack.gather import PackStatistics
from packhouse.recipe.model import Preferences, preferences_in
from packhouse.records.ledger import Filter, LedgerLine, filters_of
from packhouse.records.render_counts import RenderCounts
from packhouse.store.layout import (
    check_name,
    check_vid,
    manifest_key,
    split_version,
    version_name,
)
from packhouse.store.protocol import Steps, read_checked
from packhouse.system.fingerprint import canonical_json, digest

FORMAT = 1
"""Version of the manifest's own form."""

FileKind = Literal["data", "records", "quarantine", "dropped", "card", "report", "exports"]

TABLES = ("data", "records", "quarantine", "dropped")
"""Kinds of files that are tables of rows, numbered by split."""

FACTS = ("content_id", "counts", "audit", "lineage", "configuration", "engines", "libraries")
"""Facts that are hashed, beside the schema."""

PULLED_NAMES: dict[str, str] = {"card": "README.md", "report": "report.html"}
"""Kinds of files that have a name of their own at the top of a pulled version.

They are for people and no part of the version's identity: another packhouse may write others.
"""

MAX_MANIFEST_BYTES = 2**26
"""Room for 200,000 files. Readers refuse a larger manifest, so publishers do."""

_MAX_COUNT = 2**40  # bytes, rows or tokens of one file: sums of them fit 64 bits
_SHA256 = re.compile(r"[0-9a-f]{64}")
# No segment begins with a dot, so none is `..`; 200 leaves room for the name of a partial copy.
_KEY = re.compile(r"[a-z]+(/[A-Za-z0-9_][A-Za-z0-9._-]{0,199})+")
# `data/train-00000-of-00008-0a1b2c3d4e5f.parquet`
_SHARD = re.compile(
    r"(data|records|quarantine|dropped)/(.+)-([0-9]{5,9})-of-([0-9]{5,9})-([0-9a-f]{12})"
    r"(\.[A-Za-z0-9]+)?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a version.

    Raises:
        ConfigError: a key, name, digest or number that no version holds.
    """

    key: str
    """Relative to the version's folder, e.g. `data/train-00000-of-00008-0a1b2c3d4e5f.parquet`."""
    kind: FileKind
    """`data` is what `datasets` loads; `card` is pulled as README.md, `report` as report.html;
    `exports` are other forms."""
    split: str
    size: int
    """Bytes."""
    sha256: str
    rows: int
    tokens: int
    source: str | None = None
    """The source of all its rows, where a split has files by source; else not written."""

    def __post_init__(self) -> None:
        key = self.key
        check_name("split", self.split)
        if self.source is not None:
            check_name("source", self.source)
        if not _KEY.fullmatch(key) or len(key) > 512 or key.partition("/")[0] != self.kind:
            raise ConfigError(f"file {key[:80]!r} of kind {self.kind!r}: not a key of a version")
        if self.kind not in get_args(FileKind) or not _SHA256.fullmatch(self.sha256):
            raise ConfigError(f"file {key!r} has kind {self.kind!r} and sha256 {self.sha256!r}")
        for name in ("size", "rows", "tokens"):
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number < _MAX_COUNT:
                raise ConfigError(f"file {key!r} has {name} {number!r}; 0 to 2**40 is possible")
        if self.kind != "exports" and self.sha256[:12] not in key:
            raise ConfigError(f"file {key!r} is not named by its sha256 {self.sha256}")

    @property
    def path(self) -> str:
        """Where `pull` writes the file, relative to the destination."""
        return PULLED_NAMES.get(self.kind, self.key)


Counters = Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the data files."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSchema:
    """Arrow schema of the data files, as `schema_to_json` writes it."""

    fields: tuple[Column, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCounts:
    """What train or eval holds; records and tokens as often as they are packed."""

    records: int = 0
    groups: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Where every row went, and what became of them."""

    rendering: RenderCounts = field(default_factory=RenderCounts)
    ledger: tuple[LedgerLine, ...] = ()
    dedup: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, PackStatistics] = field(default_factory=dict)
    sides: Mapping[str, SideCounts] = field(default_factory=dict)
    sources: Mapping[str, Counters] = field(default_factory=dict)

    def splits(self) -> dict[str, PackStatistics]:
        """Return the statistics of the splits that have packs, train before eval.

        `num_sequences` counts a record that `concat` cuts once.
        """
        return {
            name: replace(each, num_sequences=self.sides[name].records)
            if name in self.sides
            else each
            for name, each in sorted(self.statistics.items(), reverse=True)
            if each.num_packs
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """Settings of a source that readers of its rows need."""

    format: str = ""
    label_names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard of input."""

    file: str = ""
    """`<source>/<file>`."""
    sha256: str = ""
    row_start: int = 0
    """Of its first row in the file."""
    rows: int = 0
    is_tokenized: bool = False
    """Rows came as ids, with their masks."""
    settings: SourceSettings = SourceSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """Which tokenizer made the ids."""

    # It is part of the name of an object in the store.
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}\z")] = ""
    class_name: Annotated[str, Field(alias="class")] = ""
    vocab_size: int = 0
    """0 where a publisher did not say it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """What the version was made of."""

    sources: tuple[Shard, ...] = ()
    tokenizer: TokenizerFacts = TokenizerFacts()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlace:
    """A row of a source file, `<source>/<file>`."""

    source: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Rows that the quality counters found."""

    dataset: Counters
    sources: Mapping[str, Counters]
    worst: Mapping[str, tuple[RowPlace, ...]] = field(default_factory=dict)
    languages: Counters = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """Rows that share words with a benchmark."""

    contaminated: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What the tokens teach; `packhouse.auditing` reads its limits in the document itself."""

    dataset: Counters = field(default_factory=dict)
    sources: Mapping[str, Counters] = field(default_factory=dict)
    packs: Counters = field(default_factory=dict)
    quality: Quality | None = None
    contamination: Contamination | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatSettings:
    """Of the recipe."""

    template: str = ""
    train_on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSettings:
    """Of the recipe."""

    pipeline: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Of the recipe; `seq_len` is 0 where a publisher did not say it."""

    seq_len: int = 0
    strategy: str = ""
    seed: int = 0
    over_length: str = ""
    pad_record_to_multiple_of: Annotated[int, Field(gt=0)] = 1
    balance: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """Of the recipe."""

    eval_by_source: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """Another form of the rows that the version carries."""

    format: str
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishSettings:
    """Of the recipe."""

    exports: tuple[str | ExportSettings, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Sections of the recipe."""

    format: FormatSettings = FormatSettings()
    tokenize: TokenizeSettings = TokenizeSettings()
    pack: PackSettings = PackSettings()
    split: SplitSettings = SplitSettings()
    publish: PublishSettings = PublishSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What is true of one run only."""

    keeps_tokenizer: bool = False
    tokenizer: str = ""
    """Name of the tokenizer, where it has one on the Hub."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `audit` that the version was checked against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts of a manifest."""

    schema: TableSchema
    schema_fingerprint: str
    content_id: str
    counts: Counts
    audit: Audit
    lineage: Lineage
    configuration: Configuration
    engines: Mapping[str, Any]
    libraries: Mapping[str, Any]
    provenance: Provenance


_FACTS = TypeAdapter(Facts)


def read_facts(document: Mapping[str, Any]) -> Facts:
    """Read the facts of a manifest.

    Raises:
        ConfigError: names the first that is of another type.
    """
    try:
        return _FACTS.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}") from None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed version. Equal manifests have equal bytes, but for `provenance`.

    Raises:
        ConfigError: a name, number or fact that no version holds, two files in one place, or a
            file of a numbered series that is missing.

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

    def __post_init__(self) -> None:
        check_name("dataset", self.dataset)
        check_vid(self.vid)
        if type(self.generation) is not int or not 0 <= self.generation < 10**9:
            raise ConfigError(f"generation is {self.generation!r}; 0 to 999,999,999 is possible")
        _check_files(self.files)
        _ = self.facts
        if self.schema and self.schema_fingerprint != schema_fingerprint(self.schema):
            raise ConfigError("schema_fingerprint is not that of the schema")

    @property
    def version(self) -> str:
        """`<vid>.g<N>`."""
        return version_name(self.vid, self.generation)

    @cached_property
    def manifest_id(self) -> str:
        """sha256 over everything but `provenance`."""
        return digest(self._hashed())

    @cached_property
    def facts(self) -> Facts:
        """The facts that the program reads, as typed values."""
        return read_facts({each.name: getattr(self, each.name) for each in fields(Facts)})

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def preferences(self) -> Preferences | None:
        """What the rows prefer, as `Recipe.preferences`: `pairs`, `kto`, or None."""
        return preferences_in([shard.settings.format for shard in self.facts.lineage.sources])

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer that made the ids; empty where a publisher did not say it."""
        return self.facts.lineage.tokenizer.fingerprint

    def rows_by_file(self) -> Counter[str]:
        """Count the rows read of each source file, `<source>/<file>`, whatever its shards."""
        rows: Counter[str] = Counter()
        for shard in self.facts.lineage.sources:
            rows[shard.file] += shard.rows
        return rows

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """Shards of input, as the document has them."""
        shards: Sequence[Mapping[str, Any]] = self.lineage.get("sources", ())
        return shards

    def filters(self) -> list[Filter]:
        """Return what each expression of each source's `where` left out."""
        return filters_of(self.sources)

    def splits(self) -> list[str]:
        """Names of the splits of the data files, in order of first file."""
        return list(dict.fromkeys(entry.split for entry in self.files if entry.kind == "data"))

    def to_bytes(self) -> bytes:
        """Canonical JSON with `manifest_id`, `provenance`, and a digest of all of it.

        Raises:
            ConfigError: over `MAX_MANIFEST_BYTES`.
        """
        document = self._hashed() | {
            "manifest_id": self.manifest_id,
            "provenance": dict(self.provenance),
        }
        data = canonical_json(document | {"digest": digest(document)})
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"a manifest of {len(self.files):,} files has {len(data):,} bytes, over "
                f"{MAX_MANIFEST_BYTES:,}; write fewer files: raise publish.max_file_mb"
            )
        return data

    def _hashed(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "format": FORMAT,
            "dataset": self.dataset,
            "vid": self.vid,
            "generation": self.generation,
            "files": [
                {name: value for name, value in asdict(entry).items() if value is not None}
                for entry in self.files
            ],
            "schema": dict(self.schema),
            "schema_fingerprint": self.schema_fingerprint,
        }
        return document | {name: getattr(self, name) for name in FACTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """A commit slot that garbage collection took: nothing may ever be committed there."""

    dataset: str
    version: str

    def __post_init__(self) -> None:
        check_name("dataset", self.dataset)
        split_version(self.version)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        slot = {"format": FORMAT, "tombstone": True}
        return canonical_json(slot | {"dataset": self.dataset, "version": self.version})


def parse_slot(data: bytes, where: str = "manifest.json") -> Manifest | Tombstone:
    """Read what lies in a commit slot. The caller knows the place and compares it.

    Raises:
        IntegrityError: an unknown format, or bytes that no publisher writes.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise IntegrityError(
                f"{where} has format {document['format']!r:.40}, this packhouse reads {FORMAT}; "
                "upgrade"
            )
        slot: Manifest | Tombstone
        if document.get("tombstone") is True:
            slot = Tombstone(dataset=document["dataset"], version=document["version"])
        else:
            files = tuple(FileEntry(**entry) for entry in document["files"])
            names = ("dataset", "vid", "generation", "schema", "schema_fingerprint", "provenance")
            slot = Manifest(files=files, **{name: document[name] for name in (*names, *FACTS)})
        if slot.to_bytes() != data:
            raise ConfigError("its digest, manifest_id or form does not fit what it says")
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        known = isinstance(error, ConfigError)  # the others may quote what lies there
        problem = str(error) if known else f"not the JSON of a manifest ({type(error).__name__})"
        raise IntegrityError(
            f"{where} is damaged: {problem}. Put back the manifest.json of a pulled copy, or "
            "remove that object and publish the version again",
            key=where,
        ) from None
    return slot


def read_slot_steps(dataset: str, version: str) -> Steps[Manifest | Tombstone | None]:
    """What lies in a commit slot.

    Raises:
        IntegrityError: damaged, or the manifest of another dataset or version.
    """

    def parse(data: bytes, where: str) -> Manifest | Tombstone:
        slot = parse_slot(data, where)
        if (slot.dataset, slot.version) != (dataset, version):
            raise IntegrityError(
                f"{where} is damaged: it is the manifest of '{slot.dataset}' {slot.version}. "
                "Remove that object and publish the version again",
                key=where,
            )
        return slot

    found = yield from read_checked(manifest_key(dataset, version), parse)
    return found[0] if found else None


def committed_steps(dataset: str, version: str, manifest_id: str = "") -> Steps[Manifest]:
    """The manifest of a version that must be committed; with `manifest_id`, it must have that.

    Raises:
        VersionNotFoundError: never committed, or collected.
        IntegrityError: damaged, or changed since its `manifest_id` was recorded.
    """
    slot = yield from read_slot_steps(dataset, version)
    if isinstance(slot, Manifest):
        if manifest_id not in ("", slot.manifest_id):
            raise changed_manifest(slot, manifest_id)
        return slot
    state = "does not exist" if slot is None else "was removed by garbage collection"
    raise VersionNotFoundError(f"version '{version}' of '{dataset}' {state}")


def changed_manifest(found: Manifest, recorded: str, by: str = "a ref") -> IntegrityError:
    """The error for a manifest that is another than a ref or an address recorded."""
    return IntegrityError(
        f"the manifest of '{found.dataset}' {found.version} has id {found.manifest_id[:12]}, and "
        f"{by} recorded {recorded[:12]}: somebody changed it since. Put back the manifest.json of "
        "a pulled copy, or remove that object and publish the version again",
        key=manifest_key(found.dataset, found.version),
    )


def _check_files(files: tuple[FileEntry, ...]) -> None:
    """No two files in one place, and each numbered series whole and in order."""
    places = [entry.path.lower() for entry in files]  # some disks do not tell A from a
    taken = set(places)
    # `data/a/b.parquet` makes `data` and `data/a` folders: no file may have their names.
    folders = {place[:at] for place in taken for at, sign in enumerate(place) if sign == "/"}
    if len(taken) < len(places) or taken & folders:
        raise ConfigError("two files have one path, or one is the folder of another")
    series: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for entry in files:
        if entry.kind in TABLES:
            shard = _SHARD.fullmatch(entry.key)
            name = f"{entry.split}-{entry.source}" if entry.source else entry.split
            if shard is None or shard[2] != name or shard[5] != entry.sha256[:12]:
                raise ConfigError(f"file {entry.key!r} is not <split>-<n>-of-<total>-<sha256>")
            series.setdefault((entry.kind, entry.split), []).append((int(shard[3]), int(shard[4])))
    for (kind, split), numbers in series.items():
        if numbers != [(number, len(numbers)) for number in range(len(numbers))]:
            raise ConfigError(f"{kind} files of split {split!r} are missing or out of order")


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """Arrow schema -> JSON: names, types, nullability and metadata.

    Example:
        >>> schema_to_json(pa.schema([pa.field("input_ids", pa.list_(pa.int32()))]))["fields"][0]
        {'name': 'input_ids', 'type': 'list<item: int32>', 'nullable': True}
    """
    fields = []
    for column in schema:
        described = {"name": column.name, "type": str(column.type), "nullable": column.nullable}
        metadata = _metadata_to_json(column.metadata)
        fields.append(described | ({"metadata": metadata} if metadata else {}))
    return {"fields": fields, "metadata": _metadata_to_json(schema.metadata)}


def _metadata_to_json(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    pairs = {k.decode(): v.decode(errors="replace") for k, v in (metadata or {}).items()}
    # Field numbers and the like are written by file formats, not by us.
    return {k: v for k, v in sorted(pairs.items()) if not k.startswith(("ARROW:", "PARQUET:"))}


def schema_fingerprint(schema: Mapping[str, Any]) -> str:
    """sha256 over the JSON of a schema."""
    return digest(schema)
