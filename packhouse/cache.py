"""Room in the cache of steps: what lies there, what the last runs used, what may go.

A step is in use if the last run of some dataset found or made it (`packhouse.last_run` keeps their
keys). Nothing here is needed for correctness: a step that is gone is done again, and one that goes
while a run reads it costs that run an error, never a wrong byte; hence the grace.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cached", "choose_steps", "list_steps", "remove_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached:
    """One finished job in the cache."""

    step: str
    key: str
    num_bytes: int
    used_at: float
    """When it was made, or last found by a run: seconds since 1970."""
    is_used: bool
    """Whether the last run of some dataset used it."""


def list_steps(cache: Path) -> list[Cached]:
    """List the finished jobs of a cache, by step and key. Costs a look at each file's size."""
    in_use = _keys_of_last_runs(cache)
    found = []
    for folder in sorted((cache / "steps").glob("*/*")):
        if folder.parent.name == "tmp":
            continue
        with suppress(FileNotFoundError, NotADirectoryError):  # another process took it away
            sizes = [file.stat().st_size for file in folder.iterdir()]
            found.append(
                Cached(
                    step=folder.parent.name,
                    key=folder.name,
                    num_bytes=sum(sizes),
                    used_at=(folder / "receipt.json").stat().st_mtime,
                    is_used=folder.name in in_use,
                )
            )
    return found


def _keys_of_last_runs(cache: Path) -> set[str]:
    keys: set[str] = set()
    for path in (cache / "runs").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            keys.update(job["key"] for job in json.loads(path.read_bytes()))
    return keys


def choose_steps(
    found: Sequence[Cached], most_bytes: int | None = None, grace_s: float = 3600.0
) -> list[Cached]:
    """Choose what may go: longest unused first.

    Args:
        found: what lies there.
        most_bytes: size to come down to, with steps in use if it must be; None: all out of use.
        grace_s: steps made or found in the last seconds stay.

    Example:
        >>> def step(key, used_at, is_used):
        ...     return Cached(step="s", key=key, num_bytes=10, used_at=used_at, is_used=is_used)
        >>> found = [step("a", 1.0, True), step("b", 3.0, False), step("c", 2.0, False)]
        >>> [each.key for each in choose_steps(found)]
        ['c', 'b']
        >>> [each.key for each in choose_steps(found, most_bytes=20)]
        ['c']
        >>> [each.key for each in choose_steps(found, most_bytes=0)]
        ['c', 'b', 'a']
    """
    latest = time.time() - grace_s
    old = sorted(
        (each for each in found if each.used_at <= latest),
        key=lambda each: (each.is_used, each.used_at, each.step, each.key),
    )
    if most_bytes is None:
        return [each for each in old if not each.is_used]
    chosen, size = [], sum(each.num_bytes for each in found)
    for each in old:
        if size <= most_bytes:
            break
        chosen.append(each)
        size -= each.num_bytes
    return chosen


def remove_steps(cache: Path, chosen: Sequence[Cached]) -> int:
    """Remove steps, each as a whole; returns the bytes that were freed."""
    freed = 0
    tmp = cache / "steps" / "tmp"
    tmp.mkdir(parents=True, exist_ok=True)
    for each in chosen:
        gone = tmp / f"gone-{uuid.uuid4().hex[:12]}"
        with suppress(FileNotFoundError):
            os.replace(cache / "steps" / each.step / each.key, gone)  # never seen half
            shutil.rmtree(gone, ignore_errors=True)
            freed += each.num_bytes
    return freed
