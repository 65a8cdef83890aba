"""Final state and tags of a run, as shown on the Runs page.

| state | type (sets the colour) | what happened |
|---|---|---|
| Published | Completed | a version was committed, or its ref moved |
| Unchanged | Completed | there was nothing to do |
| WaitingForApproval | Paused or Completed | a person must approve the move of the ref |
| Held | Paused or Completed | a limit or a person keeps the ref where it is |
| Refused | Failed | a gate stopped the version |
| Failed | Failed | anything else went wrong |

A run of a deployment that made the version asks once and is Paused. Resuming it runs it again, and
the ref moves if the sources still give that version. Cancelling it leaves the ref unchanged. Other
runs, such as those of a backfill, cannot be paused; they are Completed, and the deployment
`promote` moves the ref.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, ParamSpec
from uuid import uuid4

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Completed, Failed, Paused

from packhouse.addons.ci.refresh import Outcome
from packhouse.errors import PackhouseError
from packhouse.recipe import Recipe
from packhouse.system.wording import counted
from tasks.events import announce_end, gate_of

log = logging.getLogger("packhouse.flows")

P = ParamSpec("P")
_STATES: dict[Outcome, str] = {
    "published": "Published",
    "unchanged": "Unchanged",
    "waiting": "WaitingForApproval",
    "held": "Held",
}


def flow_run() -> FlowRun | None:
    """Return the flow run that this code is part of."""
    context = FlowRunContext.get()
    return context.flow_run if context else None


def is_repeated() -> bool:
    """Return True if this run has run before: it was killed and retried, or paused and resumed."""
    run = flow_run()
    return run is not None and run.run_count > 1


def tag_run(**facts: str) -> None:
    """Tag the run, as in `dataset:demo`; replaces tags with the same names."""
    run = flow_run()
    if run is None:
        return
    run.tags = tags_with(run.tags, **facts)
    with get_client(sync_client=True) as client:
        client.update_flow_run(run.id, tags=run.tags)


def tags_with(tags: Iterable[str], **facts: str) -> list[str]:
    """Return the tags with these facts; they replace tags with the same names.

    Example:
        >>> tags_with(["packhouse", "outcome:failed"], outcome="published")
        ['outcome:published', 'packhouse']
        >>> tags_with(["packhouse", "outcome:failed"], outcome="")
        ['packhouse']
    """
    kept = {tag for tag in tags if tag.partition(":")[0] not in facts}
    return sorted(kept | {f"{name}:{value}" for name, value in facts.items() if value})


def ended(outcome: Outcome, message: str, version: str, data: object) -> State[Any]:
    """Tag the run and return its final state."""
    tag_run(version=version, outcome=outcome)
    log.log(logging.WARNING if outcome == "held" else logging.INFO, "%s", message)
    return Completed(name=_STATES[outcome], data=data, message=message)


def with_stops(flow: Callable[P, Any]) -> Callable[P, Any]:
    """Decorate the function of a flow, so that an error ends its run as Refused or Failed.

    It is Refused if a gate raised the error. If it were raised, Prefect would put more words before
    its message.
    """

    @wraps(flow)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return flow(*args, **kwargs)
        except PackhouseError as error:
            gate = gate_of(error)
            what = f"refused by its {gate} gate" if gate else type(error).__name__
            log.error("%s: %s", what, error)
            return Failed(name="Refused" if gate else None, data=error, message=f"{what}: {error}")

    return run


def version_asked(state: State[Any] | None) -> str:
    """Return the version for which a run in this state asks for approval; empty if it does not."""
    return ((state and state.state_details.pause_key) or "").partition("/")[0]


def is_approved(outcome: Outcome, message: str, version: str, *, is_new: bool) -> bool:
    """Ask for approval to move the ref by suspending this run until somebody resumes it.

    Only the run that made a version asks, and only once.

    Args:
        outcome: outcome that names the state.
        message: text for the UI that explains what Resume does.
        version: version that the ref would point to.
        is_new: False if an earlier run made the version.

    Returns:
        True if this run was resumed; False if it does not ask.

    Raises:
        Pause: ends this process; a worker runs the run again when somebody resumes it.
    """
    context, run = FlowRunContext.get(), flow_run()
    if context is None or run is None or run.deployment_id is None or run.parent_task_run_id:
        return False
    with get_client(sync_client=True) as client:
        history = client.read_flow_run_states(run.id)
        answers = [
            after
            for state, after in pairwise(history)
            if state.is_paused() and version_asked(state) == version
        ]
        if answers and answers[-1].name == "Resuming":
            return True
        # A question that was cancelled is asked again if its run is run again. Prefect counts that
        # run as resumed, not as repeated.
        if not (is_new or answers or is_repeated()):
            return False
        tag_run(version=version, outcome=outcome)
        asked: State[Any] = Paused(
            name=_STATES[outcome],
            message=message,
            reschedule=True,
            pause_key=f"{version}/{uuid4()}",  # the server accepts each key once
        )
        answer = client.set_flow_run_state(run.id, asked)
    if answer.status != SetStateStatus.ACCEPT:  # the run is being cancelled
        return False
    log.warning("%s", message)
    announce_end(context.flow, run, asked)
    raise Pause(state=answer.state)


_OPEN = ("Held", "WaitingForApproval")

Runs = Sequence[tuple[str, State[Any]]]
"""Recipe and final state of each run."""


def name_of(recipe: str | Recipe) -> str:
    """Return the name of a recipe, or of its dataset."""
    return recipe if isinstance(recipe, str) else recipe.dataset


def log_recipe(name: str, state: State[Any]) -> None:
    """Log the outcome of a recipe in its backfill; a WARNING if a person has to do something."""
    is_open = not state.is_completed() or state.name in _OPEN
    log.log(
        logging.WARNING if is_open else logging.INFO, "%s: %s: %s", name, state.name, state.message
    )


def filled(runs: Runs) -> State[Any]:
    """Return the state of the backfill: completed if all runs are.

    Child runs cannot be paused, so the message lists the refs that wait for approval.
    """
    bad = [name for name, state in runs if not state.is_completed()]
    data = {name: state.message for name, state in runs}
    outcomes = Counter(str(state.name) for _, state in runs)
    counts = ", ".join(f"{number:,} {name}" for name, number in sorted(outcomes.items()))
    message = f"{counted(len(runs), 'recipe')} done: {counts}"
    if bad:
        message = f"{len(bad)} of {len(runs)} recipes failed: {', '.join(bad)}"
    open_ = [name for name, state in runs if state.name in _OPEN]
    if open_:
        message += (
            f". The refs of {', '.join(open_)} did not move; the artifact 'backfill' of this run "
            "shows how to move each of them"
        )
    if bad:
        # Prefect raises the data of a failed run, so it must be an exception.
        return Failed(data=PackhouseError(message, recipes=data), message=message)
    name = "Held" if outcomes["Held"] else "WaitingForApproval" if open_ else None
    return Completed(name=name, data=data, message=message)
