"""pack: token ids of all shards -> training rows, each side planned and gathered by itself.

A record's side is a pure function of its group key, so no pack can mix the two, and the split step
only has to prove it. Planning sees lengths alone; tokens are then gathered from the mapped shards,
half a million at a time. Order follows (file, row) and the seed, never how rows lie in shards.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.dedup import drop_duplicates
from packhouse.jobs import Job
from packhouse.packing import (
    Admitted,
    GatherTally,
    PackStatistics,
    apply_over_length,
    check_packed,
    gather,
    plan_packs,
)
from packhouse.packing.overlength import REASONS
from packhouse.progress import advance
from packhouse.recipe import PackConfig, Recipe
from packhouse.splitting import sides
from packhouse.steps.shard_io import inputs_of
from packhouse.tables import PACKED, TOKENIZED
from packhouse.workspace import Workspace, read_table

__all__ = ["RECORDS", "compute"]


# Lineage, a row per record: its raw row, its side, and what became of it.
RECORDS = pa.schema(
    [
        *(TOKENIZED.field(name) for name in ("record_id", "source", "row", "group_key")),
        pa.field("split", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("outcome", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),  # tokens of it in packs; 0: dropped
    ]
)


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write `train.arrow`, `eval.arrow` and `records.arrow`.

    Raises:
        SequenceTooLongError: a record is over `seq_len` and the policy is `error`.
        ContractError: a pack breaks its contract.
    """
    receipts = inputs_of(job, workspace, "tokenize")
    shards = [read_table(receipt.path("tokenized.arrow")) for receipt in receipts]
    vocab_size = max(receipt.facts["tokenizer"]["vocab_size"] for receipt in receipts)
    admitted = [apply_over_length(shard, recipe.pack) for shard in shards]
    if recipe.dedup.exact == "drop":
        admitted = drop_duplicates(admitted, _chunked(shards, "record_id"))
    is_eval = sides(_chunked(shards, "group_key"), recipe.split)
    rows, lengths = _kept(admitted)
    statistics = {}
    for side, is_side in (("train", ~is_eval[rows]), ("eval", is_eval[rows])):
        packing = _Packing(shards, recipe.pack, lengths[is_side], rows[is_side], vocab_size)
        path = folder / f"{side}.arrow"
        _write_batches(path, PACKED, packing)
        workspace.check("packed", read_table(path))
        statistics[side] = packing.statistics()
    records = _records(shards, admitted, is_eval)
    _write_batches(folder / "records.arrow", RECORDS, records)
    return {**_counts(admitted), "statistics": statistics}


class _Packing:
    """The packs of one side, as an iterator of checked batches; then their statistics."""

    def __init__(
        self,
        shards: Sequence[pa.Table],
        config: PackConfig,
        lengths: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        self.plan = plan_packs(lengths, config.seq_len, config.strategy, config.seed)
        self.tally = GatherTally()
        self.lengths = lengths
        self.vocab_size = vocab_size
        is_classification = any(shard["label"].null_count < len(shard) for shard in shards)
        self.allow_untrained = config.strategy == "concat" or is_classification
        self.batches = gather(shards, self.plan, lengths, rows, tally=self.tally)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self.batches:
            check_packed(
                batch,
                self.plan.seq_len,
                self.vocab_size,
                allow_untrained=self.allow_untrained,
            )
            advance(batch.num_rows / self.plan.num_packs / 2)
            yield batch

    def statistics(self) -> dict[str, Any]:
        return PackStatistics.of(self.plan, self.lengths, self.tally).to_dict()


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


def _write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _records(
    shards: Sequence[pa.Table], admitted: Sequence[Admitted], is_eval: npt.NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """Yield a batch of `RECORDS` per shard."""
    sources = pa.array(sorted({file for shard in shards for file in _files(shard)}), pa.string())
    first = 0
    for shard, each in zip(shards, admitted, strict=True):
        num_tokens = np.zeros(len(each.reasons), dtype=np.int32)
        num_tokens[each.rows] = each.lengths
        side = is_eval[first : first + len(each.reasons)].astype(np.int8)
        first += len(each.reasons)
        columns = [
            shard["record_id"].combine_chunks(),
            _recoded(shard["source"], sources),
            shard["row"].combine_chunks(),
            shard["group_key"].combine_chunks(),
            pa.DictionaryArray.from_arrays(side, ["train", "eval"]),
            pa.DictionaryArray.from_arrays(each.reasons.astype(np.int8), list(REASONS)),
            pa.array(num_tokens),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=RECORDS)


def _files(shard: pa.Table) -> list[str]:
    files: list[str] = shard["source"].unique().to_pylist()
    return files


def _recoded(column: pa.ChunkedArray, values: pa.Array) -> pa.DictionaryArray:
    """One dictionary for all shards: Arrow files hold one per column."""
    indices = pc.index_in(column.cast(pa.string()), values).combine_chunks()
    return pa.DictionaryArray.from_arrays(indices, values)


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
