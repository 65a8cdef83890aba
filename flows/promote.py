"""promote: point a ref to a version, for example to one that is waiting for approval."""

from typing import Any

from prefect import flow
from prefect.utilities.hashing import file_hash

from packhouse.recipe.sections import Name
from schemas.places import StorePlace
from tasks.allowed_places import allowed_store
from tasks.hooks import FLOW, store_run_name
from tasks.outcomes import with_stops
from tasks.versions import move_ref, moved


@flow(name="promote", version=file_hash(__file__), flow_run_name=store_run_name, **FLOW)
@with_stops
def promote(
    store: StorePlace,
    dataset: Name,
    version: str = "latest.candidate",
    ref: str = "latest",
    expected: str | None = None,
    reason: str = "",
) -> Any:
    """Point a ref to a published version.

    Args:
        store: the store: a name from sources.yaml, a folder or s3://bucket/prefix.
        dataset: name of the dataset.
        version: a version or a ref; by default the version that is waiting for approval.
        ref: the ref to move.
        expected: move the ref only if it currently points to this version.
        reason: shown in the history of the ref.
    """
    root = allowed_store(store)
    done = move_ref(root, dataset, version, ref, expected, reason or f"promoted {version}")
    return moved(root, dataset, done)
