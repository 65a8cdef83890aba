"""verify: check published versions, using only their store."""

from typing import Any

from prefect import flow
from prefect.utilities.hashing import file_hash

from packhouse.recipe.sections import Name
from schemas.places import StorePlace
from tasks.allowed_places import allowed_store
from tasks.artifacts import verify_artifacts
from tasks.hooks import FLOW, store_run_name
from tasks.outcomes import with_stops
from tasks.versions import checked, datasets_of, verify_one


@flow(name="verify", version=file_hash(__file__), flow_run_name=store_run_name, **FLOW)
@with_stops
def verify(store: StorePlace, dataset: Name | None = None, version: str = "latest") -> Any:
    """Check every byte, schema, count and value of published versions. Reads only the store.

    Args:
        store: the store: a name from sources.yaml, a folder or s3://bucket/prefix.
        dataset: name of the dataset; by default all datasets in the store.
        version: a version or a ref.
    """
    root = allowed_store(store)
    reports = [
        (name, verify_one(root, name, version)) for name in datasets_of(root, dataset, version)
    ]
    verify_artifacts(root, reports)
    return checked(reports)
