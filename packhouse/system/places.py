"""Where finished steps lie: a folder of this machine, and a mirror that machines share.

One rule for every command, flow and loader: `find_cache`. No folder is ever named like a URI.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from packhouse.errors import ConfigError
from packhouse.system.disks import disk_errors

# A URI whose slashes are missing or went when it became a path; `a:b/c` and `x/b:c` are folders.
_URI = re.compile(
    r"(?:^(?P<first>[a-z][a-z0-9+.-]+)"
    r"|/(?P<inner>[a-z][a-z0-9+.-]+(?=:/)|s3|gs|gcs|az|abfss?|file)):",
    re.I,
)
_SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlace:
    """Where finished steps lie."""

    folder: Path
    """On this machine."""
    mirror: str | None = None
    """URI of an object store through which machines without a common disk share steps."""


def find_cache(setting: str | None = None) -> CachePlace:
    """Return where finished steps lie: the one rule for every command, flow and loader.

    A setting is a folder, or the URI of a mirror. Folder and mirror are each the first one named by
    `setting` (a `--cache`), PACKHOUSE_CACHE or PACKHOUSE_CACHE_MIRROR. Else there is no mirror, and
    the folder is `.packhouse`, if the working directory has finished steps there, else the one of
    the user for all projects: `~/.cache/packhouse`, on Linux.

    Raises:
        ConfigError: PACKHOUSE_CACHE_MIRROR is a folder.

    Example:
        >>> find_cache("s3://bucket/steps").mirror, find_cache("/data/cache").folder
        ('s3://bucket/steps', PosixPath('/data/cache'))
    """
    shared = os.environ.get("PACKHOUSE_CACHE_MIRROR") or None
    if shared is not None and "://" not in shared:
        raise ConfigError(
            f"PACKHOUSE_CACHE_MIRROR is '{shared}'; give a URI such as s3://bucket/prefix"
        )
    named = [name for name in (setting, os.environ.get("PACKHOUSE_CACHE"), shared) if name]
    folders = [name for name in named if "://" not in name]
    mirrors = [name for name in named if "://" in name]
    folder = Path(".packhouse")
    if folders:  # Path.expanduser raises at `~x`, which may be a folder's name
        folder = Path(os.path.expanduser(folders[0]))  # noqa: PTH111 - for that reason
    elif not (folder / "steps").is_dir():
        folder = user_cache_path("packhouse", appauthor=False)
    return CachePlace(folder=folder, mirror=(*mirrors, None)[0])


def default_cache() -> Path:
    """Return the folder of finished steps where no setting names another; see `find_cache`."""
    return find_cache().folder


def check_cache(folder: Path) -> Path:
    """Return the folder of cached steps if it is one, or can become one; nothing is made.

    Raises:
        ConfigError: a file stands there or above it, or it looks like a URI (`s3:bucket/steps`).
    """
    if found := _URI.search(str(folder)):
        scheme = (found["first"] or found["inner"]).lower()
        if scheme not in _SCHEMES and ":/" not in str(folder):
            raise ConfigError(
                f"cache '{folder}' looks like a URI, and '{scheme}:' is none that packhouse knows "
                f"({', '.join(_SCHEMES)}); give a folder of that name by its absolute path"
            )
        slashes = "///" if scheme == "file" else "//"  # a Path keeps one of them
        rest = str(folder)[found.end() :].lstrip("/")
        raise ConfigError(
            f"cache '{folder}' is a URI, and a folder of this machine is needed here. Runs take a "
            "mirror as --cache (`packhouse prepare`, `packhouse ci`), PACKHOUSE_CACHE or "
            f"PACKHOUSE_CACHE_MIRROR: write '{scheme}:{slashes}{rest}' there"
        )
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ConfigError(
            f"cache '{folder}': '{place}' is no folder; give a folder with --cache or "
            "PACKHOUSE_CACHE"
        )
    return folder


def make_cache(folder: Path) -> None:
    """Make the folder of cached steps where it is missing.

    Raises:
        ConfigError: it cannot be made.
        DiskError: the disk is full or read-only.
    """
    try:
        with disk_errors(check_cache(folder)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache '{folder}' cannot be made ({error.strerror}); give a folder with --cache or "
            "PACKHOUSE_CACHE"
        ) from None
