"""What people give - a recipe, data, a tokenizer - as a run needs it: files, folders and names.

Rows and tokenizers that are objects of this process are written to the cache, under names by their
content: the same rows are the same version, wherever they came from.
"""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from packhouse.errors import ConfigError, TokenizerError
from packhouse.recipe import Recipe, SourceConfig, load_recipe
from packhouse.runtime.disks import disk_errors
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.tokenization.names import pin_tokenizer

__all__ = [
    "data_uri",
    "is_rows",
    "is_settings",
    "pinned",
    "read_recipe",
    "tokenizer_name",
    "write_content",
]

# `data/train.jsonl` is a file, even where it does not exist.
_DATASET_ID = re.compile(
    r"[\w.-]{1,96}/(?!.*\.(?:jsonl?|ndjson|csv|tsv|txt|xlsx|parquet|arrow|gz|zst|bz2|xz|zip)$)[\w.-]{1,96}"
)
_SPEAKER = {"role", "from"}
"""Keys by which a message names who speaks."""


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe, and pin the name of its tokenizer to the commit that it stands for now.

    Raises:
        ConfigError: see `load_recipe`.
        TokenizerError: there is no such tokenizer.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no torch: as it should be
    return pinned(load_recipe(path, overrides, settings))


def pinned(recipe: Recipe) -> Recipe:
    """Return the recipe with `org/name@<commit>` where its tokenizer is `org/name`."""
    return recipe.model_copy(update={"tokenizer": pin_tokenizer(recipe.tokenizer)})


def data_uri(data: Any, cache: Path) -> str:
    """Return where data lies: a path or address as it is, a dataset's id, or a file in the cache.

    Args:
        data: a file, folder, glob, `s3://` or `hf://` address; a dataset of the Hub (`org/name`,
            if there is no folder `org` here); or rows: a `datasets.Dataset`, a pandas or polars
            frame, an Arrow table, a list of dicts or of conversations.
        cache: rows are written below it.

    Raises:
        ConfigError: none of these, or rows that JSON or Parquet cannot hold.
        DiskError: the rows cannot be written.
    """
    if isinstance(data, str | Path):
        uri = str(data)
        if not uri:
            raise ConfigError("data is an empty path; give a file or a folder")
        is_id = _DATASET_ID.fullmatch(uri) and not Path(uri).parent.exists()
        return f"hf://datasets/{uri}" if is_id else uri
    name = "rows.jsonl" if isinstance(data, list | tuple) else "rows.parquet"
    return write_content(cache, name, _writer_of(data))


def is_rows(data: Any) -> bool:
    """Return True for a list of rows: dicts, or conversations that are lists of messages.

    Example:
        >>> is_rows([{"text": "a"}]), is_rows([[{"role": "user", "content": "a"}]])
        (True, True)
        >>> is_rows(["a.jsonl", {"path": "b.jsonl", "format": "chat"}]), is_rows([])
        (False, False)
    """
    return isinstance(data, list | tuple) and bool(data) and all(map(_is_row, data))


def is_settings(data: Any) -> bool:
    """Return True for the settings of a source: a dict with a path."""
    return isinstance(data, dict) and "path" in data and set(data) <= set(SourceConfig.model_fields)


def _is_row(row: Any) -> bool:
    if isinstance(row, dict):
        return not is_settings(row)
    is_list = isinstance(row, list) and bool(row)
    return is_list and all(isinstance(m, dict) and not _SPEAKER.isdisjoint(m) for m in row)


def _writer_of(data: Any) -> Callable[[str], Any]:
    """The function that writes rows to a path."""
    if is_rows(data):
        lines = b"".join(_json_line(row, number) for number, row in enumerate(data))
        return lambda path: Path(path).write_bytes(lines)
    if isinstance(data, pa.Table):
        import pyarrow.parquet as pq

        return _arrow_errors(data, lambda path: pq.write_table(data, path))
    library = type(data).__module__.partition(".")[0]
    if not isinstance(data, type):
        if library == "datasets" and hasattr(data, "to_parquet"):
            return _arrow_errors(data, _without_bar(data.to_parquet))
        if library == "pandas" and hasattr(data, "to_parquet"):
            is_named = any(name is not None for name in data.index.names)  # else mere row numbers
            return _arrow_errors(data, lambda path: data.to_parquet(path, index=is_named))
        for name in ("write_parquet", "to_parquet"):  # polars; whatever else can
            if hasattr(data, name):
                return _arrow_errors(data, getattr(data, name))
    hint = ""
    if isinstance(data, dict) and any(hasattr(split, "to_parquet") for split in data.values()):
        hint = f"; of a dict of splits give one: data[{next(iter(data))!r:.40}]"
    elif hasattr(data, "collect"):
        hint = "; of a lazy frame give `data.collect()`"
    raise ConfigError(
        f"data of type {type(data).__name__} holds no rows; give a path, a list of dicts, a "
        f"datasets.Dataset, a pandas or polars frame, or an Arrow table{hint}"
    )


def _json_line(row: Any, number: int) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(
            f"row {number} of the list cannot be written as JSON ({error}); give text, numbers, "
            "true, false, None, lists and dicts with keys of text"
        ) from None


def _arrow_errors(data: Any, write: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(path: str) -> None:
        try:
            write(path)
        except (pa.ArrowException, TypeError, ValueError) as error:
            said = " ".join(map(str, error.args))[:200]
            raise ConfigError(
                f"rows of the {type(data).__name__} cannot be written as Parquet ({said}); give "
                "each column one type and a name of its own"
            ) from None

    return checked


def _without_bar(write: Callable[[str], Any]) -> Callable[[str], Any]:
    """Writing by `datasets` without its bar: the run has one of its own."""
    from datasets import utils

    def silent(path: str) -> None:
        is_shown = not utils.are_progress_bars_disabled()
        utils.disable_progress_bars()
        try:
            write(path)
        finally:
            if is_shown:
                utils.enable_progress_bars()

    return silent


def tokenizer_name(tokenizer: Any, cache: Path) -> str:
    """Return a folder or a pinned name; a tokenizer object is saved to the cache first.

    Raises:
        TokenizerError: no such folder and no such name, or an object that is no tokenizer.
        DiskError: the object cannot be saved.
    """
    if isinstance(tokenizer, str | Path):
        return pin_tokenizer(os.path.expanduser(tokenizer))  # noqa: PTH111 - `org/name` stays text
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained"):
        raise TokenizerError(
            f"an object of type {type(tokenizer).__name__} is no tokenizer; give a folder, a "
            "name of the Hub (`org/name`) or a tokenizer of transformers; "
            "`PreTrainedTokenizerFast(tokenizer_object=...)` makes one of a tokenizers.Tokenizer"
        )
    return str(_kept(cache, tokenizer.save_pretrained, fingerprint_tokenizer))


def write_content(cache: Path, name: str, write: Callable[[str], Any]) -> str:
    """Write a file to a folder named by its content, and return its path."""

    def digest(folder: str) -> str:
        with (Path(folder) / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return str(_kept(cache, lambda folder: write(f"{folder}/{name}"), digest) / name)


def _kept(cache: Path, write: Callable[[str], Any], content_of: Callable[[str], str]) -> Path:
    """Fill a folder and move it to where its content belongs.

    One that lies there already, maybe from another process, stays if it still has that content.
    """
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
                    if not _has_content(place, content_of):  # else another process was quicker
                        raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return place


def _has_content(place: Path, content_of: Callable[[str], str]) -> bool:
    try:
        return content_of(str(place)) == place.name
    except (OSError, TokenizerError):
        return False
