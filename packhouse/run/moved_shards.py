"""Copy the steps of shards that only moved within their file.

Files are cut after the same records whatever precedes them, so an inserted row usually changes
one shard. The shards after it have the same bytes at another place, and so their rows have other
numbers and their steps other keys. The files of the last run need only these numbers, which takes a
sixth of the time of making them again.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.table_schemas import read_table, with_column, write_table
from packhouse.run.step_cache import AnyReceipt, LastJob
from packhouse.system.fingerprint import digest

if TYPE_CHECKING:
    from packhouse.run.step import AnyJob


class Move(NamedTuple):
    """A job that read the same bytes at another place of the file."""

    key: str
    rows: int
    """To add to its row numbers."""
    num_bytes: int
    """To add to its byte offsets."""


def find_moves(jobs: "Sequence[AnyJob]", last_run: Collection[LastJob]) -> dict[str, Move]:
    """Return the moves of jobs that the last run did for the same bytes at another place.

    Args:
        jobs: jobs of a plan that read one shard; each comes after those that it reads.
        last_run: jobs of the last run.

    Returns:
        Key of a job -> the job of the last run, and how far its rows and bytes moved.
    """
    keys, last_keys = {job.key for job in jobs}, {job.key for job in last_run}
    # Only what changed, so that an unchanged run with thousands of files digests nothing.
    gone = [job for job in last_run if job.key not in keys]
    known = {_identity(job.step, job.parts): job for job in gone}
    moves: dict[str, Move] = {}
    for job in jobs:
        if job.key in last_keys:
            continue
        inputs = cast("list[str]", job.parts["inputs"])
        of_inputs = [moves[key] for key in inputs if key in moves]
        parts = {**job.parts, "inputs": [moves[k].key if k in moves else k for k in inputs]}
        shard = getattr(job.parameters, "shard", None)
        old = known.get(_identity(job.step.name, parts))
        if old is None:
            continue
        if of_inputs:
            moves[job.key] = of_inputs[0]._replace(key=old.key)
        elif shard is not None and old.shard is not None:
            rows = shard.row_start - old.shard["row_start"]
            moves[job.key] = Move(old.key, rows, shard.byte_start - old.shard["byte_start"])
    return moves


def _identity(step: str, parts: Mapping[str, Any]) -> str:
    """Return a digest of what decides a job's output, except for the place of its shard."""
    known = parts.get("shard", {})
    known = {n: known[n] for n in known if n not in ("row_start", "byte_start", "byte_end")}
    return digest([step, {**parts, "shard": known}])


def copy_moved(old: AnyReceipt, move: Move, folder: Path) -> None:
    """Copy the files of a step with other row numbers."""
    for name in old.files:
        table = read_table(old.path(name))
        for column, by in (("row", move.rows), ("byte_offset", move.num_bytes)):
            if column in table.column_names:
                table = with_column(table, column, pc.add(table[column], pa.scalar(by)))
        write_table(folder / name, table)


def moved_places(found: Any, rows: int) -> Any:
    """Return plain JSON with new row numbers in all places: objects with `source` and `row`.

    Example:
        >>> moved_places({"html": 1, "worst": [{"source": "a/a.jsonl", "row": 4}]}, 10)
        {'html': 1, 'worst': [{'source': 'a/a.jsonl', 'row': 14}]}
    """
    match found:
        case {"source": str(), "row": int(row), **rest}:
            return {**found, **moved_places(rest, rows), "row": row + rows}
        case dict():
            return {name: moved_places(value, rows) for name, value in found.items()}
        case list() | tuple():
            return [moved_places(value, rows) for value in found]
        case _:
            return found
