"""The audit of the whole: shards added up, and the packs as they will be published."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.auditing.shard import NUM_WORST
from packhouse.records.lists import flat_list, read_ranges, zero_based
from packhouse.system.arrays import Bools


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
_NOTES = ("control_text", "control_text_rows", "straddles_start", "straddles_end", "split_prompts")


def audit_packs(
    packs: Iterable[pa.RecordBatch],
    is_control: Bools,
    is_blank: Bools,
) -> dict[str, int]:
    r"""Look at training rows as they are: packs and sequences without a trained token, cut answers.

    A sequence that ends on a trained token which is no control token teaches the model to go on;
    white space may stand behind it, as in `<|im_end|>\n`.

    Args:
        packs: batches of schema `tables.PACKED`.
        is_control: whether an id is of a control token, shape [vocab_size].
        is_blank: whether an id is nothing but white space, shape [vocab_size].

    Returns:
        `packs`, `sequences`, `untrained_packs`, `untrained_sequences`, `cut_sequences`.
    """
    counts: Counter[str] = Counter()
    for batch in packs:
        if batch.num_rows:
            counts.update(_audit_batch(batch, is_control, is_blank))
    return dict(counts)


def _audit_batch(batch: pa.RecordBatch, is_control: Bools, is_blank: Bools) -> dict[str, int]:
    ids, offsets = zero_based(*flat_list(batch["input_ids"]))
    lengths, _ = zero_based(*flat_list(batch["seq_lengths"]))
    ranges = read_ranges(batch["trained_ranges"])
    rows = ranges.row_of_each()
    ends = ranges.ends + offsets[rows].astype(np.int64)
    # Sequences of [3 2] tokens end at [3 5], trained ranges at [2 5]: both have one, and the
    # second ends on a trained token.
    sequence_ends = np.cumsum(lengths, dtype=np.int64)
    is_trained = np.zeros(len(lengths), np.bool_)
    is_trained[np.searchsorted(sequence_ends, ends - 1, "right")] = True
    last_range = np.searchsorted(ends, sequence_ends)
    is_open = np.isin(sequence_ends, ends)  # ends on a trained token
    starts = (ranges.starts + offsets[rows].astype(np.int64))[last_range[is_open]]
    # The last token that is no white space, of each; one before the range is not trained.
    last = np.maximum.accumulate(np.where(is_blank[ids], -1, np.arange(len(ids))))
    last = last[sequence_ends[is_open] - 1]
    is_cut = (last < starts) | ~is_control[ids[last]]
    # A label for a model's head is what such a row teaches; its tokens are not.
    has_label = batch["label"].is_valid().to_numpy(zero_copy_only=False)
    return {
        "packs": batch.num_rows,
        "sequences": len(lengths),
        "untrained_packs": int(((ranges.counts() == 0) & ~has_label).sum()),
        "untrained_sequences": int((~is_trained).sum()),
        "cut_sequences": int(is_cut.sum()),
    }
