"""Run the chain inside a flow run, with jobs as tasks and progress and outcome as artifacts."""

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from textwrap import shorten
from threading import current_thread, main_thread
from typing import Any

from prefect import Task
from prefect.client.base import ServerType
from prefect.client.orchestration import get_client

from packhouse.addons.ci.refresh import (
    Outcome,
    Refreshed,
    candidate_recipe,
    finish_refresh,
    unchanged,
)
from packhouse.addons.quarantine import count_reasons, read_bad_rows
from packhouse.cli.result_summary import ledger_block
from packhouse.errors import PackhouseError
from packhouse.read.compression import lines_of_rows, place_of
from packhouse.recipe import Recipe
from packhouse.records.ledger import RowCounts, filters_of, ledger_of, units_of
from packhouse.run.chain import Plan, Prepared, prepare as prepare_chain
from packhouse.run.step import AnyJob
from packhouse.run.step_cache import AnyReceipt, open_mirror
from packhouse.run.steps.validate import QUARANTINE
from packhouse.system.disks import CachePlace
from packhouse.system.escaping import for_terminal
from packhouse.system.progress import start_phase
from packhouse.system.wording import counted, text_table
from tasks.artifacts import (
    artifact_key,
    publish_artifacts,
    refresh_artifacts,
    refusal_artifacts,
)
from tasks.cleanup import end_questions
from tasks.engines import Runner
from tasks.events import announce_held, announce_published
from tasks.outcomes import ended, flow_run, is_approved, is_repeated
from tasks.progress import progress_artifacts
from tasks.runner import prefect_runner
from tasks.steps import this_run
from tasks.versions import look_at_sources, move_ref

Steps = Sequence[Task[..., Any]]
"""A task for each step of the chain, named like the step (`tasks.steps`)."""

log = logging.getLogger("packhouse.flows")

# A detail may quote a row; the UI shows a line of a log as one line.
_MOST_DETAIL = 200


def run_chain(
    recipe: Recipe,
    cache: CachePlace,
    steps: Steps,
    runner: Runner | None = None,
    plan: Plan | None = None,
) -> Prepared:
    """Prepare and publish a version, show the result in the UI, and announce the version.

    A cancellation during the publish takes effect after the announcement, because no other process
    would announce the version.

    Args:
        recipe: recipe to run.
        cache: location of finished steps.
        steps: tasks of the chain.
        runner: name of the engine; by default PACKHOUSE_RUNNER of the worker, else `threads`.
        plan: plan of the recipe, if already made.

    Raises:
        PackhouseError: nothing was published; the UI shows the reason.
    """
    with ExitStack() as publication:
        try:
            folder, mirror = cache.folder, open_mirror(cache)
            with (
                progress_artifacts(recipe.dataset),
                prefect_runner(recipe, str(folder), steps, runner) as run,
            ):
                done: list[AnyReceipt] = []

                def run_step(jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
                    if jobs and jobs[0].step.name == "publish":
                        publication.enter_context(_sigterm_waits())
                    start = time.perf_counter()
                    receipts = run(jobs)
                    _log_step(recipe, done, receipts, time.perf_counter() - start)
                    done.extend(receipts)
                    return receipts

                prepared = prepare_chain(recipe, run_step, folder, plan, mirror=mirror)
                for note in mirror.notes if mirror else ():
                    log.warning("%s", note)
        except PackhouseError as error:
            error = _with_page(recipe, error)
            refusal_artifacts(recipe, error)
            raise error from None
        block = ledger_block(prepared.ledger, filters_of(prepared.published.sources))
        table = text_table([block.columns, *block.rows])
        log.info("%s", "\n".join(["the ledger of the run", table, *block.lines]))
        publish_artifacts(recipe, prepared)
        if prepared.created or is_repeated():  # a killed run may not have announced it
            announce_published(prepared)
        if prepared.published.held_back:
            announce_held(prepared)
    return prepared


def _with_page(recipe: Recipe, error: PackhouseError) -> PackhouseError:
    """Return the error with the page that shows the bad rows: a form gives no recipe file."""
    with get_client(sync_client=True) as client:
        if client.server_type == ServerType.EPHEMERAL:  # nobody can open its pages
            return error
    said = str(error).replace(
        "run `packhouse quarantine show RECIPE`",
        f"open the artifact '{artifact_key(recipe.dataset, 'refused')}' of this run",
    )
    return type(error)(said, **error.facts)


def _log_step(
    recipe: Recipe, before: Sequence[AnyReceipt], receipts: Sequence[AnyReceipt], seconds: float
) -> None:
    """Log the result of a step: rows in and out, bad rows by reason, time.

        validate: 304 rows in, 295 rows out; quarantined: duplicate_key 1, json 1 (0.2 s)
        audit: 9 jobs (0.4 s)

    The line of a step that quarantined rows is a WARNING, and names the location of the first row
    with the most frequent reason.

    Args:
        recipe: recipe of the run.
        before: receipts of the previous steps.
        receipts: receipts of the step's jobs.
        seconds: wall time of the whole step.
    """
    step, said = receipts[0].step, [counted(len(receipts), "job")]
    is_bad = False
    if any(isinstance(receipt.facts, RowCounts) for receipt in receipts):
        ledger = ledger_of([*before, *receipts])
        line, (taken, given) = ledger[-1], units_of(ledger)[step]
        is_bad = bool(line.quarantined)
        said = [f"{counted(line.rows_in, taken)} in, {counted(line.rows_out, given)} out"]
        if line.tokens_out is not None:
            said[0] += f", {counted(line.tokens_out, 'token')}"
        reasons = ledger_block(ledger, []).lines
        said += [text.removeprefix(step).strip() for text in reasons if text.startswith(f"{step} ")]
    cached = sum(receipt.cached for receipt in receipts)
    how = "cached" if cached == len(receipts) else f"{seconds:.1f} s"
    if 0 < cached < len(receipts):
        how += f", {cached:,} of {counted(len(receipts), 'job')} cached"
    said[-1] += f" ({how})"
    files = [each.path(QUARANTINE) for each in receipts if QUARANTINE in each.files]
    if is_bad and (bad := read_bad_rows(files)) is not None:
        most = count_reasons(bad, 1)[0]
        (row,) = most.samples
        place = place_of(row, lines_of_rows([row], recipe.sources))
        detail = shorten(row["detail"], _MOST_DETAIL, placeholder="...")
        said.append(for_terminal(f"the first {most.reason} is {place}: {detail}"))
    log.log(logging.WARNING if is_bad else logging.INFO, "%s: %s", step, "; ".join(said))


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Delay a SIGTERM, which a worker sends to cancel its run, until the end of the block.

    It then matters only to a backfill, which has more to do; any other run ends here anyway.
    """
    if current_thread() is not main_thread():  # only the main thread receives signals
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        run = flow_run()
        if received and run is not None and run.parent_task_run_id is not None:
            signal.raise_signal(signal.SIGTERM)


def prepare_run(
    recipe: Recipe, cache: CachePlace, steps: Steps, runner: Runner | None = None
) -> Any:
    """Run the chain, and return the final state of the run with a `Prepared`."""
    prepared = run_chain(recipe, cache, steps, runner)
    published, version = prepared.published, prepared.version
    ref, at = published.ref, published.ref_version or published.ref_before
    outcome: Outcome = "published"
    message = f"published {prepared.dataset} {version}"
    if not prepared.created and published.is_ref_moved:
        message = f"{prepared.dataset} {version} was published before"
    elif not prepared.created:
        outcome = "unchanged"
        message = f"nothing changed: {prepared.dataset} {version} was published before"
    if published.held_back:
        outcome = "held"
        message += f", '{ref}' stays: {'; '.join(published.held_back)}"
    elif at != version and not published.is_ref_left:
        outcome = "held"
        message += f", but '{ref}' points to {at}; publishing a version again does not move the ref"
    elif published.is_ref_moved and published.ref_before:
        message += f", '{ref}' moved to it from {published.ref_before}"
    else:
        message += f", '{ref}' points to {at}"
    return _ended(recipe, (ref, at), outcome, message, version, prepared, is_new=prepared.created)


def refresh_run(
    recipe: Recipe, cache: CachePlace, steps: Steps, *, approval: bool, runner: Runner | None = None
) -> Any:
    """Check only the gates if nothing changed; otherwise run the chain and maybe move the ref.

    Returns:
        The final state of the run, with a `Refreshed`.
    """
    start_phase("checking the sources")
    found = look_at_sources(recipe, str(cache.folder))
    if found.is_unchanged or (approval and found.is_waiting):
        try:
            refreshed = unchanged(recipe, found, cache.folder)
        except PackhouseError as error:
            refusal_artifacts(recipe, error)
            raise
    else:
        published = candidate_recipe(recipe) if approval else recipe
        prepared = run_chain(published, cache, steps, runner, found.plan)
        refreshed = finish_refresh(recipe, found, prepared, by=this_run())
        if approval and refreshed.prepared and refreshed.prepared.published.held_back:
            announce_held(refreshed.prepared)
    refresh_artifacts(recipe, refreshed)
    made = refreshed.prepared
    return _ended(
        recipe,
        (found.ref, found.current),
        refreshed.outcome,
        refreshed.said,
        refreshed.version,
        refreshed,
        is_new=made is not None and made.created,
    )


def _ended(
    recipe: Recipe,
    ref_now: tuple[str, str | None],
    outcome: Outcome,
    message: str,
    version: str,
    data: Prepared | Refreshed,
    *,
    is_new: bool,
) -> Any:
    """Return the final state of a run, with the next action to take; may ask for approval first.

    Args:
        recipe: recipe of the run.
        ref_now: name of the ref, and the version that it points to.
        outcome: outcome that names the state.
        message: summary of the outcome.
        version: version that was published or found.
        data: result of the run.
        is_new: True if this run committed the version.
    """
    ref, current = ref_now
    place = recipe.publish.store, recipe.dataset
    end_questions(*place, ref, version if outcome == "published" else current, version)
    if outcome in ("waiting", "held"):
        move = (
            f"run the deployment promote/promote-version with store {place[0]}, dataset "
            f"{recipe.dataset}, version {version}, ref {ref}"
        )
        question = (
            f"{message}. To move '{ref}', resume this run, or {move}. To leave '{ref}' "
            "unchanged, cancel this run"
        )
        message += f". To move '{ref}', {move}"
        if is_approved(outcome, question, version, is_new=is_new):
            move_ref(*place, version, ref, current, "approved: someone resumed the run")
            outcome, message = "published", f"'{ref}' moved to {version}: someone resumed this run"
            if isinstance(data, Refreshed):
                data = replace(data, outcome=outcome, said=message, command="")
                refresh_artifacts(recipe, data)
    return ended(outcome, message, version, data)
