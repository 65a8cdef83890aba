"""The plan of the last run of each dataset, kept so that `explain` can say what changed since."""

import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packhouse.fingerprint import canonical_json
from packhouse.jobs import Job

__all__ = ["changed_parts", "load_last_run", "save_last_run"]


def save_last_run(cache: Path, dataset: str, done: Iterable[Job]) -> None:
    """Remember every job's key and what it was made of."""
    jobs = [
        {"step": job.step, "label": job.label, "key": job.key, "parts": job.parts} for job in done
    ]
    path = _path(cache, dataset)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(canonical_json(jobs))
    os.replace(temporary, path)


def load_last_run(cache: Path, dataset: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the jobs of the last run by (step, label); empty when there was none."""
    try:
        jobs = json.loads(_path(cache, dataset).read_bytes())
        return {(job["step"], job["label"]): job for job in jobs}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def changed_parts(before: Any, after: Any, name: str = "") -> list[str]:
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
    return [f"{name}: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _path(cache: Path, dataset: str) -> Path:
    return cache / "runs" / f"{dataset}.json"
