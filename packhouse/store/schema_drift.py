"""Decide if a ref may move to another version: breaking schema changes and drift.

Readers open a ref, not a version: a trainer that reads `labels` from `latest` must still find it
tomorrow. So a version whose schema would break readers of the ref's current version is refused
before anything is uploaded. Drift is measured from the two manifests alone:

    lengths      total variation distance of the histograms of record lengths      [0, 1]
    sources      total variation distance of the sources' shares of rows           [0, 1]
    quarantined  absolute change of the share of rows that were quarantined        [0, 1]
    trained      absolute change of the share of tokens that are trained           [0, 1]

Total variation distance is half the sum of the absolute differences of shares: 0.1 means that a
tenth of the records would have to move to another bin.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from packhouse.recipe import PublishConfig
from packhouse.records.gate_results import GateOutcome, GateResult
from packhouse.store.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestDiff:
    """Differences between the manifests of two versions: key -> [old value, new value]."""

    old: str
    """Version compared; `new` is the other one."""
    new: str
    is_same_content: bool
    configuration: Mapping[str, list[Any]]
    """By dotted key, e.g. `pack.seq_len`; a missing value is None."""
    counts: Mapping[str, list[Any]]
    lineage: Mapping[str, list[Any]]
    engines: Mapping[str, list[Any]]
    libraries: Mapping[str, list[Any]]
    schema: Mapping[str, list[Any]]
    """Types by column."""
    totals: Mapping[str, list[int]]
    """Rows and tokens of each split."""


_DRIFTS = {
    "lengths": ("max_length_drift", "length"),
    "sources": ("max_source_drift", "source"),
    "quarantined": ("max_quarantine_drift", "quarantine"),
    "trained": ("max_trained_drift", "trained-token"),
}
"""Field of `Drift` -> its limit in the recipe, and its name in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Distance between a version and the previous one; None if a manifest lacks the numbers."""

    lengths: float | None
    sources: float | None
    quarantined: float | None
    trained: float | None

    def results(self, limits: PublishConfig) -> tuple[GateResult, ...]:
        """Return each measure with its limit and outcome.

        Example:
            >>> drift = Drift(lengths=0.3, sources=0.0, quarantined=None, trained=0.01)
            >>> for result in drift.results(PublishConfig(max_length_drift=0.25)):
            ...     print(result.name, result.outcome, result.value, result.limit)
            drift.lengths failed 0.3 0.25
            drift.sources passed 0.0 None
            drift.quarantined not reached None None
            drift.trained passed 0.01 None
        """
        results = []
        for measure, (setting, what) in _DRIFTS.items():
            name, value = f"drift.{measure}", getattr(self, measure)
            limit = getattr(limits, setting)
            outcome: GateOutcome = "passed"
            detail = ""
            if value is None:
                outcome, detail = "not reached", "a manifest lacks the numbers"
            elif limit is not None and value > limit:
                outcome = "failed"
                detail = f"{what} drift is {value:.4f}; the limit is {limit:.4f}"
            each = GateResult(name=name, outcome=outcome, value=value, limit=limit, detail=detail)
            results.append(each)
        return tuple(results)

    def beyond(self, limits: PublishConfig) -> tuple[str, ...]:
        """Return one sentence for each measure over its limit.

        Example:
            >>> drift = Drift(lengths=0.3, sources=0.0, quarantined=None, trained=0.01)
            >>> drift.beyond(PublishConfig(max_length_drift=0.25, max_quarantine_drift=0.1))
            ('length drift is 0.3000; the limit is 0.2500',)
        """
        return tuple(each.detail for each in self.results(limits) if each.outcome == "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RefChange:
    """Differences that readers would notice if a ref moved from its version to another one."""

    current: str
    """Version that the ref points to."""
    drift: Drift
    breaking: tuple[str, ...]
    """Schema changes that would break readers."""

    @classmethod
    def of(cls, old: Manifest, new: Manifest, **more: Any) -> Self:
        """Compare the version of the ref with another one; `more` are fields of a subclass."""
        drift, breaking = measure_drift(old, new), tuple(breaking_changes(old, new))
        return cls(current=old.version, drift=drift, breaking=breaking, **more)

    def reasons(self, limits: PublishConfig) -> tuple[str, ...]:
        """Return why the ref may not move, one sentence each."""
        breaking = () if limits.allow_breaking_schema else self.breaking
        would = (f"readers of {self.current} would break: {what}" for what in breaking)
        return (*would, *self.drift.beyond(limits))


def schema_gate(changes: Sequence[str], detail: str) -> GateResult:
    """Return the result of the gate `schema`."""
    outcome: GateOutcome = "failed" if changes else "passed"
    return GateResult(name="schema", outcome=outcome, value=len(changes), limit=0, detail=detail)


def ref_gates(limits: PublishConfig, ref: str, change: RefChange | None) -> list[GateResult]:
    """Return the results of the gates that a version must pass before the ref moves to it.

    Args:
        limits: Publish settings of the recipe.
        ref: Name of the ref.
        change: Difference from the version that it points to; None if there is no other version.
    """
    if change is None:
        detail = f"'{ref}' has no other version to compare with"
        gate = partial(GateResult, outcome="not reached", detail=detail)
        return [gate(name="schema"), gate(name="drift")]
    schema = schema_gate(change.breaking, "; ".join(change.breaking))
    if limits.allow_breaking_schema:
        detail = "publish.allow_breaking_schema is set"
        schema = GateResult(name="schema", outcome="not reached", detail=detail)
    return [schema, *change.drift.results(limits)]


def breaking_changes(old: Manifest, new: Manifest) -> list[str]:
    """Return the changes from `old` to `new` that would break readers, one sentence each.

    New columns break nothing. These do: a removed column, another type, a column that may now be
    null, and another value of a `packhouse.*` key in the schema's metadata (how labels are shifted,
    which label is ignored). Splits are not part of the schema: a recipe may stop making an eval
    split.
    """
    found = []
    before, after = old.facts.schema, new.facts.schema
    columns = {column.name: column for column in after.fields}
    for was in before.fields:
        now = columns.get(was.name)
        if now is None:
            found.append(f"column '{was.name}' was removed")
        elif was.type != now.type:
            found.append(f"column '{was.name}' changed from {was.type} to {now.type}")
        elif now.nullable and not was.nullable:
            found.append(f"column '{was.name}' may now be null")
    metadata = after.metadata
    for key, value in before.metadata.items():
        if key.startswith("packhouse.") and metadata.get(key) != value:
            found.append(f"{key} changed from '{value}' to '{metadata.get(key)}'")
    return found


def measure_drift(old: Manifest, new: Manifest) -> Drift:
    """Measure the drift between two versions from their manifests."""
    lengths: list[Counter[int]] = []
    quarantined: list[float | None] = []
    trained: list[float | None] = []
    for counts in (old.facts.counts, new.facts.counts):
        sides, ledger = counts.statistics.values(), counts.ledger
        lengths.append(Counter())
        for length, number in (each for side in sides for each in side.length_histogram):
            lengths[-1][length] += number
        # The first line is that of validate, with the rows read.
        num_rows, num_tokens = ledger[0].rows_in if ledger else 0, sum(s.num_tokens for s in sides)
        num_bad = sum(line.num_bad_rows for line in ledger)
        quarantined.append(num_bad / num_rows if num_rows else None)
        num_trained = sum(side.num_trained for side in sides)
        trained.append(num_trained / num_tokens if num_tokens else None)
    return Drift(
        lengths=distance(*lengths),
        sources=distance(old.rows_by_file(), new.rows_by_file()),
        quarantined=_change(*quarantined),
        trained=_change(*trained),
    )


def distance(old: Mapping[Any, int], new: Mapping[Any, int]) -> float | None:
    """Return the total variation distance of two histograms, in [0, 1]; None if one is empty.

    Example:
        >>> distance({"a": 3, "b": 1}, {"a": 2, "b": 2})
        0.25
    """
    before, after = sum(old.values()), sum(new.values())
    if not before or not after:
        return None
    # Shares 3/4, 1/4 and 2/4, 2/4 differ by 1/4 twice, so the distance is 1/4.
    keys = sorted({*old, *new})  # in a fixed order, since sums of floats depend on it
    return sum(abs(old.get(k, 0) / before - new.get(k, 0) / after) for k in keys) / 2


def _change(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else abs(new - old)


def diff_manifests(old: Manifest, new: Manifest) -> ManifestDiff:
    """Compare two versions by their manifests alone."""
    before, after = _by_name(old), _by_name(new)
    totals = [Counter[str](), Counter[str]()]
    for sums, manifest in zip(totals, (old, new), strict=True):
        for entry in manifest.files:
            if entry.kind == "data":
                sums[f"{entry.split}.packs"] += entry.rows
                sums[f"{entry.split}.tokens"] += entry.tokens
    return ManifestDiff(
        old=old.version,
        new=new.version,
        is_same_content=bool(old.content_id) and old.content_id == new.content_id,
        configuration=changed_settings(old.configuration, new.configuration),
        **{part: changed_keys(values, after[part]) for part, values in before.items()},
        totals={key: [sums[key] for sums in totals] for key in sorted({*totals[0], *totals[1]})},
    )


def _by_name(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the parts of a manifest with lists as mappings, so that a diff shows single values.

    Steps of the ledger are keyed by name, shards by file and first row, columns by name.
    """
    lines = manifest.counts.get("ledger", ())
    steps = {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in lines}
    shards = {}
    for shard, written in zip(manifest.facts.lineage.sources, manifest.sources, strict=True):
        start = f" from row {shard.row_start}" if shard.row_start else ""
        shards[f"{shard.file}{start}"] = written
    columns = manifest.facts.schema.fields
    return {
        "counts": {**manifest.counts, "ledger": steps},
        "lineage": {**manifest.lineage, "sources": shards},
        "engines": dict(manifest.engines),
        "libraries": dict(manifest.libraries),
        "schema": {each.name: each.type + " not null" * (not each.nullable) for each in columns},
    }


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the dotted keys of two configurations whose values differ.

    `mix` and `audit` are compared key by key even if only one configuration has the section.

    Example:
        >>> changed_settings({"pack": {"seq_len": 8}}, {"mix": {"chats.weight": 2.0}})
        {'mix.chats.weight': [None, 2.0], 'pack': [{'seq_len': 8}, None]}
    """
    empty: dict[str, Any] = {"mix": {}, "audit": {}}
    return changed_keys(empty | {**old}, empty | {**new})


def changed_keys(old: Any, new: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Return the dotted keys whose values differ, with both values.

    Lists of strings with equal length are compared item by item, other lists as a whole.

    Example:
        >>> old = {"pack": {"seq_len": 8, "seed": 0}, "where": ["a > 2", "b"], "lengths": [5, 7]}
        >>> new = {"pack": {"seq_len": 16, "seed": 0}, "where": ["a > 3", "b"], "lengths": [5, 8]}
        >>> changed_keys(old, new)
        {'pack.seq_len': [8, 16], 'where.0': ['a > 2', 'a > 3'], 'lengths': [[5, 7], [5, 8]]}
    """
    are_lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if are_lists and all(isinstance(value, str) for value in (*old, *new)):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changed: dict[str, list[Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            changed |= changed_keys(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return changed
    return {} if old == new else {prefix: [old, new]}
