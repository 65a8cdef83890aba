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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packhouse.records.gates import GateOutcome, GateResult
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Limits for moving a ref to another version."""

    allow_breaking: bool = False
    """Publish even if the schema breaks readers of the ref's current version."""
    max_lengths: float | None = None
    """Maximum distance of record lengths at which the ref still moves; None for no limit."""
    max_sources: float | None = None
    """Maximum distance of the sources' shares."""
    max_quarantined: float | None = None
    """Maximum change of the quarantined share."""
    max_trained: float | None = None
    """Maximum change of the trained share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Distance between a version and the previous one; None if a manifest lacks the numbers."""

    lengths: float | None
    sources: float | None
    quarantined: float | None
    trained: float | None

    def results(self, gate: Gate) -> tuple[GateResult, ...]:
        """Return each measure with its limit and outcome.

        Example:
            >>> drift = Drift(lengths=0.3, sources=0.0, quarantined=None, trained=0.01)
            >>> for result in drift.results(Gate(max_lengths=0.25)):
            ...     print(result.name, result.outcome, result.value, result.limit)
            drift.lengths failed 0.3 0.25
            drift.sources passed 0.0 None
            drift.quarantined not reached None None
            drift.trained passed 0.01 None
        """
        results = []
        for measure in ("lengths", "sources", "quarantined", "trained"):
            name, value = f"drift.{measure}", getattr(self, measure)
            limit = getattr(gate, f"max_{measure}")
            outcome: GateOutcome = "passed"
            detail = ""
            if value is None:
                outcome, detail = "not reached", "a manifest lacks the numbers"
            elif limit is not None and value > limit:
                outcome, detail = "failed", f"drift of {measure} is {value:.4f}, over {limit:.4f}"
            each = GateResult(name=name, outcome=outcome, value=value, limit=limit, detail=detail)
            results.append(each)
        return tuple(results)

    def beyond(self, gate: Gate) -> tuple[str, ...]:
        """Return one sentence for each measure over its limit.

        Example:
            >>> drift = Drift(lengths=0.3, sources=0.0, quarantined=None, trained=0.01)
            >>> drift.beyond(Gate(max_lengths=0.25, max_quarantined=0.1))
            ('drift of lengths is 0.3000, over 0.2500',)
        """
        return tuple(each.detail for each in self.results(gate) if each.outcome == "failed")


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
    return Drift(
        lengths=distance(_lengths(old), _lengths(new)),
        sources=distance(old.rows_by_file(), new.rows_by_file()),
        quarantined=_change(_quarantined(old), _quarantined(new)),
        trained=_change(_trained(old), _trained(new)),
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
    keys = sorted({*old, *new})
    return sum(abs(old.get(k, 0) / before - new.get(k, 0) / after) for k in keys) / 2


def _change(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else abs(new - old)


def _lengths(manifest: Manifest) -> Counter[int]:
    lengths: Counter[int] = Counter()
    for side in manifest.facts.counts.statistics.values():
        for length, number in side.length_histogram:
            lengths[length] += number
    return lengths


def _trained(manifest: Manifest) -> float | None:
    sides = manifest.facts.counts.statistics.values()
    tokens = sum(side.num_tokens for side in sides)
    return sum(side.num_trained for side in sides) / tokens if tokens else None


def _quarantined(manifest: Manifest) -> float | None:
    ledger = manifest.facts.counts.ledger
    if not ledger or not ledger[0].rows_in:
        return None
    return sum(line.num_bad_rows for line in ledger) / ledger[0].rows_in


def diff_manifests(old: Manifest, new: Manifest) -> ManifestDiff:
    """Compare two versions by their manifests alone."""
    before, after = _totals(old), _totals(new)
    return ManifestDiff(
        old=old.version,
        new=new.version,
        is_same_content=bool(old.content_id) and old.content_id == new.content_id,
        configuration=changed_settings(old.configuration, new.configuration),
        counts=changed_keys(_by_step(old.counts), _by_step(new.counts)),
        lineage=changed_keys(_by_file(old.lineage), _by_file(new.lineage)),
        engines=changed_keys(old.engines, new.engines),
        libraries=changed_keys(old.libraries, new.libraries),
        schema=changed_keys(_types(old), _types(new)),
        totals={key: [before[key], after[key]] for key in sorted({*before, *after})},
    )


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
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if all(isinstance(value, str) for value in (*old, *new)):
            old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changed: dict[str, list[Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            changed |= changed_keys(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return changed
    return {} if old == new else {prefix: [old, new]}


def _by_step(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts with the ledger as a mapping by step, so that a diff shows single numbers."""
    if "ledger" not in counts:
        return dict(counts)
    ledger = {
        line.get("step", ""): {name: value for name, value in line.items() if name != "step"}
        for line in counts["ledger"]
    }
    return {**counts, "ledger": ledger}


def _by_file(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Return lineage with sources as a mapping by file and first row, for a diff by setting."""
    sources = {}
    for entry in lineage.get("sources", ()):
        start = f" from row {entry['row_start']}" if entry.get("row_start") else ""
        sources[f"{entry.get('file', '')}{start}"] = entry
    return {**lineage, "sources": sources}


def _types(manifest: Manifest) -> dict[str, str]:
    fields = manifest.facts.schema.fields
    return {each.name: each.type + ("" if each.nullable else " not null") for each in fields}


def _totals(manifest: Manifest) -> Counter[str]:
    """Count packs and tokens of each split, e.g. {"train.packs": 3, "train.tokens": 4096}."""
    totals: Counter[str] = Counter()
    for entry in manifest.files:
        if entry.kind == "data":
            totals[f"{entry.split}.packs"] += entry.rows
            totals[f"{entry.split}.tokens"] += entry.tokens
    return totals
