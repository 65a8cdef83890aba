"""Validated: a conversation that passed its checks."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import HEX20, check_values, rows_where

_roles = pl.col("messages").list.eval(pl.element().struct.field("role"))

VALIDATED = pandera.DataFrameSchema(
    {
        "record_id": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
        "row": pandera.Column(pl.Int64, pandera.Check.ge(0)),
        "weight": pandera.Column(pl.Float32, pandera.Check.gt(0), nullable=True),
        "label": pandera.Column(pl.Int64, pandera.Check.ge(0), nullable=True),
        "group_key": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
    },
    checks=[
        rows_where(pl.col("messages").list.len() > 0, "has_messages"),
        rows_where(
            _roles.list.eval(
                pl.element().is_in(["system", "user", "assistant", "tool"])
            ).list.all(),
            "known_roles",
        ),
    ],
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of validated conversations."""
    check_columns("validated", table, tables.VALIDATED)
    columns = ["record_id", "row", "messages", "weight", "label", "group_key"]
    check_values("validated", pl.DataFrame(table.select(columns)), VALIDATED)
