"""promote: point a ref to a version, such as one that waited for approval."""

from typing import Any

from prefect import flow

from packhouse.recipe.settings import Name
from schemas.places import StorePlace
from tasks.guard import allowed_store
from tasks.hooks import FLOW, store_run_name
from tasks.versions import move_ref, moved


@flow(name="promote", flow_run_name=store_run_name, **FLOW)
def promote(
    store: StorePlace,
    dataset: Name,
    version: str = "latest.candidate",
    ref: str = "latest",
    expected: str | None = None,
    reason: str = "",
) -> Any:
    """Point a ref to a published version, by compare-and-swap.

    Args:
        store: root of the store: a name of this deployment, a folder or s3://bucket/prefix.
        dataset: which dataset.
        version: a version, or a ref; by default what a refresh left for approval.
        ref: the ref to move.
        expected: move only if the ref points to this version now.
        reason: kept in the ref's log.
    """
    root = allowed_store(store)
    done = move_ref(root, dataset, version, ref, expected, reason or f"promoted {version}")
    return moved(root, dataset, done)
