"""The contract of every artefact, checked before its step counts as done.

`check("validated", table)` runs the contract of that name: `schemas/validated.py` and so on. The
modules are imported at the first check, and not at all by a run that finds everything cached.
"""

import importlib

import pyarrow as pa

from packhouse.runtime.without_pandas import without_pandas

__all__ = ["check"]


def check(artefact: str, table: pa.Table) -> None:
    """Check a table against the contract of its artefact.

    Raises:
        ContractError: names artefact, column, check and the first rows that break it.
    """
    with without_pandas():
        importlib.import_module(f"schemas.{artefact}").check(table)
