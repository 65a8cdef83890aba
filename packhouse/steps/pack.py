"""pack: which tokens of which record become which training row; each side planned by itself.

Works on lengths alone, over all shards at once: a plan per group of shards would leave packs half
empty. No token is read here; `packhouse.steps.gather` brings them together, an output shard at a
time. Order follows (file, row) and the seed, never how rows lie in shards.

A record's side is a pure function of its group key, so no pack can mix the two, and the split step
only has to prove it. Memory: about 30 bytes a record while packs are planned (docs/operations.md).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.jobs import Job
from packhouse.packing import (
    Admitted,
    GatherTally,
    IndexArray,
    PackPlan,
    PackStatistics,
    apply_over_length,
    plan_packs,
)
from packhouse.packing.overlength import REASONS
from packhouse.recipe import PackConfig, Recipe, SplitConfig
from packhouse.splitting import sides
from packhouse.step_store import Receipt
from packhouse.steps.records import OUTCOMES, PLACES, write_batches
from packhouse.steps.selection import Selection, select
from packhouse.steps.shard_io import MappedTables, inputs_of
from packhouse.workspace import Workspace

__all__ = ["SEQUENCES", "compute"]

# What lies in the packs of a side, one behind another: tokens [start, end) of a record, which is
# numbered through all shards. A pack's own are those between two of `OFFSETS`.
SEQUENCES = pa.schema(
    [
        pa.field("record", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
OFFSETS = pa.schema([pa.field("offset", pa.int64(), nullable=False)])

_BLOCK = 2**20  # sequences written at a time


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write the plan of each side, what became of each record, and where records lie.

    Raises:
        SequenceTooLongError: a record is over `seq_len` and the policy is `error`.
    """
    receipts = inputs_of(job, workspace, "tokenize")
    shards = MappedTables([receipt.path("tokenized.arrow") for receipt in receipts])
    admitted = [apply_over_length(shard, recipe.pack) for shard in shards]
    formatted = [inputs_of(job, workspace, step) for step in ("validate", "format")]
    shard_receipts = list(zip(*formatted, strict=True))
    selection = select(shards, shard_receipts, admitted, recipe, workspace)
    admitted = selection.admitted
    is_eval = _sides(shards, selection, recipe.split)
    has_label = _has_label(shards)
    with_weights = any(s["range_weights"].null_count < s.num_rows for s in shards)
    _write_places(folder, receipts, shards, admitted)
    write_batches(folder / "outcomes.arrow", OUTCOMES, _outcomes(selection, is_eval))
    counts = {**_counts(selection), **_selected(selection, is_eval)}
    if recipe.split.eval_fraction or recipe.split.eval_count:
        counts["split"] = _split_facts(shards, selection, is_eval, recipe.split)
    rows, lengths = selection.kept()
    del admitted, selection
    is_eval = is_eval[rows]
    kept = {"eval": (rows[is_eval], lengths[is_eval]), "train": (rows[~is_eval], lengths[~is_eval])}
    del rows, lengths
    planned = {}
    for side in ("train", "eval"):
        own, lengths = kept.pop(side)
        facts = _plan_side(folder, side, recipe.pack, own, lengths)
        with_label = recipe.pack.strategy == "none" and bool(has_label[own].any())
        planned[side] = {**facts, "with_label": with_label, "with_weights": with_weights}
    return {
        **counts,
        "sides": planned,
        "vocab_size": max(receipt.facts["tokenizer"]["vocab_size"] for receipt in receipts),
        "allow_untrained": recipe.pack.strategy == "concat" or bool(has_label.any()),
    }


def _plan_side(
    folder: Path,
    side: str,
    config: PackConfig,
    rows: IndexArray,
    lengths: npt.NDArray[np.int32],
) -> dict[str, Any]:
    plan = plan_packs(lengths, config.seq_len, config.strategy, config.seed)
    write_batches(folder / f"{side}-sequences.arrow", SEQUENCES, _sequences(plan, rows, lengths))
    offsets = pa.RecordBatch.from_arrays([pa.array(plan.pack_offsets)], schema=OFFSETS)
    write_batches(folder / f"{side}-offsets.arrow", OFFSETS, [offsets])
    statistics = PackStatistics.of(plan, lengths, GatherTally())  # its tallies come with gather
    known = ("seq_len", "strategy", "lower_bound", "length_histogram")
    return {
        "num_packs": plan.num_packs,
        "num_tokens": plan.num_tokens,
        "statistics": {name: getattr(statistics, name) for name in known},
    }


def _sequences(
    plan: PackPlan, rows: IndexArray, lengths: npt.NDArray[np.int32]
) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(plan.order), _BLOCK):
        block = slice(first, first + _BLOCK)
        order = plan.order[block]
        starts = np.zeros(len(order), np.int32) if plan.starts is None else plan.starts[block]
        ends = lengths[order] if plan.ends is None else plan.ends[block]
        columns = [
            pa.array(rows[order], pa.int64()),
            pa.array(starts, pa.int32()),
            pa.array(ends, pa.int32()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=SEQUENCES)


def _sides(
    shards: Sequence[pa.Table], selection: Selection, config: SplitConfig
) -> npt.NDArray[np.bool_]:
    """Which records are for evaluation; a count needs all keys at once, a share does not."""
    if selection.group_keys is not None:
        return sides(selection.group_keys, config)
    if config.eval_count:
        chunks = [chunk for shard in shards for chunk in shard["group_key"].chunks]
        return sides(pa.chunked_array(chunks, pa.string()), config)
    parts = [sides(shard["group_key"], config) for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def _has_label(shards: Sequence[pa.Table]) -> npt.NDArray[np.bool_]:
    parts = [shard["label"].is_valid().to_numpy() for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def _selected(selection: Selection, is_eval: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """What mixing and repeats did, for the manifest."""
    facts = dict(selection.facts)
    if "dedup" in facts:
        facts["dedup"]["near"]["on_both_sides"] = selection.num_near_on_both_sides(is_eval)
    return facts


def _split_facts(
    shards: Sequence[pa.Table],
    selection: Selection,
    is_eval: npt.NDArray[np.bool_],
    config: SplitConfig,
) -> dict[str, Any]:
    """How many records were asked for eval, and are there; and how many were joined to others.

    Records are those that are packed, each counted once.
    """
    is_packed = np.concatenate([np.zeros(0, np.int32), *selection.times]) > 0
    num_packed = int(is_packed.sum())
    joined = np.zeros(len(is_packed), np.bool_)
    if selection.group_keys is not None:
        keys = [chunk for shard in shards for chunk in shard["group_key"].chunks]
        own = pa.chunked_array(keys, pa.string())
        joined = pc.not_equal(own, selection.group_keys).to_numpy(zero_copy_only=False)
    count = config.eval_count
    return {
        "records": num_packed,
        "eval": int((is_eval & is_packed).sum()),
        "asked": count if count is not None else round(config.eval_fraction * num_packed),
        "joined": int((joined & is_packed).sum()),
    }


def _write_places(
    folder: Path,
    receipts: Sequence[Receipt],
    shards: Sequence[pa.Table],
    admitted: Sequence[Admitted],
) -> None:
    """Write where records lie: the first one of each shard; and the names of all files."""
    sizes = [len(each.reasons) for each in admitted]
    first = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
    keys = pa.array([receipt.key for receipt in receipts])
    columns = [keys, pa.array(first), pa.array(sizes, pa.int64())]
    places = pa.RecordBatch.from_arrays(columns, schema=PLACES)
    write_batches(folder / "places.arrow", PLACES, [places])
    files = {file for shard in shards for file in shard["source"].unique().to_pylist()}
    (folder / "sources.json").write_text(json.dumps(sorted(files)), encoding="utf-8")


def _outcomes(selection: Selection, is_eval: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    """Yield a batch of `OUTCOMES` per shard."""
    first = 0
    for each, times in zip(selection.admitted, selection.times, strict=True):
        num_tokens = np.zeros(len(each.reasons), dtype=np.int32)
        num_tokens[each.rows] = each.lengths
        rows = slice(first, first + len(each.reasons))
        first, none = rows.stop, pa.nulls(len(times), pa.string())
        columns = [
            pa.DictionaryArray.from_arrays(is_eval[rows].astype(np.int8), ["train", "eval"]),
            pa.DictionaryArray.from_arrays(each.reasons.astype(np.int8), list(REASONS)),
            pa.array(num_tokens),
            pa.array(times),
            none if selection.repeats is None else selection.repeats[rows],
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTCOMES)


def _counts(selection: Selection) -> dict[str, Any]:
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for each in selection.admitted:
        counts = each.counts()
        rows.update(counts["rows"])
        tokens.update(counts["tokens"])
    added = selection.added
    more = {name: sum(counts.values()) for name, counts in added.items()}
    return {
        "rows_in": rows.pop("in", 0),
        "rows_out": rows.pop("kept", 0) + more.get("rows", 0),
        "added": added.get("rows", {}),
        "dropped": {reason: n for reason, n in sorted(rows.items()) if n},
        "tokens_in": tokens.pop("in", 0),
        "tokens_out": tokens.pop("kept", 0) + more.get("tokens", 0),
        "tokens_added": added.get("tokens", {}),
        "tokens_dropped": {reason: n for reason, n in sorted(tokens.items()) if n},
    }
