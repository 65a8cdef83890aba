"""The tokenizer of a published version: from the cache, else from the version's own store."""

import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from packhouse.recipe.rows import PipelineChoice
from packhouse.store.read import OpenVersion
from packhouse.store.tokenizers import fetch_tokenizer
from packhouse.system.disks import disk_errors
from packhouse.tokenize.loading import find_snapshot, load_snapshot
from packhouse.tokenize.pipeline import TokenizerSnapshot

LoadSnapshot = Callable[[], TokenizerSnapshot | None]
"""Loads a tokenizer from this machine's disk; it can be pickled, for a worker process."""


def tokenizer_of(opened: OpenVersion, tokenizers: Path) -> LoadSnapshot | None:
    """Return what loads the tokenizer of a version, fetched into `tokenizers` if need be.

    Other versions of the libraries than the version was made with decode as well.

    Args:
        opened: the version.
        tokenizers: folder of tokenizers in the cache (`Workspace.tokenizers`).

    Returns:
        None if neither the cache nor the store has it.

    Raises:
        IntegrityError: the store's copy is damaged.
        TokenizerError: it does not load.
    """
    wanted = opened.manifest.tokenizer_fingerprint
    pipeline = pipeline_of_version(opened)
    if find_snapshot(wanted, tokenizers, pipeline) is not None:
        return partial(find_snapshot, wanted, tokenizers, pipeline)
    folder = tokenizers / f"files-{wanted}"
    if not folder.is_dir():
        files = fetch_tokenizer(opened.store, wanted)
        if files is None:
            return None
        _write(files, folder)
    load = partial(load_snapshot, folder, tokenizers, pipeline)
    load()
    return load


def pipeline_of_version(opened: OpenVersion) -> PipelineChoice:
    """Return whose pipeline made the ids of a version, which is asked no more."""
    settings = opened.manifest.facts.configuration.tokenize
    return "file" if settings.pipeline == "file" else "class"


def _write(files: dict[str, bytes], folder: Path) -> None:
    """Write a folder whole or not at all; of two processes that do so, one is enough."""
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    with disk_errors(folder.parent):
        try:
            staged.mkdir(parents=True)
            for name, content in files.items():
                (staged / name).write_bytes(content)
            with suppress(OSError):  # another process was first
                os.replace(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
