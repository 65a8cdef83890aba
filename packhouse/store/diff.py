"""Compare two versions: settings, counts, schema, and record by record, tokens and masks.

A record is known by its id (a hash of its content), wherever packing put it. Its tokens and its
mask are hashed apart, so a changed template (tokens differ) is told from a changed rule of what is
trained (only masks differ). Reads the data files of both versions once; holds about 200 bytes a
record, so 5 million records need 2 GB.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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

__all__ = ["Diff", "RecordDiff", "Trace", "changed_keys", "diff_versions", "trace_records"]

_MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Trace:
    """What is kept of a record for the comparison."""

    num_tokens: int
    num_trained: int
    tokens: bytes
    """8-byte digest of its token ids."""
    mask: bytes
    """8-byte digest of which of them are trained."""
    split: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDiff:
    """How many records differ in which way, and a few ids of each."""

    num_added: int
    num_removed: int
    num_changed_tokens: int
    """In both versions, with other tokens."""
    num_changed_masks: int
    """In both versions, with the same tokens and another mask."""
    num_moved: int
    """In both versions, on another side (train or eval)."""
    num_same: int
    examples: Mapping[str, list[str]]


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
                    traces[record_id] = trace if seen is None else _joined(seen, trace)
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
    """A record that comes again (a duplicate), or goes on in the next pack (`concat`)."""
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
    groups = {
        "added": [key for key in after if key not in before],
        "removed": [key for key in before if key not in after],
        "changed_tokens": [k for k in both if before[k].tokens != after[k].tokens],
        "changed_masks": [
            k
            for k in both
            if before[k].tokens == after[k].tokens and before[k].mask != after[k].mask
        ],
        "moved": [k for k in both if before[k].split != after[k].split],
    }
    changed = len(groups["changed_tokens"]) + len(groups["changed_masks"])
    return RecordDiff(
        **{f"num_{name}": len(keys) for name, keys in groups.items()},
        num_same=len(both) - changed,
        examples={name: sorted(keys)[:_MAX_EXAMPLES] for name, keys in groups.items() if keys},
    )


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
