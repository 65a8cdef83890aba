"""Find a published version, and load a split of it as rows that are mapped, not read.

Needs no torch. What lies on this machine: `packhouse.load.copies`.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    EmptyDatasetError,
    VersionNotFoundError,
)
from packhouse.load.boundaries import first_packs, watch_packs
from packhouse.load.copies import mapped_file
from packhouse.store import FileEntry, OpenVersion, open_store
from packhouse.store.layout import split_pinned
from packhouse.store.manifest import Manifest, changed_manifest, parse_slot
from packhouse.store.read import open_address
from packhouse.system.disks import check_cache, default_cache

if TYPE_CHECKING:
    from datasets import Dataset


@overload
def load_packed(
    uri: str | Path,
    version: str = ...,
    split: str = ...,
    *,
    by_source: Literal[False] = ...,
    cache: str | Path | None = ...,
    verify: bool = ...,
) -> "Dataset": ...
@overload
def load_packed(
    uri: str | Path,
    version: str = ...,
    split: str = ...,
    *,
    by_source: Literal[True],
    cache: str | Path | None = ...,
    verify: bool = ...,
) -> "dict[str, Dataset]": ...
def load_packed(
    uri: str | Path,
    version: str = "latest",
    split: str = "train",
    *,
    by_source: bool = False,
    cache: str | Path | None = None,
    verify: bool = True,
) -> "Dataset | dict[str, Dataset]":
    """Load a split of a published version as a memory-mapped `datasets.Dataset`.

    Rows have `input_ids`, `labels` (made from the ranges where the layout is `compact`),
    `seq_lengths`, `record_ids`, `position_ids`, for classification `label`, and `loss_weights`
    where some tokens weigh other than 1. They carry
    `position_ids` even if the files do not: the one mark of record boundaries that
    `transformers.Trainer` does not drop.

    Args:
        uri: `<store>/<dataset>`, a folder or `s3://bucket/prefix/<dataset>`, may end in `@<ref>` or
            `@<version>#<digest>`; or a folder that `packhouse pull` wrote.
        version: a ref, a version (`<vid>.g<N>`) or a version id; best `<version>#<digest>`.
        split: `train` or `eval`.
        by_source: return a dict of one dataset for each source, as `Trainer(eval_dataset=...)`
            takes it; of a version with `split.eval_by_source`.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: compare each file's sha256 before this process first reads it (1-2 GB/s); if False,
            trust copies that were verified before, while size and time of change stay the same.

    Returns:
        A `datasets.Dataset`, or a dict of such by source; its `info.version` is unset and
        `info.description` names the version.

    Raises:
        ConfigError: `uri` ends in another name than `version`, a file is in the place of the
            cache, or `by_source` of a split that has no files by source.
        DiskError: the cache cannot be written: no room, no right.
        VersionNotFoundError: no such dataset, version or split.
        EmptyDatasetError: the split holds no row.
        IntegrityError: the store's bytes are not the published ones.

    Example:
        >>> from packhouse import prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(9)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=folder, progress=False, cache=folder / "cache")
        >>> packs = load_packed(folder / "numbers", cache=folder / "cache")
        >>> packs.num_rows, sum(packs[0]["seq_lengths"]) == len(packs[0]["input_ids"])
        (1, True)
    """
    folder = cache_folder(cache)
    opened, entries = open_split(uri, version, split)
    paths: dict[str | None, list[Path]] = {}
    for entry in entries:
        source = entry.source if by_source else None
        if by_source and source is None:
            raise ConfigError(
                f"split '{split}' of {opened.dataset} {opened.version} has no files by source; "
                "prepare with split.eval_by_source: true, and load split='eval'"
            )
        paths.setdefault(source, []).append(mapped_file(opened, entry, folder, verify))
    about = f"packhouse {opened.dataset} {opened.version} {split}"
    rows = {name: map_rows(own, f"{about} {name or ''}".strip()) for name, own in paths.items()}
    for each in rows.values():
        watch_packs(first_packs(each))
    if "transformers.trainer" in sys.modules and any(
        "loss_weights" in each.column_names for each in rows.values()
    ):
        warnings.warn(
            "rows have loss_weights, which transformers.Trainer drops and other collators leave "
            "out. Set remove_unused_columns=False and apply them (docs/how-to/own-loop.md)",
            stacklevel=2,
        )
    return {str(name): each for name, each in rows.items()} if by_source else rows[None]


def map_rows(paths: Sequence[Path], description: str) -> "Dataset":
    """Map files that `mapped_file` gave, one behind another, as a dataset."""
    from datasets import Dataset, DatasetInfo, concatenate_datasets

    info = DatasetInfo(description=description)
    return concatenate_datasets([Dataset.from_file(str(path)) for path in paths], info=info)


def cache_folder(cache: str | Path | None) -> Path:
    """The folder of local copies: the one given, else as `find_cache` says.

    Raises:
        ConfigError: a file stands there or above it.
    """
    return check_cache(Path(cache) if cache is not None else default_cache())


def open_split(
    uri: str | Path, version: str, split: str, *, preferences: bool = False
) -> tuple[OpenVersion, list[FileEntry]]:
    """Resolve a version and the data files of one of its splits, in published order.

    Raises:
        ConfigError: `uri` ends in another name than `version`, or the version holds preferences
            where others are wanted, whose rejected answers would be trained like any: or none.
        VersionNotFoundError: no such dataset, version or split.
    """
    uri = str(uri)
    opened = _open_pulled(uri, version)
    if opened is None:
        opened = open_address(uri, version)
    if preferences != (opened.manifest.preferences is not None):
        raise ConfigError(
            f"{opened.dataset} {opened.version} holds no preferences: load it with load_packed"
            if preferences
            else f"{opened.dataset} {opened.version} holds preferences, and its bad answers would "
            "be trained like good ones: load it with load_preferences"
        )
    entries = opened.files(split=split)
    if not entries:
        raise VersionNotFoundError(
            f"{opened.dataset} {opened.version} has no split '{split}'; it has "
            f"{', '.join(opened.manifest.splits()) or 'none'}"
        )
    filled = [entry for entry in entries if entry.rows]
    if not filled:
        raise EmptyDatasetError(
            f"split '{split}' of {opened.dataset} {opened.version} holds no row; load another one"
        )
    return opened, filled


class _Pulled(OpenVersion):
    """A version whose files lie under their own names in one folder, as `packhouse pull` wrote."""

    __slots__ = ()

    @override
    def key(self, entry: FileEntry) -> str:
        return entry.path


def _open_pulled(uri: str, version: str) -> OpenVersion | None:
    """Open a folder that `packhouse pull` wrote; None where `uri` is no such folder."""
    folder = Path(uri).expanduser()
    if "://" in uri or not (folder / "manifest.json").is_file():
        return None
    manifest = parse_slot((folder / "manifest.json").read_bytes(), f"'{folder / 'manifest.json'}'")
    if not isinstance(manifest, Manifest):
        raise VersionNotFoundError(f"'{folder}' holds a removed version; pull another one")
    version, recorded = split_pinned(version)
    if version not in ("latest", manifest.version, manifest.vid):
        raise VersionNotFoundError(
            f"'{folder}' is a copy of {manifest.version}, not of '{version}'; leave `version` out "
            "or load from the store"
        )
    if not manifest.manifest_id.startswith(recorded):
        raise changed_manifest(manifest, recorded, "the address")
    return _Pulled(
        store=open_store(str(folder)),
        dataset=manifest.dataset,
        version=manifest.version,
        manifest=manifest,
    )
