"""Where a run works on this machine, and what it checks its tables with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from packhouse.records import contracts
from packhouse.run.cache.steps import StepStore
from packhouse.system.places import check_cache, default_cache

Check = Callable[[str, pa.Table], None]
"""Called with an artefact's name and its table; raises ContractError."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The folder of a run and its contract checks."""

    cache: Path = field(default_factory=default_cache)
    """Steps that are done lie under it; deleting it loses time, never data."""
    check: Check = contracts.check
    """Contract of every table, called before its step counts as done."""

    def __post_init__(self) -> None:
        check_cache(self.cache)

    @property
    def steps(self) -> StepStore:
        """The step store of this workspace."""
        return StepStore(self.cache / "steps")

    @property
    def tokenizers(self) -> Path:
        """Folder of tokenizer snapshots."""
        return self.cache / "tokenizers"
