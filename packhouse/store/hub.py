"""Mirror a version to a dataset repository on the Hugging Face Hub, as one commit.

The Hub is a target, not the record: the version in the store stays what counts. A mirror is one
commit that adds the version's data files, card and manifest and deletes the data files of the
version before, with the commit we looked at as its condition (`parent_commit`): either a reader of
the repository sees all of it or nothing, and two mirrors at once cannot mix. Quarantined raw rows
and lineage records stay in the store. Token and endpoint come from the usual HF environment.
"""

import re
from pathlib import Path
from typing import Any

from packhouse.disks import temporary_folder
from packhouse.errors import ConfigError, ConflictError, StoreError, TransientError
from packhouse.store.read import OpenVersion

__all__ = ["MIRRORED_KINDS", "mirror_to_hub", "parse_hub_uri"]

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


def mirror_to_hub(opened: OpenVersion, uri: str, *, private: bool = True) -> str:
    """Make a dataset repository hold this version, in one commit; makes the repository if need be.

    Repeating it is free: a repository that holds the version gets no commit.

    Returns:
        Id of the commit that holds the version.

    Raises:
        ConflictError: others keep committing to the repository.
        StoreError: refused by the Hub: no token, no rights.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    repo, api = parse_hub_uri(uri), HfApi()
    with _translated(uri), temporary_folder("hub") as folder:
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        files = _fetch(opened, folder)
        for _ in range(_MAX_TRIES):
            head, present = _look(api, repo)
            operations = _operations(files, present)
            if not operations:
                return head
            commit = _commit(api, repo, opened, operations, head)
            if commit is not None:
                return commit
    raise ConflictError(f"others committed to {uri} during {_MAX_TRIES} tries; try again later")


def _fetch(opened: OpenVersion, folder: Path) -> dict[str, Path]:
    """Path in the repository -> verified local file."""
    wanted = [e for e in opened.manifest.files if e.kind in MIRRORED_KINDS]
    files = {e.path: opened.fetch(e, folder / e.path) for e in wanted}
    manifest = folder / "manifest.json"
    manifest.write_bytes(opened.manifest.to_bytes())
    return files | {"manifest.json": manifest}


def _look(api: Any, repo: str) -> tuple[str, set[str]]:
    info = api.repo_info(repo, repo_type="dataset")
    return info.sha, {sibling.rfilename for sibling in info.siblings or ()}


def _operations(files: dict[str, Path], present: set[str]) -> list[Any]:
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


def _commit(
    api: Any, repo: str, opened: OpenVersion, operations: list[Any], head: str
) -> str | None:
    """The new commit, or None if the repository has moved on since we looked."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        done = api.create_commit(
            repo,
            operations,
            commit_message=f"{opened.dataset} {opened.version}",
            repo_type="dataset",
            parent_commit=head,
        )
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (409, 412):
            return None
        raise
    commit: str = done.oid
    return commit


class _translated:
    """Errors of the Hub's client -> ours."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        # Uploads of large files fail in threads, with what happened as the cause.
        if type(error) is RuntimeError and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code if error.response is not None else 0
            if status == 429 or status >= 500:
                raise TransientError(f"{self.uri}: the Hub answers {status}") from error
            raise StoreError(
                f"{self.uri}: the Hub refuses ({status}); check HF_TOKEN and its rights"
            ) from error
        if isinstance(error, LocalTokenNotFoundError):
            raise ConfigError(f"{self.uri}: no token; set HF_TOKEN or log in") from error
        if type(error).__module__.partition(".")[0] in _CLIENTS:
            raise TransientError(f"{self.uri}: {error}") from error
        if isinstance(error, ConnectionError):  # what hf_xet says of anything
            raise TransientError(
                f"{self.uri}: {error}. Where a Hub or a proxy before it has no Xet storage, set "
                "HF_HUB_DISABLE_XET=1"
            ) from error
