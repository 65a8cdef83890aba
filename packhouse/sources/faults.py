"""The column in which a reader of workbooks and databases says which rows it could not read.

It is the last one of the tables of the formats `WITH_FAULTS`, by its place: a column of the file
may have any name. A row with a fault is quarantined. The cell that is bad is null, so that the row
is not taken for mended; the detail says what was in it.
"""

from collections.abc import Mapping

import pyarrow as pa

WITH_FAULTS = ("xlsx", "sqlite", "duckdb")
"""Formats of files whose rows have it."""

fault_field = pa.field(
    "packhouse fault", pa.struct([("reason", pa.string()), ("detail", pa.string())])
)


def fault_column(faults: Mapping[int, tuple[str, str]], num_rows: int) -> pa.Array:
    """Return the column of a table; `faults`: row from 0 -> reason and detail."""
    values: list[dict[str, str] | None] = [None] * num_rows
    for row, (reason, detail) in faults.items():
        values[row] = {"reason": reason, "detail": detail}
    return pa.array(values, fault_field.type)
