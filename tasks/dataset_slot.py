"""Let only one run work on a dataset at a time.

Runs of one dataset queue: each holds the only slot of a global concurrency limit and renews its
lease. If a run is killed, its lease ends after a minute and the next run starts. The store refuses
to mix two publishers anyway, so the slot only saves work and puts moves of refs in order. Prefect's
embedded server has no other runs, so no slot is held there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from packhouse.recipe import Recipe
from tasks.outcomes import tag_run

log = logging.getLogger("packhouse.flows")

LEASE_S = 60.0
"""Seconds until the slot of a killed run is free; the shortest lease that Prefect allows."""


@contextmanager
def dataset_slot(recipe: Recipe) -> Iterator[None]:
    """Hold the only slot of a dataset during the block; wait while another run holds it."""
    name = slot_name(recipe)
    tag_run(dataset=recipe.dataset, outcome="")  # a run that is run again has that of the last time
    with get_client(sync_client=True) as client:
        if client.server_type == ServerType.EPHEMERAL:
            yield
            return
        make_limit(client, name)
    log.info("waiting until no other run works on '%s' (slot %s)", recipe.dataset, name)
    # A run goes on if the server is away for a while: the store refuses to mix two publishers.
    with concurrency(
        name, strict=True, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False
    ):
        log.info("no other run works on '%s'; starting", recipe.dataset)
        yield


def make_limit(client: SyncPrefectClient, name: str) -> None:
    """Create the limit if it is missing. Checks first, because the server logs every conflict."""
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):  # another run was faster
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))


def slot_name(recipe: Recipe) -> str:
    """Return the name of a dataset's limit, which all recipes for the same dataset and store share.

    Example:
        >>> from packhouse.recipe import Recipe
        >>> raw = {"dataset": "demo", "sources": [{"path": "a.jsonl"}], "tokenizer": "t"}
        >>> slot_name(Recipe.model_validate({**raw, "publish": {"store": "s3://bucket/store/"}}))
        'packhouse.demo.1ac35ceb'
    """
    place = place_of(recipe.publish.store)
    return f"packhouse.{recipe.dataset}.{sha256(place.encode()).hexdigest()[:8]}"


def place_of(store: str) -> str:
    """Return the canonical spelling of a store's root."""
    store = store.rstrip("/")
    return store if "://" in store else str(Path(store).expanduser().resolve())
