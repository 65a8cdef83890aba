"""Name the runs of a backfill and summarize their outcomes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from packhouse.recipe import Recipe

Runs = Sequence[tuple[str, State[Any]]]
"""Recipe and final state of each run."""


def name_of(recipe: str | Recipe) -> str:
    """Return the name of a recipe, or of its dataset."""
    return recipe if isinstance(recipe, str) else recipe.dataset


def filled(runs: Runs) -> State[Any]:
    """Return the state of the backfill: completed if all runs are.

    Child runs cannot be paused, so the message lists the refs that wait for approval.
    """
    bad = [name for name, state in runs if not state.is_completed()]
    data = {name: state.message for name, state in runs}
    outcomes = Counter(str(state.name) for _, state in runs)
    counts = ", ".join(f"{number:,} {name}" for name, number in sorted(outcomes.items()))
    message = f"all {len(runs)} recipes done: {counts}"
    if bad:
        message = f"{len(bad)} of {len(runs)} recipes failed: {', '.join(bad)}"
    open_ = [name for name, state in runs if state.name in ("Held", "WaitingForApproval")]
    if open_:
        message += (
            f". The refs of {', '.join(open_)} did not move; the artifact 'backfill' of this run "
            "says for each what to run to move it"
        )
    if bad:
        return Failed(data=data, message=message)
    name = "Held" if outcomes["Held"] else "WaitingForApproval" if open_ else None
    return Completed(name=name, data=data, message=message)
