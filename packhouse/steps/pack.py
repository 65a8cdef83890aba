"""pack: which tokens of which record become which training row; each side planned by itself.

Works on lengths alone, over all shards at once: a plan per group of shards would leave packs half
empty. No token is read here; `packhouse.steps.gather` brings them together, an output shard at a
time. Order follows (file, row) and the seed, never how rows lie in shards.

A record's side is a pure function of its group key, so no pack can mix the two, and the split step
only has to prove it. Memory: about 40 bytes a record while packs are planned (docs/operations.md).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.dedup import drop_duplicates
from packhouse.jobs import Job
from packhouse.packing import (
    Admitted,
    GatherTally,
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
from packhouse.steps.shard_io import MappedTables, inputs_of
from packhouse.tables import TOKENIZED
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
    if recipe.dedup.exact == "drop":
        admitted = drop_duplicates(admitted, _chunked(shards, "record_id"))
    is_eval = _sides(shards, recipe.split)
    has_label = _has_label(shards)
    _write_places(folder, receipts, shards, admitted)
    write_batches(folder / "outcomes.arrow", OUTCOMES, _outcomes(admitted, is_eval))
    counts = _counts(admitted)
    rows, lengths = _kept(admitted)
    del admitted
    planned = {}
    for side, is_side in (("train", ~is_eval[rows]), ("eval", is_eval[rows])):
        facts = _plan_side(folder, side, recipe.pack, rows[is_side], lengths[is_side])
        with_label = recipe.pack.strategy == "none" and bool(has_label[rows[is_side]].any())
        planned[side] = {**facts, "with_label": with_label}
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
    rows: npt.NDArray[np.int64],
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
    plan: PackPlan, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(plan.order), _BLOCK):
        block = slice(first, first + _BLOCK)
        order = plan.order[block]
        starts = np.zeros(len(order), np.int32) if plan.starts is None else plan.starts[block]
        ends = lengths[order] if plan.ends is None else plan.ends[block]
        columns = [pa.array(rows[order]), pa.array(starts, pa.int32()), pa.array(ends, pa.int32())]
        yield pa.RecordBatch.from_arrays(columns, schema=SEQUENCES)


def _sides(shards: Sequence[pa.Table], config: SplitConfig) -> npt.NDArray[np.bool_]:
    """Which records are for evaluation; a count needs all keys at once, a share does not."""
    if config.eval_count:
        return sides(_chunked(shards, "group_key"), config)
    parts = [sides(shard["group_key"], config) for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def _has_label(shards: Sequence[pa.Table]) -> npt.NDArray[np.bool_]:
    parts = [shard["label"].is_valid().to_numpy() for shard in shards]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def _chunked(shards: Sequence[pa.Table], name: str) -> pa.ChunkedArray:
    chunks = [chunk for shard in shards for chunk in shard[name].chunks]
    return pa.chunked_array(chunks, TOKENIZED.field(name).type)


def _kept(
    admitted: Sequence[Admitted],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Rows that are packed, numbered through all shards, and how many tokens of each."""
    first = np.cumsum([0, *(len(each.reasons) for each in admitted)])
    rows = [each.rows + base for each, base in zip(admitted, first, strict=False)]
    return np.concatenate(rows), np.concatenate([each.lengths for each in admitted])


def _write_places(
    folder: Path,
    receipts: Sequence[Receipt],
    shards: Sequence[pa.Table],
    admitted: Sequence[Admitted],
) -> None:
    """Write where records lie: the first one of each shard; and the names of all files."""
    sizes = [len(each.reasons) for each in admitted]
    first = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
    columns = [
        pa.array([receipt.key for receipt in receipts]),
        pa.array(first),
        pa.array(sizes, pa.int64()),
    ]
    places = pa.RecordBatch.from_arrays(columns, schema=PLACES)
    write_batches(folder / "places.arrow", PLACES, [places])
    files = {file for shard in shards for file in shard["source"].unique().to_pylist()}
    (folder / "sources.json").write_text(json.dumps(sorted(files)), encoding="utf-8")


def _outcomes(
    admitted: Sequence[Admitted], is_eval: npt.NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """Yield a batch of `OUTCOMES` per shard."""
    first = 0
    for each in admitted:
        num_tokens = np.zeros(len(each.reasons), dtype=np.int32)
        num_tokens[each.rows] = each.lengths
        side = is_eval[first : first + len(each.reasons)].astype(np.int8)
        first += len(each.reasons)
        columns = [
            pa.DictionaryArray.from_arrays(side, ["train", "eval"]),
            pa.DictionaryArray.from_arrays(each.reasons.astype(np.int8), list(REASONS)),
            pa.array(num_tokens),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTCOMES)


def _counts(admitted: Sequence[Admitted]) -> dict[str, Any]:
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for each in admitted:
        counts = each.counts()
        rows.update(counts["rows"])
        tokens.update(counts["tokens"])
    return {
        "rows_in": rows.pop("in", 0),
        "rows_out": rows.pop("kept", 0),
        "dropped": {reason: n for reason, n in sorted(rows.items()) if n},
        "tokens_in": tokens.pop("in", 0),
        "tokens_out": tokens.pop("kept", 0),
        "tokens_dropped": {reason: n for reason, n in sorted(tokens.items()) if n},
    }
