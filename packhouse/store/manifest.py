"""The manifest of a version: its files with digests, its schema, counts and inputs.

The manifest is the commit point. A second publisher compares it byte for byte, so it is canonical
JSON (sorted keys, no spaces, UTF-8), and `manifest_id` is the sha256 of everything in it except
`provenance`. Facts of one run only (hosts, interpreter, library versions that cannot change bytes)
belong there, or nowhere. A `digest` of the whole document detects any damaged byte.

A manifest comes from a store, so it is validated like any other input. `FileEntry` and `Manifest`
check their fields when they are created, by a publisher or by `parse_slot`, and the bytes must be
exactly those that the parsed manifest would write. So readers can safely join keys to paths. Facts
are kept as they are in the document; `Manifest.facts` has typed values of those that the program
reads.
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
from packhouse.pack.gather_tokens import PackStatistics
from packhouse.recipe.recipe import Preferences, preferences_in
from packhouse.records.ledger import Filter, LedgerLine, RenderCounts, filters_of
from packhouse.store import object_keys
from packhouse.store.store_requests import Steps, read_checked
from packhouse.system.fingerprint import canonical_json, digest

FORMAT = 1
"""Version of the manifest format."""

FileKind = Literal["data", "records", "quarantine", "dropped", "card", "report", "exports"]

TABLES = ("data", "records", "quarantine", "dropped")
"""Kinds of files that are tables of rows, numbered by split."""

FACTS = ("content_id", "counts", "audit", "lineage", "configuration", "engines", "libraries")
"""Facts that are part of `manifest_id`, in addition to the schema."""

PULLED_NAMES: dict[str, str] = {"card": "README.md", "report": "report.html"}
"""Kinds of files with a fixed name at the top of a pulled version.

They are for people and not part of the version's identity, because another release of packhouse may
write them differently.
"""

MAX_MANIFEST_BYTES = 2**26
"""Maximum size of a manifest, enough for 200,000 files. Enforced by readers and publishers."""

_MAX_COUNT = 2**40  # limit for bytes, rows and tokens of one file, so that sums fit 64 bits
_SHA256 = re.compile(r"[0-9a-f]{64}")
# No segment begins with a dot, so none is `..`. Limited to 200 characters, because `fetch` adds a
# suffix for partial copies, and filesystems allow 255.
_KEY = re.compile(r"[a-z]+(/[A-Za-z0-9_][A-Za-z0-9._-]{0,199})+")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a version.

    Raises:
        ConfigError: A key, name, digest or number is not valid.
    """

    key: str
    """Relative to the version's folder, e.g. `data/train-00000-of-00008-0a1b2c3d4e5f.parquet`."""
    kind: FileKind
    """`data` files are loaded by `datasets`; `card` is pulled as README.md, `report` as
    report.html; `exports` are the rows in other formats."""
    split: str
    size: int
    """Bytes."""
    sha256: str
    rows: int
    tokens: int
    source: str | None = None
    """Source of all its rows, if the split has files by source; otherwise not written."""

    def __post_init__(self) -> None:
        key = self.key
        object_keys.check_name("split", self.split)
        if self.source is not None:
            object_keys.check_name("source", self.source)
        if not _KEY.fullmatch(key) or len(key) > 512 or key.partition("/")[0] != self.kind:
            raise ConfigError(f"file {key[:80]!r} is not a valid key for kind {self.kind!r}")
        kind, sha256 = self.kind, self.sha256
        if kind not in get_args(FileKind) or not _SHA256.fullmatch(sha256):
            raise ConfigError(f"file {key!r}: kind {kind!r} or sha256 {sha256!r} is not valid")
        for name in ("size", "rows", "tokens"):
            number = getattr(self, name)
            # By type, because True is an int, and JSON has it.
            if type(number) is not int or not 0 <= number < _MAX_COUNT:
                raise ConfigError(f"file {key!r}: {name} is not an integer in [0, 2**40)")
        # Exports keep the names that their readers expect.
        # MDS lists its shards in `index.json`, and Megatron-Bridge looks for `.idx.parquet`.
        if kind != "exports" and sha256[:12] not in key:
            raise ConfigError(f"the name of file {key!r} does not contain its sha256 {sha256}")

    @property
    def path(self) -> str:
        """Path to which `pull` writes the file, relative to the destination."""
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
    """Content of train or eval. A record that is packed twice counts twice."""

    records: int = 0
    groups: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of rows, records and tokens through all steps."""

    rendering: RenderCounts = field(default_factory=RenderCounts)
    ledger: tuple[LedgerLine, ...] = ()
    dedup: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, PackStatistics] = field(default_factory=dict)
    sides: Mapping[str, SideCounts] = field(default_factory=dict)
    sources: Mapping[str, Counters] = field(default_factory=dict)

    def splits(self) -> dict[str, PackStatistics]:
        """Return the statistics of the splits that have packs, train before eval.

        In `num_sequences`, a record that `concat` splits counts once.
        """
        splits = {name: each for name, each in self.statistics.items() if each.num_packs}
        for name in splits.keys() & self.sides:
            splits[name] = replace(splits[name], num_sequences=self.sides[name].records)
        return dict(sorted(splits.items(), reverse=True))


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
    """Number of its first row in the file."""
    rows: int = 0
    is_tokenized: bool = False
    """True if the rows were already tokenized."""
    settings: SourceSettings = SourceSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """The tokenizer that made the token IDs."""

    # Becomes part of a key in the store, so it must not contain a slash.
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}\z")] = ""
    class_name: Annotated[str, Field(alias="class")] = ""
    vocab_size: int = 0
    """0 if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Inputs of the version."""

    sources: tuple[Shard, ...] = ()
    tokenizer: TokenizerFacts = TokenizerFacts()


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedRow:
    """One of the worst rows of a finding. Fields that its check does not write are empty."""

    source: str
    """`<source>/<file>`."""
    row: int
    record_id: str = ""
    value: int | None = None
    """Size of the finding in this row; for `Inference`, the number of the message."""
    detail: str = ""
    """Problem that a plug-in's check reports."""
    benchmark: str = ""
    words: str = ""
    """Words that the row shares with the benchmark."""
    finding: str = ""
    what: str = ""
    text: str = ""
    expected: str = ""
    """For `Inference`: `text` is where `expected` should be, and `what` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Rows that the quality counters found."""

    dataset: Counters
    sources: Mapping[str, Counters]
    worst: Mapping[str, tuple[AuditedRow, ...]] = field(default_factory=dict)
    languages: Counters = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """Rows that share words with a benchmark."""

    contaminated: int
    rows: int = 0
    ngram: int = 0
    on_match: str = "stop"
    by_benchmark: Counters = field(default_factory=dict)
    worst: tuple[AuditedRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """Trained answers compared with the prompts and stop tokens of inference."""

    turns: str
    sources: Mapping[str, Counters] = field(default_factory=dict)
    worst: tuple[AuditedRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginCheck:
    """Rows that a plug-in's check rejects."""

    plugin: str
    rows: int
    failed: int
    worst: tuple[AuditedRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Counts of what the tokens of a version teach, and the worst rows of each finding."""

    dataset: Counters = field(default_factory=dict)
    sources: Mapping[str, Counters] = field(default_factory=dict)
    packs: Counters = field(default_factory=dict)
    worst: Mapping[str, tuple[AuditedRow, ...]] = field(default_factory=dict)
    quality: Quality | None = None
    contamination: Contamination | None = None
    inference: Inference | None = None
    checks: Mapping[str, PluginCheck] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatSettings:
    """Settings of the recipe's `format` section."""

    template: str = ""
    train_on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSettings:
    """Settings of the recipe's `tokenize` section."""

    pipeline: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Settings of the recipe's `pack` section; `seq_len` is 0 if unknown."""

    seq_len: int = 0
    strategy: str = ""
    seed: int = 0
    over_length: str = ""
    pad_record_to_multiple_of: Annotated[int, Field(gt=0)] = 1
    balance: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """Settings of the recipe's `split` section."""

    eval_by_source: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """An export included in the version."""

    format: str
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishSettings:
    """Settings of the recipe's `publish` section."""

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
    """Facts of one run only, not part of the version's identity."""

    keeps_tokenizer: bool = False
    tokenizer: str = ""
    """Name of the tokenizer on the Hub, if it has one."""
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
_AUDIT = TypeAdapter(Audit)


def read_audit(document: Mapping[str, Any]) -> Audit:
    """Return the typed values of an audit that this program wrote."""
    return _AUDIT.validate_python(document)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed version. Equal manifests have equal bytes, except for `provenance`.

    Raises:
        ConfigError: A name, number or fact is not valid, or two files have the same path.

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
    """sha256 of the JSON of the schema."""
    content_id: str = ""
    """Hash of the logical rows: equal even if writers encode the same rows in different bytes."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """The ledger: rows and tokens in, out, quarantined and dropped at each step."""
    audit: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    engines: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object_keys.check_name("dataset", self.dataset)
        object_keys.check_vid(self.vid)
        if type(self.generation) is not int or not 0 <= self.generation < 10**9:
            raise ConfigError("generation is not an integer from 0 to 999,999,999")
        _ = self.facts  # refuses facts of a wrong type
        places = [entry.path.lower() for entry in self.files]  # some filesystems ignore case
        taken = set(places)
        # `data/a/b.parquet` makes `data` and `data/a` folders, so no file may have these names.
        folders = {place[:at] for place in taken for at, sign in enumerate(place) if sign == "/"}
        if len(taken) < len(places) or taken & folders:
            raise ConfigError("two files have the same path, or one path is a folder of another")

    @property
    def version(self) -> str:
        """`<vid>.g<N>`."""
        return object_keys.version_name(self.vid, self.generation)

    @cached_property
    def manifest_id(self) -> str:
        """sha256 of everything except `provenance`."""
        return digest(self._hashed())

    @cached_property
    def facts(self) -> Facts:
        """Typed values of the facts that the program reads."""
        try:
            return _FACTS.validate_python({f.name: getattr(self, f.name) for f in fields(Facts)})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ConfigError(f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}") from None

    @property
    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def preferences(self) -> Preferences | None:
        """`pairs` or `kto` for preference data, else None; see `Recipe.preferences`."""
        return preferences_in([shard.settings.format for shard in self.facts.lineage.sources])

    @property
    def tokenizer_fingerprint(self) -> str:
        """Fingerprint of the tokenizer that made the token IDs; empty if unknown."""
        return self.facts.lineage.tokenizer.fingerprint

    def rows_by_file(self) -> Counter[str]:
        """Return the rows read from each source file (`<source>/<file>`), over all its shards."""
        rows: Counter[str] = Counter()
        for shard in self.facts.lineage.sources:
            rows[shard.file] += shard.rows
        return rows

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """Input shards, as written in the document."""
        return tuple(self.lineage.get("sources", ()))

    def filters(self) -> list[Filter]:
        """Return the rows dropped by each `where` expression of each source."""
        return filters_of(self.sources)

    def splits(self) -> list[str]:
        """Return the splits of the data files, in order of their first file."""
        return list(dict.fromkeys(entry.split for entry in self.files if entry.kind == "data"))

    def to_bytes(self) -> bytes:
        """Return canonical JSON with `manifest_id`, `provenance`, and a digest of the document.

        Raises:
            ConfigError: It is larger than `MAX_MANIFEST_BYTES`.
        """
        document = self._hashed() | {"manifest_id": self.manifest_id, "provenance": self.provenance}
        data = canonical_json(document | {"digest": digest(document)})
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"the manifest of {len(self.files):,} files has {len(data):,} bytes (limit "
                f"{MAX_MANIFEST_BYTES:,}). Raise publish.max_file_mb to write fewer files"
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
    """Marks a commit slot as taken by garbage collection: nothing may be committed there again."""

    dataset: str
    version: str

    def __post_init__(self) -> None:
        object_keys.check_name("dataset", self.dataset)
        object_keys.split_version(self.version)

    def to_bytes(self) -> bytes:
        """Return canonical JSON."""
        return canonical_json({"format": FORMAT, "tombstone": True, **asdict(self)})


def parse_slot(data: bytes, where: str = "manifest.json") -> Manifest | Tombstone:
    """Parse the content of a commit slot. The caller compares dataset and version with its key.

    Raises:
        IntegrityError: The format is unknown, or the bytes are not those of a valid manifest.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise IntegrityError(
                f"{where} has format {document['format']!r:.40}, but this release of packhouse "
                f"reads format {FORMAT}. Upgrade packhouse"
            )
        slot: Manifest | Tombstone
        if document.get("tombstone") is True:
            slot = Tombstone(dataset=document["dataset"], version=document["version"])
        else:
            files = tuple(FileEntry(**entry) for entry in document["files"])
            names = ("dataset", "vid", "generation", "schema", "schema_fingerprint", "provenance")
            slot = Manifest(files=files, **{name: document[name] for name in (*names, *FACTS)})
        # So an added field, a duplicate JSON key or a wrong `manifest_id` is refused too.
        if slot.to_bytes() != data:
            raise ConfigError("its digest, manifest_id or format does not match its content")
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        known = isinstance(error, ConfigError)  # other messages may quote untrusted content
        problem = str(error) if known else f"not the JSON of a manifest ({type(error).__name__})"
        raise IntegrityError(
            f"{where} is damaged: {problem}. Restore it from a copy made with `packhouse pull`, "
            "or delete it and publish the version again",
            key=where,
        ) from None
    return slot


def read_slot_steps(dataset: str, version: str) -> Steps[Manifest | Tombstone | None]:
    """Read a commit slot; None if it is empty.

    Raises:
        IntegrityError: The slot is damaged, or has the manifest of another dataset or version.
    """

    def parse(data: bytes, where: str) -> Manifest | Tombstone:
        slot = parse_slot(data, where)
        if (slot.dataset, slot.version) != (dataset, version):
            raise IntegrityError(
                f"{where} is damaged: it is the manifest of '{slot.dataset}' {slot.version}. "
                "Delete it and publish the version again",
                key=where,
            )
        return slot

    found = yield from read_checked(object_keys.manifest_key(dataset, version), parse)
    return found[0] if found else None


def committed_steps(dataset: str, version: str, manifest_id: str = "") -> Steps[Manifest]:
    """Read the manifest of a committed version; its ID must be `manifest_id`, if given.

    Raises:
        VersionNotFoundError: The version was never committed, or was collected.
        IntegrityError: The manifest is damaged, or was changed after its ID was recorded.
    """
    slot = yield from read_slot_steps(dataset, version)
    if isinstance(slot, Manifest):
        if manifest_id not in ("", slot.manifest_id):
            raise changed_manifest(slot, manifest_id)
        return slot
    state = "does not exist" if slot is None else "was removed by garbage collection"
    raise VersionNotFoundError(f"version '{version}' of '{dataset}' {state}")


def changed_manifest(found: Manifest, recorded: str, by: str = "a ref") -> IntegrityError:
    """Return the error for a manifest whose ID differs from the one in a ref or an address."""
    return IntegrityError(
        f"the manifest of '{found.dataset}' {found.version} was changed: its ID is "
        f"{found.manifest_id[:12]}, but {by} recorded {recorded[:12]}. Restore manifest.json from "
        "a pulled copy, or delete it and publish the version again",
        key=object_keys.manifest_key(found.dataset, found.version),
    )


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """Convert an Arrow schema to JSON: names, types, nullability and metadata.

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
    # Left out: keys that the file formats add, such as field numbers.
    return {k: v for k, v in sorted(pairs.items()) if not k.startswith(("ARROW:", "PARQUET:"))}
