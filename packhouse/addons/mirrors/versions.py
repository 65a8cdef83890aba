"""Copy a version to a dataset repository of the Hugging Face Hub, or to Weights & Biases.

The version in the store stays authoritative.

On the Hub, a mirror is one commit. It adds the version's data files, card and manifest, and deletes
the data files of the previous version, on condition that the repository is still at the commit that
was read (`parent_commit`). Readers see all of it or nothing, and two mirrors at the same time
cannot mix. Quarantined rows and lineage records stay in the store. Token and endpoint come from the
usual HF environment.

W&B gets an artifact of type `dataset`: the first records of each split as readable text, the
manifest, and the address of the version in its store. With `files`, it also contains the data, and
`artifact.download()` returns what `packhouse pull` writes. Works offline (`WANDB_MODE=offline`,
sync later).
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhouse.errors import ConfigError, ConflictError, StoreError, TransientError
from packhouse.pack.layout import records_of
from packhouse.store.contracts import read_batches
from packhouse.store.layout import version_folder
from packhouse.store.read import OpenVersion
from packhouse.system.disks import temporary_folder
from packhouse.system.plugins import import_extra

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MIRRORED_KINDS = ("data", "card")
"""Kinds of files that may leave the store; others may contain raw rows."""

_REPO = re.compile(r"hf://datasets/([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})")
_MAX_TRIES = 5
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # of the Hub's client


def parse_hub_uri(uri: str) -> str:
    """Return the repository id of `hf://datasets/org/name`.

    Example:
        >>> parse_hub_uri("hf://datasets/acme/alpaca-packed")
        'acme/alpaca-packed'

    Raises:
        ConfigError: the address has another form.
    """
    match = _REPO.fullmatch(uri)
    if match is None:
        raise ConfigError(f"'{uri}' is no dataset repository; expected hf://datasets/ORG/NAME")
    return match[1]


def mirror_to_hub(opened: OpenVersion, uri: str) -> str:
    """Commit this version to a dataset repository, creating a private one if needed.

    Repeating it has no effect: a repository with this version gets no commit.

    Returns:
        ID of the commit with the version.

    Raises:
        ConflictError: others keep committing to the repository.
        StoreError: the Hub refused it: no token or no permission.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repo, api = parse_hub_uri(uri), HfApi()
    with _translated(uri), temporary_folder("hub") as folder:
        api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        wanted = [entry for entry in opened.manifest.files if entry.kind in MIRRORED_KINDS]
        files = {entry.path: opened.fetch(entry, folder / entry.path) for entry in wanted}
        files["manifest.json"] = folder / "manifest.json"
        files["manifest.json"].write_bytes(opened.manifest.to_bytes())
        for _ in range(_MAX_TRIES):
            info = api.dataset_info(repo)
            operations = _operations(files, {each.rfilename for each in info.siblings or ()})
            if not operations:
                return str(info.sha)
            try:
                committed = api.create_commit(
                    repo,
                    operations,
                    commit_message=f"{opened.dataset} {opened.version}",
                    repo_type="dataset",
                    parent_commit=info.sha,
                )
            except HfHubHTTPError as error:
                # 409 and 412: `parent_commit` is no longer the latest commit.
                if error.response is None or error.response.status_code not in (409, 412):
                    raise
                continue  # someone committed in the meantime
            return str(committed.oid)
    raise ConflictError(f"others committed to {uri} during {_MAX_TRIES} tries; try again later")


def _operations(
    files: Mapping[str, Path], present: Set[str]
) -> "list[CommitOperationAdd | CommitOperationDelete]":
    """Return the operations that leave exactly these data files, or none if they are there already.

    Data files are named by content, so equal names mean equal files.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    data = {path for path in files if path.startswith("data/")}
    old = {path for path in present if path.startswith("data/")}
    if data == old and "manifest.json" in present:
        return []
    added = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file))
        for path, file in sorted(files.items())
        if path not in old
    ]
    return [*added, *(CommitOperationDelete(path_in_repo=path) for path in sorted(old - data))]


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Convert errors of the Hub's client."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except Exception as raised:
        # Uploads of large files fail in threads, with the original error as the cause.
        is_wrapped = type(raised) is RuntimeError and raised.__cause__ is not None
        error = raised.__cause__ if is_wrapped else raised
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code if error.response is not None else 0
            if status == 429 or status >= 500:
                raise TransientError(f"{uri}: the Hub answers {status}") from error
            raise StoreError(
                f"{uri}: the Hub refuses ({status}); check HF_TOKEN and its rights"
            ) from error
        if isinstance(error, LocalTokenNotFoundError):
            raise ConfigError(f"{uri}: no token; set HF_TOKEN or log in") from error
        if type(error).__module__.partition(".")[0] in _CLIENTS:
            raise TransientError(f"{uri}: {error}") from error
        if isinstance(error, ConnectionError):  # hf_xet raises it for everything
            raise TransientError(
                f"{uri}: {error}. Where a Hub or a proxy before it has no Xet storage, set "
                "HF_HUB_DISABLE_XET=1"
            ) from error
        raise


COLUMNS = ["record_id", "text", "trained_text", "num_tokens", "num_trained"]

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, such as a tokenizer's `decode`."""


def log_to_wandb(
    opened: OpenVersion, project: str, *, decode: Decode, num_rows: int = 200, files: bool = False
) -> dict[str, Any]:
    """Log a version as an artifact, with one table per split.

    Args:
        opened: the version.
        project: W&B project; entity, mode and key come from W&B's environment.
        decode: token ids -> text.
        num_rows: number of records per table, from the start of the split.
        files: also add the packed files and the card.

    Returns:
        Name of the artifact, folder of the run, and rows of each table.

    Raises:
        ConfigError: wandb is not installed, or has no account.
        TransientError: W&B cannot be reached.
    """
    wandb = import_extra("wandb", "wandb", "wandb://")
    tables = {
        split: [list(row) for row in itertools.islice(text_rows(opened, split, decode), num_rows)]
        for split in opened.manifest.splits()
    }  # location, content and origin of the version
    manifest = opened.manifest
    described = {  # where the version is, what it holds, and how it was made
        "uri": f"{opened.store.uri}/{version_folder(opened.dataset, opened.version)}",
        "version": opened.version,
        "manifest_id": manifest.manifest_id,
        "content_id": manifest.content_id,
        "packs": sum(entry.rows for entry in opened.files()),
        "tokens": sum(entry.tokens for entry in opened.files()),
        "configuration": dict(manifest.configuration),
        "lineage": dict(manifest.lineage),
    }
    artifact = wandb.Artifact(opened.dataset, type="dataset", metadata=described)
    for split, rows in tables.items():
        artifact.add(wandb.Table(columns=COLUMNS, data=rows), split)
    with artifact.new_file("manifest.json", mode="wb") as file:
        file.write(manifest.to_bytes())
    if files:  # one file at a time: W&B copies each to its staging folder
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
    """Yield the records of a split as text, in published order; see `COLUMNS`."""
    with temporary_folder("wandb") as folder:
        for entry in opened.files("data", split):
            path = opened.fetch(entry, folder / entry.key)
            for batch in read_batches(path):
                for record_id, ids, mask in records_of(batch):
                    text, trained = decode(ids.tolist()), decode(ids[mask].tolist())
                    yield record_id, text, trained, len(ids), int(mask.sum())
