"""Show a version in Weights & Biases: an artifact of type `dataset` with tables of text rows.

W&B is a window, not the record: the artifact holds the first records of each split as readable
text, the manifest, and the address of the version in its store; the data stay where they are, or
are in it too, where that is asked for: `artifact.download()` is then what `packhouse pull` writes.
Works offline (`WANDB_MODE=offline`, sync later), as W&B's own environment says.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from packhouse.errors import ConfigError, TransientError
from packhouse.pack.layout import records_of
from packhouse.store.contracts import read_batches
from packhouse.store.layout import version_folder
from packhouse.store.read import OpenVersion
from packhouse.system.disks import temporary_folder
from packhouse.system.plugins import import_extra

COLUMNS = ["record_id", "text", "trained_text", "num_tokens", "num_trained"]

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, e.g. a tokenizer's `decode`."""


def log_to_wandb(
    opened: OpenVersion, project: str, *, decode: Decode, num_rows: int = 200, files: bool = False
) -> dict[str, Any]:
    """Log a version as an artifact, with one table a split.

    Args:
        opened: the version.
        project: W&B project; entity, mode and key come from W&B's environment.
        decode: token ids -> text.
        num_rows: records in each table, from the first of the split on.
        files: put the packed files and the card into it as well.

    Returns:
        Name of the artifact, folder of the run, and rows of each table.

    Raises:
        ConfigError: wandb is not installed, or knows no account.
        TransientError: W&B cannot be reached.
    """
    wandb = import_extra("wandb", "wandb", "wandb://")
    tables = {
        split: [list(row) for row in itertools.islice(text_rows(opened, split, decode), num_rows)]
        for split in opened.manifest.splits()
    }
    manifest = opened.manifest
    described = {  # where the version is, what it holds, and how it was made
        "uri": f"{opened.store.uri}/{version_folder(opened.dataset, opened.version)}",
        "version": opened.version,
        "manifest_id": manifest.manifest_id,
        "content_id": manifest.content_id,
        "rows": sum(entry.rows for entry in opened.files()),
        "tokens": sum(entry.tokens for entry in opened.files()),
        "configuration": dict(manifest.configuration),
        "lineage": dict(manifest.lineage),
    }
    artifact = wandb.Artifact(opened.dataset, type="dataset", metadata=described)
    for split, rows in tables.items():
        artifact.add(wandb.Table(columns=COLUMNS, data=rows), split)
    with artifact.new_file("manifest.json", mode="wb") as file:
        file.write(manifest.to_bytes())
    if files:  # that a trainer loads, one at a time: W&B copies each to its staging folder
        with temporary_folder("wandb") as scratch:
            for entry in [*opened.files("data"), *opened.files("card")]:
                path = opened.fetch(entry, scratch / entry.path)
                artifact.add_file(str(path), name=entry.path)
                path.unlink()
    errors = wandb.errors
    try:
        with wandb.init(project=project, job_type="publish") as run:
            run.log_artifact(artifact, aliases=["latest", opened.version])
            folder = run.dir
    except (errors.UsageError, errors.AuthenticationError) as error:
        raise ConfigError(
            f"wandb://{project}: {error} Or set WANDB_API_KEY, or WANDB_MODE=offline"
        ) from error
    except errors.Error as error:
        raise TransientError(f"wandb://{project}: {error}") from error
    return {
        "artifact": opened.dataset,
        "folder": folder,
        "rows": {split: len(rows) for split, rows in tables.items()},
    }


def text_rows(
    opened: OpenVersion, split: str, decode: Decode
) -> Iterator[tuple[str, str, str, int, int]]:
    """Records of a split as text, in published order, file by file; see `COLUMNS`."""
    with temporary_folder("wandb") as folder:
        for entry in opened.files("data", split):
            path = opened.fetch(entry, folder / entry.key)
            for batch in read_batches(path):
                for record_id, ids, mask in records_of(batch):
                    text, trained = decode(ids.tolist()), decode(ids[mask].tolist())
                    yield record_id, text, trained, len(ids), int(mask.sum())
