"""Where a run works on this machine, and what it checks its tables with."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from packhouse.errors import ConfigError
from packhouse.step_store import StepStore

__all__ = ["Check", "Workspace", "check_cache", "default_cache", "read_table", "write_table"]

Check = Callable[[str, pa.Table], None]
"""Called with an artefact's name and its table; raises ContractError."""


def _no_check(artefact: str, table: pa.Table) -> None:
    """Check nothing: for library use without the pipeline's schemas."""


def default_cache() -> Path:
    """Return the folder of cached steps: PACKHOUSE_CACHE, else `.packhouse` where one stands."""
    return Path(os.environ.get("PACKHOUSE_CACHE", ".packhouse"))


def check_cache(folder: Path) -> Path:
    """Return the folder of cached steps if it is one, or can become one; nothing is made.

    Raises:
        ConfigError: a file stands there or above it.
    """
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ConfigError(
            f"cache '{folder}': '{place}' is no folder; give a folder with --cache or "
            "PACKHOUSE_CACHE"
        )
    return folder


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The folder of a run and its contract checks."""

    cache: Path = field(default_factory=default_cache)
    """Steps that are done lie under it; deleting it loses time, never data."""
    check: Check = _no_check
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


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an uncompressed Arrow IPC file, which readers map instead of loading."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.unify_dictionaries())  # a file holds one dictionary per column


def read_table(path: Path) -> pa.Table:
    """Map an Arrow IPC file: its pages are read when they are touched, and can be dropped again."""
    with pa.memory_map(str(path)) as source:
        # One buffer for all columns: for each one read by itself the kernel walks its pages.
        return pa.ipc.open_file(source.read_buffer()).read_all()
