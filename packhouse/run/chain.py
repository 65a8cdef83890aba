"""The chain, written once: validate -> format -> tokenize -> pack -> split -> publish.

Up to tokenize a job is a shard of input. Pack plans all of them at once, on lengths; then a job is
a shard of output: gather brings its tokens together, files writes it. Publish commits them all.

`run` does a step's jobs and returns their receipts: on this machine (`packhouse.run.local_pool`)
or as Prefect's tasks (`tasks.runner`). Both call `packhouse.run.step.execute`, so the bytes are
the same.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from packhouse.errors import DiskError, EmptyDatasetError, QuarantineLimitError
from packhouse.recipe import Recipe
from packhouse.records.gates import GateLog, GateResult
from packhouse.records.ledger import LedgerLine, RowCounts, check_quarantine, ledger_of
from packhouse.records.render_counts import factor_note
from packhouse.registry import function_of_addon, has_function
from packhouse.run.cache import AnyReceipt, Mirror, Workspace
from packhouse.run.cache_room import (
    Hold,
    hold_steps,
    in_mb,
    keep_limits,
    load_last_run,
    obsolete_keys,
    save_last_run,
)
from packhouse.run.local_pool import Run
from packhouse.run.step import AnyJob
from packhouse.run.steps import STEPS
from packhouse.run.steps.format import FORMAT, check_reasoning, split_text_of
from packhouse.run.steps.plan import Plan, bytes_needed, output_jobs, plan_jobs
from packhouse.run.steps.publish import Published
from packhouse.run.steps.validate import check_all_text_is_read, filters_of_run
from packhouse.store.guard import check_usable
from packhouse.store.layout import pinned
from packhouse.system.progress import after_first_job, say, start_phase
from packhouse.system.terminal import check_interrupted
from packhouse.system.wording import counted

log = logging.getLogger("packhouse.run.cache")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run did: the version it published or found, and the account of every row."""

    dataset: str
    store: str
    sources: tuple[str, ...] = ()
    """Where the raw rows came from: paths and URIs of the recipe."""
    published: Published
    """Facts of the publish step: which version, its statistics, audit and ref."""
    gates: tuple[GateResult, ...]
    """What each gate found."""
    golden: int = 0
    """Golden conversations that came out as pinned."""
    ledger: list[LedgerLine]
    factor_note: str | None = None
    """How many times the text of one rendering per row the records hold, if over 1.1; in words."""
    receipts: list[AnyReceipt] = field(repr=False)
    seconds: dict[str, float] = field(repr=False)
    """Wall time of each step, all its jobs together."""

    @property
    def version(self) -> str:
        """The version that was published, or found."""
        return self.published.version

    @property
    def pinned(self) -> str:
        """`<version>#<digest>`, which no other manifest answers to."""
        return pinned(self.version, self.published.manifest_id)

    @property
    def uri(self) -> str:
        """`<store>/<dataset>`."""
        return f"{self.store.rstrip('/')}/{self.dataset}"

    @property
    def address(self) -> str:
        """`<store>/<dataset>@<version>#<digest>`."""
        return f"{self.uri}@{self.pinned}"

    @property
    def created(self) -> bool:
        """False where the version was there already."""
        return self.published.created


def prepare(
    recipe: Recipe,
    run: Run,
    cache: Path,
    plan: Plan | None = None,
    gates: GateLog | None = None,
    mirror: Mirror | None = None,
) -> Prepared:
    """Turn raw rows into a published version.

    Nothing becomes visible in the store unless every step, contract and count held. No step of the
    run is removed from the cache until it has succeeded (`cache.holds`); the cache is
    brought within its limits before and after (`cache.limits`).

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
    keys = [job.key for job in (*plan, *plan.beside)]
    with hold_steps(cache, plan.version_id, keys) as hold:
        _say_room(cache, plan)
        prepared = _do_steps(recipe, run, cache, plan, gates, mirror, hold)
    try:
        keep_limits(cache, obsolete_keys(before, plan.shards))
    except DiskError as error:  # the version is published, and the next run tries again
        log.warning("cache '%s' was not brought within its limits: %s", cache, error)
    return replace(prepared, golden=golden.total)


def check_golden(recipe: Recipe, tokenizers: Path) -> GateResult:
    """Check the conversations that the recipe pins, if it does.

    Raises:
        AuditError: one came out otherwise.
        ConfigError: their file cannot be read or holds something else.
    """
    if recipe.golden is None:
        detail = "the recipe pins no conversations"
        return GateResult(name="golden", outcome="not reached", detail=detail)
    checked: GateResult = function_of_addon("check_pinned")(recipe, tokenizers)
    return checked


def _say_room(cache: Path, plan: Plan) -> None:
    room, needed = keep_limits(cache), bytes_needed(plan, Workspace(cache=cache))
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
    mirror: Mirror | None,
    hold: Hold,
) -> Prepared:
    done: list[AnyReceipt] = []
    seconds: dict[str, float] = {}

    def do(jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        check_interrupted()  # a signal whose exception was lost in C code
        start = time.perf_counter()
        # The jobs of format do those beside them, too (`then` in `steps/format.py`).
        beside = plan.beside if jobs is plan.format else ()
        with mirror.sharing([job.ref for job in (*jobs, *beside)]) if mirror else nullcontext():
            receipts = run(jobs)
        seconds[receipts[0].step] = time.perf_counter() - start
        _say_done(receipts, seconds[receipts[0].step], done)
        done.extend(receipts)
        return receipts

    workspace = Workspace(cache=cache)

    def say_factor() -> None:
        """Say early what splitting rows costs: long before the last shard is rendered."""
        found = [FORMAT.peek(job.key, workspace) for job in plan.format[:8]]
        if note := factor_note(split_text_of(filter(None, found)), recipe.format):
            logging.getLogger("packhouse.format").warning("so far, %s", note)

    for jobs in (plan.validate, plan.format, plan.tokenize):
        if jobs is plan.format and not all(FORMAT.peek(job.key, workspace) for job in jobs):
            check_reasoning(recipe, done, workspace.tokenizers)
        with after_first_job(say_factor) if jobs is plan.format else nullcontext():
            do(jobs)
        try:
            limit = recipe.validate_.max_quarantined
            quarantine = check_quarantine(ledger_of(done), limit, filters_of_run(done))
        except (EmptyDatasetError, QuarantineLimitError) as error:
            bad = [r.path("quarantined.arrow") for r in done if "quarantined.arrow" in r.files]
            if has_function("explain_bad_rows"):
                error = function_of_addon("explain_bad_rows")(error, bad, recipe)
            raise error from None
        if jobs is plan.validate:
            check_all_text_is_read(recipe, plan.validate, done)
    gates.add([quarantine])
    (packed,) = do([plan.pack])
    output = output_jobs(plan, recipe, packed.facts)
    hold(job.key for job in output)
    do(output.gather)
    do([plan.split])
    ledger = ledger_of(done)
    do((*plan.audit, *output.audit))
    do(output.files)
    (published,) = do([output.publish])
    rendered = [receipt for receipt in done if receipt.step == FORMAT.name]
    save_last_run(cache, recipe.dataset, (*plan, *plan.beside, *output))
    gates.add(published.facts.gates, seconds["audit"])
    return Prepared(
        dataset=recipe.dataset,
        store=recipe.publish.store,
        sources=tuple(source.path for source in recipe.sources),
        published=published.facts,
        gates=tuple(gates.results),
        ledger=ledger,
        factor_note=factor_note(split_text_of(rendered), recipe.format),
        receipts=done,
        seconds=seconds,
    )


def _say_done(receipts: Sequence[AnyReceipt], seconds: float, before: Sequence[AnyReceipt]) -> None:
    step = receipts[0].step
    is_split = any(
        set(each.facts.added) - {"repeated"} for each in before if isinstance(each.facts, RowCounts)
    )
    counts = [receipt.facts for receipt in receipts if isinstance(receipt.facts, RowCounts)]
    rows = sum(each.rows_in for each in counts)
    cached = sum(receipt.cached for receipt in receipts)
    what = counted(rows, "record" if is_split else "row") if rows else counted(len(receipts), "job")
    if cached:
        what += (
            " cached"
            if cached == len(receipts)
            else f" ({cached:,} of {counted(len(receipts), 'job')} cached)"
        )
    number = [each.name for each in STEPS].index(step) + 1
    say(f"{number}/{len(STEPS)} {step:<8} {what:>18}", seconds)
