"""Packages that not every install has, and how DuckDB and the Hub's client are set up."""

import os
from importlib import import_module
from typing import Any

from packhouse.errors import ConfigError

NO_FILES = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Else what memory does not hold goes to `.tmp` in the working directory, up to 90% of the disk.
    "max_temp_directory_size": "0B",
}
"""Settings of a DuckDB connection; each use adds its own memory and threads."""


def hub_options() -> dict[str, Any]:
    """Return the endpoint and the token of the environment, as the Hub's client takes them.

    The token comes from `HF_TOKEN` only; `False` keeps the client from a login that lies on disk.
    """
    return {
        "endpoint": os.environ.get("HF_ENDPOINT"),
        "token": os.environ.get("HF_TOKEN") or False,
    }


def silent_bar() -> type:
    """Return the Hub client's progress bar, never shown: the run has one of its own."""
    tqdm: Any = import_module("tqdm.auto").tqdm  # which has no types

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tqdm.__init__(self, *args, **{**kwargs, "disable": True})

    return type("Silent", (tqdm,), {"__init__": init})


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of packhouse brings.

    Args:
        module: its name.
        extra: what to install: `packhouse[extra]`.
        what: who needs it, for the message.

    Raises:
        ConfigError: it is not installed; says how to install it.

    Example:
        >>> import_extra("no_such_module", "s3", "s3://")
        Traceback (most recent call last):
        packhouse.errors.ConfigError: s3:// needs no_such_module, which is not installed: pip ...
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which is not installed: pip install 'packhouse[{extra}]'"
        ) from None
