"""Formatted: a rendered conversation, with the byte spans that are content and that are trained."""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.contracts import check_columns
from packhouse.records import tables
from schemas.contract import HEX20, check_values, rows_where, spans_in_order

FORMATTED = pandera.DataFrameSchema(
    {
        "record_id": pandera.Column(pl.String, pandera.Check.str_matches(HEX20)),
        "text": pandera.Column(pl.String, pandera.Check.str_length(min_value=1)),
    },
    checks=[
        rows_where(pl.col("content_in_order"), "content_spans_in_order"),
        rows_where(pl.col("trained_in_order"), "trained_spans_in_order"),
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
    columns = ["record_id", "text", "trained_spans", "span_weights", "label"]
    sizes = pc.binary_length(table["text"])
    frame = pl.DataFrame(table.select(columns)).with_columns(
        content_in_order=spans_in_order(table["content_spans"], sizes),
        trained_in_order=spans_in_order(table["trained_spans"], sizes),
    )
    check_values("formatted", frame, FORMATTED)
