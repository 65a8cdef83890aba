"""The audit of the whole: shards added up, the packs as they will be published, and repetition."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.audit.shard import NUM_WORST
from packhouse.packing.lists import flat_list, read_ranges, string_bytes, zero_based

__all__ = ["audit_packs", "audit_records", "combine"]


def combine(shards: Sequence[tuple[str, Mapping[str, Any], Mapping[str, int]]]) -> dict[str, Any]:
    """Add up the audits of shards, by source and in all.

    Args:
        shards: name of the source, result of `audit_shard`, notes of the tokenize step; in order.

    Returns:
        `dataset`: counts of all; `sources`: counts by name; `worst`: rows by finding.
    """
    sources: dict[str, Counter[str]] = {}
    worst: dict[str, list[dict[str, Any]]] = {}
    for name, audited, notes in shards:
        counts = sources.setdefault(name, Counter())
        counts.update(audited["counts"])
        counts.update({note: notes.get(note, 0) for note in _NOTES})
        for finding, rows in audited["worst"].items():
            worst.setdefault(finding, []).extend(rows)
    for rows in worst.values():
        rows.sort(key=lambda row: (-row["value"], row["source"], row["row"], row["record_id"]))
        del rows[NUM_WORST:]
    total: Counter[str] = Counter()
    for counts in sources.values():
        total.update(counts)
    return {
        "dataset": dict(sorted(total.items())),
        "sources": {name: dict(sorted(counts.items())) for name, counts in sorted(sources.items())},
        "worst": {finding: worst[finding] for finding in sorted(worst)},
    }


# Counts of the tokenize step that no table shows afterwards.
_NOTES = ("control_text", "control_text_rows", "straddles_start", "straddles_end")


def audit_packs(
    packs: Iterable[pa.RecordBatch], is_control: npt.NDArray[np.bool_]
) -> dict[str, int]:
    """Look at training rows as they are: packs and sequences without a trained token, cut answers.

    A sequence that ends on a trained token which is no control token teaches the model to go on.

    Args:
        packs: batches of schema `tables.PACKED`.
        is_control: whether an id is of a control token, shape [vocab_size].

    Returns:
        `packs`, `sequences`, `untrained_packs`, `untrained_sequences`, `cut_sequences`.
    """
    counts: Counter[str] = Counter()
    for batch in packs:
        if batch.num_rows:
            counts.update(_audit_batch(batch, is_control))
    return dict(counts)


def _audit_batch(batch: pa.RecordBatch, is_control: npt.NDArray[np.bool_]) -> dict[str, int]:
    ids, offsets = zero_based(*flat_list(batch["input_ids"]))
    lengths, _ = zero_based(*flat_list(batch["seq_lengths"]))
    ranges = read_ranges(batch["trained_ranges"])
    rows = ranges.row_of_each()
    ends = ranges.ends + offsets[rows].astype(np.int64)
    sequence_ends = np.cumsum(lengths, dtype=np.int64)
    is_trained = np.zeros(len(lengths), np.bool_)
    is_trained[np.searchsorted(sequence_ends, ends - 1, "right")] = True
    last = sequence_ends - 1
    is_cut = np.isin(last, ends - 1) & ~is_control[ids[last]]
    # A label for a model's head is what such a row teaches; its tokens are not.
    has_label = batch["label"].is_valid().to_numpy(zero_copy_only=False)
    return {
        "packs": batch.num_rows,
        "sequences": len(lengths),
        "untrained_packs": int(((ranges.counts() == 0) & ~has_label).sum()),
        "untrained_sequences": int((~is_trained).sum()),
        "cut_sequences": int(is_cut.sum()),
    }


def audit_records(batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
    """Count what occurs more than once, in each source and in all, and what is on both sides.

    Ids and groups are compared by their leading 64 bits. Memory: 31 bytes a record, and as much
    again while they are sorted.

    Args:
        batches: of schema `steps.records.RECORDS`, at least its columns `record_id`, `source`,
            `row`, `group_key`, `split` and `num_tokens`; those that were dropped do not count.

    Returns:
        `duplicates`: records beyond the first of their content; `prompt_groups`: prompts that
        several different records share, and `prompt_group_records`, how many do; `both_sides`:
        contents in train and eval; `sources`: duplicates within each; `worst`: most frequent ones.
    """
    records = _Records.of(batches)
    order = np.argsort(records.ids, kind="stable")
    starts = np.flatnonzero(np.diff(records.ids[order], prepend=~records.ids[order][:1]))
    times = np.diff(starts, append=len(order))
    first = order[starts]  # of each different record, the first in the order of file and row
    in_eval = np.add.reduceat(records.is_eval[order], starts, dtype=np.int64) if len(order) else 0
    sharing = np.unique(records.groups[first], return_counts=True)[1]
    return {
        "duplicates": int((times - 1).sum()),
        "prompt_groups": int((sharing > 1).sum()),
        "prompt_group_records": int(sharing[sharing > 1].sum()),
        "both_sides": int(np.count_nonzero((in_eval > 0) & (in_eval < times))),
        "sources": _within_sources(records, order[np.repeat(times > 1, times)]),
        "worst": _most_frequent(records, first, times),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Records:
    """What is compared of all records, as numbers."""

    ids: npt.NDArray[np.uint64]
    id_ends: npt.NDArray[np.uint16]
    groups: npt.NDArray[np.uint64]
    files: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    is_eval: npt.NDArray[np.bool_]
    file_names: list[str]

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch]) -> "_Records":
        columns: list[list[npt.NDArray[Any]]] = [[], [], [], [], [], []]
        numbers: dict[str, int] = {}
        for batch in batches:
            packed = batch.filter(pc.greater(batch["num_tokens"], 0))
            files = packed["source"]
            number = [numbers.setdefault(n, len(numbers)) for n in files.dictionary.to_pylist()]
            for column, values in zip(
                columns,
                (
                    *_halves(packed["record_id"]),
                    _halves(packed["group_key"])[0],
                    np.array(number, np.int32)[files.indices.to_numpy()],
                    packed["row"].to_numpy(),
                    pc.equal(packed["split"], "eval").to_numpy(zero_copy_only=False),
                ),
                strict=True,
            ):
                column.append(values)
        kinds = (np.uint64, np.uint16, np.uint64, np.int32, np.int64, np.bool_)
        joined: list[Any] = [
            np.concatenate([np.empty(0, kind), *column])
            for kind, column in zip(kinds, columns, strict=True)
        ]
        joined.append(list(numbers))
        return cls(*joined)

    def sources(self) -> npt.NDArray[Any]:
        """Name of the source of each file."""
        return np.array([name.split("/")[0] for name in self.file_names], dtype=object)


def _halves(keys: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint16]]:
    """The leading 64 and the last 16 bits of keys of 20 hex digits."""
    values, offsets = string_bytes(keys)
    parsed = bytes.fromhex(values[offsets[0] : offsets[-1]].tobytes().decode("ascii"))
    whole = np.frombuffer(parsed, np.uint8).reshape(-1, 10)
    leading = np.ascontiguousarray(whole[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
    return leading, np.ascontiguousarray(whole[:, 8:]).view(">u2").reshape(-1).astype(np.uint16)


def _within_sources(records: _Records, repeated: npt.NDArray[np.int64]) -> dict[str, int]:
    """Records beyond the first of their content within each source.

    Args:
        records: all of them.
        repeated: those whose content occurs more than once, in all.
    """
    names = records.sources()
    found = {str(names[file]): 0 for file in np.unique(records.files).tolist()}
    seen: set[tuple[int, str]] = set()
    for index in repeated.tolist():
        name = str(names[records.files[index]])
        if (int(records.ids[index]), name) in seen:
            found[name] += 1
        seen.add((int(records.ids[index]), name))
    return dict(sorted(found.items()))


def _most_frequent(
    records: _Records, first: npt.NDArray[np.int64], times: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Where the first record of the most frequent contents comes from."""
    often = np.flatnonzero(times > 1)
    chosen = often[np.lexsort((first[often], -times[often]))[:NUM_WORST]]
    return [
        {
            "source": records.file_names[records.files[index]],
            "row": int(records.rows[index]),
            "record_id": f"{records.ids[index]:016x}{records.id_ends[index]:04x}",
            "value": value,
        }
        for index, value in zip(first[chosen].tolist(), times[chosen].tolist(), strict=True)
    ]
