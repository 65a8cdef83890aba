"""rollback: move a ref back to its previous version."""

from typing import Annotated, Any

from prefect import flow
from prefect.utilities.hashing import file_hash
from pydantic import Field

from packhouse.recipe.sections import Name
from packhouse.system.wording import counted
from schemas.places import StorePlace
from tasks.allowed_places import allowed_store
from tasks.hooks import FLOW, store_run_name
from tasks.outcomes import with_stops
from tasks.versions import move_ref, moved, past_of_ref


@flow(name="rollback", version=file_hash(__file__), flow_run_name=store_run_name, **FLOW)
@with_stops
def rollback(
    store: StorePlace,
    dataset: Name,
    ref: str = "latest",
    steps: Annotated[int, Field(ge=1, le=500)] = 1,
    reason: str = "",
) -> Any:
    """Move a ref back to its previous version.

    Args:
        store: the store: a name from sources.yaml, a folder or s3://bucket/prefix.
        dataset: name of the dataset.
        ref: the ref to move.
        steps: how many moves to go back.
        reason: shown in the history of the ref.
    """
    root = allowed_store(store)
    current, before = past_of_ref(root, dataset, ref, steps)
    why = reason or f"rolled back {counted(steps, 'move')}"
    done = move_ref(root, dataset, before, ref, current, why)
    return moved(root, dataset, done)
