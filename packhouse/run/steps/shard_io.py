"""What steps that work on shards share: bad rows, and tables that are mapped when looked at."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from packhouse.read import SourceShard, with_raw_rows
from packhouse.recipe import ValidateConfig
from packhouse.records.ledger import RowCounts
from packhouse.records.render_counts import RenderCounts
from packhouse.records.tables import REFUSED, read_table, write_table
from packhouse.run.cache.steps import Receipt

QUARANTINE = "quarantined.arrow"
"""Bad rows of a shard, in the folder of the step that refused them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts(RowCounts):
    """What came of the rows of a shard."""

    notes: Mapping[str, int]
    """How often something was seen that a reader should know, though no row was lost by it."""
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Of the format step: tokens that end answers, and where each is from."""
    rows_rendered: int | None = None
    """Of the format step: rows that gave a record."""


def render_counts(receipts: Iterable[Receipt[ShardCounts]]) -> RenderCounts:
    """Return what the format step says of all shards, and the notes of whatever steps are given."""
    return RenderCounts.total(
        RenderCounts(
            rows=(facts.rows_rendered or facts.rows_out) * (receipt.step == "format"),
            records=facts.rows_out * (receipt.step == "format"),
            stop_tokens=facts.stop_tokens,
            notes=facts.notes,
        )
        for receipt in receipts
        if isinstance(facts := receipt.facts, ShardCounts)
    )


class MappedTables(Sequence[pa.Table]):
    """Tables of files, mapped when they are looked at: no number of shards is too large."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> pa.Table: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[pa.Table]: ...

    def __getitem__(self, index: int | slice) -> pa.Table | Sequence[pa.Table]:
        if isinstance(index, slice):
            return MappedTables(self._paths[index])
        return read_table(self._paths[index])


def take_refused(
    folder: Path, shard: SourceShard, rules: ValidateConfig, before: Sequence[Receipt[ShardCounts]]
) -> dict[str, Any]:
    """Give the rows that a worker refused their raw bytes; write and count them.

    Args:
        folder: of the step.
        shard: where the raw bytes are.
        rules: how many of them are kept.
        before: receipts of the steps before, of the same shard.

    Returns:
        `quarantined` and `quarantined_again` of `RowCounts`.
    """
    refused = folder / REFUSED
    quarantined = with_raw_rows(read_table(refused), shard, rules)
    refused.unlink()
    files = [each.path(QUARANTINE) for each in before if QUARANTINE in each.files]
    known = [read_table(file)["row"] for file in files]
    return write_quarantined(folder, quarantined, known)


def write_quarantined(
    folder: Path, rows: pa.Table, before: Sequence[pa.ChunkedArray] = ()
) -> dict[str, Any]:
    """Write bad rows, if any; `before` are the numbers of those that earlier steps found.

    Returns:
        `quarantined` and `quarantined_again` of `RowCounts`.
    """
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *map(np.asarray, before)]))
    new = np.setdiff1d(rows["row"].to_numpy(), every)
    return {
        "quarantined": write_with_reasons(folder / QUARANTINE, rows),
        "quarantined_again": rows.num_rows - len(new),
    }


def write_with_reasons(path: Path, rows: pa.Table) -> dict[str, int]:
    """Write bad rows, or those that the recipe leaves out, if any; count them by reason."""
    if rows.num_rows:
        write_table(path, rows)
    return dict(sorted(Counter(rows["reason"].to_pylist()).items()))
