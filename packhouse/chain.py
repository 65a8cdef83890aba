"""The chain, written once: validate -> format -> tokenize -> pack -> split -> publish.

Up to tokenize a job is a shard of input. Pack plans all of them at once, on lengths; then a job is
a shard of output: gather brings its tokens together, files writes it. Publish commits them all.

`run` does a step's jobs and returns their receipts. It is `LocalRunner` here, and Prefect's tasks
in `flows/prepare.py`; both call `packhouse.steps.execute`, so the bytes are the same either way.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhouse.golden import check_golden
from packhouse.jobs import Job, Plan, plan_jobs
from packhouse.last_run import save_last_run
from packhouse.ledger import LedgerLine, check_quarantine, ledger_of
from packhouse.output_jobs import output_jobs
from packhouse.progress import job_done, step_progress
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps import execute
from packhouse.store.doctor import check_usable
from packhouse.workspace import Workspace

__all__ = ["LocalRunner", "Prepared", "Run", "prepare"]

Run = Callable[[Sequence[Job]], list[Receipt]]
"""Does the jobs of one step, in any order, and returns their receipts in the order of the jobs."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run did: the version it published or found, and the account of every row."""

    dataset: str
    version: str
    store: str
    created: bool
    """False where the version was there already."""
    ledger: list[LedgerLine]
    receipts: list[Receipt] = field(repr=False)
    seconds: dict[str, float] = field(repr=False)
    """Wall time of each step, all its jobs together."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of the publish step: files, statistics, audit; and the number of golden
    conversations that came out as pinned."""


def prepare(recipe: Recipe, run: Run, cache: Path, plan: Plan | None = None) -> Prepared:
    """Turn raw rows into a published version.

    Nothing becomes visible in the store unless every step, contract and count held.

    Args:
        recipe: what to do.
        run: does the jobs of one step.
        cache: folder in which the plan is remembered for `packhouse explain`.
        plan: of the recipe, where it was made already; it costs a read of the sources.

    Raises:
        PackhouseError: see `packhouse.errors`; each names file, place, limit and remedy.
    """
    check_usable(recipe.publish.store)
    num_golden = check_golden(recipe, Workspace(cache=cache).tokenizers)
    plan = plan or plan_jobs(recipe)
    done: list[Receipt] = []
    seconds: dict[str, float] = {}

    def do(jobs: Sequence[Job]) -> None:
        start = time.perf_counter()
        done.extend(run(jobs))
        seconds.update({job.step: time.perf_counter() - start for job in jobs})

    for jobs in (plan.validate, plan.format, plan.tokenize):
        do(jobs)
        places = [str(r.path("quarantined.arrow")) for r in done if r.facts.get("quarantined")]
        check_quarantine(ledger_of(done), recipe.validate_.max_quarantined, places[:3])
    do([plan.pack])
    output = output_jobs(plan, recipe, done[-1].facts)
    do(output.gather)
    do([plan.split])
    ledger = ledger_of(done)
    do((*plan.audit, *output.audit))
    do(output.files)
    do([output.publish])
    save_last_run(cache, recipe.dataset, (*plan, *output))
    published = done[-1].facts
    return Prepared(
        dataset=recipe.dataset,
        version=published["version"],
        store=recipe.publish.store,
        created=published["created"],
        ledger=ledger,
        receipts=done,
        seconds=seconds,
        facts={**published, "golden": num_golden},
    )


@dataclass(frozen=True, kw_only=True)
class LocalRunner:
    """Does jobs in this process, one after another; parallel work happens inside a step."""

    recipe: Recipe
    workspace: Workspace

    def __call__(self, jobs: Sequence[Job]) -> list[Receipt]:
        """Do the jobs in order."""
        receipts = []
        with step_progress(jobs[0].step if jobs else "", len(jobs)):
            for job in jobs:
                receipts.append(execute(job, self.recipe, self.workspace))
                job_done(len(receipts))
        return receipts
