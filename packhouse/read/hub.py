"""Files of dataset repositories on the Hugging Face Hub: `hf://datasets/ORG/NAME[@REVISION]/PATH`.

A revision (a branch, a tag, a commit; by default `main`) is resolved to its commit when the source
is scanned, and every later read is of that commit: a push in between changes nothing. Keys hold the
digest of what was read, not the revision. A file is downloaded once, into the Hub client's own
cache (`HF_HUB_CACHE`, `HF_HOME`), resumed where a download broke off, and read from there; with a
commit for a revision and its files in the cache, no network is needed. The token comes from
`HF_TOKEN` only; a login kept on disk is not used.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhouse.errors import PackhouseError, SourceError, TransientError
from packhouse.system.plugins import hub_options, silent_bar
from packhouse.system.wording import first_line

_URI = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # of the Hub's client, by its version
GLOB = re.compile(r"[*?\[]")
"""What makes a path a glob."""
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
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile, RepoFolder

    wanted = parse_uri(uri)
    repo, path = wanted.repo, wanted.path
    with _translated(wanted):
        api: Any = HfApi(**hub_options())
        commit = wanted.revision
        if not _COMMIT.fullmatch(commit):
            commit = str(api.repo_info(repo, repo_type="dataset", revision=commit).sha)
        of_commit: Any = {"repo_type": "dataset", "revision": commit}
        pinned = replace(wanted, revision=commit)
        pattern = GLOB.search(path)
        folder = path[: pattern.start()].rpartition("/")[0] if pattern else path
        if path and not pattern:
            parent = path.rpartition("/")[0]
            if wanted.revision == commit:  # no network is needed for a file in the cache
                cached = try_to_load_from_cache(repo, path, **of_commit)
                if isinstance(cached, str):
                    return [replace(pinned, size=Path(cached).stat().st_size)], parent
            [*found] = api.get_paths_info(repo, [path], **of_commit)
            if not found:
                why = "the repository holds no such file"
                raise SourceError(f"source '{pinned.uri}': {why}", uri=pinned.uri)
            if not isinstance(found[0], RepoFolder):
                return [replace(pinned, size=int(found[0].size))], parent
        files = [
            replace(pinned, path=item.path, size=item.size)
            for item in api.list_repo_tree(repo, folder or None, recursive=True, **of_commit)
            if isinstance(item, RepoFile)
        ]
    if pattern:
        is_named = _glob_to_regex(path).fullmatch
        files = [file for file in files if is_named(file.path)]
    return files, folder


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
            tqdm_class=silent_bar(),
            **hub_options(),
        )
    return Path(path)


def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    """A shell pattern in which `*` stays within a folder and `**` does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(parts.get(p, p if p[:1] == "[" else re.escape(p)) for p in pieces))


@contextmanager
def _translated(wanted: HubFile) -> Iterator[None]:
    """Turn errors of the Hub's client into ours."""
    try:
        yield
    except Exception as error:
        ours = _translate(error, wanted)
        if ours is None:
            raise
        raise ours from None


def _translate(error: Any, wanted: HubFile) -> PackhouseError | None:
    from huggingface_hub import errors

    repo = f"hf://datasets/{wanted.repo}"
    response = getattr(error, "response", None)
    status = 0 if response is None else response.status_code
    has_token = bool(hub_options()["token"])
    if isinstance(error, errors.GatedRepoError):
        why = (
            f"access to {repo} is granted by its owners; ask for it on its page, and set HF_TOKEN "
            "to a token of that account"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = f"{repo} has no revision '{wanted.revision}'"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        why = (
            "HF_HUB_OFFLINE is set, and only files of a commit (@ and its 40 digits) that lie in "
            "the cache can be read then"
        )
    elif (
        isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError)
        or type(error).__module__.split(".")[0] in _CLIENTS
    ):
        return TransientError(
            f"source '{wanted.uri}': the Hub cannot be reached, and the file is not in the cache "
            f"({first_line(error)}); check the network and HF_ENDPOINT"
        )
    elif isinstance(error, errors.EntryNotFoundError):
        why = "the repository holds no such file"
    elif not isinstance(error, errors.HfHubHTTPError):
        return None
    elif status == 429 or status >= 500:
        return TransientError(f"source '{wanted.uri}': the Hub answers {status}", uri=wanted.uri)
    elif status in (401, 403) and has_token:
        why = f"HF_TOKEN is not valid, or may not read {repo} ({status})"
    elif status in (401, 403):
        why = f"{repo} is private or does not exist ({status}); set HF_TOKEN to read a private one"
    elif isinstance(error, errors.RepositoryNotFoundError):
        unseen = ", or HF_TOKEN may not see it" if has_token else ""
        why = f"there is no dataset {repo}{unseen}; check its name"
    else:
        why = f"the Hub refuses ({status})"
    return SourceError(f"source '{wanted.uri}': {why}", uri=wanted.uri)
