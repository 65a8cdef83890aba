"""Runs the chain's jobs as Prefect tasks: one task run per job, a step's jobs at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect import unmapped

from packhouse.jobs import Job
from packhouse.progress import job_done, step_progress
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.audit import audit
from tasks.files import files
from tasks.format import format_
from tasks.gather import gather
from tasks.pack import pack
from tasks.publish import publish
from tasks.split import split
from tasks.tokenize import tokenize
from tasks.validate import validate

__all__ = ["PrefectRunner"]

TASKS: dict[str, Any] = {
    "validate": validate,
    "format": format_,
    "tokenize": tokenize,
    "pack": pack,
    "gather": gather,
    "split": split,
    "audit": audit,
    "files": files,
    "publish": publish,
}


@dataclass(frozen=True, kw_only=True)
class PrefectRunner:
    """Does jobs as task runs of the flow that calls it."""

    recipe: Recipe
    cache: str

    def __call__(self, jobs: Sequence[Job]) -> list[Receipt]:
        """Submit the jobs of one step and wait for all of them."""
        if not jobs:
            return []
        receipts: list[Receipt] = []
        with step_progress(jobs[0].step, len(jobs)):
            futures = TASKS[jobs[0].step].map(
                list(jobs), unmapped(self.recipe), unmapped(self.cache)
            )
            for future in futures:
                receipts.append(future.result())
                job_done(len(receipts))
        return receipts
