"""What a cancelled or killed run leaves is put in order.

Half-done steps and objects of an uncommitted version are removed after a cancellation. Task and
child runs of a killed run, which says nothing any more, are shown as Crashed.

A run that is told to stop gives back its slot at once and ends when its jobs in hand are done; one
that takes over half a minute for that is killed by its worker. Neither leaves anything that a
reader can see. The rest is removed here, by the worker; what a whole machine takes down with it is
removed by the next run there, or by `gc`.
"""

import logging
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Crashed

from packhouse.recipe import Recipe
from packhouse.run.cache import StepStore
from packhouse.store import open_store
from packhouse.store.gc import collect_steps, find_garbage
from packhouse.store.protocol import run
from packhouse.system.disks import default_cache
from tasks.guard import allowed_recipe

log = logging.getLogger("packhouse.flows")


def clean_up(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """Remove what a cancelled run left; a hook of every flow."""
    folders = StepStore(default_cache() / "steps").sweep()
    recipe = recipe_of(flow_run)
    if recipe is None:
        return
    store = open_store(recipe.publish.store)
    found = [
        item
        for item in find_garbage(store, recipe.dataset, grace_s=0)
        if item.reason == "abandoned"
    ]
    objects = sum(run(store, collect_steps(item)) for item in found)
    log.info("removed %d folders and %d objects of an unfinished run", folders, objects)


def end_parts(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """End the task runs and child runs of a crashed run: they would stay Running forever.

    A hook of every flow.
    """
    with get_client(sync_client=True) as client:
        _end_parts(client, flow_run.id, Crashed(message=f"its run crashed: {state.message}"))


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
        _end_parts(client, child.id, ended)


def recipe_of(flow_run: FlowRun) -> Recipe | None:
    """Return the recipe that a run was given, resolved as the run resolves it."""
    given = flow_run.parameters.get("recipe")
    if given is None:
        return None
    recipe = given if isinstance(given, str | Recipe) else Recipe.model_validate(given)
    deployed = flow_run.deployment_id is not None
    return allowed_recipe(recipe, flow_run.parameters.get("store"), deployed=deployed)
