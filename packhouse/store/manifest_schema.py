"""Types of the facts in a manifest that the program reads; keys without a field are ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from packhouse.errors import ConfigError
from packhouse.pack import PackStatistics
from packhouse.records.ledger import LedgerLine
from packhouse.records.render_counts import RenderCounts

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
class Side:
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
    sides: Mapping[str, Side] = field(default_factory=dict)
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
    rows: int = 0
    settings: SourceSettings = SourceSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
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
    tokenizer: Tokenizer = Tokenizer()


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
