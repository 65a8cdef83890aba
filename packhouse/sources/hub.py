"""Files of dataset repositories on the Hugging Face Hub: `hf://datasets/ORG/NAME[@REVISION]/PATH`.

A revision (a branch, a tag, a commit; by default `main`) is resolved to its commit when the source
is scanned, and every later read is of that commit: a push in between changes nothing. Keys hold the
digest of what was read, not the revision. A file is downloaded once, into the Hub client's own
cache (`HF_HUB_CACHE`, `HF_HOME`), resumed where a download broke off, and read from there; with a
commit for a revision and its files in the cache, no network is needed. The token comes from
`HF_TOKEN` only; a login kept on disk is not used.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packhouse.errors import SourceError, TransientError

__all__ = ["HubFile", "fetch", "find_hub_files", "parse_uri"]

_URI = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAGIC = re.compile(r"[*?\[]")
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # of the Hub's client, by its version
_FORM = "hf://datasets/ORG/NAME[@REVISION]/PATH"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository, or a pattern of such files."""

    repo: str
    revision: str
    path: str
    size: int = 0

    @property
    def uri(self) -> str:
        """As it is written in a recipe."""
        return f"hf://datasets/{self.repo}@{self.revision.replace('/', '%2F')}/{self.path}"


def parse_uri(uri: str) -> HubFile:
    """Take a Hub URI apart; a revision with a slash has it written `%2F`.

    Example:
        >>> parse_uri("hf://datasets/acme/talks@v1/data/a.jsonl").uri
        'hf://datasets/acme/talks@v1/data/a.jsonl'
        >>> parse_uri("hf://datasets/acme/talks").revision
        'main'

    Raises:
        SourceError: another form.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise SourceError(f"source '{uri}' is no file of a dataset repository; expected {_FORM}")
    revision = (match["revision"] or "main").replace("%2F", "/")
    return HubFile(repo=match["repo"], revision=revision, path=(match["path"] or "").strip("/"))


def find_hub_files(uri: str) -> tuple[list[HubFile], str]:
    """Files that a path, a folder or a glob names, and the folder that their names are below.

    Raises:
        SourceError: no such repository, revision or file, or no right to read it.
        TransientError: the Hub cannot be reached.
    """
    wanted = parse_uri(uri)
    with _translated(wanted):
        commit = _commit_of(wanted)
        pinned = HubFile(repo=wanted.repo, revision=commit, path=wanted.path)
        if _MAGIC.search(pinned.path):
            folder = _MAGIC.split(pinned.path)[0].rpartition("/")[0]
            pattern = _glob_to_regex(pinned.path)
            found = _list(pinned, folder)
            return [file for file in found if pattern.fullmatch(file.path)], folder
        if not pinned.path:
            return _list(pinned, ""), ""
        if wanted.revision == commit and (cached := _cached(pinned)) is not None:
            return [cached], pinned.path.rpartition("/")[0]
        kind, size = _look_at(pinned)
        if kind == "folder":
            return _list(pinned, pinned.path), pinned.path
        file = HubFile(repo=pinned.repo, revision=commit, path=pinned.path, size=size)
        return [file], pinned.path.rpartition("/")[0]


def fetch(uri: str) -> Path:
    """Where a file of a repository lies on this machine, downloaded first if it does not yet.

    Raises:
        SourceError: it is not there, or may not be read.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    file = parse_uri(uri)
    with _translated(file):
        path = hf_hub_download(
            file.repo,
            file.path,
            repo_type="dataset",
            revision=file.revision,
            token=_token(),
            endpoint=os.environ.get("HF_ENDPOINT"),
            tqdm_class=_silent(),
        )
    return Path(path)


def _token() -> str | bool:
    return os.environ.get("HF_TOKEN") or False  # False: not one that lies on disk either


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=_token())


def _silent() -> Any:
    """Its bar, never shown: the run has one of its own."""
    utils: Any = import_module("huggingface_hub.utils")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        utils.tqdm.__init__(self, *args, **{**kwargs, "disable": True})

    return type("Silent", (utils.tqdm,), {"__init__": init})


def _commit_of(wanted: HubFile) -> str:
    if _COMMIT.fullmatch(wanted.revision):
        return wanted.revision
    info = _api().repo_info(wanted.repo, repo_type="dataset", revision=wanted.revision)
    return str(info.sha)


def _cached(pinned: HubFile) -> HubFile | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(
        pinned.repo, pinned.path, revision=pinned.revision, repo_type="dataset"
    )
    if not isinstance(found, str):
        return None
    size = Path(found).stat().st_size
    return HubFile(repo=pinned.repo, revision=pinned.revision, path=pinned.path, size=size)


def _look_at(pinned: HubFile) -> tuple[str, int]:
    from huggingface_hub.hf_api import RepoFolder

    found = _api().get_paths_info(
        pinned.repo, [pinned.path], revision=pinned.revision, repo_type="dataset"
    )
    if not found:
        raise SourceError(
            f"source '{pinned.uri}': the repository holds no such file", uri=pinned.uri
        )
    if isinstance(found[0], RepoFolder):
        return "folder", 0
    return "file", int(found[0].size)


def _list(pinned: HubFile, folder: str) -> list[HubFile]:
    from huggingface_hub.hf_api import RepoFile

    found = _api().list_repo_tree(
        pinned.repo, folder or None, recursive=True, revision=pinned.revision, repo_type="dataset"
    )
    return [
        HubFile(repo=pinned.repo, revision=pinned.revision, path=item.path, size=item.size)
        for item in found
        if isinstance(item, RepoFile)
    ]


def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    """A shell pattern in which `*` stays within a folder and `**` does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(parts.get(p, p if p[:1] == "[" else re.escape(p)) for p in pieces))


@contextmanager
def _translated(wanted: HubFile) -> Iterator[None]:
    """Errors of the Hub's client -> ours."""
    from huggingface_hub import errors

    repo, what = f"hf://datasets/{wanted.repo}", f"source '{wanted.uri}'"
    try:
        yield
    except errors.GatedRepoError:
        raise SourceError(
            f"{what}: access to {repo} is granted by its owners; ask for it on its page, and set "
            "HF_TOKEN to a token of that account",
            uri=wanted.uri,
        ) from None
    except errors.RepositoryNotFoundError as error:
        raise SourceError(f"{what}: {_why_hidden(error, repo)}", uri=wanted.uri) from None
    except errors.RevisionNotFoundError:
        raise SourceError(
            f"{what}: {repo} has no revision '{wanted.revision}'", uri=wanted.uri
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(what, error) from None
    except errors.EntryNotFoundError:
        raise SourceError(f"{what}: the repository holds no such file", uri=wanted.uri) from None
    except errors.OfflineModeIsEnabled:
        raise SourceError(
            f"{what}: HF_HUB_OFFLINE is set, and only files of a commit (@ and its 40 digits) that "
            "lie in the cache can be read then",
            uri=wanted.uri,
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 429 or status >= 500:
            raise TransientError(f"{what}: the Hub answers {status}", uri=wanted.uri) from None
        if status in (401, 403):
            raise SourceError(f"{what}: {_why_refused(status, repo)}", uri=wanted.uri) from None
        raise SourceError(f"{what}: the Hub refuses ({status})", uri=wanted.uri) from None
    except Exception as error:
        is_clients = type(error).__module__.split(".")[0] in _CLIENTS
        if is_clients or isinstance(error, ConnectionError | TimeoutError):
            raise _unreachable(what, error) from None
        raise


def _unreachable(what: str, error: BaseException) -> TransientError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TransientError(
        f"{what}: the Hub cannot be reached, and the file is not in the cache ({said}); check the "
        "network and HF_ENDPOINT"
    )


def _why_hidden(error: Any, repo: str) -> str:
    status = error.response.status_code if error.response is not None else 404
    if status in (401, 403):
        return _why_refused(status, repo)
    return (
        f"there is no dataset {repo}"
        + (", or HF_TOKEN may not see it" if _token() else "")
        + "; check its name"
    )


def _why_refused(status: int, repo: str) -> str:
    if not _token():
        return f"{repo} is private or does not exist ({status}); set HF_TOKEN to read a private one"
    return f"HF_TOKEN is not valid, or may not read {repo} ({status})"
