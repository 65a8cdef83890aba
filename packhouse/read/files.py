"""Find the files of a source and open them: local, `s3://`, `gs://`, `az://`, `hf://`.

Local paths use the standard library; s3fs, obstore and the Hub's client are imported when first
needed, with credentials from the environment only. What is not a plain file (symbolic links, FIFOs,
folders where a file is due) is refused: a link can change what a recipe means without changing it.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from packhouse.errors import PackhouseError, SourceError, TransientError
from packhouse.read import hub
from packhouse.read.file_formats import FORMATS_BY_ENDING, format_of_name
from packhouse.recipe import SourceConfig
from packhouse.store.objects import open_filesystem
from packhouse.system.wording import first_line, near_files

_SCHEMES = ("file", "s3", "gs", "az", "hf")


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
        files = _find_in_bucket(path)
    if not files:
        endings = [f".{ending}" for ending in FORMATS_BY_ENDING]
        raise SourceError(
            f"source '{path}' names no files (a folder is searched for {', '.join(endings)}, "
            f"plain, .gz or .zst){near_files(path, *endings) if scheme == '' else ''}",
            path=path,
        )
    return sorted(_without_saved_state(files), key=lambda file: file.uri)


def _without_saved_state(files: list[SourceFile]) -> list[SourceFile]:
    """Files without what `save_to_disk` of `datasets` writes beside its rows.

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
    """Name of a source in lineage: as given, else the file's name without its endings.

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
        filesystem, path = open_filesystem(uri)
        info = filesystem.info(path)
        return int(info["size"]), _pin(info)


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
    filesystem, inside = open_filesystem(uri)  # the endpoint, style and checksums of our stores
    opened: IO[bytes] = filesystem.open(inside, "rb", block_size=8 * 2**20)
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
            f"source file '{uri}' does not exist{near_files(uri) or '; correct its path'}", uri=uri
        ) from None
    except PermissionError as error:
        raise SourceError(f"source file '{uri}' may not be read: {error}", uri=uri) from None
    except OSError as error:
        if "://" not in uri:
            raise SourceError(f"source file '{uri}' cannot be read: {error}", uri=uri) from None
        raise TransientError(f"storage did not give '{uri}': {error}", uri=uri) from None
    except Exception as error:
        client = type(error).__module__.split(".")[0]
        if client not in _CLIENTS:
            raise
        said = first_line(error)
        if client == "obstore":  # it has no PermissionError, as s3fs has
            from packhouse.store.cloud import status_of

            if status_of(error) in (400, 401, 403, 404):
                raise SourceError(f"source file '{uri}' may not be read: {said}", uri=uri) from None
        raise TransientError(f"storage did not give '{uri}': {said}", uri=uri) from None


_CLIENTS = (
    "aiobotocore", "aiohttp", "botocore", "httpx", "huggingface_hub", "obstore", "s3fs", "urllib3",
)  # fmt: skip


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
            f"supported; use a local path, s3://, gs://, az:// or hf://, or download the file first"
        )
    return parts.scheme


def _find_local(path: Path) -> list[SourceFile]:
    text = str(path)
    with file_errors(text):
        if hub.GLOB.search(text) and not path.exists():
            return _local_glob(path)
        if path.is_dir():
            found = sorted(path.rglob("*"))
            return [_local(p, path) for p in found if _is_data(p.relative_to(path))]
        return [_local(path, path.parent)]


def _local_glob(pattern: Path) -> list[SourceFile]:
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if hub.GLOB.search(part))
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
        raise SourceError(f"source '{path}' is a symbolic link; name its target '{target}' instead")
    if kind in _NOT_PLAIN:
        raise SourceError(f"source '{path}' is {_NOT_PLAIN[kind]}, not a plain file")
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
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


def _find_on_hub(uri: str) -> list[SourceFile]:
    found, folder = hub.find_hub_files(uri)
    files = [
        SourceFile(
            uri=file.uri,
            name=file.path.removeprefix(folder).lstrip("/"),
            size=file.size,
            pin=file.revision,
        )
        for file in found
    ]
    is_one = len(found) == 1 and hub.parse_uri(uri).path == found[0].path
    is_stated = is_one or hub.GLOB.search(uri)
    return [file for file in files if is_stated or _is_data(Path(file.name))]


def _find_in_bucket(uri: str) -> list[SourceFile]:
    scheme = uri.partition("://")[0]
    with file_errors(uri):
        filesystem, path = open_filesystem(uri.rstrip("/"))
        folder = path.rsplit("/", 1)[0]
        if hub.GLOB.search(path):
            folder = hub.GLOB.split(path)[0].rsplit("/", 1)[0]
            found = filesystem.glob(path, detail=True)
            infos = {name: info for name, info in found.items() if info["type"] == "file"}
        elif filesystem.isdir(path):
            folder = path
            found = filesystem.find(path, detail=True)
            infos = {n: info for n, info in found.items() if _is_data(Path(n[len(path) :]))}
        else:
            infos = {path: filesystem.info(path)}
    return [
        SourceFile(
            uri=f"{scheme}://{name}",
            name=name.removeprefix(folder).lstrip("/"),
            size=int(info["size"]),
            pin=_pin(info),
        )
        for name, info in infos.items()
    ]


def _pin(info: Mapping[str, Any]) -> str:
    tag = info.get("ETag") or info.get("e_tag") or info.get("LastModified")
    return str(tag or "").strip('"')
