"""How commands name a version: `STORE/DATASET`, with `@REF` or `@VERSION` if not latest."""

from packhouse.errors import ConfigError
from packhouse.store import OpenVersion, open_version

__all__ = ["TARGET_HELP", "open_target", "split_target"]

TARGET_HELP = (
    "VERSION is STORE/DATASET, optionally with @REF or @VERSION (by default @latest): "
    "./store/demo, s3://bucket/store/demo@prod, ./store/demo@0a1b2c3d4e5f6071.g0"
)


def split_target(target: str) -> tuple[str, str, str]:
    """Split `STORE/DATASET@NAME` into its three parts.

    Example:
        >>> split_target("s3://bucket/store/demo@prod")
        ('s3://bucket/store', 'demo', 'prod')
        >>> split_target("demo")
        ('.', 'demo', 'latest')
    """
    path, at, name = target.rstrip("/").rpartition("@")
    if not at or "/" in name:
        path, name = target.rstrip("/"), "latest"
    store, _, dataset = path.rpartition("/")
    if not dataset or not name:
        raise ConfigError(f"'{target}' names no version; {TARGET_HELP}")
    return store or ".", dataset, name


def open_target(target: str) -> OpenVersion:
    """Open the version that a target names.

    Raises:
        VersionNotFoundError: there is none.
    """
    store, dataset, name = split_target(target)
    return open_version(store, dataset, name)
