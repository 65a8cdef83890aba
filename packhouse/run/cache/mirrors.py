"""Finished steps in an object store, for machines without a common disk."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

from packhouse.registry import function_of_addon
from packhouse.store.objects import ObjectStore
from packhouse.system.places import CachePlace


class Mirror(Protocol):
    """Shares finished steps with machines that have another cache: `packhouse.addons.mirrors`."""

    store: ObjectStore
    notes: list[str]
    """What went wrong with it; each costs time only."""

    def sharing(self, names: Sequence[tuple[str, str]]) -> AbstractContextManager[None]:
        """Fetch what is missing of some steps, as (step, key); write what the block computes."""

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of the steps, as (step, key), it has."""


def open_mirror(place: CachePlace) -> Mirror | None:
    """Open the mirror of a cache; None where it has none.

    Raises:
        ConfigError: no such kind of store, no credentials.
    """
    if place.mirror is None:
        return None
    return cast("Mirror", function_of_addon("open_step_mirror")(place.mirror, place.folder))
