"""Find the files of a source and open them: local, `s3://`, `hf://`.

Local paths use the standard library; other schemes go through fsspec, imported when first needed,
with credentials from the environment only. What is not a plain file (symbolic links, FIFOs,
folders where a file is due) is refused: a link can change what a recipe means without changing it.
"""

import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from packhouse.errors import PackhouseError, SourceError, TransientError
from packhouse.recipe import SourceConfig
from packhouse.sources import hub
from packhouse.store.objects import open_filesystem

__all__ = [
    "SourceFile",
    "file_errors",
    "find_files",
    "local_path",
    "open_file",
    "pin_of",
    "source_name",
]

KNOWN_ENDINGS = ("json", "jsonl", "ndjson", "csv", "tsv", "parquet", "arrow", "feather")
"""Endings that a folder is searched for; each may be followed by `.gz` or `.zst`."""

_SCHEMES = ("file", "s3", "hf")
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source, as it was when it was found."""

    uri: str
    """Absolute path or URL."""
    name: str
    """Path below the source's folder, or the file's own name."""
    size: int
    """Bytes as stored, compressed or not."""
    pin: str
    """Changes when the file changes: modification time, ETag or blob id."""


def find_files(config: SourceConfig) -> list[SourceFile]:
    """Files that `config.path` names, sorted by uri.

    Raises:
        SourceError: nothing there, not a plain file, an unsupported scheme, or credentials in the
            URL.
        TransientError: the storage did not answer.
    """
    path = config.path
    scheme = _check_uri(path)
    if scheme in ("", "file"):
        files = _find_local(Path(path.removeprefix("file://")).expanduser())
    elif scheme == "hf":
        files = _find_on_hub(path)
    else:
        files = _find_remote(path)
    if not files:
        raise SourceError(f"source '{path}' names no files{_why_none()}", path=path)
    return sorted(files, key=lambda file: file.uri)


def source_name(config: SourceConfig) -> str:
    """Name of a source in lineage: as given, else the file's name without its endings.

    Example:
        >>> source_name(SourceConfig(path="raw/Alpaca Data.json.gz"))
        'alpaca-data'
    """
    if config.name is not None:
        return config.name
    stem = config.path.rstrip("/").rsplit("/", 1)[-1]
    while "." in stem[1:] and stem.rsplit(".", 1)[1] in (*KNOWN_ENDINGS, "gz", "zst"):
        stem = stem.rsplit(".", 1)[0]
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return name[:64] or "source"


def pin_of(uri: str) -> tuple[int, str]:
    """Present size in bytes and pin of a file.

    Raises:
        SourceError: it is gone.
        TransientError: the storage did not answer.
    """
    with file_errors(uri):
        if "://" not in uri:
            status = Path(uri).stat()
            return status.st_size, str(status.st_mtime_ns)
        if uri.startswith("hf://"):  # of a commit, so it cannot change
            return hub.fetch(uri).stat().st_size, hub.parse_uri(uri).revision
        info = _filesystem(uri).info(uri)
        return int(info["size"]), _remote_pin(info)


def local_path(uri: str) -> Path | None:
    """Where a file lies on this machine; None: it is read from its storage."""
    if uri.startswith("hf://"):
        return hub.fetch(uri)
    return None if "://" in uri else Path(uri)


def open_file(uri: str) -> IO[bytes]:
    """Open a file for reading in big sequential steps."""
    path = local_path(uri)
    if path is not None:
        return path.open("rb", buffering=0)
    opened: IO[bytes] = _filesystem(uri).open(uri, "rb", block_size=8 * 2**20)
    return opened


@contextmanager
def file_errors(uri: str) -> Iterator[None]:
    """Turn what the operating system and storage clients raise into errors that name the file."""
    try:
        yield
    except PackhouseError:
        raise
    except FileNotFoundError:
        raise SourceError(
            f"source file '{uri}' does not exist; correct its `path` in the recipe", uri=uri
        ) from None
    except PermissionError as error:
        raise SourceError(f"source file '{uri}' may not be read: {error}", uri=uri) from None
    except OSError as error:
        if "://" not in uri:
            raise SourceError(f"source file '{uri}' cannot be read: {error}", uri=uri) from None
        raise TransientError(f"storage did not give '{uri}': {error}", uri=uri) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] not in _CLIENTS:
            raise
        raise TransientError(f"storage did not give '{uri}': {error}", uri=uri) from None


_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "httpx", "huggingface_hub", "s3fs", "urllib3")


def _check_uri(path: str) -> str:
    if "\0" in path:
        raise SourceError(f"source path {path!r} holds a NUL character")
    if "://" not in path:
        return ""
    parts = urlsplit(path)
    if "@" in parts.netloc:
        host = parts.netloc.rsplit("@", 1)[1]
        raise SourceError(
            f"source '{parts.scheme}://***@{host}{parts.path}' carries credentials; take them out "
            "and set them in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)"
        )
    host, colon, port = parts.netloc.partition(":")
    if colon and host != "arn" and not re.fullmatch("[0-9]*", port):  # `key:sec/ret@bucket`
        raise SourceError(
            f"a {parts.scheme}:// source carries credentials; take them out and set them in the "
            "environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)"
        )
    if parts.scheme not in _SCHEMES:
        raise SourceError(
            f"source '{parts.scheme}://{parts.netloc}{parts.path}': scheme '{parts.scheme}' is not "
            f"supported; use a local path, s3:// or hf://, or download the file first"
        )
    return parts.scheme


def _find_local(path: Path) -> list[SourceFile]:
    text = str(path)
    with file_errors(text):
        if _MAGIC.search(text) and not path.exists():
            return _local_glob(path)
        if path.is_dir():
            found = sorted(path.rglob("*"))
            return [_local(p, path) for p in found if _is_data(p.relative_to(path))]
        return [_local(path, path.parent)]


def _local_glob(pattern: Path) -> list[SourceFile]:
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    root = Path(*parts[:first])
    found = sorted(root.glob("/".join(parts[first:])))
    shows_hidden = any(part.startswith(".") for part in parts[first:])
    found = [path for path in found if shows_hidden or not _is_hidden(path.relative_to(root))]
    found = [path for path in found if not path.is_dir()]
    real = root.resolve()
    for folder in {path.parent for path in found}:  # a worker may be allowed this root, and no more
        if not folder.resolve().is_relative_to(real):
            raise SourceError(
                f"source '{folder}' lies behind a symbolic link that leads out of '{root}'; name "
                f"its target '{folder.resolve()}' instead"
            )
    return [_local(path, root) for path in found]


def _is_data(path: Path) -> bool:
    return not _is_hidden(path) and _has_known_ending(path.name)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _has_known_ending(name: str) -> bool:
    plain = re.sub(r"\.(gz|zst)$", "", name.lower())
    return any(fnmatch.fnmatch(plain, f"*.{ending}") for ending in KNOWN_ENDINGS)


def _local(path: Path, root: Path) -> SourceFile:
    status = path.lstat()
    kind = _not_plain(status.st_mode)
    if kind == "a symbolic link":
        target = os.path.realpath(path)
        raise SourceError(f"source '{path}' is a symbolic link; name its target '{target}' instead")
    if kind:
        raise SourceError(f"source '{path}' is {kind}, not a plain file")
    if _is_not_unicode(str(path)):
        raise SourceError(
            f"source {os.fsencode(path)!r}: its name is no UTF-8, so no manifest can hold it; "
            "rename the file"
        )
    return SourceFile(
        uri=os.path.abspath(path),  # noqa: PTH100 (resolve() would follow links of parents)
        name=path.relative_to(root).as_posix(),
        size=status.st_size,
        pin=str(status.st_mtime_ns),
    )


def _is_not_unicode(name: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in name)


def _not_plain(mode: int) -> str | None:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode))


def _filesystem(uri: str) -> Any:
    import fsspec

    scheme = uri.split("://", 1)[0]
    if scheme == "s3":
        return open_filesystem(uri)[0]  # the endpoint, style and checksums of our stores
    return fsspec.filesystem(scheme, use_listings_cache=False)


def _find_on_hub(uri: str) -> list[SourceFile]:
    found, root = hub.find_hub_files(uri)
    is_one = len(found) == 1 and hub.parse_uri(uri).path == found[0].path
    return [
        SourceFile(
            uri=file.uri,
            name=file.path.removeprefix(root).lstrip("/"),
            size=file.size,
            pin=file.revision,
        )
        for file in found
        if is_one or _MAGIC.search(uri) or _is_data(Path(file.path.removeprefix(root).lstrip("/")))
    ]


def _find_remote(uri: str) -> list[SourceFile]:
    scheme = uri.split("://", 1)[0]
    with file_errors(uri):
        filesystem = _filesystem(uri)
        infos, root = _remote_infos(filesystem, uri)
        return [
            SourceFile(
                uri=f"{scheme}://{info['name']}",
                name=info["name"].removeprefix(root).lstrip("/"),
                size=int(info["size"]),
                pin=_remote_pin(info),
            )
            for info in infos
        ]


def _remote_infos(filesystem: Any, uri: str) -> tuple[list[dict[str, Any]], str]:
    path = filesystem._strip_protocol(uri)
    parent = path.rsplit("/", 1)[0]
    if _MAGIC.search(path):
        fixed = _MAGIC.split(path)[0].rsplit("/", 1)[0]
        found = filesystem.glob(path, detail=True)
        return [info for info in found.values() if info["type"] == "file"], fixed
    if not filesystem.isdir(path):
        return [filesystem.info(path)], parent
    found = filesystem.find(path, detail=True)
    return [info for name, info in found.items() if _is_data(Path(name[len(path) :]))], path


def _remote_pin(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "blob_id", "LastModified", "mtime", "created"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


def _why_none() -> str:
    endings = ", ".join(f".{ending}" for ending in KNOWN_ENDINGS)
    return f" (a folder is searched for {endings}, plain, .gz or .zst)"
