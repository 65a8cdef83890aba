"""Where things lie under a root, how that is written, and which names are allowed there.

<dataset>/v/<vid>.g<N>/data/train-00000-of-00008-<sha12>.parquet   create-only
<dataset>/v/<vid>.g<N>/manifest.json                               commit point, create-only
<dataset>/refs/<name>.json                                         compare-and-swap
_tokenizers/<fingerprint>.gz                                       create-only, for all datasets
_doctor-<random>/...                                               what a check of the store wrote
"""

import re
from dataclasses import dataclass

from packhouse.errors import ConfigError

PROBES = "_doctor-"
"""How the folders of store checks begin; no dataset may be called so."""

_NAME = re.compile(r"(?=.{1,64}\Z)[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*")
_VID = re.compile(r"[a-z0-9]{4,64}")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")
_VERSION = re.compile(r"([a-z0-9]{4,64})\.g(0|[1-9][0-9]{0,8})")


def check_name(what: str, name: str) -> str:
    """Return the name of a dataset or ref if it is allowed.

    Example:
        >>> check_name("dataset", "alpaca-v2")
        'alpaca-v2'
        >>> check_name("ref", "../prod")
        Traceback (most recent call last):
        ...
        packhouse.errors.ConfigError: ref '../prod': use a-z, 0-9, '.', '_' and '-', at most 64 ...
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r}: use a-z, 0-9, '.', '_' and '-', at most 64 characters, the "
            "first a letter or digit, no dot at the end or behind a dot"
        )
    if what == "ref" and is_version(name):
        raise ConfigError(f"ref {name!r} looks like a version; choose another name")
    return name


def is_name(name: str) -> bool:
    """Return True if a dataset or ref may have this name."""
    return _NAME.fullmatch(name) is not None


def check_vid(vid: str) -> str:
    """Return `vid` if it is 4 to 64 of a-z and 0-9 (a hex digest, commonly)."""
    if not _VID.fullmatch(vid):
        raise ConfigError(f"version id {vid[:80]!r}: use 4 to 64 of a-z and 0-9")
    return vid


def version_name(vid: str, generation: int) -> str:
    """Name of a version.

    Example:
        >>> version_name("3f2a9c", 0)
        '3f2a9c.g0'
    """
    return f"{vid}.g{generation}"


def is_version(name: str) -> bool:
    """Return True if `name` has the form of a version, `<vid>.g<N>`."""
    return _VERSION.fullmatch(name) is not None


def split_version(version: str) -> tuple[str, int]:
    """Version id and generation of a version.

    Example:
        >>> split_version("3f2a9c.g10")
        ('3f2a9c', 10)
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ConfigError(f"{version[:80]!r} is not a version: expected <vid>.g<N>")
    return match[1], int(match[2])


def pinned(version: str, manifest_id: str) -> str:
    """Name a version together with its manifest, which nobody can change unnoticed then.

    128 bits of the digest: too many for a second manifest that has the same ones.

    Example:
        >>> pinned("3f2a9c.g0", "0123456789abcdef" * 4)
        '3f2a9c.g0#0123456789abcdef0123456789abcdef'
    """
    return f"{version}#{manifest_id[:32]}"


def split_pinned(name: str) -> tuple[str, str]:
    """Split a name, which may be pinned, into the name and the digest; empty if there is none.

    Raises:
        ConfigError: what follows the name is no digest, or is too short a part of one.
    """
    name, sign, manifest_id = name.partition("#")
    if sign and not _DIGEST.fullmatch(manifest_id):
        raise ConfigError(
            f"'{name}#{manifest_id[:80]}' does not end in a digest: give the first 32 to 64 digits "
            "of the manifest_id, as `packhouse show` prints them"
        )
    return name, manifest_id


def version_folder(dataset: str, version: str) -> str:
    """Key prefix of a version, without a slash at its end."""
    return f"{check_name('dataset', dataset)}/v/{version}"


def manifest_key(dataset: str, version: str) -> str:
    """Key of the commit point of a version."""
    return f"{version_folder(dataset, version)}/manifest.json"


def file_key(dataset: str, version: str, key: str) -> str:
    """Key under the root of a file that the manifest names relative to its version."""
    return f"{version_folder(dataset, version)}/{key}"


def ref_key(dataset: str, ref: str) -> str:
    """Key of a ref."""
    return f"{check_name('dataset', dataset)}/refs/{ref}.json"


def tokenizer_key(fingerprint: str) -> str:
    """Key of a tokenizer that versions of any dataset are made with."""
    return f"_tokenizers/{fingerprint}.gz"


@dataclass(frozen=True, slots=True)
class Address:
    """Parts of `ROOT/DATASET@NAME`."""

    root: str
    dataset: str
    name: str
    """A ref, a version, or a version id; `latest` if nothing was given. It may be pinned."""


def parse_address(text: str) -> Address:
    """Split an address; nothing is opened.

    Example:
        >>> parse_address("s3://bucket/store/alpaca@prod")
        Address(root='s3://bucket/store', dataset='alpaca', name='prod')
        >>> parse_address("./store/alpaca")
        Address(root='./store', dataset='alpaca', name='latest')

    Raises:
        ConfigError: no dataset in it.
    """
    place, at, name = text.rstrip("/").rpartition("@")
    if not at or "/" in name:  # an @ of a folder's name
        place, name = text.rstrip("/"), "latest"
    root, slash, dataset = place.rpartition("/")
    if not slash:
        root = "."
    if not dataset or root.endswith(":/"):
        raise ConfigError(f"'{text}' names no dataset: expected ROOT/DATASET or ROOT/DATASET@NAME")
    return Address(root or "/", check_name("dataset", dataset), name)
