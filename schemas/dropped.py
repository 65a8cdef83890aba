"""Dropped: a row that the recipe leaves out, with place and reason."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import check_values

DROPPED = pandera.DataFrameSchema(
    {
        "row": pandera.Column(pl.Int64, pandera.Check.ge(0)),
        "reason": pandera.Column(pl.String, pandera.Check.str_matches(r"^[a-z][a-z0-9_]*$")),
        "detail": pandera.Column(pl.String, pandera.Check.str_length(min_value=1)),
    },
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of dropped rows."""
    check_columns("dropped", table, tables.DROPPED)
    check_values("dropped", pl.DataFrame(table.drop_columns(["source"])), DROPPED)
