"""Mirror a version to a dataset repository on the Hugging Face Hub, as one commit.

The Hub is a target, not the record: the version in the store stays what counts. A mirror is one
commit that adds the version's data files, card and manifest and deletes the data files of the
version before, with the commit we looked at as its condition (`parent_commit`): either a reader of
the repository sees all of it or nothing, and two mirrors at once cannot mix. Quarantined raw rows
and lineage records stay in the store. Token and endpoint come from the usual HF environment.
"""

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packhouse.errors import ConfigError, ConflictError, StoreError, TransientError
from packhouse.store.read import OpenVersion
from packhouse.system.disks import temporary_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MIRRORED_KINDS = ("data", "card")
"""Kinds of files that leave the store; the others may hold raw rows."""

_REPO = re.compile(r"hf://datasets/([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})")
_MAX_TRIES = 5
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # of the Hub's client, by its version


def parse_hub_uri(uri: str) -> str:
    """Repository id of `hf://datasets/org/name`.

    Example:
        >>> parse_hub_uri("hf://datasets/acme/alpaca-packed")
        'acme/alpaca-packed'

    Raises:
        ConfigError: another form.
    """
    match = _REPO.fullmatch(uri)
    if match is None:
        raise ConfigError(f"'{uri}' is no dataset repository; expected hf://datasets/ORG/NAME")
    return match[1]


def mirror_to_hub(opened: OpenVersion, uri: str) -> str:
    """Make a dataset repository hold this version, in one commit; makes a private one if need be.

    Repeating it is free: a repository that holds the version gets no commit.

    Returns:
        Id of the commit that holds the version.

    Raises:
        ConflictError: others keep committing to the repository.
        StoreError: refused by the Hub: no token, no rights.
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
                if error.response is None or error.response.status_code not in (409, 412):
                    raise
                continue  # the repository has moved on since we looked
            return str(committed.oid)
    raise ConflictError(f"others committed to {uri} during {_MAX_TRIES} tries; try again later")


def _operations(
    files: Mapping[str, Path], present: Set[str]
) -> "list[CommitOperationAdd | CommitOperationDelete]":
    """What makes the repository hold exactly these data files; nothing if it does already.

    Data files are named by content, so their names say whether they are the same.
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
    """Errors of the Hub's client -> ours."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except Exception as raised:
        # Uploads of large files fail in threads, with the failure itself as the cause.
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
        if isinstance(error, ConnectionError):  # what hf_xet says of anything
            raise TransientError(
                f"{uri}: {error}. Where a Hub or a proxy before it has no Xet storage, set "
                "HF_HUB_DISABLE_XET=1"
            ) from error
        raise
