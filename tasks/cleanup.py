"""Clean up after runs that were cancelled, killed, or approved elsewhere.

After a cancellation, unfinished steps and objects of an uncommitted version are removed. Task runs
and child runs of a killed run, which can no longer report, are marked as Crashed: by its worker, or
by the next run if the worker died too. A paused run ends if its ref was moved without it or its
sources have changed since.

A cancelled run releases its slot at once and ends when its current jobs are done. If that takes
more than half a minute, its worker kills it. Either way, readers never see its leftover files. The
worker removes them here; if the whole machine went down, the next run there or `gc` removes them.
"""

import logging
from typing import Any
from uuid import UUID

from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Completed, Crashed

from packhouse.addons.gc import collect_steps, find_garbage_steps
from packhouse.errors import PackhouseError
from packhouse.recipe import Recipe
from packhouse.run.step_cache import StepStore
from packhouse.store import open_store
from packhouse.store.store_requests import run
from packhouse.system.disks import default_cache
from tasks.allowed_places import allowed_recipe
from tasks.dataset_slot import place_of
from tasks.outcomes import flow_run as current_run, tags_with, version_asked

log = logging.getLogger("packhouse.flows")

_MOST_LOOKED_AT = 200  # the most that Prefect's server returns


def clean_up(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """Remove files left by a cancelled run; a hook of every flow."""
    folders = StepStore(default_cache() / "steps").sweep()
    recipe = recipe_of(flow_run)
    if recipe is None:
        return
    store = open_store(recipe.publish.store)
    # Without a grace period: a publisher at work finds its slot taken, and starts again in the
    # next generation.
    found = [
        item
        for item in run(store, find_garbage_steps(recipe.dataset, 0))
        if item.reason == "abandoned"
    ]
    objects = sum(run(store, collect_steps(item)) for item in found)
    log.info("removed %d folders and %d objects of an unfinished run", folders, objects)


def end_parts(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """End the task runs and child runs of a crashed run, which would stay Running forever.

    A hook of every flow.
    """
    with get_client(sync_client=True) as client:
        _end_parts(client, flow_run.id, Crashed(message=f"its run crashed: {state.message}"))


def end_runs_without_hooks(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """Tag runs that ended while no process was there to run their hooks, and end their parts.

    The server marks a run as Crashed if its machine died, and a person may cancel a paused run. A
    hook of every flow when it starts: the next run does what these could not.
    """
    ended = FlowRunFilterStateType(any_=[StateType.CRASHED, StateType.CANCELLED])
    found = FlowRunFilter(
        state=FlowRunFilterState(type=ended), tags=FlowRunFilterTags(all_=["packhouse"])
    )
    with get_client(sync_client=True) as client:
        if client.server_type == ServerType.EPHEMERAL:  # it has no other runs
            return
        for run in client.read_flow_runs(
            flow_run_filter=found, sort=FlowRunSort.END_TIME_DESC, limit=_MOST_LOOKED_AT
        ):
            outcome = str(run.state_name).lower()
            if run.state is None or f"outcome:{outcome}" in run.tags:
                continue
            why = f"its run ended: {run.state.message or run.state.name}"
            _end_parts(client, run.id, Crashed(message=why))
            client.update_flow_run(run.id, tags=tags_with(run.tags, outcome=outcome))


def _end_parts(client: SyncPrefectClient, flow_run: UUID, ended: State[Any]) -> None:
    unfinished = [StateType.PENDING, StateType.RUNNING]
    task_runs = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=unfinished))
        ),
    )
    for task_run in task_runs:
        client.set_task_run_state(task_run.id, ended, force=True)
    children = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished)),
        )
    )
    for child in children:
        client.set_flow_run_state(child.id, ended, force=True)
        client.update_flow_run(child.id, tags=tags_with(child.tags, outcome="crashed"))
        _end_parts(client, child.id, ended)


def end_questions(store: str, dataset: str, ref: str, at: str | None, found: str = "") -> None:
    """End paused runs whose request to move a ref is obsolete.

    Args:
        store: root of the store.
        dataset: dataset of the ref.
        ref: ref that the runs want to move.
        at: version that the ref points to. A run that asks for this version becomes Published.
        found: version that the sources of this run give. Earlier runs of the same deployment and
            parameters that ask for another version become Superseded.
    """
    this = current_run()
    with get_client(sync_client=True) as client:
        if client.server_type == ServerType.EPHEMERAL:  # it has no other runs
            return
        paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
        tags = FlowRunFilterTags(all_=[f"dataset:{dataset}"])
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused, tags=tags)):
            asked = version_asked(run.state)
            try:
                recipe = recipe_of(run)
            except PackhouseError:  # its recipe was deleted, so its ref is unknown
                continue
            if recipe is None or recipe.publish.ref != ref:
                continue
            if place_of(recipe.publish.store) != place_of(store):
                continue
            if asked == at:
                outcome, answer = "published", f"'{ref}' was moved to {asked} without this run"
                state: State[Any] = Completed(name="Published", message=answer)
            elif (
                found not in ("", asked)
                and this
                and (run.deployment_id, run.parameters) == (this.deployment_id, this.parameters)
            ):
                outcome, answer = "superseded", f"the sources changed: {this.name} made {found}"
                state = Cancelled(name="Superseded", message=answer)
            else:
                continue
            client.set_flow_run_state(run.id, state, force=True)
            client.update_flow_run(run.id, tags=tags_with(run.tags, outcome=outcome))


def recipe_of(flow_run: FlowRun) -> Recipe | None:
    """Return the recipe of a run, resolved in the same way as in the run."""
    given = flow_run.parameters.get("recipe")
    if given is None:
        return None
    recipe = given if isinstance(given, str | Recipe) else Recipe.model_validate(given)
    deployed = flow_run.deployment_id is not None
    return allowed_recipe(recipe, flow_run.parameters.get("store"), deployed=deployed)
