"""Run the chain: validate -> format -> tokenize -> pack -> split -> publish.

Through tokenize, a job processes one shard of input. Pack then plans the whole dataset from lengths
alone. After that, a job produces one shard of output: gather collects its tokens and files writes
it. Publish commits all of them.

`run` executes the jobs of a step and returns their receipts, either on this machine
(`packhouse.run.local_pool`) or as Prefect tasks (`tasks.runner`). Both call
`packhouse.run.step.execute`, so the output is the same.
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
from packhouse.system.worker import return_freed_memory, run_if_idle
from packhouse.tokenize.encoders import forget_encoders

log = logging.getLogger("packhouse.run.cache")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of a run: the version it published or found, and a count of every row."""

    dataset: str
    store: str
    sources: tuple[str, ...] = ()
    """Paths and URIs of the raw rows, as in the recipe."""
    published: Published
    """Facts of the publish step: the version, its statistics, audit and ref."""
    gates: tuple[GateResult, ...]
    """Result of each gate."""
    golden: int = 0
    """Golden conversations that match their pinned output."""
    ledger: list[LedgerLine]
    factor_note: str | None = None
    """A sentence about how much splitting rows repeats their text, if by more than 1.1 times."""
    receipts: list[AnyReceipt] = field(repr=False)
    seconds: dict[str, float] = field(repr=False)
    """Wall time of each step, over all its jobs."""

    @property
    def version(self) -> str:
        """The version that was published, or found."""
        return self.published.version

    @property
    def pinned(self) -> str:
        """`<version>#<digest>`, which matches only this manifest."""
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
        """False if the version already existed."""
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

    Nothing becomes visible in the store unless every step, contract and count checks out. The run's
    steps stay in the cache until it succeeds (`hold_steps`). The cache is brought within its
    limits before and after the run (`keep_limits`).

    Args:
        recipe: recipe to run.
        run: executes the jobs of one step.
        cache: folder of finished steps.
        plan: plan of the recipe, if already made; making one reads the sources.
        gates: receives the result of each gate as soon as it is known. An error carries its gate
            results itself, as its fact `gates`.
        mirror: shares steps with machines that use another cache.

    Raises:
        PackhouseError: see `packhouse.errors`; each names the file, place, limit and fix.
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
    except DiskError as error:  # the version is published; the next run tries again
        log.warning("cache '%s' is over its limits and could not be trimmed: %s", cache, error)
    return replace(prepared, golden=golden.total)


def check_golden(recipe: Recipe, tokenizers: Path) -> GateResult:
    """Check the recipe's golden conversations, if it has any.

    Raises:
        AuditError: a conversation differs from its pinned output.
        ConfigError: the golden file cannot be read or is not one.
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
            "cache '%s' has %s free, but this run needs about %s. Free some space, "
            "or the run may fail with a full disk.",
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
        check_interrupted()  # C code may have swallowed the exception of a signal
        start = time.perf_counter()
        # Format jobs also run the side jobs of their shard (`then` in `steps/format.py`).
        beside = plan.beside if jobs is plan.format else ()
        with mirror.sharing([job.ref for job in (*jobs, *beside)]) if mirror else nullcontext():
            receipts = run(jobs)
        seconds[receipts[0].step] = time.perf_counter() - start
        _say_done(receipts, seconds[receipts[0].step], done)
        done.extend(receipts)
        return receipts

    workspace = Workspace(cache=cache)

    def say_factor() -> None:
        """Warn about the cost of splitting rows after the first shards, not after the last."""
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
            return_freed_memory()  # the worker needs some for tokenizers now
    gates.add([quarantine])
    run_if_idle(forget_encoders)  # 150 MB for Qwen; the steps that follow encode nothing
    (packed,) = do([plan.pack])
    output = output_jobs(plan, recipe, packed.facts)
    hold(job.key for job in output)
    do(output.gather)
    do([plan.split])
    ledger = ledger_of(done)
    do((*plan.audit, *output.audit))
    do(output.files)
    return_freed_memory()  # the worker needs some for the report
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
