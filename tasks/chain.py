"""The chain inside a flow run: its jobs as tasks, its progress and its outcome as artifacts."""

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import current_thread, main_thread
from typing import Any

from prefect import Task
from prefect.context import FlowRunContext
from prefect.states import Completed

from packhouse.addons.ci.refresh import Refreshed, candidate_recipe, finish_refresh, unchanged
from packhouse.errors import PackhouseError
from packhouse.recipe import Recipe
from packhouse.run.cache import AnyReceipt, open_mirror
from packhouse.run.chain import Prepared
from packhouse.run.chain import prepare as prepare_chain
from packhouse.run.step import AnyJob
from packhouse.run.steps.plan import Plan
from packhouse.system.disks import CachePlace
from packhouse.system.progress import start_phase
from tasks.artifacts import publish_artifacts, refresh_artifacts, refusal_artifacts
from tasks.engines import Runner
from tasks.events import announce_held, announce_published
from tasks.progress import progress_artifacts
from tasks.runner import prefect_runner
from tasks.versions import look_at_sources

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
    """Prepare and publish, show the result in the UI, and announce the version.

    A cancellation that arrives while the version is being published waits until it is announced:
    nobody else would announce it.

    Args:
        recipe: what to do.
        cache: where finished steps lie.
        steps: the tasks of the chain.
        runner: the engine that does it; by default the worker's PACKHOUSE_RUNNER, else threads.
        plan: of the recipe, where it was made already.

    Raises:
        PackhouseError: nothing was published; the UI says why.
    """
    with ExitStack() as publication:
        try:
            folder, mirror = cache.folder, open_mirror(cache)
            with (
                progress_artifacts(recipe.dataset),
                prefect_runner(recipe, str(folder), steps, runner) as run,
            ):

                def run_step(jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
                    if jobs and jobs[0].step.name == "publish":
                        publication.enter_context(_sigterm_waits())
                    return run(jobs)

                prepared = prepare_chain(recipe, run_step, folder, plan, mirror=mirror)
                for note in mirror.notes if mirror else ():
                    log.warning("%s", note)
        except PackhouseError as error:
            refusal_artifacts(recipe, error)
            raise
        publish_artifacts(prepared)
        context = FlowRunContext.get()
        flow_run = context.flow_run if context else None
        is_repeated = flow_run is not None and flow_run.run_count > 1
        if prepared.created or is_repeated:  # a run that was killed may not have announced it
            announce_published(prepared)
        if prepared.published.held_back:
            announce_held(prepared)
    return prepared


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Hold back a SIGTERM, by which a worker cancels its run, until the block is done.

    It is then of use only to a backfill, which has more to do; another run ends now by itself.
    """
    if current_thread() is not main_thread():  # signals are for the main thread alone
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        context = FlowRunContext.get()
        flow_run = context.flow_run if context else None
        if received and flow_run is not None and flow_run.parent_task_run_id is not None:
            signal.raise_signal(signal.SIGTERM)


def prepared_state(prepared: Prepared) -> Any:
    """Return the state of a run that prepared a version: Completed, or Held if its ref stays."""
    verb = "published" if prepared.created else "unchanged, already published:"
    message = f"{verb} {prepared.dataset} {prepared.version}"
    held = "; ".join(prepared.published.held_back)
    if held:
        return Completed(name="Held", data=prepared, message=f"{message}; ref held: {held}")
    return Completed(data=prepared, message=message)


def refresh_chain(
    recipe: Recipe, cache: CachePlace, steps: Steps, *, approval: bool, runner: Runner | None = None
) -> Any:
    """Check the gates if nothing changed; else run the chain, and move the ref or leave it.

    Returns:
        The state of the run, with a `Refreshed`.

    Raises:
        PackhouseError: nothing was published, or a gate refuses what is; the UI says why.
    """
    start_phase("looking at the sources")
    found = look_at_sources(recipe, str(cache.folder))
    if found.is_unchanged or (approval and found.is_waiting):
        try:
            return _completed(recipe, unchanged(recipe, found, cache.folder))
        except PackhouseError as error:
            refusal_artifacts(recipe, error)
            raise
    published = candidate_recipe(recipe) if approval else recipe
    prepared = run_chain(published, cache, steps, runner, found.plan)
    refreshed = finish_refresh(recipe, found, prepared)
    if approval and refreshed.prepared and refreshed.prepared.published.held_back:
        announce_held(refreshed.prepared)
    return _completed(recipe, refreshed)


def _completed(recipe: Recipe, refreshed: Refreshed) -> Any:
    refresh_artifacts(recipe, refreshed)
    name = "Held" if refreshed.outcome == "held" else None
    return Completed(name=name, data=refreshed, message=refreshed.message)
