"""Compare two versions: settings, counts, schema, and record by record, tokens and masks.

A record is known by its id (a hash of its content), wherever packing put it. The tokens and the
mask of one copy are hashed apart, so a changed template (tokens differ) is told from a changed
rule of what is trained (only masks differ) and from another number of copies. A row whose content
changed has another id: of ids that only one version has, those of one row are pairs, `edited`.
Reads the data files and the records of both versions once, and the data once more for examples;
holds about 200 bytes a record, so 5 million records need 2 GB.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packhouse.errors import ContractError
from packhouse.packing.layout import IGNORE_INDEX
from packhouse.runtime.disks import temporary_folder
from packhouse.store.contracts import read_batches
from packhouse.store.manifest import Manifest
from packhouse.store.read import OpenVersion

__all__ = [
    "Change",
    "Diff",
    "RecordDiff",
    "Trace",
    "changed_keys",
    "diff_versions",
    "read_records",
    "trace_records",
]

_MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Trace:
    """What is kept of a record for the comparison."""

    num_tokens: int
    num_trained: int
    tokens: bytes
    """8-byte digest of the token ids of one copy."""
    mask: bytes
    """8-byte digest of which of them are trained."""
    split: str
    times: int = 1
    """Copies of it in the packs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record that differs."""

    record_id: str
    """In the new version, or in the old one where it was removed."""
    old_id: str
    """In the old version, or in the new one where it was added; another one where edited."""
    place: str
    """File and row, `faq.jsonl row 7`; empty where the version does not say."""
    detail: str
    """What changed: `100 -> 108 tokens`, `1 -> 2 copies`, `train -> eval`, `now duplicate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDiff:
    """How many records differ in which way, and a few ids of each."""

    num_added: int
    num_removed: int
    num_edited: int
    """Rows whose content changed: the same place, another record."""
    num_changed_tokens: int
    """In both versions, with other tokens."""
    num_changed_masks: int
    """In both versions, with the same tokens and another mask."""
    num_copies: int
    """In both versions, more or less often."""
    num_moved: int
    """In both versions, on another side (train or eval)."""
    num_same: int
    """In both versions, with none of these."""
    examples: Mapping[str, list[Change]]
    """By `added`, `removed`, `edited`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """Everything in which two versions differ."""

    old: str
    new: str
    is_same_content: bool
    configuration: Mapping[str, list[Any]]
    """Key, e.g. `pack.seq_len`, to [old, new]; a missing side is None."""
    counts: Mapping[str, list[Any]]
    lineage: Mapping[str, list[Any]]
    engines: Mapping[str, list[Any]]
    libraries: Mapping[str, list[Any]]
    schema: Mapping[str, list[Any]]
    """Column to [old, new] type."""
    totals: Mapping[str, list[int]]
    """Rows and tokens of each split, as [old, new]."""
    records: RecordDiff | None
    """None if the rows were not read, or hold no record ids."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def diff_versions(old: OpenVersion, new: OpenVersion, *, records: bool = True) -> Diff:
    """Compare two versions; with `records`, read the data files of both.

    Raises:
        IntegrityError: a data file is damaged.
    """
    left, right = old.manifest, new.manifest
    before, after = _totals(old), _totals(new)
    same = bool(left.content_id) and left.content_id == right.content_id
    return Diff(
        old=old.version,
        new=new.version,
        is_same_content=same,
        configuration=changed_keys(left.configuration, right.configuration),
        counts=changed_keys(_by_step(left.counts), _by_step(right.counts)),
        lineage=changed_keys(left.lineage, right.lineage),
        engines=changed_keys(left.engines, right.engines),
        libraries=changed_keys(left.libraries, right.libraries),
        schema=changed_keys(_columns(left), _columns(right)),
        totals={key: [before[key], after[key]] for key in sorted({*before, *after})},
        records=_diff_records(old, new) if records else None,
    )


def changed_keys(old: Any, new: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Dotted keys whose values differ, with both values; lists are compared whole.

    Example:
        >>> changed_keys({"pack": {"seq_len": 8, "seed": 0}}, {"pack": {"seq_len": 16, "seed": 0}})
        {'pack.seq_len': [8, 16]}
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changed: dict[str, list[Any]] = {}
        for key in sorted({*old, *new}):
            changed |= changed_keys(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return changed
    return {} if old == new else {prefix: [old, new]}


def _by_step(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts with the ledger's lines by their step, so that a changed number is named alone."""
    if "ledger" not in counts:
        return dict(counts)
    ledger = {
        line.get("step", ""): {name: value for name, value in line.items() if name != "step"}
        for line in counts["ledger"]
    }
    return {**counts, "ledger": ledger}


def trace_records(opened: OpenVersion) -> dict[str, Trace]:
    """Record id -> trace, over all data files of a version.

    Raises:
        ContractError: the data files hold no record ids.
    """
    traces: dict[str, Trace] = {}
    is_cut = opened.manifest.configuration.get("pack", {}).get("strategy") == "concat"
    with temporary_folder("diff") as folder:
        for entry in opened.files():
            path = opened.fetch(entry, folder / entry.key)
            for batch in read_batches(path):
                for record_id, ids, mask in records_of(batch):
                    tokens = ids.astype("<i8").tobytes()
                    trained = np.packbits(mask).tobytes()
                    trace = Trace(
                        len(ids), int(mask.sum()), _hash(tokens), _hash(trained), entry.split
                    )
                    seen = traces.get(record_id)
                    if seen is not None and is_cut:
                        trace = _joined(seen, trace)
                    elif seen is not None:
                        trace = replace(seen, times=seen.times + 1)
                    traces[record_id] = trace
            path.unlink()
    return traces


def records_of(
    batch: pa.RecordBatch,
) -> Iterator[tuple[str, NDArray[np.int32], NDArray[np.bool_]]]:
    """Id, token ids and trained mask of each record of each pack.

    Raises:
        ContractError: a column is missing.
    """
    names = set(batch.schema.names)
    if not {"input_ids", "record_ids", "seq_lengths"} <= names:
        raise ContractError("no record_ids in the data files; records cannot be compared")
    ids, lengths, records, trained = (
        batch.column(name)
        for name in (
            "input_ids",
            "seq_lengths",
            "record_ids",
            "labels" if "labels" in names else "trained_ranges",
        )
    )
    for row in range(batch.num_rows):
        tokens = ids[row].values.to_numpy(zero_copy_only=False)
        if "labels" in names:
            mask = trained[row].values.to_numpy(zero_copy_only=False) != IGNORE_INDEX
        else:  # [2, 4) of 5 tokens -> [0, 0, 1, 1, 0]
            mask = np.zeros(len(tokens), dtype=bool)
            for span in trained[row].as_py():
                mask[span["start"] : span["end"]] = True
        ends = np.cumsum(lengths[row].values.to_numpy(zero_copy_only=False)).tolist()
        start = 0
        for record_id, end in zip(records[row].as_py(), ends, strict=True):
            yield record_id, tokens[start:end], mask[start:end]
            start = end


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _joined(seen: Trace, more: Trace) -> Trace:
    """A record that goes on in the next pack (`concat`)."""
    return Trace(
        seen.num_tokens + more.num_tokens,
        seen.num_trained + more.num_trained,
        _hash(seen.tokens + more.tokens),
        _hash(seen.mask + more.mask),
        seen.split,
    )


def _diff_records(old: OpenVersion, new: OpenVersion) -> RecordDiff | None:
    try:
        before, after = trace_records(old), trace_records(new)
    except ContractError:
        return None
    both = [key for key in before if key in after]
    pairs = [(before[key], after[key], key) for key in both]
    places = _places(old), _places(new)
    added, removed, edited = _edited(before, after, places)
    groups: dict[str, list[tuple[str, str]]] = {
        "added": [(key, key) for key in added],
        "removed": [(key, key) for key in removed],
        "edited": edited,
        "changed_tokens": [(k, k) for a, b, k in pairs if a.tokens != b.tokens],
        "changed_masks": [(k, k) for a, b, k in pairs if a.tokens == b.tokens and a.mask != b.mask],
        "copies": [(k, k) for a, b, k in pairs if a.times != b.times],
        "moved": [(k, k) for a, b, k in pairs if a.split != b.split],
    }
    examples = {
        name: [_change(name, *pair, before, after, places) for pair in sorted(keys)[:_MAX_EXAMPLES]]
        for name, keys in groups.items()
        if keys
    }
    return RecordDiff(
        **{f"num_{name}": len(keys) for name, keys in groups.items()},
        num_same=sum(a == b for a, b, _ in pairs),
        examples=examples,
    )


_Places = Mapping[str, tuple[str, str]]
"""Record id -> its first row, `faq.jsonl row 7`, and what became of it, `kept`."""


def _places(opened: OpenVersion) -> _Places:
    places: dict[str, tuple[str, str]] = {}
    columns = ["record_id", "source", "row", "outcome"]
    with temporary_folder("diff") as folder:
        for entry in opened.files("records"):
            for batch in read_batches(opened.fetch(entry, folder / entry.key), columns):
                if not set(columns) <= set(batch.schema.names):
                    return {}
                values = (batch.column(name).to_pylist() for name in columns)
                for record_id, source, row, outcome in zip(*values, strict=True):
                    seen = places.get(record_id)
                    if seen is None or (outcome == "kept" and seen[1] != "kept"):
                        places[record_id] = f"{source} row {row}", outcome
    return places


def _edited(
    before: Mapping[str, Trace], after: Mapping[str, Trace], places: tuple[_Places, _Places]
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Ids that were added and removed, and (new, old) ids of rows whose content changed.

    A row of a duplicate is no pair: its content is there in both versions.
    """
    added = [key for key in after if key not in before and key not in places[0]]
    removed = [key for key in before if key not in after and key not in places[1]]
    rows = {places[0][key][0]: key for key in removed if key in places[0]}
    found = ((key, rows.get(places[1].get(key, ("", ""))[0])) for key in added)
    edited = [(key, old) for key, old in found if old is not None]
    news, olds = {new for new, _ in edited}, {old for _, old in edited}
    return (
        [key for key in after if key not in before and key not in news],
        [key for key in before if key not in after and key not in olds],
        edited,
    )


def _change(
    name: str,
    record_id: str,
    old_id: str,
    before: Mapping[str, Trace],
    after: Mapping[str, Trace],
    places: tuple[_Places, _Places],
) -> Change:
    old, new = before.get(old_id), after.get(record_id)
    place = places[0 if name == "removed" else 1].get(record_id, ("", ""))[0]
    if name == "removed":
        detail = places[1].get(record_id, ("", ""))[1]
        return Change(record_id, old_id, place, f"now {detail}" if detail else "not in the sources")
    if old is None or new is None:
        detail = places[0].get(record_id, ("", ""))[1]
        return Change(record_id, old_id, place, f"was {detail}" if detail else "")
    said = {
        "copies": f"{old.times} -> {new.times} copies",
        "moved": f"{old.split} -> {new.split}",
        "changed_masks": f"{old.num_trained:,} -> {new.num_trained:,} trained",
    }
    tokens = f"{old.num_tokens:,} -> {new.num_tokens:,} tokens"
    return Change(record_id, old_id, place, said.get(name, tokens))


def read_records(
    opened: OpenVersion, record_ids: Collection[str]
) -> dict[str, tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Token ids and trained mask of a few records: of the first copy, or the first piece."""
    found: dict[str, tuple[NDArray[np.int32], NDArray[np.bool_]]] = {}
    with temporary_folder("diff") as folder:
        for entry in opened.files():
            if len(found) == len(record_ids):
                break
            for batch in read_batches(opened.fetch(entry, folder / entry.key)):
                for record_id, ids, mask in records_of(batch):
                    if record_id in record_ids and record_id not in found:
                        found[record_id] = ids, mask
    return found


def _columns(manifest: Manifest) -> dict[str, str]:
    fields = manifest.schema.get("fields", ())
    return {f["name"]: f["type"] + ("" if f["nullable"] else " not null") for f in fields}


def _totals(opened: OpenVersion) -> Counter[str]:
    """Rows and tokens of each split, e.g. {"train.rows": 3, "train.tokens": 4096}."""
    totals: Counter[str] = Counter()
    for entry in opened.files():
        totals[f"{entry.split}.rows"] += entry.rows
        totals[f"{entry.split}.tokens"] += entry.tokens
    return totals
