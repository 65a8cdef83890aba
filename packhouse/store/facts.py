"""Types of those facts of a manifest that readers use; others are only shown and compared.

A fact may come from a store that anybody wrote to, so numbers are strict and bounded: `true`, `1.0`
and `-1` are no counts.

The steps have types for what they write (`LedgerLine`, `PackStatistics`), and these look alike, but
they are no duplicates. A step's types hold what this release writes, with numbers that it made. A
manifest may be of another release or program, with fewer fields or more, and what is wrong in it is
refused before anyone reckons with it.
"""

from typing import Annotated, NotRequired, Required

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from packhouse.errors import ConfigError
from packhouse.recipe.publish import MAX_SHARDS

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Counters = dict[str, _Count]


class _Column(TypedDict):
    name: str
    type: str
    nullable: bool


class _Schema(TypedDict, total=False):
    fields: list[_Column]
    metadata: dict[str, str]


class _LedgerLine(TypedDict, total=False):
    step: Required[str]
    rows_in: Required[_Count]
    rows_out: Required[_Count]
    added: _Counters
    quarantined: _Counters
    quarantined_again: _Count
    dropped: _Counters
    tokens_added: _Counters
    tokens_dropped: _Counters
    tokens_in: _Count | None
    tokens_out: _Count | None


class _Statistics(TypedDict, total=False):
    num_packs: _Count
    num_tokens: _Count
    num_trained: _Count
    seq_len: _Count
    length_histogram: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]]


class _Rendering(TypedDict, total=False):
    rows: _Count
    records: _Count
    stop_tokens: dict[str, str]
    notes: _Counters


class _Counts(TypedDict, total=False):
    rendering: _Rendering
    ledger: list[_LedgerLine]
    dedup: dict[str, object]
    statistics: dict[str, _Statistics]
    sides: dict[str, _Counters]
    sources: dict[str, _Counters]


class _Source(TypedDict, total=False):
    file: str
    sha256: str
    rows: _Count
    dropped: _Counters
    filtered: _Counters


class _Tokenizer(TypedDict, total=False):
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}\z")]  # part of a file's name
    vocab_size: _Count


class _Lineage(TypedDict, total=False):
    sources: list[_Source]
    tokenizer: _Tokenizer


class _Row(TypedDict):
    source: str
    row: _Count


class _Quality(TypedDict):
    dataset: _Counters
    sources: dict[str, _Counters]
    worst: dict[str, Annotated[list[_Row], Field(min_length=1)]]
    languages: NotRequired[_Counters]


class _Contamination(TypedDict):
    rows: _Count
    contaminated: _Count


class _Inference(TypedDict):
    turns: str
    dataset: _Counters
    sources: dict[str, _Counters]


class _Audit(TypedDict):
    dataset: _Counters
    sources: dict[str, _Counters]
    packs: NotRequired[_Counters]
    inference: NotRequired[_Inference]
    quality: NotRequired[_Quality]
    contamination: NotRequired[_Contamination]


class _Pack(TypedDict, total=False):
    seq_len: _Count
    strategy: str
    seed: int
    balance: _Count
    pad_record_to_multiple_of: Annotated[_Count, Field(gt=0)]


class _Export(TypedDict):
    format: str
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)]


class _Publish(TypedDict, total=False):
    exports: list[str | _Export]


class _Configuration(TypedDict, total=False):
    pack: _Pack
    format: dict[str, object]
    publish: _Publish
    mix: dict[str, object]
    audit: dict[str, object]


@with_config(ConfigDict(strict=True, extra="allow"))  # of the types within, too
class _Facts(TypedDict):
    schema: _Schema
    schema_fingerprint: str
    content_id: str
    counts: _Counts
    audit: _Audit | Annotated[dict[str, object], Field(max_length=0)]
    lineage: _Lineage
    configuration: _Configuration
    engines: dict[str, object]
    libraries: dict[str, object]
    provenance: dict[str, object]


FACT_TYPES = _Facts.__annotations__
"""Names of all facts, and their types."""
_FACTS = TypeAdapter(_Facts)


def check_facts(facts: dict[str, object]) -> None:
    """Refuse facts that readers cannot use.

    Raises:
        ConfigError: names the first.
    """
    try:
        _FACTS.validate_python(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}") from None
