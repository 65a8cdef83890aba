"""The chain, written once: validate -> format -> tokenize -> pack -> split -> publish.

Up to tokenize a job is a shard of input. Pack plans all of them at once, on lengths; then a job is
a shard of output: gather brings its tokens together, files writes it. Publish commits them all.

`run` does a step's jobs and returns their receipts. It is `LocalRunner` here, and Prefect's tasks
in `flows/prepare.py`; both call `packhouse.steps.execute`, so the bytes are the same either way.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packhouse.cache import bytes_needed, in_mb, keep_limits
from packhouse.cache_holds import Hold, hold_steps
from packhouse.errors import DiskError
from packhouse.gates import GateLog
from packhouse.golden import check_golden
from packhouse.interrupts import check_interrupted
from packhouse.jobs import STEPS, Job, Plan, plan_jobs
from packhouse.last_run import load_last_run, obsolete_keys, save_last_run
from packhouse.ledger import LedgerLine, check_quarantine, ledger_of
from packhouse.output_jobs import output_jobs
from packhouse.progress import job_done, say, start_phase, step_progress
from packhouse.recipe import Recipe
from packhouse.step_mirror import StepMirror
from packhouse.step_store import Receipt
from packhouse.steps import execute
from packhouse.steps.selection import fingerprint_jobs
from packhouse.store.doctor import check_usable
from packhouse.workspace import Workspace

__all__ = ["LocalRunner", "Prepared", "Run", "prepare"]

log = logging.getLogger("packhouse.cache")

Run = Callable[[Sequence[Job]], list[Receipt]]
"""Does the jobs of one step, in any order, and returns their receipts in the order of the jobs."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run did: the version it published or found, and the account of every row."""

    dataset: str
    version: str
    store: str
    sources: tuple[str, ...] = ()
    """Where the raw rows came from: paths and URIs of the recipe."""
    created: bool
    """False where the version was there already."""
    ledger: list[LedgerLine]
    receipts: list[Receipt] = field(repr=False)
    seconds: dict[str, float] = field(repr=False)
    """Wall time of each step, all its jobs together."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of the publish step: files, statistics, audit, results of the gates; and the number of
    golden conversations that came out as pinned."""


def prepare(
    recipe: Recipe,
    run: Run,
    cache: Path,
    plan: Plan | None = None,
    gates: GateLog | None = None,
    mirror: StepMirror | None = None,
) -> Prepared:
    """Turn raw rows into a published version.

    Nothing becomes visible in the store unless every step, contract and count held. No step of the
    run is removed from the cache until it has succeeded (`packhouse.cache_holds`); the cache is
    brought within its limits before and after (`packhouse.cache`).

    Args:
        recipe: what to do.
        run: does the jobs of one step.
        cache: folder of finished steps.
        plan: of the recipe, where it was made already; it costs a read of the sources.
        gates: gets the result of each gate as soon as it is known. Those of an error are not in
            it: they are the fact `gates` of the error.
        mirror: shares the steps with machines that have another cache.

    Raises:
        PackhouseError: see `packhouse.errors`; each names file, place, limit and remedy.
    """
    gates = gates or GateLog()
    start_phase("planning" if plan is None else "checking the store")
    check_usable(recipe.publish.store)
    golden = check_golden(recipe, Workspace(cache=cache).tokenizers)
    gates.add([golden])
    plan = plan or plan_jobs(recipe)
    before = load_last_run(cache, recipe.dataset).values()
    keys = [job.key for job in (*plan, *fingerprint_jobs(plan, recipe))]
    with hold_steps(cache, plan.version_id, keys) as hold:
        _say_room(cache, plan)
        prepared = _do_steps(recipe, run, cache, plan, gates, mirror, hold)
    try:
        keep_limits(cache, obsolete_keys(before, plan))
    except DiskError as error:  # the version is published, and the next run tries again
        log.warning("cache '%s' was not brought within its limits: %s", cache, error)
    return replace(prepared, facts={**prepared.facts, "golden": golden.total})


def _say_room(cache: Path, plan: Plan) -> None:
    room, needed = keep_limits(cache), bytes_needed(plan, Workspace(cache=cache).steps)
    log.info("cache '%s': %s; this run adds about %s", cache, room, in_mb(needed))
    if needed > room.free_bytes:
        log.warning(
            "cache '%s' has %s free, and this run needs about %s: it may end with a full disk",
            cache,
            in_mb(room.free_bytes),
            in_mb(needed),
        )


def _do_steps(
    recipe: Recipe,
    run: Run,
    cache: Path,
    plan: Plan,
    gates: GateLog,
    mirror: StepMirror | None,
    hold: Hold,
) -> Prepared:
    fingerprints = fingerprint_jobs(plan, recipe)
    done: list[Receipt] = []
    seconds: dict[str, float] = {}

    def do(jobs: Sequence[Job]) -> None:
        check_interrupted()  # a signal whose exception was lost in C code
        start = time.perf_counter()
        beside = fingerprints if jobs is plan.format else ()
        with mirror.sharing((*jobs, *beside)) if mirror else nullcontext():
            receipts = run(jobs)
        done.extend(receipts)
        seconds.update({job.step: time.perf_counter() - start for job in jobs})
        _say_done(receipts, time.perf_counter() - start)

    for jobs in (plan.validate, plan.format, plan.tokenize):
        do(jobs)
        places = [str(r.path("quarantined.arrow")) for r in done if r.facts.get("quarantined")]
        limit = recipe.validate_.max_quarantined
        quarantine = check_quarantine(ledger_of(done), limit, places[:3])
    gates.add([quarantine])
    do([plan.pack])
    output = output_jobs(plan, recipe, done[-1].facts)
    hold(job.key for job in output)
    do(output.gather)
    do([plan.split])
    ledger = ledger_of(done)
    do((*plan.audit, *output.audit))
    do(output.files)
    do([output.publish])
    save_last_run(cache, recipe.dataset, (*plan, *fingerprints, *output))
    published = done[-1].facts
    gates.add(published["gates"], seconds["audit"])
    return Prepared(
        dataset=recipe.dataset,
        version=published["version"],
        store=recipe.publish.store,
        sources=tuple(source.path for source in recipe.sources),
        created=published["created"],
        ledger=ledger,
        receipts=done,
        seconds=seconds,
        facts={**published, "gates": tuple(gates.results)},
    )


def _say_done(receipts: Sequence[Receipt], seconds: float) -> None:
    step = receipts[0].step
    rows = sum(receipt.facts.get("rows_in", 0) for receipt in receipts)
    cached = sum(receipt.cached for receipt in receipts)
    what = f"{rows:,} rows" if rows else f"{len(receipts):,} job{'s' * (len(receipts) > 1)}"
    if cached:
        what += (
            " cached"
            if cached == len(receipts)
            else f" ({cached:,} of {len(receipts):,} jobs cached)"
        )
    say(f"{STEPS.index(step) + 1}/{len(STEPS)} {step:<8} {what:>18}", seconds)


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
