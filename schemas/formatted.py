"""Formatted: a rendered conversation, with the byte spans that are content and that are trained."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa

from packhouse import tables
from schemas.contract import HEX20, check_columns, check_values, rows_where

__all__ = ["FORMATTED", "check"]


def _in_order(spans: str) -> pl.Expr:
    """Spans are inside the text, not empty, sorted and disjoint."""
    starts = pl.col(spans).list.eval(pl.element().struct.field("start"))
    ends = pl.col(spans).list.eval(pl.element().struct.field("end"))
    empty = pl.col(spans).list.len() == 0
    inside = (starts.list.min() >= 0) & (ends.list.max() <= pl.col("text").str.len_bytes())
    not_empty = pl.col(spans).list.eval(
        pl.element().struct.field("start") < pl.element().struct.field("end")
    )
    disjoint = pl.col(spans).list.eval(
        (
            pl.element().struct.field("start").shift(-1) >= pl.element().struct.field("end")
        ).fill_null(True)
    )
    return empty | (inside & not_empty.list.all() & disjoint.list.all())


FORMATTED = pandera.DataFrameSchema(
    {
        "record_id": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
        "text": pandera.Column(pl.String, pandera.Check.str_length(min_value=1)),
    },
    checks=[
        rows_where(_in_order("content_spans"), "content_spans_in_order"),
        rows_where(_in_order("trained_spans"), "trained_spans_in_order"),
        rows_where(
            pl.col("span_weights").is_null()
            | (
                (pl.col("span_weights").list.len() == pl.col("trained_spans").list.len())
                & pl.col("span_weights")
                .list.eval(pl.element().is_finite() & (pl.element() > 0))
                .list.all()
            ),
            "a_weight_over_0_for_each_trained_span",
        ),
        rows_where(
            (pl.col("trained_spans").list.len() > 0) | pl.col("label").is_not_null(),
            "has_something_to_train",
        ),
    ],
    strict=False,
)


def check(table: pa.Table) -> None:
    """Raise ContractError unless `table` is a table of rendered conversations."""
    check_columns("formatted", table, tables.FORMATTED)
    columns = ["record_id", "text", "content_spans", "trained_spans", "span_weights", "label"]
    check_values("formatted", pl.DataFrame(table.select(columns)), FORMATTED)
