"""gc: reclaim what dead publishers left; shows what, and deletes only if told to."""

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from packhouse.recipe.settings import Name
from schemas.places import StorePlace
from tasks.artifacts import garbage_artifacts
from tasks.guard import allowed_store
from tasks.hooks import FLOW, store_run_name
from tasks.versions import collect, collected, datasets_of


@flow(name="gc", flow_run_name=store_run_name, **FLOW)
def gc(
    store: StorePlace,
    dataset: Name | None = None,
    grace_hours: Annotated[float, Field(ge=0)] = 24.0,
    delete: bool = False,
) -> Any:
    """Reclaim what no reader can reach; committed versions are never touched.

    Args:
        store: root of the store: a name of this deployment, a folder or s3://bucket/prefix.
        dataset: which dataset; all of the store if left out.
        grace_hours: hours for which uncommitted attempts are left alone after their last write.
        delete: delete what is found; without it, only show.
    """
    root = allowed_store(store)
    reports = [
        (name, collect(root, name, grace_hours, delete)) for name in datasets_of(root, dataset)
    ]
    garbage_artifacts(root, reports)
    return collected(reports)
