"""Packed: one training row of whole records behind one another.

The values of `input_ids` and `labels` are checked token by token in `packhouse.packing.layout`,
which the loaders and `packhouse verify` use too; here stands what holds of whole rows.
"""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import check_values, rows_where

PACKED = pandera.DataFrameSchema(
    checks=[
        rows_where(pl.col("seq_lengths").list.sum() == pl.col("num_tokens"), "seq_lengths_add_up"),
        rows_where(pl.col("seq_lengths").list.min() > 0, "no_empty_sequence"),
        rows_where(
            pl.col("seq_lengths").list.len() == pl.col("num_records"), "record_id_per_sequence"
        ),
    ],
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of packs."""
    check_columns("packed", table, tables.PACKED)
    frame = pl.DataFrame(table.select(["seq_lengths"])).with_columns(
        num_tokens=pl.Series(pc.list_value_length(table["input_ids"])),
        num_records=pl.Series(pc.list_value_length(table["record_ids"])),
    )
    check_values("packed", frame, PACKED)
