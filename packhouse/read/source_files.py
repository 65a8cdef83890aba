"""Find the files of a source and open them: local, `s3://`, `gs://`, `az://`, `hf://`.

Local paths use the standard library; s3fs, obstore and the Hub's client are imported on first use,
with credentials from the environment only. Anything but a plain file (symbolic links, FIFOs, a
folder in place of a file) is refused: a link can change what a recipe means without changing it.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from packhouse.errors import PackhouseError, SourceError, TransientError
from packhouse.read.file_formats import FORMATS_BY_ENDING, file_error, format_of_name
from packhouse.recipe import SourceConfig
from packhouse.registry import function_of_addon
from packhouse.store.object_store import open_filesystem
from packhouse.system.hub import hub_options, silent_bar
from packhouse.system.wording import first_line, near_files

_SCHEMES = ("file", "s3", "gs", "az", "hf")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source, at the time of the scan."""

    uri: str
    """Absolute path or URL."""
    name: str
    """Path relative to the source's folder, or the file's name."""
    size: int
    """Stored bytes, compressed or not."""
    pin: str
    """Changes when the file changes: modification time, ETag or blob id."""


def find_files(config: SourceConfig) -> list[SourceFile]:
    """Return the files that `config.path` names, sorted by uri.

    Raises:
        SourceError: nothing is there, it is not a plain file, the scheme is not supported, or the
            URL contains credentials.
        TransientError: the storage did not answer.
    """
    path = config.path
    scheme = _check_uri(path)
    if scheme in ("", "file"):
        local = Path(path.removeprefix("file://")).expanduser()
        with file_errors(str(local)):
            if _GLOB.search(str(local)) and not local.exists():
                files = _local_glob(local)
            elif local.is_dir():
                inside = sorted(local.rglob("*"))
                files = [_local(p, local) for p in inside if _is_data(p.relative_to(local))]
            else:
                files = [_local(local, local.parent)]
    elif scheme == "hf":
        files = find_on_hub(path)
    else:
        files = _find_in_bucket(path)
    if not files:
        endings = [f".{ending}" for ending in FORMATS_BY_ENDING]
        raise SourceError(
            f"source '{path}' matches no files (a folder is searched for {', '.join(endings)}, "
            f"also with .gz or .zst){near_files(path, *endings) if scheme == '' else ''}",
            path=path,
        )
    return sorted(_without_saved_state(files), key=lambda file: file.uri)


def _without_saved_state(files: list[SourceFile]) -> list[SourceFile]:
    """Leave out the files that `save_to_disk` of `datasets` writes next to the rows.

    saved/{dataset_dict.json, train/{data-00000-of-00001.arrow, state.json, cache-1f.arrow}}
    -> saved/train/data-00000-of-00001.arrow
    """
    split = [(*file.uri.rpartition("/")[::2], file) for file in files]
    saved = {folder for folder, name, _ in split if name == "state.json"}
    saved &= {folder for folder, name, _ in split if re.fullmatch(r"data-.*\.arrow", name)}
    if not saved:
        return files
    above = {folder.rpartition("/")[0] for folder in saved}
    return [
        file
        for folder, name, file in split
        if not (folder in saved and not name.startswith("data-"))
        and not (folder in above and name == "dataset_dict.json")
    ]


def source_name(config: SourceConfig) -> str:
    """Return the source's name in lineage: the given one, else the file name without its endings.

    Example:
        >>> source_name(SourceConfig(path="raw/Alpaca Data.json.gz"))
        'alpaca-data'
    """
    if config.name is not None:
        return config.name
    stem = config.path.rstrip("/").rsplit("/", 1)[-1]
    while "." in stem[1:] and stem.rsplit(".", 1)[1] in (*FORMATS_BY_ENDING, "xlsx", "gz", "zst"):
        stem = stem.rsplit(".", 1)[0]
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return name[:64] or "source"


def pin_of(uri: str) -> tuple[int, str]:
    """Return the current size in bytes and the pin of a file.

    Raises:
        SourceError: the file is gone.
        TransientError: the storage did not answer.
    """
    with file_errors(uri):
        if "://" not in uri:
            status = Path(uri).stat()
            return status.st_size, str(status.st_mtime_ns)
        if uri.startswith("hf://"):  # the URI has a commit, so the file cannot change
            return fetch_from_hub(uri).stat().st_size, parse_hub_uri(uri).revision
        filesystem, path = open_filesystem(uri)
        info = filesystem.info(path)
        return int(info["size"]), _pin(info)


def local_path(uri: str) -> Path | None:
    """Return a file's path on this machine; None if it is read from object storage."""
    if uri.startswith("hf://"):
        return fetch_from_hub(uri)
    return None if "://" in uri else Path(uri)


def open_file(uri: str) -> IO[bytes]:
    """Open a file for large sequential reads."""
    path = local_path(uri)
    if path is not None:
        return path.open("rb", buffering=0)  # chunks of 4 MiB need no buffer
    filesystem, inside = open_filesystem(uri)  # same endpoint and checksum settings as our stores
    opened: IO[bytes] = filesystem.open(inside, "rb", block_size=8 * 2**20)
    return opened


@contextmanager
def file_errors(uri: str) -> Iterator[None]:
    """Turn errors of the operating system and storage clients into ours, which name the file."""
    try:
        yield
    except PackhouseError:
        raise
    except FileNotFoundError:
        advice = near_files(uri) or ". Check the path"
        raise file_error(uri, f" does not exist{advice}") from None
    except PermissionError as error:
        raise SourceError(f"no permission to read source file '{uri}': {error}", uri=uri) from None
    except OSError as error:
        if "://" not in uri:
            raise file_error(uri, f" cannot be read: {error}") from None
        raise TransientError(f"storage failed to return '{uri}': {error}", uri=uri) from None
    except Exception as error:
        # By the name of the package, so that clients need not be imported to be recognised.
        client = type(error).__module__.split(".")[0]
        if client not in _CLIENTS:
            raise
        said = first_line(error)
        if client == "obstore":  # s3fs raises PermissionError, obstore only tells the status
            if function_of_addon("status_of")(error) in (400, 401, 403, 404):
                raise SourceError(f"no access to source file '{uri}': {said}", uri=uri) from None
        raise TransientError(f"storage failed to return '{uri}': {said}", uri=uri) from None


_CLIENTS = (
    "aiobotocore", "aiohttp", "botocore", "httpx", "huggingface_hub", "obstore", "s3fs", "urllib3",
)  # fmt: skip


def _check_uri(path: str) -> str:
    if "\0" in path:
        raise SourceError(f"source path {path!r} contains a NUL character")
    if "://" not in path:
        return ""
    parts = urlsplit(path)
    fix = "Remove them, and set them in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)"
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://***@{parts.netloc.rsplit('@', 1)[1]}{parts.path}"
        raise SourceError(f"source '{shown}' contains credentials. {fix}")
    # A key of AWS may contain a slash. In `s3://KEY:SEC/RET@bucket` the netloc then ends before the
    # `@`, so the check above misses it, and what follows the colon is not a port.
    host, colon, port = parts.netloc.partition(":")
    if colon and host != "arn" and not re.fullmatch("[0-9]*", port):  # `key:sec/ret@bucket`
        raise SourceError(f"a {parts.scheme}:// source contains credentials. {fix}")
    if parts.scheme not in _SCHEMES:
        raise SourceError(
            f"source '{parts.scheme}://{parts.netloc}{parts.path}': scheme '{parts.scheme}' is not "
            f"supported. Use a local path, s3://, gs://, az:// or hf://, or download the file first"
        )
    return parts.scheme


def _local_glob(pattern: Path) -> list[SourceFile]:
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if _GLOB.search(part))
    root = Path(*parts[:first])
    found = sorted(root.glob("/".join(parts[first:])))
    shows_hidden = any(part.startswith(".") for part in parts[first:])
    found = [path for path in found if shows_hidden or not _is_hidden(path.relative_to(root))]
    found = [path for path in found if not path.is_dir()]
    real = root.resolve()
    for folder in {path.parent for path in found}:  # a worker may be allowed this root only
        if not folder.resolve().is_relative_to(real):
            what = f"is reached through a symbolic link that leads outside '{root}'"
            fix = f"Use its target '{folder.resolve()}' instead"
            raise SourceError(f"source '{folder}' {what}. {fix}")
    return [_local(path, root) for path in found]


def _is_data(path: Path) -> bool:
    return not _is_hidden(path) and format_of_name(path.name) in FORMATS_BY_ENDING.values()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


_NOT_PLAIN = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _local(path: Path, root: Path) -> SourceFile:
    status = path.lstat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFLNK:
        target = os.path.realpath(path)
        raise SourceError(f"source '{path}' is a symbolic link. Use its target '{target}' instead")
    if kind in _NOT_PLAIN:
        raise SourceError(f"source '{path}' is {_NOT_PLAIN[kind]}, not a plain file")
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
        what = "has a name that is not valid UTF-8, which a manifest cannot store. Rename the file"
        raise SourceError(f"source {os.fsencode(path)!r} {what}")
    # `Path.resolve` would follow the links of parents, and the URI would name another folder than
    # the recipe does; `Path.absolute` would keep `..`.
    uri = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links
    name = path.relative_to(root).as_posix()
    return SourceFile(uri, name, status.st_size, str(status.st_mtime_ns))


def _find_in_bucket(uri: str) -> list[SourceFile]:
    scheme = uri.partition("://")[0]
    with file_errors(uri):
        filesystem, path = open_filesystem(uri.rstrip("/"))
        folder = path.rsplit("/", 1)[0]
        if _GLOB.search(path):
            folder = _GLOB.split(path)[0].rsplit("/", 1)[0]
            found = filesystem.glob(path, detail=True)
            infos = {name: info for name, info in found.items() if info["type"] == "file"}
        elif filesystem.isdir(path):
            folder = path
            found = filesystem.find(path, detail=True)
            infos = {n: info for n, info in found.items() if _is_data(Path(_below(path, n)))}
        else:
            infos = {path: filesystem.info(path)}
    return [
        SourceFile(f"{scheme}://{path}", _below(folder, path), int(info["size"]), _pin(info))
        for path, info in infos.items()
    ]


def _below(folder: str, path: str) -> str:
    return path.removeprefix(folder).lstrip("/")


def _pin(info: Mapping[str, Any]) -> str:
    # s3fs says `ETag` and `LastModified`, obstore `e_tag` and `last_modified`.
    tags = (info.get(name) for name in ("ETag", "e_tag", "LastModified", "last_modified"))
    return str(next(filter(None, tags), "")).strip('"')


# Files of dataset repositories on the Hub: `hf://datasets/ORG/NAME[@REVISION]/PATH`.
#
# A revision (a branch, a tag, a commit; by default `main`) is resolved to its commit when the
# source is scanned, and every later read uses that commit: a push in between changes nothing.
# Keys hold the digest of the bytes, not the revision. A file is downloaded once, into the Hub
# client's cache (`HF_HUB_CACHE`, `HF_HOME`); an interrupted download resumes. If the revision is
# a commit and its files are in the cache, no network is needed. The token comes from `HF_TOKEN`
# only; a login saved on disk is not used.


_HUB_URI = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # depends on the client's version


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPath:
    """A file, folder or glob in a dataset repository."""

    repo: str
    revision: str
    path: str

    @property
    def uri(self) -> str:
        """The URI as a recipe has it."""
        return f"hf://datasets/{self.repo}@{self.revision.replace('/', '%2F')}/{self.path}"


def parse_hub_uri(uri: str) -> HubPath:
    """Split a Hub URI into its parts; a slash in a revision is written `%2F`.

    Example:
        >>> parse_hub_uri("hf://datasets/acme/talks@v1/data/a.jsonl").uri
        'hf://datasets/acme/talks@v1/data/a.jsonl'
        >>> parse_hub_uri("hf://datasets/acme/talks").revision
        'main'

    Raises:
        SourceError: the URI has another form.
    """
    match = _HUB_URI.fullmatch(uri)
    if match is None:
        what = "is not a path in a dataset repository"
        raise SourceError(f"source '{uri}' {what}. Expected hf://datasets/ORG/NAME[@REVISION]/PATH")
    repo, revision, path = match.groups()
    revision = (revision or "main").replace("%2F", "/")
    return HubPath(repo=repo, revision=revision, path=(path or "").strip("/"))


def find_on_hub(uri: str) -> list[SourceFile]:
    """Return the files that a path, folder or glob on the Hub names.

    Raises:
        SourceError: no such repository, revision or file, or no permission to read it.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile, RepoFolder

    wanted = parse_hub_uri(uri)
    path, pattern = wanted.path, _GLOB.search(wanted.path)
    with _hub_errors(wanted):
        api: Any = HfApi(**hub_options())
        commit = wanted.revision
        if not _COMMIT.fullmatch(commit):
            commit = str(api.repo_info(wanted.repo, repo_type="dataset", revision=commit).sha)
        of_commit: Any = {"repo_type": "dataset", "revision": commit}
        sizes: dict[str, int] | None = None
        folder = path[: pattern.start()].rpartition("/")[0] if pattern else path
        if path and not pattern:
            cached = None
            if wanted.revision == commit:  # no network is needed for a file in the cache
                cached = try_to_load_from_cache(wanted.repo, path, **of_commit)
            if isinstance(cached, str):
                sizes = {path: Path(cached).stat().st_size}
            else:
                [*found] = api.get_paths_info(wanted.repo, [path], **of_commit)
                if not found:
                    pinned = replace(wanted, revision=commit).uri
                    why = "the repository has no such file"
                    raise SourceError(f"source '{pinned}': {why}", uri=pinned)
                if not isinstance(found[0], RepoFolder):
                    sizes = {path: int(found[0].size)}
        if sizes is not None:
            folder = path.rpartition("/")[0]
        else:
            tree = api.list_repo_tree(wanted.repo, folder or None, recursive=True, **of_commit)
            sizes = {item.path: item.size for item in tree if isinstance(item, RepoFile)}
            if pattern:
                is_named = _glob_to_regex(path).fullmatch
                sizes = {name: size for name, size in sizes.items() if is_named(name)}
            else:
                sizes = {n: s for n, s in sizes.items() if _is_data(Path(_below(folder, n)))}
    uris = {path: replace(wanted, revision=commit, path=path).uri for path in sizes}
    return [SourceFile(uris[n], _below(folder, n), size, commit) for n, size in sizes.items()]


def fetch_from_hub(uri: str) -> Path:
    """Return the local path of a repository's file; download it first if it is not in the cache.

    Raises:
        SourceError: the file does not exist, or there is no permission to read it.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    file = parse_hub_uri(uri)
    with _hub_errors(file):
        of_revision: Any = {"repo_type": "dataset", "revision": file.revision, **hub_options()}
        return Path(hf_hub_download(file.repo, file.path, tqdm_class=silent_bar(), **of_revision))


def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    """Compile a shell pattern in which `*` stays within a folder and `**` does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(parts.get(p, p if p[:1] == "[" else re.escape(p)) for p in pieces))


@contextmanager
def _hub_errors(wanted: HubPath) -> Iterator[None]:
    """Turn errors of the Hub's client into ours."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:
        repo = f"hf://datasets/{wanted.repo}"
        response = getattr(error, "response", None)
        status = 0 if response is None else response.status_code
        has_token, is_temporary = bool(hub_options()["token"]), False
        if isinstance(error, errors.GatedRepoError):
            access = "Request access on its page, and set HF_TOKEN to a token for that account"
            why = f"{repo} is gated. {access}"
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"{repo} has no revision '{wanted.revision}'"
        elif isinstance(error, errors.OfflineModeIsEnabled):
            which = "only cached files can be read, and only by commit (@ and its 40 digits)"
            why = f"HF_HUB_OFFLINE is set, so {which}"
        elif (
            isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError)
            or type(error).__module__.split(".")[0] in _HUB_CLIENTS
        ):
            what = "the Hub cannot be reached, and the file is not in the cache"
            why = f"{what} ({first_line(error)}). Check the network and HF_ENDPOINT"
            is_temporary = True
        elif isinstance(error, errors.EntryNotFoundError):
            why = "the repository has no such file"
        elif not isinstance(error, errors.HfHubHTTPError):
            raise
        elif status == 429 or status >= 500:
            is_temporary, why = True, f"the Hub returned {status}"
        elif status in (401, 403) and has_token:
            why = f"HF_TOKEN is invalid or has no access to {repo} ({status})"
        elif status in (401, 403):
            fix = "To read a private one, set HF_TOKEN"
            why = f"{repo} is private or does not exist ({status}). {fix}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            unseen = ", or HF_TOKEN has no access to it" if has_token else ""
            why = f"{repo} does not exist{unseen}. Check its name"
        else:
            why = f"the Hub refused the request ({status})"
        kind = TransientError if is_temporary else SourceError
        raise kind(f"source '{wanted.uri}': {why}", uri=wanted.uri) from None
