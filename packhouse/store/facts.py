"""Types of those facts of a manifest that readers use; others are only shown and compared.

A fact may come from a store that anybody wrote to, so numbers are strict and bounded: `true`, `1.0`
and `-1` are no counts.
"""

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from packhouse.errors import ConfigError
from packhouse.recipe.publish import MAX_SHARDS

__all__ = ["FACT_TYPES", "check_facts"]

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Column(TypedDict):
    name: str
    type: str
    nullable: bool


class _Schema(TypedDict, total=False):
    fields: list[_Column]
    metadata: dict[str, str]


class _LedgerLine(TypedDict, total=False):
    step: str
    rows_in: _Count
    rows_out: _Count
    added: dict[str, _Count]
    quarantined: dict[str, _Count]
    dropped: dict[str, _Count]
    tokens_added: dict[str, _Count]
    tokens_dropped: dict[str, _Count]
    tokens_in: _Count | None
    tokens_out: _Count | None


class _Statistics(TypedDict, total=False):
    num_packs: _Count
    num_tokens: _Count
    num_trained: _Count
    seq_len: _Count
    length_histogram: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]]


class _Counts(TypedDict, total=False):
    ledger: list[_LedgerLine]
    statistics: dict[str, _Statistics]
    sides: dict[str, dict[str, _Count]]
    sources: dict[str, dict[str, _Count]]


class _Source(TypedDict, total=False):
    file: str
    sha256: str
    rows: _Count
    dropped: dict[str, _Count]
    filtered: dict[str, _Count]


class _Tokenizer(TypedDict, total=False):
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}\z")]  # part of a file's name
    vocab_size: _Count


class _Lineage(TypedDict, total=False):
    sources: list[_Source]
    tokenizer: _Tokenizer


class _Audit(TypedDict):
    dataset: dict[str, _Count]
    sources: dict[str, dict[str, _Count]]
    packs: NotRequired[dict[str, _Count]]


class _Pack(TypedDict, total=False):
    seq_len: _Count
    strategy: str


class _Export(TypedDict):
    format: str
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)]


class _Publish(TypedDict, total=False):
    exports: list[str | _Export]


class _Configuration(TypedDict, total=False):
    pack: _Pack
    publish: _Publish


@with_config(ConfigDict(strict=True, extra="allow"))  # of the types within, too
class _Facts(TypedDict):
    schema: _Schema
    schema_fingerprint: str
    content_id: str
    counts: _Counts
    audit: _Audit | Annotated[dict[str, Any], Field(max_length=0)]
    lineage: _Lineage
    configuration: _Configuration
    engines: dict[str, Any]
    libraries: dict[str, Any]
    provenance: dict[str, Any]


FACT_TYPES = _Facts.__annotations__
"""Names of all facts, and their types."""
_FACTS = TypeAdapter(_Facts)


def check_facts(facts: dict[str, Any]) -> None:
    """Refuse facts that readers cannot use.

    Raises:
        ConfigError: names the first.
    """
    try:
        _FACTS.validate_python(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}") from None
