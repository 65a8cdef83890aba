"""The contracts of a run's tables, where the pipeline that has them is installed.

The library stands alone: trainers need no Pandera. A checkout's `schemas` offers its contracts by
an entry point, which `packhouse ci` takes up; flows import them.
"""

from importlib.metadata import PackageNotFoundError, distribution

from packhouse.engine.workspace import Check

__all__ = ["installed_contracts"]

_GROUP = "packhouse.contracts"


def installed_contracts() -> Check | None:
    """Return the check of every table, or None where only the library is installed.

    Nobody but packhouse's own distribution is asked, so that no other package runs here.
    """
    try:
        offered = distribution("packhouse").entry_points.select(group=_GROUP)
        check: Check | None = next((entry.load() for entry in offered), None)
    except (PackageNotFoundError, ModuleNotFoundError):  # no metadata; a wheel, without `schemas`
        return None
    return check
