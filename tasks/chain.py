"""Run the chain inside a flow run, with jobs as tasks and progress and outcome as artifacts."""

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import current_thread, main_thread
from typing import Any

from prefect import Task

from packhouse.addons.ci.refresh import (
    Outcome,
    Refreshed,
    candidate_recipe,
    finish_refresh,
    unchanged,
)
from packhouse.errors import PackhouseError
from packhouse.recipe import Recipe
from packhouse.run.cache import AnyReceipt, open_mirror
from packhouse.run.chain import Plan, Prepared
from packhouse.run.chain import prepare as prepare_chain
from packhouse.run.step import AnyJob
from packhouse.system.disks import CachePlace
from packhouse.system.progress import start_phase
from tasks.artifacts import publish_artifacts, refresh_artifacts, refusal_artifacts
from tasks.cleanup import end_questions
from tasks.engines import Runner
from tasks.events import announce_held, announce_published
from tasks.outcomes import ended, flow_run, is_approved, is_repeated, stopped
from tasks.policies import this_run
from tasks.progress import progress_artifacts
from tasks.runner import prefect_runner
from tasks.story import log_end, log_step
from tasks.versions import look_at_sources, move_ref

Steps = Sequence[Task[..., Any]]
"""A task for each step of the chain, named like the step (`tasks.steps`)."""

log = logging.getLogger("packhouse.flows")


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
                    log_step(recipe, done, receipts, time.perf_counter() - start)
                    done.extend(receipts)
                    return receipts

                prepared = prepare_chain(recipe, run_step, folder, plan, mirror=mirror)
                for note in mirror.notes if mirror else ():
                    log.warning("%s", note)
        except PackhouseError as error:
            refusal_artifacts(recipe, error)
            raise
        log_end(prepared)
        publish_artifacts(recipe, prepared)
        if prepared.created or is_repeated():  # a killed run may not have announced it
            announce_published(prepared)
        if prepared.published.held_back:
            announce_held(prepared)
    return prepared


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
    try:
        prepared = run_chain(recipe, cache, steps, runner)
    except PackhouseError as error:
        return stopped(error)
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
        message += f", but '{ref}' points to {at}, and publishing again does not move it"
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
    start_phase("looking at the sources")
    try:
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
    except PackhouseError as error:
        return stopped(error)
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
            f"run the deployment promote/promote-version with dataset {recipe.dataset}, version "
            f"{version}, ref {ref}"
        )
        question = (
            f"{message}. To move '{ref}', resume this run, or {move}. To keep it, cancel this run"
        )
        message += f". To move '{ref}', {move}"
        if is_approved(outcome, question, version, is_new=is_new):
            move_ref(*place, version, ref, current, "approved: someone resumed the run")
            outcome, message = "published", f"'{ref}' moved to {version}: someone resumed this run"
    return ended(outcome, message, version, data)
