"""Where a run works on this machine, and what it checks its tables with."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from packhouse.errors import ConfigError
from packhouse.step_store import StepStore

__all__ = [
    "CachePlace",
    "Check",
    "Workspace",
    "check_cache",
    "default_cache",
    "find_cache",
    "read_table",
    "write_table",
]

Check = Callable[[str, pa.Table], None]
"""Called with an artefact's name and its table; raises ContractError."""


def _no_check(artefact: str, table: pa.Table) -> None:
    """Check nothing: for library use without the pipeline's schemas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlace:
    """Where finished steps lie."""

    folder: Path
    """On this machine."""
    mirror: str | None = None
    """URI of an object store through which machines without a common disk share steps."""


def find_cache(setting: str | None = None) -> CachePlace:
    """Return where finished steps lie: the one rule for every command, flow and loader.

    A setting is a folder, or the URI of a mirror. Folder and mirror are each the first one named by
    `setting` (a `--cache`), PACKHOUSE_CACHE or PACKHOUSE_CACHE_MIRROR. Else the folder is
    `.packhouse`, and there is no mirror.

    Raises:
        ConfigError: PACKHOUSE_CACHE_MIRROR is a folder.

    Example:
        >>> find_cache("s3://bucket/steps").mirror, find_cache("/data/cache").folder
        ('s3://bucket/steps', PosixPath('/data/cache'))
    """
    shared = os.environ.get("PACKHOUSE_CACHE_MIRROR") or None
    if shared is not None and "://" not in shared:
        raise ConfigError(
            f"PACKHOUSE_CACHE_MIRROR is '{shared}'; give a URI such as s3://bucket/prefix"
        )
    named = [name for name in (setting, os.environ.get("PACKHOUSE_CACHE"), shared) if name]
    folders = [name for name in named if "://" not in name]
    mirrors = [name for name in named if "://" in name]
    return CachePlace(folder=Path((*folders, ".packhouse")[0]), mirror=(*mirrors, None)[0])


def default_cache() -> Path:
    """Return the folder of finished steps where no setting names another; see `find_cache`."""
    return find_cache().folder


def check_cache(folder: Path) -> Path:
    """Return the folder of cached steps if it is one, or can become one; nothing is made.

    Raises:
        ConfigError: a file stands there or above it, or it is a URI.
    """
    if re.search(r"(^|/)[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise ConfigError(
            f"cache '{folder}' is a URI, and a folder of this machine is needed here. Runs "
            "(`python -m flows.prepare`, `packhouse ci`) take the URI of a mirror as --cache, "
            "PACKHOUSE_CACHE or PACKHOUSE_CACHE_MIRROR"
        )
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
