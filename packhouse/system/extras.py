"""Packages that not every install has, imported where they are needed."""

from importlib import import_module
from typing import Any

from packhouse.errors import ConfigError


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
