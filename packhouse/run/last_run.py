"""The plan of the last run of each dataset, kept so that `explain` can say what changed since."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from packhouse.read import SourceShard
from packhouse.run.step import AnyJob
from packhouse.system.disks import write_whole
from packhouse.system.fingerprint import canonical_json
from packhouse.system.wording import cut_pair

_OF_ALL_SHARDS = ("quarantine", "dropped")


def save_last_run(cache: Path, dataset: str, executed: Iterable[AnyJob]) -> None:
    """Remember every job's key and what it was made of; and where the rows of shards lay."""
    jobs = []
    for job in executed:
        about = {"step": job.step.name, "label": job.label, "key": job.key, "parts": job.parts}
        shard = getattr(job.parameters, "shard", None)
        jobs.append(about | ({"shard": asdict(shard)} if isinstance(shard, SourceShard) else {}))
    write_whole(_path(cache, dataset), canonical_json(jobs))


def load_last_run(cache: Path, dataset: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the jobs of the last run by (step, label); empty when there was none."""
    try:
        jobs = orjson.loads(_path(cache, dataset).read_bytes())
        return {(job["step"], job["label"]): job for job in jobs if _is_job(job)}
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _is_job(job: object) -> bool:
    """Return True if a job is as `save_last_run` wrote it; its key is the name of a folder."""
    return (
        isinstance(job, dict)
        and all(isinstance(job.get(name), str) for name in ("step", "label", "key"))
        and re.fullmatch("[0-9a-f]{64}", job["key"]) is not None
        and isinstance(job.get("parts"), dict)
        and isinstance(job["parts"].get("shard", {}), dict)
    )


def touch_last_run(cache: Path, dataset: str) -> None:
    """Count the steps of the last run as used now, as a look that finds nothing changed does."""
    with suppress(OSError):  # there was none, or the cache is only read
        os.utime(_path(cache, dataset))


def obsolete_keys(before: Iterable[Mapping[str, Any]], now: Iterable[SourceShard]) -> set[str]:
    """Return the keys of what was made from bytes that a source no longer holds.

    A file that grew has another last shard: the former one, and all that was made from it, is
    needed by no recipe. Steps of other settings are not obsolete: someone may go back to them.

    Args:
        before: jobs of the run before, as `load_last_run` gives them.
        now: shards of this run.
    """
    shards = list(now)
    files, contents = {shard.file for shard in shards}, {shard.sha256 for shard in shards}
    gone: set[str] = set()
    # a.jsonl had shards 1 and 2, and was appended to: it has 1 and 3 now. Gone is what was made of
    # 2: its jobs of validate, format and tokenize, pack, and all behind it.
    for job in before:  # each comes after those that it reads
        parts = job["parts"]
        shard = parts.get("shard", {})
        is_changed = shard.get("file") in files and shard["sha256"] not in contents
        is_of_changed = gone.intersection(parts.get("inputs", [parts.get("input")]))
        if is_changed or is_of_changed or (gone and parts.get("of") in _OF_ALL_SHARDS):
            gone.add(job["key"])
    return gone


def changed_parts(before: object, after: object, name: str = "") -> list[str]:
    """List the differences between two keys' parts, each as `name: before -> after`.

    Example:
        >>> changed_parts({"pack": {"seq_len": 2048}}, {"pack": {"seq_len": 4096}})
        ['pack.seq_len: 2048 -> 4096']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        changes = []
        for key in sorted({*before, *after}):
            path = f"{name}.{key}" if name else key
            changes += changed_parts(before.get(key), after.get(key), path)
        return changes
    if before == after:
        return []
    old, new = cut_pair(json.dumps(before), json.dumps(after), 24)
    return [f"{name}: {old} -> {new}"]


def _path(cache: Path, dataset: str) -> Path:
    return cache / "runs" / f"{dataset}.json"
