"""gc: delete files left by interrupted publishes (dry run by default)."""

from typing import Annotated, Any

from prefect import flow
from prefect.utilities.hashing import file_hash
from pydantic import Field

from packhouse.recipe.sections import Name
from schemas.places import StorePlace
from tasks.allowed_places import allowed_store
from tasks.artifacts import garbage_artifacts
from tasks.hooks import FLOW, store_run_name
from tasks.outcomes import with_stops
from tasks.versions import collect, collected, datasets_of


@flow(name="gc", version=file_hash(__file__), flow_run_name=store_run_name, **FLOW)
@with_stops
def gc(
    store: StorePlace,
    dataset: Name | None = None,
    grace_hours: Annotated[float, Field(ge=0)] = 24.0,
    delete: bool = False,
) -> Any:
    """Delete files left by interrupted publishes (dry run by default). Published versions stay.

    Args:
        store: the store: a name from sources.yaml, a folder or s3://bucket/prefix.
        dataset: name of the dataset; by default all datasets in the store.
        grace_hours: keep interrupted publishes that were modified in the last N hours.
        delete: delete the files instead of only listing them.
    """
    root = allowed_store(store)
    reports = [
        (name, collect(root, name, grace_hours, delete)) for name in datasets_of(root, dataset)
    ]
    garbage_artifacts(root, reports)
    return collected(reports)
