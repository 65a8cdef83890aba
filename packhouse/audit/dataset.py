"""The audit of the whole: shards added up, the packs as they will be published, and repetition."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.audit.shard import NUM_WORST
from packhouse.packing.lists import flat_list, read_ranges, zero_based

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


def audit_records(records: pa.Table) -> dict[str, Any]:
    """Count what occurs more than once, in each source and in all, and what is on both sides.

    Args:
        records: schema `steps.pack.RECORDS`, every record once for every time it occurs; those
            that were dropped do not count.

    Returns:
        `duplicates`: records beyond the first of their content; `prompt_groups`: prompts that
        several different records share, and `prompt_group_records`, how many do; `both_sides`:
        contents in train and eval; `sources`: duplicates within each; `worst`: most frequent ones.
    """
    records = records.filter(pc.greater(records["num_tokens"], 0))
    counted = pc.value_counts(_one(records["record_id"]))
    times = counted.field("counts").to_numpy()
    by_group = records.group_by("group_key").aggregate([("record_id", "count_distinct")])
    sharing = by_group["record_id_count_distinct"].to_numpy()
    sides = [records.filter(pc.equal(records["split"], side)) for side in ("train", "eval")]
    distinct = [pc.count_distinct(side["record_id"]).as_py() for side in sides]
    both = sum(distinct) - pc.count_distinct(records["record_id"]).as_py()
    return {
        "duplicates": int((times - 1).sum()),
        "prompt_groups": int((sharing > 1).sum()),
        "prompt_group_records": int(sharing[sharing > 1].sum()),
        "both_sides": both,
        "sources": _within_sources(records),
        "worst": _most_frequent(records, counted, times),
    }


def _within_sources(records: pa.Table) -> dict[str, int]:
    files = _one(records["source"].unify_dictionaries())
    names = pa.array([file.split("/")[0] for file in files.dictionary.to_pylist()], pa.string())
    table = pa.table({"source": names.take(files.indices), "record_id": records["record_id"]})
    counts = table.group_by("source").aggregate(
        [("record_id", "count"), ("record_id", "count_distinct")]
    )
    return {
        row["source"]: row["record_id_count"] - row["record_id_count_distinct"]
        for row in sorted(counts.to_pylist(), key=lambda row: row["source"])
    }


def _most_frequent(
    records: pa.Table, counted: pa.StructArray, times: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Where the first record of the most frequent contents comes from."""
    often = np.flatnonzero(times > 1)
    chosen = often[np.argsort(-times[often], kind="stable")[:NUM_WORST]]
    ids = counted.field("values").take(pa.array(chosen))
    places = pc.index_in(ids, value_set=_one(records["record_id"]))
    rows = records.select(["source", "row", "record_id"]).take(places).to_pylist()
    return [row | {"value": int(n)} for row, n in zip(rows, times[chosen].tolist(), strict=True)]


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
