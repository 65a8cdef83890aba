"""Show tokens to people: the text of each token, in runs of the same kind.

    ids [17, 4, 99], trained [no, yes, yes], 99 is <|end|>
    -> Run("2+2?"), Run("4", trained), Run("<|end|>", trained and special)

A terminal shows colors; a pipe gets trained text between `{+` and `+}`, as in a word diff; a page
gets spans. The text of rows is untrusted: runs contain it unescaped, and `plain`, `coloured` (drawn
by `terminal.console`) and `html_runs` escape it.

`tokenizer_of` loads the tokenizer of a published version from the cache, or from the store.
"""

import codecs
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.pack.pack_columns import trained_tokens
from packhouse.recipe.sections import PipelineChoice
from packhouse.records.arrays import list_offsets
from packhouse.store.commit import fetch_tokenizer
from packhouse.store.version_reader import OpenVersion
from packhouse.system.disks import disk_errors
from packhouse.system.escaping import for_terminal, html_text
from packhouse.tokenize.encoders import Pipeline, TokenizerSnapshot, read_pipeline
from packhouse.tokenize.tokenizer_loading import find_snapshot, load_snapshot

if TYPE_CHECKING:
    from rich.text import Text


LoadSnapshot = Callable[[], TokenizerSnapshot | None]
"""Loads a tokenizer from the local disk. Can be pickled and sent to a worker process."""


def tokenizer_of(opened: OpenVersion, tokenizers: Path) -> LoadSnapshot | None:
    """Return a loader for the tokenizer of a version; download the tokenizer if necessary.

    The installed libraries may differ from those that the version was made with: decoding works.

    Args:
        opened: The version.
        tokenizers: Folder of tokenizers in the cache (`Workspace.tokenizers`).

    Returns:
        None if neither the cache nor the store has the tokenizer.

    Raises:
        IntegrityError: The copy in the store is damaged.
        TokenizerError: The tokenizer cannot be loaded.
    """
    # By fingerprint: the Hub's files may have changed since, and the recipe is not needed.
    wanted = opened.manifest.tokenizer_fingerprint
    pipeline = pipeline_of_version(opened)
    if find_snapshot(wanted, tokenizers, pipeline) is not None:
        return partial(find_snapshot, wanted, tokenizers, pipeline)
    folder = tokenizers / f"files-{wanted}"
    if not folder.is_dir():
        files = fetch_tokenizer(opened.store, wanted)
        if files is None:
            return None
        staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        with disk_errors(folder.parent):
            try:
                staged.mkdir(parents=True)
                for name, content in files.items():
                    (staged / name).write_bytes(content)
                # If another process was faster, its files stay: they are the same.
                with suppress(OSError):
                    os.replace(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    load = partial(load_snapshot, folder, tokenizers, pipeline)
    load()
    return load


def pipeline_of_version(opened: OpenVersion) -> PipelineChoice:
    """Return the pipeline that made the token IDs of a version."""
    pipeline = opened.manifest.facts.configuration.tokenize.pipeline
    return "file" if pipeline == "file" else "class"


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of a record that are all trained or not, and all special or not."""

    start: int
    end: int
    text: str
    is_trained: bool
    is_special: bool = False
    """True for control tokens."""


def pipeline_of(load: LoadSnapshot | None) -> Pipeline | None:
    """Return the decoding tables of a tokenizer; None without a tokenizer."""
    snapshot = load() if load else None
    return read_pipeline(snapshot.backend) if snapshot else None


def token_texts(ids: Sequence[int], pipeline: Pipeline | None) -> list[str]:
    r"""Return the text of each token, without splitting characters.

    A character whose bytes are spread over several tokens is the text of the last one; the others
    are empty: the tokens of "\N{GRINNING FACE}" give ["", "\N{GRINNING FACE}"]. Without a pipeline,
    the text of a token is its ID.

    Example:
        >>> token_texts([7, 1000], None)
        ['7 ', '1000 ']
    """
    if pipeline is None:
        return [f"{token} " for token in ids]
    given = np.asarray(ids, np.int64)
    is_known = (given >= 0) & (given < len(pipeline.shown))
    # At once: `as_py` for each token takes 9 us of its 12.
    found = pipeline.shown.take(pa.array(np.where(is_known, given, 0))).to_pylist()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps incomplete characters
    tokens = zip(ids, found, is_known.tolist(), strict=True)
    texts = [decoder.decode(data if is_own else b"[%d]" % token) for token, data, is_own in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def special_tokens(ids: Sequence[int], pipeline: Pipeline | None) -> Mask:
    """Return a mask of the control tokens."""
    if pipeline is None or not len(pipeline.is_control):
        return np.zeros(len(ids), np.bool_)
    given = np.asarray(ids, np.int64)
    known = np.clip(given, 0, len(pipeline.is_control) - 1)
    return np.asarray(pipeline.is_control[known] & (known == given))


def runs_of(ids: Sequence[int], trained: Mask, pipeline: Pipeline | None) -> tuple[Run, ...]:
    """Split the tokens of a record into runs that are all trained or not, all special or not."""
    texts, special = token_texts(ids, pipeline), special_tokens(ids, pipeline)
    changes = np.flatnonzero((np.diff(trained) != 0) | (np.diff(special) != 0)) + 1
    bounds = [0, *changes.tolist(), len(texts)] if texts else []
    return tuple(
        Run(a, b, "".join(texts[a:b]), bool(trained[a]), bool(special[a]))
        for a, b in pairwise(bounds)
    )


def rows_with_masks(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return packed or tokenized rows as dicts, with a mask of their trained tokens, `trained`.

    Example:
        >>> batch = pa.record_batch({"input_ids": [[7, 8], [9]], "labels": [[-100, 8], [-100]]})
        >>> rows_with_masks(batch)
        [{'input_ids': [7, 8], 'trained': [False, True]}, {'input_ids': [9], 'trained': [False]}]
    """
    offsets = list_offsets(rows["input_ids"])
    offsets = offsets - offsets[0]
    trained = trained_tokens(rows, offsets)
    trained[offsets[:-1][np.diff(offsets) > 0]] = False  # nothing predicts a record's first token
    names = {"labels", "trained_ranges", "position_ids"}
    others = rows.select([name for name in rows.schema.names if name not in names])
    return [
        {**row, "trained": trained[start:end].tolist()}
        for row, start, end in zip(others.to_pylist(), offsets, offsets[1:], strict=False)
    ]


def trained_ranges(trained: Mask) -> list[list[int]]:
    """Return the trained ranges [start, end) of a mask.

    Example:
        >>> trained_ranges(np.array([False, True, True, False, True]))
        [[1, 3], [4, 5]]
    """
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
    return list(edges.reshape(-1, 2).tolist())


def plain(runs: Sequence[Run]) -> str:
    r"""Return runs as text without colors; `{+` and `+}` inside the text get a backslash.

    Example:
        >>> plain([Run(0, 4, "2+2?", False), Run(4, 5, "4", True), Run(5, 6, "<|end|>", True)])
        '2+2?{+4<|end|>+}'
        >>> print(plain([Run(0, 3, "{+x+}", False)]))
        {\+x+\}
    """
    text = ""
    for is_trained, alike in groupby(runs, key=lambda run: run.is_trained):
        own = "".join(run.text for run in alike).replace("{+", r"{\+").replace("+}", r"+\}")
        text += f"{{+{own}+}}" if is_trained else own
    return for_terminal(text, keep_lines=True)


def coloured(runs: Sequence[Run]) -> "Text":
    """Return runs as a `rich` text: trained is green, special blue (bold if trained)."""
    from rich.text import Text

    text = Text()
    for run in runs:
        style = "green" if run.is_trained else "dim"
        if run.is_special:
            style = "bold blue" if run.is_trained else "blue"
        text.append(run.text, style)
    return text


def html_runs(runs: Sequence[Run]) -> str:
    """Return runs as HTML for a page with `PAGE_STYLE`."""
    parts = []
    for run in runs:
        names = "trained " * run.is_trained + "special" * run.is_special
        text = html_text(run.text)
        parts.append(f'<span class="{names.strip()}">{text}</span>' if names else text)
    return f"<pre>{''.join(parts)}</pre>"
