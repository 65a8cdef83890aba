"""Restrict what a flow run may access to the places that its worker allows.

A run of a deployment can be started by anyone who may fill in its form, so all paths and URIs in
its parameters are resolved with the worker's sources.yaml (`schemas.places`). A run from a shell
has the rights of its user and only looks up names there. Secret blocks listed in the file become
environment variables of the run's process, never parameters.
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from prefect.blocks.system import Secret
from prefect.context import FlowRunContext
from prefect.runtime import deployment

from packhouse.errors import ConfigError
from packhouse.recipe import Recipe
from packhouse.run.prepare_arguments import pinned, read_recipe
from packhouse.system.disks import CachePlace, find_cache
from schemas.places import AllowedPaths, load_places


def allowed_recipe(
    recipe: Recipe | str, store: str | None = None, *, deployed: bool | None = None
) -> Recipe:
    """Return the recipe of a run: the file listed under a name, or a recipe with resolved paths.

    Args:
        recipe: a name listed in sources.yaml, or the recipe itself.
        store: store to publish to instead of the recipe's.
        deployed: True if it comes from a form; by default, True in a run of a deployment.

    Raises:
        ConfigError: the name is not listed, this worker does not allow a path or URI, or one
            contains a credential.
    """
    places = _places(deployed)
    if isinstance(recipe, str):
        found = named_recipe(recipe)
    else:
        found = pinned(recipe if places is None else places.recipe(recipe))
    if store is None:
        return found
    root = store if places is None else places.store(store)
    publish = found.publish.model_copy(update={"store": root})
    return found.model_copy(update={"publish": publish})


def named_recipe(name: str) -> Recipe:
    """Return the recipe listed under this name in sources.yaml.

    Raises:
        ConfigError: the name is not listed, or the recipe is invalid.
    """
    places = load_places(_places_file())
    if name not in places.recipes:
        known = ", ".join(sorted(places.recipes)) or "none"
        raise ConfigError(
            f"recipe '{name}' is not listed in {_places_file()} (known: {known}). Choose a known "
            "one, or add it to that file"
        )
    _take_secrets(places)
    return read_recipe(places.recipes[name])


def allowed_store(store: str) -> str:
    """Return the root of the store that a parameter refers to.

    Raises:
        ConfigError: it is not listed in sources.yaml and is outside the allowed prefixes, or it
            contains a credential.
    """
    places = _places()
    return store if places is None else places.store(store)


def worker_cache(cache: str | None) -> CachePlace:
    """Return the location of finished steps; a deployed run uses the worker's own.

    Raises:
        ConfigError: a form sets another one.
    """
    if cache is not None and _is_deployed():
        raise ConfigError("a deployed run uses the worker's PACKHOUSE_CACHE. Leave `cache` empty")
    place = find_cache(cache)
    return replace(place, folder=place.folder.absolute())


def _is_deployed() -> bool:
    """Return True if this run or a parent of it belongs to a deployment.

    Check the run's own record first, because `deployment.id` would ask the server for it again.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is not None and run.parent_task_run_id is None and run.deployment_id is None:
        return False
    return bool(deployment.id)


def _places_file() -> Path:
    return Path(os.environ.get("PACKHOUSE_SOURCES", "deployments/sources.yaml"))


def _places(deployed: bool | None = None) -> AllowedPaths | None:
    """Return the rules for this run; None (no limits) in a shell without PACKHOUSE_SOURCES."""
    deployed = _is_deployed() if deployed is None else deployed
    if not deployed and "PACKHOUSE_SOURCES" not in os.environ:
        return None
    places = load_places(_places_file())
    _take_secrets(places)
    return places


def _take_secrets(places: AllowedPaths) -> None:
    # Into the environment, because the server stores and shows parameters.
    for variable, block in places.secrets.items():
        if variable not in os.environ:
            os.environ[variable] = _secret(block)


@cache
def _secret(block: str) -> str:
    try:
        secret = Secret.load(block)
    except ValueError:
        raise ConfigError(
            f"the server has no Secret block '{block}', which sources.yaml lists. Create it"
        ) from None
    assert isinstance(secret, Secret), "Prefect loads synchronously outside of an event loop"
    return str(secret.get())
