"""Quarantined: a row that did not pass, with place and reason."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import check_values

QUARANTINED = pandera.DataFrameSchema(
    {
        "row": pandera.Column(pl.Int64, pandera.Check.ge(0)),
        "byte_offset": pandera.Column(pl.Int64, pandera.Check.ge(0), nullable=True),
        "step": pandera.Column(pl.String, pandera.Check.isin(["validate", "format", "tokenize"])),
        "reason": pandera.Column(pl.String, pandera.Check.str_matches(r"^[a-z][a-z0-9_]*$")),
        "detail": pandera.Column(pl.String, pandera.Check.str_length(min_value=1)),
        "raw_size": pandera.Column(pl.Int64, pandera.Check.ge(0)),
        "raw_sha256": pandera.Column(pl.String, pandera.Check.str_matches(r"^[0-9a-f]{64}$")),
    },
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of quarantined rows."""
    check_columns("quarantined", table, tables.QUARANTINED)
    check_values("quarantined", pl.DataFrame(table.drop_columns(["source", "raw"])), QUARANTINED)
