"""A Pandera schema (polars, eager) of each table between steps, made of the one declaration.

A rule of `packhouse.records.table_schemas` is a Boolean column of the frame that Pandera checks:
False in the rows that break it. Eager, because a LazyFrame passes bad data silently at Pandera's
default depth. 52,002 rows cost 6 ms; importing Pandera and polars costs 0.14 s, once.
"""

import pandera.polars as pandera
import polars as pl
import pyarrow as pa
from pandera.errors import SchemaErrors

from packhouse.errors import ContractError
from packhouse.records.table_schemas import CONTRACTS, broken_rules, check_columns


def check_table(artefact: str, table: pa.Table) -> None:
    """Check columns, then every value.

    Raises:
        ContractError: column or rule, and row, of up to three breaches, and how many there are.
    """
    declared = CONTRACTS[artefact]
    check_columns(artefact, table)  # exact Arrow types, which polars does not keep
    if not table.num_rows:  # the usual case for `quarantined`; Pandera takes 6 ms
        return
    # Lists are left to the rules, which read them in Arrow without a copy.
    plain = [field for field in declared if not pa.types.is_nested(field.type)]
    frame = pl.DataFrame(table.select([field.name for field in plain])).with_columns(
        **{rule: pl.Series(~broken) for rule, broken in broken_rules(table)}
    )
    columns = {field.name: pandera.Column(nullable=field.nullable) for field in plain}
    columns |= {
        rule: pandera.Column(pl.Boolean, pandera.Check.eq(True))
        for rule in frame.columns
        if rule not in columns
    }
    try:
        pandera.DataFrameSchema(columns, strict=True).validate(frame, lazy=True)
    except SchemaErrors as error:
        cases = error.failure_cases.rows(named=True)
        shown = "; ".join(f"{case['column']} in row {case['index']:,}" for case in cases[:3])
        raise ContractError(
            f"{artefact}: {len(cases):,} values break the contract: {shown}",
            artefact=artefact,
            breaches=len(cases),
        ) from None
