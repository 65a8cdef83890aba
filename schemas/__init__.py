"""The contract of every artefact, checked before its step counts as done.

`check("validated", table)` runs the contract of that name: `schemas/validated.py` and so on. The
modules are imported at the first check, because Pandera takes two seconds to import and a run that
finds everything cached checks nothing.
"""

import importlib

import pyarrow as pa

__all__ = ["check"]


def check(artefact: str, table: pa.Table) -> None:
    """Check a table against the contract of its artefact.

    Raises:
        ContractError: names artefact, column, check and the first rows that break it.
    """
    importlib.import_module(f"schemas.{artefact}").check(table)
