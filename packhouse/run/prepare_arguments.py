"""Turn the arguments of `prepare` (a recipe, data, a tokenizer) into files, folders and names.

Rows and tokenizers in memory are written to the cache, in folders named by their content, so the
same rows always give the same version.
"""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from packhouse.errors import ConfigError, TokenizerError
from packhouse.recipe import Recipe, SourceConfig, load_recipe, parse_recipe, recipe_file
from packhouse.recipe.recipe_file import merge_settings
from packhouse.system.disks import disk_errors
from packhouse.tokenize import fingerprint_tokenizer
from packhouse.tokenize.tokenizer_loading import pin_tokenizer

# `data/train.jsonl` is a file, even where it does not exist.
_DATASET_ID = re.compile(
    r"[\w.-]{1,96}/(?!.*\.(?:jsonl?|ndjson|csv|tsv|txt|xlsx|parquet|arrow|gz|zst|bz2|xz|zip)$)[\w.-]{1,96}"
)
# Keys by which a message names who speaks: OpenAI's and ShareGPT's.
_SPEAKER = {"role", "from"}


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Recipe:
    """Read a recipe and pin a tokenizer from the Hub to its current commit.

    Raises:
        ConfigError: see `load_recipe`.
        TokenizerError: the tokenizer does not exist.
    """
    # transformers warns if torch is missing, but packhouse works without it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return pinned(load_recipe(path, overrides, settings))


def pinned(recipe: Recipe) -> Recipe:
    """Return the recipe with tokenizer `org/name` replaced by `org/name@<commit>`."""
    return recipe.model_copy(update={"tokenizer": pin_tokenizer(recipe.tokenizer)})


def data_uri(data: object, cache: Path) -> str:
    """Return the path or URI of the data, after writing rows in memory to the cache.

    Args:
        data: a file, folder, glob or URI (`s3://`, ...); a dataset on the Hub (`org/name`,
            unless a folder `org` exists here); or rows: a `datasets.Dataset`, a pandas or polars
            frame, an Arrow table, a list of dicts or of conversations.
        cache: cache folder; rows are written under it.

    Raises:
        ConfigError: the type is not supported, or JSON or Parquet cannot hold the rows.
        DiskError: the rows cannot be written.
    """
    if isinstance(data, str | Path):
        uri = str(data)
        if not uri:
            raise ConfigError("data is an empty path. Pass a file or a folder.")
        is_id = _DATASET_ID.fullmatch(uri) and not Path(uri).parent.exists()
        return f"hf://datasets/{uri}" if is_id else uri
    name = "rows.jsonl" if isinstance(data, list | tuple) else "rows.parquet"
    return write_content(cache, name, partial(_write_rows, data))


def is_rows(data: object) -> bool:
    """Return True for a list of rows: dicts, or conversations that are lists of messages.

    Example:
        >>> is_rows([{"text": "a"}]), is_rows([[{"role": "user", "content": "a"}]])
        (True, True)
        >>> is_rows(["a.jsonl", {"path": "b.jsonl", "format": "chat"}]), is_rows([])
        (False, False)
    """
    return isinstance(data, list | tuple) and bool(data) and all(map(_is_row, data))


def is_settings(data: object) -> bool:
    """Return True if a dict holds the settings of a source, that is, a path and known options."""
    return isinstance(data, dict) and "path" in data and set(data) <= set(SourceConfig.model_fields)


def _is_row(row: Any) -> bool:
    if isinstance(row, dict):
        return not is_settings(row)
    is_list = isinstance(row, list) and bool(row)
    return is_list and all(isinstance(m, dict) and not _SPEAKER.isdisjoint(m) for m in row)


def _write_rows(data: Any, path: str) -> None:
    """Write rows to a file: a list as JSON Lines, everything else as Parquet."""
    if is_rows(data):
        options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        with Path(path).open("wb") as file:
            for number, row in enumerate(data):
                try:
                    file.write(orjson.dumps(row, option=options))
                except TypeError as error:
                    raise ConfigError(
                        f"row {number} of the list cannot be written as JSON ({error}). Use only "
                        "strings, numbers, True, False, None, lists, and dicts with string keys."
                    ) from None
        return
    library = "" if isinstance(data, type) else type(data).__module__.partition(".")[0]
    try:
        if isinstance(data, pa.Table):
            pq.write_table(data, path)
        elif library == "datasets" and hasattr(data, "to_parquet"):
            from datasets import utils

            # Hide the progress bars of `datasets`, because the run shows its own.
            is_hidden = utils.are_progress_bars_disabled()
            utils.disable_progress_bars()
            try:
                data.to_parquet(path)
            finally:
                if not is_hidden:
                    utils.enable_progress_bars()
        elif library == "pandas" and hasattr(data, "to_parquet"):
            # An unnamed index holds row numbers only.
            is_named = any(name is not None for name in data.index.names)
            data.to_parquet(path, index=is_named)
        elif library and hasattr(data, "write_parquet"):  # polars
            data.write_parquet(path)
        elif library and hasattr(data, "to_parquet"):  # dask, geopandas, ...
            data.to_parquet(path)
        else:
            hint = ""
            if isinstance(data, dict) and any(hasattr(s, "to_parquet") for s in data.values()):
                first = f"{next(iter(data))!r:.40}"
                hint = f" From a dict of splits, pass one split: data[{first}]."
            elif hasattr(data, "collect"):
                hint = " For a lazy frame, pass `data.collect()`."
            raise ConfigError(
                f"data of type {type(data).__name__} does not hold rows. Pass a path, a list of "
                f"dicts, a datasets.Dataset, a pandas or polars frame, or an Arrow table.{hint}"
            )
    except (pa.ArrowException, TypeError, ValueError) as error:
        said = " ".join(map(str, error.args))[:200]
        raise ConfigError(
            f"rows of the {type(data).__name__} cannot be written as Parquet ({said}). Give "
            "each column a unique name and a single type."
        ) from None


def tokenizer_name(tokenizer: object, cache: Path) -> str:
    """Return a tokenizer folder or pinned name, after saving a tokenizer object to the cache.

    Raises:
        TokenizerError: the folder or name does not exist, or the object is not a tokenizer.
        DiskError: the object cannot be saved.
    """
    if isinstance(tokenizer, str | Path):
        return pin_tokenizer(os.path.expanduser(tokenizer))  # noqa: PTH111 - `org/name` stays text
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained"):
        raise TokenizerError(
            f"an object of type {type(tokenizer).__name__} is not a tokenizer. Pass a folder, a "
            "Hub name (`org/name`) or a transformers tokenizer; wrap a tokenizers.Tokenizer in "
            "`PreTrainedTokenizerFast(tokenizer_object=...)`."
        )
    return str(_kept(cache, tokenizer.save_pretrained, fingerprint_tokenizer))


def write_content(cache: Path, name: str, write: Callable[[str], Any]) -> str:
    """Write a file into a folder named by its content and return its path."""

    def digest(folder: str) -> str:
        with (Path(folder) / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return str(_kept(cache, lambda folder: write(f"{folder}/{name}"), digest) / name)


def _kept(cache: Path, write: Callable[[str], Any], content_of: Callable[[str], str]) -> Path:
    """Fill a folder, then move it to the path derived from its content.

    A folder that is already there, perhaps from another process, is kept if its content is intact.
    """
    # Next to its final place, on the same file system, so that the rename is atomic.
    staged = cache / "given" / f".{uuid.uuid4().hex}"
    with disk_errors(cache):
        staged.mkdir(parents=True)
        try:
            write(str(staged))
            place = cache / "given" / content_of(str(staged))
            if not _has_content(place, content_of):
                shutil.rmtree(place, ignore_errors=True)
                try:
                    staged.rename(place)
                except OSError:
                    # If it is intact now, another process was faster.
                    if not _has_content(place, content_of):
                        raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return place


def _has_content(place: Path, content_of: Callable[[str], str]) -> bool:
    try:
        return content_of(str(place)) == place.name
    except (OSError, TokenizerError):
        return False


def recipe_for(
    data: Any,
    *,
    tokenizer: object = None,
    seq_len: int | None = None,
    store: str | Path | None = None,
    dataset: str | None = None,
    cache: Path,
    settings: Mapping[str, object],
    overrides: Sequence[str] = (),
) -> Recipe:
    """Return the recipe for the arguments of `prepare`; rows in memory are written to the cache.

    `overrides` (`section.key=value`) take precedence over `settings`. If they change the data that
    a recipe produces, `publish.move_ref` becomes false unless it is set explicitly.

    Raises:
        ConfigError: a setting is unknown, or the tokenizer is missing.
        TokenizerError: the tokenizer does not exist.
    """
    for key, section, given_too in (("seq_len", "pack", seq_len), ("store", "publish", store)):
        also = settings.get(section)
        known = also.model_fields_set if isinstance(also, BaseModel) else also
        if given_too is not None and isinstance(known, Mapping | Set) and key in known:
            raise ConfigError(f"{key} is set twice, as {key}= and in {section}=. Remove one.")
    over: dict[str, Any] = {
        "dataset": dataset,
        "tokenizer": None if tokenizer is None else tokenizer_name(tokenizer, cache),
        "pack": {} if seq_len is None else {"seq_len": seq_len},
        "publish": {} if store is None else {"store": str(store)},
    }
    if os.path.isdir(over["tokenizer"] or ""):  # noqa: PTH112 - a Path raises on long names
        # Paths in a recipe are relative to its folder, arguments to the current one.
        over["tokenizer"] = str(Path(over["tokenizer"]).absolute())
    is_recipe = isinstance(data, Recipe) or recipe_file.is_recipe_path(data)
    put = [*merge_settings({}, over), *merge_settings({}, settings), *overrides]
    if is_recipe and recipe_file.changes_data(put):
        over["publish"]["move_ref"] = False
    merge_settings(over, settings)
    if recipe_file.is_recipe_path(data):
        return read_recipe(data, overrides, over)
    raw = _raw_recipe(data, cache, settings)
    merge_settings(raw, over)
    for override in overrides:
        recipe_file.apply_override(raw, override)
    if not raw.get("tokenizer"):
        raise ConfigError("no tokenizer. Pass a Hub name (`org/name`) or a folder.")
    return pinned(parse_recipe(raw, where="prepare"))


def _raw_recipe(data: Any, cache: Path, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the recipe as a mapping, before settings are applied."""
    if isinstance(data, Recipe):
        return data.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if "sources" in settings:
        raise ConfigError(
            "data and sources= both specify rows. Pass all of them as a list in data."
        )
    several = isinstance(data, list | tuple) and not is_rows(data)
    given = list(data) if several else [data]
    if not given:
        raise ConfigError("data is an empty list. Pass rows, or at least one file.")
    if several and any(map(_is_row, given)):
        number = next(number for number, each in enumerate(given) if not _is_row(each))
        raise ConfigError(
            f"item {number} of the list has type {type(given[number]).__name__}, but others are "
            "rows. Pass only rows, or only files and their settings."
        )
    sources = [source_settings(each, cache) for each in given]
    in_memory = [s for s in sources if Path(s["path"]).is_relative_to(cache / "given")]
    # Their files in the cache are all called `rows`, but names of sources must be unique.
    if len(in_memory) > 1:
        for number, source in enumerate(in_memory, 1):
            source.setdefault("name", f"rows-{number}")
    return {"dataset": name_of(given[0]), "sources": sources}


def source_settings(data: Any, cache: Path) -> dict[str, Any]:
    """Return the settings of a source for data, or for a dict of settings or a `SourceConfig`."""
    if isinstance(data, SourceConfig):
        return data.model_dump(mode="json", exclude_unset=True)
    if is_settings(data):
        return {**data, "path": data_uri(data["path"], cache)}
    return {"path": data_uri(data, cache)}


def name_of(data: object) -> str:
    """Return a dataset name for a file: `My Data.v2.jsonl.gz` -> `my-data`."""
    if isinstance(data, SourceConfig | dict):
        data = data.path if isinstance(data, SourceConfig) else data.get("path")
    if not isinstance(data, str | Path):
        return "dataset"
    stem = re.split(r"[\\/]", str(data).rstrip("/"))[-1].partition(".")[0].lower()
    return re.sub(r"[^a-z0-9_]+", "-", stem).strip("-_")[:64] or "dataset"
