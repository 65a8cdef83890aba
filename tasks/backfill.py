"""What a backfill does with the runs of its recipes: name them, and say how they ended."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from packhouse.recipe import Recipe

Runs = Sequence[tuple[str, State[Any]]]
"""Recipe and final state of its run."""


def name_of(recipe: str | Recipe) -> str:
    """Return the name of a recipe, or of its dataset."""
    return recipe if isinstance(recipe, str) else recipe.dataset


def filled(runs: Runs) -> State[Any]:
    """Return the state of the whole: completed if every run is."""
    bad = [name for name, state in runs if not state.is_completed()]
    data = {name: state.message for name, state in runs}
    if bad:
        message = f"{len(bad)} of {len(runs)} recipes failed: {', '.join(bad)}"
        return Failed(data=data, message=message)
    outcomes = Counter(str(state.name) for _, state in runs)
    counts = ", ".join(f"{number:,} {name}" for name, number in sorted(outcomes.items()))
    return Completed(data=data, message=f"all {len(runs)} recipes done: {counts}")
