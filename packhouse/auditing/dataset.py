"""The audit of the whole: shards added up, packs as they will be published, what occurs twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.tokens import NUM_WORST
from packhouse.errors import PluginError
from packhouse.records.hex_keys import is_among, leading_bits, sort_leading_bits
from packhouse.records.lists import flat_list, read_ranges, zero_based
from packhouse.system.arrays import Bools, Uint64s
from packhouse.system.plugins import Plugin

_MAX_DETAIL = 200

# Counts of the tokenize step that no table shows afterwards.
_NOTES = ("control_text", "control_text_rows", "straddles_start", "straddles_end", "split_prompts")


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
        if not batch.num_rows:
            continue
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
        counts.update(
            packs=batch.num_rows,
            sequences=len(lengths),
            untrained_packs=int(((ranges.counts() == 0) & ~has_label).sum()),
            untrained_sequences=int((~is_trained).sum()),
            cut_sequences=int(is_cut.sum()),
        )
    return dict(counts)


Read: TypeAlias = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def audit_records(read: Read, num_records: int) -> dict[str, Any]:
    """Count what occurs more than once, in each source and in all, and what is on both sides.

    Ids and groups are compared by their leading 64 bits. Memory: 9 bytes a record, and 70 more for
    each that shares its content; so records are read three times.

    Args:
        read: gives the named columns of all records, of schema `steps.records.RECORDS`, in batches,
            each time in the same order; those that were dropped do not count.
        num_records: at most so many.

    Returns:
        `duplicates`: records beyond the first of their content; `prompt_groups`: prompts that
        several different records share, and `prompt_group_records`, how many do; `both_sides`:
        contents in train and eval; `sources`: duplicates within each; `worst`: most frequent ones.
    """
    files: set[str] = set()

    def packed(*columns: str) -> Iterator[pa.RecordBatch]:
        for batch in read([*columns, "times"]):
            yield batch.filter(pc.greater(batch["times"], 0))

    def ids() -> Iterator[pa.Array]:
        for batch in packed("record_id", "source"):
            files.update(batch["source"].unique().to_pylist())
            yield batch["record_id"]

    ordered = sort_leading_bits(ids(), num_records)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    sharing = []  # records whose content occurs more than once
    for batch in packed("record_id", "group_key", "source", "row", "split"):
        sharing.append(batch.filter(pa.array(is_among(leading_bits(batch["record_id"]), repeated))))
    records = pa.Table.from_batches(sharing, None if sharing else _NO_RECORDS)
    names = [file.split("/")[0] for file in records["source"].to_pylist()]
    flat = pa.table(
        {
            "bits": leading_bits(records["record_id"]),
            "name": pa.array(names, pa.string()),
            "is_eval": pc.equal(records["split"], "eval"),
            "at": np.arange(records.num_rows),
        }
    )
    # Records a b a: content a is first at 0, and occurs twice.
    counted = [("at", "min"), ("at", "count"), ("is_eval", "sum")]
    contents = flat.group_by("bits").aggregate(counted).sort_by("at_min")
    first, times, in_eval = (contents[f"{n}_{how}"].to_numpy() for n, how in counted)
    chosen = np.argsort(-times, kind="stable")[:NUM_WORST]
    places = records.select(["source", "row", "record_id"]).take(pa.array(first[chosen]))
    again = Counter(names)
    again.subtract(flat.group_by(["bits", "name"]).aggregate([])["name"].to_pylist())

    def groups() -> Iterator[pa.Array | pa.ChunkedArray]:
        """The group of each content."""
        yield records["group_key"].take(pa.array(first))
        for batch in packed("record_id", "group_key"):
            is_repeated = pa.array(is_among(leading_bits(batch["record_id"]), repeated))
            yield batch["group_key"].filter(pc.invert(is_repeated))

    return {
        "duplicates": int((times - 1).sum()),
        "both_sides": int(np.count_nonzero((in_eval > 0) & (in_eval < times))),
        "sources": {name: again[name] for name in sorted({f.split("/")[0] for f in files})},
        "worst": [
            {**place, "value": value}
            for place, value in zip(places.to_pylist(), times[chosen].tolist(), strict=True)
        ],
        **_shared_prompts(sort_leading_bits(groups(), num_records)),
    }


_TEXTS = ("record_id", "group_key", "source", "split")
_NO_RECORDS = pa.schema([*((name, pa.string()) for name in _TEXTS), ("row", pa.int64())])


def _shared_prompts(groups: Uint64s) -> dict[str, int]:
    """How many groups occur more than once, and how often in all.

    Example:
        >>> _shared_prompts(np.array([1, 2, 2, 3, 4, 4, 4], np.uint64))
        {'prompt_groups': 2, 'prompt_group_records': 5}
    """
    is_again = groups[1:] == groups[:-1]
    num_again = int(np.count_nonzero(is_again))
    num_groups = num_again - int(np.count_nonzero(is_again[1:] & is_again[:-1]))
    return {"prompt_groups": num_groups, "prompt_group_records": num_again + num_groups}


def run_check(plugin: Plugin, conversations: pa.Table) -> dict[str, object]:
    """Let a plug-in look at a shard: it returns a dict, the number of a bad row -> what is wrong.

    Args:
        plugin: the check, called with the table.
        conversations: table of schema `tables.VALIDATED`.

    Returns:
        Plain JSON: the check, rows, rows that failed, and the first of these.

    Raises:
        PluginError: its code failed, or it returned something else.
    """
    with plugin.named_in_errors(f" on {conversations.num_rows:,} conversations"):
        found = plugin.load()(conversations)
    if not isinstance(found, dict) or not all(
        type(row) is int and isinstance(detail, str) for row, detail in found.items()
    ):
        raise PluginError(f"{plugin} returned no dict of row numbers and texts")
    if found and not 0 <= min(found) <= max(found) < conversations.num_rows:
        raise PluginError(
            f"{plugin} named row {max(found, key=abs)} of {conversations.num_rows:,} conversations"
        )
    first = sorted(found)[:NUM_WORST]
    places = conversations.select(["source", "row"]).take(pa.array(first, pa.int64())).to_pylist()
    return {
        "check": plugin.name,
        "plugin": str(plugin),
        "rows": conversations.num_rows,
        "failed": len(found),
        "worst": [
            {**place, "detail": found[index][:_MAX_DETAIL]}
            for index, place in zip(first, places, strict=True)
        ],
    }


def combine_checks(shards: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Add up what checks found, by the name of the check."""
    combined: dict[str, dict[str, Any]] = {}
    for found in shards:
        total = combined.setdefault(
            found["check"], {"plugin": found["plugin"], "rows": 0, "failed": 0, "worst": []}
        )
        total["rows"] += found["rows"]
        total["failed"] += found["failed"]
        total["worst"] = [*total["worst"], *found["worst"]][:NUM_WORST]
    return combined
