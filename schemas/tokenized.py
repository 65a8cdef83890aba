"""Tokenized: token ids, and the token ranges that are trained."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse import tables
from schemas.contract import HEX20, check_columns, check_values, rows_where

__all__ = ["TOKENIZED", "check"]

_start = pl.element().struct.field("start")
_end = pl.element().struct.field("end")
_ranges = pl.col("trained_ranges")

TOKENIZED = pandera.DataFrameSchema(
    {
        "record_id": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
        "num_tokens": pandera.Column(pl.Int32, pandera.Check.ge(1)),
        "num_trained": pandera.Column(pl.Int32, pandera.Check.ge(0)),
        "group_key": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
    },
    checks=[
        rows_where(pl.col("input_ids").list.len() == pl.col("num_tokens"), "num_tokens_is_length"),
        rows_where(
            _ranges.list.eval(_end - _start).list.sum() == pl.col("num_trained"),
            "num_trained_is_sum_of_ranges",
        ),
        rows_where(
            _ranges.list.eval(
                (_start >= 0) & (_start < _end) & (_start.shift(-1) >= _end).fill_null(True)
            ).list.all(),
            "trained_ranges_in_order",
        ),
        rows_where(
            (_ranges.list.len() == 0)
            | (_ranges.list.last().struct.field("end") <= pl.col("num_tokens")),
            "trained_ranges_inside",
        ),
        rows_where(
            (pl.col("num_trained") > 0) | pl.col("label").is_not_null(), "has_something_to_train"
        ),
    ],
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of token ids."""
    check_columns("tokenized", table, tables.TOKENIZED)
    columns = ["record_id", "input_ids", "trained_ranges", "num_tokens", "num_trained", "label"]
    frame = pl.DataFrame(table.select([*columns, "group_key"]))
    check_values("tokenized", frame, TOKENIZED)
