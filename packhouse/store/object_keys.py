"""Keys of objects under a store's root, addresses, and allowed names.

<dataset>/v/<vid>.g<N>/data/train-00000-of-00008-<sha12>.parquet   create-only
<dataset>/v/<vid>.g<N>/manifest.json                               commit point, create-only
<dataset>/refs/<name>.json                                         compare-and-swap
_tokenizers/<fingerprint>.gz                                       create-only, for all datasets
_doctor-<random>/...                                               temporary, of store checks
"""

import re
from dataclasses import dataclass

from packhouse.errors import ConfigError

PROBES = "_doctor-"
"""Prefix of folders of store checks. Names of datasets cannot begin with `_`."""

# Lower-case, because some file systems ignore case. No dot at the beginning or after another one,
# so a name cannot be `..`.
_NAME = re.compile(r"(?=.{1,64}\Z)[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*")
_VID = re.compile(r"[a-z0-9]{4,64}")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")
_VERSION = re.compile(r"([a-z0-9]{4,64})\.g(0|[1-9][0-9]{0,8})")


def check_name(what: str, name: str) -> str:
    """Return the name of a dataset, ref or split if it is allowed.

    Example:
        >>> check_name("dataset", "alpaca-v2")
        'alpaca-v2'
        >>> check_name("ref", "../prod")
        Traceback (most recent call last):
        ...
        packhouse.errors.ConfigError: ref '../prod': use at most 64 characters from a-z, 0-9, ...
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r}: use at most 64 characters from a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or digit, with no dot at the end or after another dot"
        )
    if what == "ref" and is_version(name):
        raise ConfigError(f"ref {name!r} looks like a version. Choose another name")
    return name


def is_name(name: str) -> bool:
    """Return True if a dataset or ref may have this name."""
    return _NAME.fullmatch(name) is not None


def check_vid(vid: str) -> str:
    """Return `vid` if it has 4 to 64 characters of a-z and 0-9 (usually a hex digest)."""
    if not _VID.fullmatch(vid):
        raise ConfigError(
            f"version ID {vid[:80]!r} is not valid. Use 4 to 64 characters from a-z and 0-9"
        )
    return vid


def version_name(vid: str, generation: int) -> str:
    """Return the name of a version.

    Example:
        >>> version_name("3f2a9c", 0)
        '3f2a9c.g0'
    """
    return f"{vid}.g{generation}"


def is_version(name: str) -> bool:
    """Return True if `name` has the form of a version, `<vid>.g<N>`."""
    return _VERSION.fullmatch(name) is not None


def split_version(version: str) -> tuple[str, int]:
    """Split a version into its ID and generation.

    Example:
        >>> split_version("3f2a9c.g10")
        ('3f2a9c', 10)
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ConfigError(f"{version[:80]!r} is not a version. Use the form <vid>.g<N>")
    return match[1], int(match[2])


def pinned(version: str, manifest_id: str) -> str:
    """Return the name of a version with the digest of its manifest, to detect any change of it.

    128 bits of the digest are enough that nobody can make another manifest with the same ones.

    Example:
        >>> pinned("3f2a9c.g0", "0123456789abcdef" * 4)
        '3f2a9c.g0#0123456789abcdef0123456789abcdef'
    """
    return f"{version}#{manifest_id[:32]}"


def split_pinned(name: str) -> tuple[str, str]:
    """Split a pinned name into name and digest; the digest is empty if the name is not pinned.

    Raises:
        ConfigError: The text after `#` is not a digest of at least 32 digits.
    """
    name, sign, manifest_id = name.partition("#")
    if sign and not _DIGEST.fullmatch(manifest_id):
        raise ConfigError(
            f"'{name}#{manifest_id[:80]}' does not end in a digest of 32 to 64 digits. Use the "
            "first 32 digits of the manifest_id from `packhouse show`"
        )
    return name, manifest_id


def version_folder(dataset: str, version: str) -> str:
    """Return the key prefix of a version, without a trailing slash."""
    return f"{check_name('dataset', dataset)}/v/{version}"


def manifest_key(dataset: str, version: str) -> str:
    """Return the key of a version's manifest, its commit point."""
    return f"{version_folder(dataset, version)}/manifest.json"


def file_key(dataset: str, version: str, key: str) -> str:
    """Return the key under the root of a file, from its key relative to the version."""
    return f"{version_folder(dataset, version)}/{key}"


def ref_key(dataset: str, ref: str) -> str:
    """Return the key of a ref."""
    return f"{check_name('dataset', dataset)}/refs/{ref}.json"


def tokenizer_key(fingerprint: str) -> str:
    """Return the key of a tokenizer, which versions of all datasets share."""
    # No dataset can have this name: names begin with a letter or a digit.
    return f"_tokenizers/{fingerprint}.gz"


@dataclass(frozen=True, slots=True)
class Address:
    """Parts of `STORE/DATASET@REF`."""

    root: str
    dataset: str
    name: str
    """Ref, version or version ID, possibly pinned; default: `latest`."""


def parse_address(text: str) -> Address:
    """Split an address into its parts without opening anything.

    Example:
        >>> parse_address("s3://bucket/store/alpaca@prod")
        Address(root='s3://bucket/store', dataset='alpaca', name='prod')
        >>> parse_address("./store/alpaca")
        Address(root='./store', dataset='alpaca', name='latest')

    Raises:
        ConfigError: The address has no dataset.
    """
    place, at, name = text.rstrip("/").rpartition("@")
    if not at or "/" in name:  # no @, or the @ is part of a folder's name
        place, name = text.rstrip("/"), "latest"
    root, slash, dataset = place.rpartition("/")
    if not slash:
        root = "."
    if not dataset or root.endswith(":/"):
        raise ConfigError(f"'{text}' has no dataset. Use STORE/DATASET or STORE/DATASET@REF")
    return Address(root or "/", check_name("dataset", dataset), name)
