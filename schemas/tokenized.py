"""Tokenized: token ids, and the token ranges that are trained."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import HEX20, check_values, rows_where, spans_in_order

_start = pl.element().struct.field("start")
_end = pl.element().struct.field("end")
_ranges = pl.col("trained_ranges")
_weights = pl.col("range_weights")

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
        rows_where(pl.col("ranges_in_order"), "trained_ranges_in_order"),
        rows_where(
            _weights.is_null()
            | (
                (_weights.list.len() == _ranges.list.len())
                & _weights.list.eval(pl.element().is_finite() & (pl.element() > 0)).list.all()
            ),
            "a_weight_over_0_for_each_trained_range",
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
    columns = ["record_id", "input_ids", "trained_ranges", "range_weights", "num_tokens"]
    frame = pl.DataFrame(table.select([*columns, "num_trained", "label", "group_key"]))
    frame = frame.with_columns(
        ranges_in_order=spans_in_order(table["trained_ranges"], table["num_tokens"])
    )
    check_values("tokenized", frame, TOKENIZED)
