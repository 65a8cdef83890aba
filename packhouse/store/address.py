"""Names of datasets and versions on the command line: `ROOT/DATASET@NAME`."""

from dataclasses import dataclass
from pathlib import Path

from packhouse.errors import ConfigError
from packhouse.store.layout import check_name
from packhouse.store.objects import ObjectStore, open_store
from packhouse.store.read import OpenVersion, open_version


@dataclass(frozen=True, slots=True)
class Address:
    """Parts of `ROOT/DATASET@NAME`."""

    root: str
    dataset: str
    name: str
    """A ref, a version, or a bare version id; `latest` if nothing was given."""


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


def open_address(text: str) -> OpenVersion:
    """Open the version that an address names.

    Raises:
        ConfigError: it is a file of rows.
        VersionNotFoundError: it is not there.
    """
    if Path(text).is_file():
        raise ConfigError(
            f"'{text}' is a file, not a version; `packhouse init {text} --tokenizer NAME` writes a "
            "recipe that reads it, and `packhouse inspect` of the recipe shows its rows"
        )
    address = parse_address(text)
    return open_version(address.root, address.dataset, address.name)


def open_beside(opened: OpenVersion, text: str) -> OpenVersion:
    """Open another version: of an address, or of a bare name in the same dataset.

    Raises:
        VersionNotFoundError: it is not there.
    """
    if "/" in text:
        return open_address(text)
    return open_version(opened.store, opened.dataset, text.removeprefix("@"))


def open_dataset(text: str) -> tuple[ObjectStore, str]:
    """Open the store of `ROOT/DATASET`, and say which dataset.

    Raises:
        ConfigError: a version is named where a whole dataset is meant.
    """
    address = parse_address(text)
    if "@" in text.rpartition("/")[2]:
        raise ConfigError(f"'{text}' names a version; give ROOT/DATASET")
    return open_store(address.root), address.dataset
