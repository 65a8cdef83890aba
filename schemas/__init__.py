"""The contracts of tables between steps, checked with Pandera before a step counts as done.

Columns and rules of values are declared once, in `packhouse.records.table_schemas`.
`schemas.pandera_contracts` makes Pandera schemas of both. It is imported at the first check, so not
at all by a run that finds everything cached.
"""

import pyarrow as pa

__all__ = ["check"]


def check(artefact: str, table: pa.Table) -> None:
    """Check a table against the contract of its artefact.

    Raises:
        ContractError: names artefact, column or rule, and the first rows that break it.
    """
    from schemas.pandera_contracts import check_table

    check_table(artefact, table)
