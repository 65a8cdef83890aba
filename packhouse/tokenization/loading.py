"""Read a tokenizer's folder into a snapshot, with transformers once and never again.

The class that `AutoTokenizer` picks can change ids, so transformers has to read the folder; it
costs one to four seconds of import. What it found is kept as JSON under the fingerprint of the
files, with its own digest; later processes read that (0.02 s) and need only `tokenizers`.
A kept file whose digest does not match is built again, never trusted.
"""

import hashlib
import json
import os
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from packhouse.errors import TokenizerError
from packhouse.near import near_files
from packhouse.runtime.checked_files import read_checked, write_checked
from packhouse.runtime.confine import run_confined
from packhouse.runtime.confined import at, limited
from packhouse.runtime.disks import temporary_folder
from packhouse.tokenization.encoders import bare, load_tokenizer
from packhouse.tokenization.names import TOKENIZER_FILES, tokenizer_folder
from packhouse.tokenization.pipeline import MAX_IDS, read_pipeline
from packhouse.tokenization.snapshot import TokenizerSnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")
_SNAPSHOT_FORMAT = 1

MEMORY_PER_BYTE = 32
"""What a child may take for each byte of the tokenizer's files and of the texts it works on."""

# Shards are formatted by threads of one process, and a first `import transformers` in two threads
# at once fails: its lazy module is half made when the second one looks.
_LOADING = threading.Lock()
_IN_PROCESS: dict[tuple[str, Path | None], TokenizerSnapshot] = {}


def fingerprint_tokenizer(folder: str | Path) -> str:
    """Identity of a tokenizer: sha256 over its files and the libraries that read them.

    Reads and hashes the files (Qwen: 11 MB, 0.03 s), again if any changed; imports no library.

    Args:
        folder: what `save_pretrained` wrote, or a pinned name (`pin_tokenizer`). Other files in
            it, such as weights, do not count.

    Returns:
        64 hex digits. The same files give the same digits in any folder.

    Raises:
        TokenizerError: no such folder, or no tokenizer in it.
    """
    if "://" in str(folder):
        raise TokenizerError(
            "a tokenizer cannot be an address (`scheme://`); give a local folder, or a name of the "
            "Hugging Face Hub (`org/name`); download others and give their folder"
        )
    files = _tokenizer_files(tokenizer_folder(folder))
    return _digest(tuple((file, _state(file)) for file in files))


def check_unchanged(tokenizer: str, fingerprint: str) -> None:
    """Fail if a tokenizer is another one than it was when the run was planned.

    Raises:
        TokenizerError: its files changed.
    """
    if fingerprint_tokenizer(tokenizer) != fingerprint:
        raise TokenizerError(
            f"tokenizer '{tokenizer}' changed while the run worked with it; what was made since is "
            "not kept. Run again"
        )


def _state(file: Path) -> tuple[int, ...]:
    """What changes whenever a file's bytes do."""
    state = file.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


@lru_cache(maxsize=4)
def _digest(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    digest = hashlib.sha256()
    for piece in _pieces([file for file, _ in files]):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(files: Sequence[Path]) -> Iterator[bytes]:
    """All that a fingerprint is made of."""
    for library in ("transformers", "tokenizers"):
        yield f"{library}={version(library)}\n".encode()
    for file in files:
        content = file.read_bytes()
        yield f"{file.name} {len(content)}\n".encode()
        yield content


def fingerprinted_bytes(folder: str | Path) -> bytes:
    """Return the bytes whose sha256 is the fingerprint, files included: what a store keeps.

    Raises:
        TokenizerError: as `fingerprint_tokenizer`.
    """
    return b"".join(_pieces(_tokenizer_files(tokenizer_folder(folder))))


def load_snapshot(folder: str | Path, cache: Path | None = None) -> TokenizerSnapshot:
    """Read a tokenizer's folder, offline and without remote code.

    Args:
        folder: what `save_pretrained` wrote, or a pinned name (`pin_tokenizer`).
        cache: folder to keep the snapshot in; None keeps it for this process only.

    Raises:
        TokenizerError: no tokenizer there, a broken file (named), no fast tokenizer, or one whose
            ids are random (BPE dropout).
    """
    fingerprint = fingerprint_tokenizer(folder)
    file = _kept_file(cache, fingerprint) if cache else None
    with _LOADING:
        if (fingerprint, file) not in _IN_PROCESS:
            _IN_PROCESS[fingerprint, file] = _read_or_build(
                tokenizer_folder(folder), fingerprint, file
            )
        return _IN_PROCESS[fingerprint, file]


def find_snapshot(fingerprint: str, cache: Path) -> TokenizerSnapshot | None:
    """Return the snapshot that `load_snapshot` kept in `cache` under a fingerprint, if any."""
    return _read_snapshot(_kept_file(cache, fingerprint), fingerprint)


def _kept_file(cache: Path, fingerprint: str) -> Path:
    return cache / f"tokenizer-{fingerprint}.json"


def _read_or_build(folder: Path, fingerprint: str, file: Path | None) -> TokenizerSnapshot:
    kept = _read_snapshot(file, fingerprint) if file else None
    if kept is not None:
        return kept
    num_bytes = tokenizer_bytes(folder)
    # transformers reads other files too (`additional_chat_templates/`, `tokenizer.model.v3`), which
    # the fingerprint does not know: here it finds only those that it does.
    with temporary_folder("tokenizer") as known:
        for each in _tokenizer_files(folder):
            (known / each.name).symlink_to(each.absolute())
        fields = run_confined(
            partial(_build, folder, fingerprint, known),
            what=f"tokenizer '{folder}'",
            blames=TokenizerError,
            num_bytes=num_bytes,
            more_memory=num_bytes * MEMORY_PER_BYTE,
        )
    if file is not None:
        write_checked(file, {"format": _SNAPSHOT_FORMAT, **fields})
    return TokenizerSnapshot(**fields)


def _build(folder: Path, fingerprint: str, known: Path) -> dict[str, object]:
    """Fields of the snapshot; `known` links to the files of `folder` that the fingerprint knows."""
    with limited(tokenizer_bytes(folder)):
        at("while it is loaded")
        tokenizer = _load_with_transformers(folder, known)
        snapshot = _snapshot_of(tokenizer, fingerprint, folder)
    load_tokenizer.keep(snapshot.backend, bare(tokenizer.backend_tokenizer))  # it is HF: 0.4 s
    return {name: getattr(snapshot, name) for name in TokenizerSnapshot.__slots__}


def tokenizer_bytes(folder: str | Path) -> int:
    """Size of a tokenizer's files, which decides how much memory its child may take."""
    return sum(file.stat().st_size for file in _tokenizer_files(tokenizer_folder(folder)))


def _tokenizer_files(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):  # noqa: PTH112 - `Path.is_dir` raises if the name is too long
        near = near_files(folder)
        raise TokenizerError(
            f"no tokenizer folder at '{str(folder)[:200]}'{near + ' Or' if near else ';'} give the "
            "folder that `tokenizer.save_pretrained(folder)` wrote, or a name of the Hub such as "
            "`Qwen/Qwen2.5-0.5B-Instruct`",
            folder=str(folder),
        )
    files = sorted(file for file in folder.iterdir() if file.is_file())
    files = [file for file in files if _matches(file.name, TOKENIZER_FILES)]
    if not any(_matches(file.name, _VOCABULARIES) for file in files):
        found = ", ".join(file.name for file in files) or "no tokenizer file"
        raise TokenizerError(
            f"no vocabulary in tokenizer folder '{folder}' ({found}); it needs tokenizer.json, "
            "vocab.json + merges.txt, vocab.txt or tokenizer.model",
            folder=str(folder),
        )
    return files


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _load_with_transformers(folder: Path, known: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    _check_names_no_file(folder)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(known), local_files_only=True, trust_remote_code=False
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers and tokenizers raise: the file is at fault
        raise TokenizerError(
            f"tokenizer '{folder}' does not load: {_broken_file(folder, known, error)}",
            folder=str(folder),
        ) from error
    if not tokenizer.is_fast:
        raise TokenizerError(
            f"tokenizer '{folder}' loads as {type(tokenizer).__name__}, which has no fast "
            "tokenizer; save it with tokenizer.json (`AutoTokenizer...save_pretrained`)",
            folder=str(folder),
        )
    return tokenizer


def _check_names_no_file(folder: Path) -> None:
    """Refuse a config by which transformers would read a vocabulary from any other file.

    Raises:
        TokenizerError: `fast_tokenizer_files` names one, in the folder or outside of it.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):  # it does not load, which is said then
        return
    usual = ["tokenizer.json"]
    if isinstance(config, dict) and config.get("fast_tokenizer_files", usual) != usual:
        raise TokenizerError(
            f"tokenizer '{folder}': its tokenizer_config.json names another file for its "
            "vocabulary (fast_tokenizer_files); remove that key and keep the file as "
            "tokenizer.json",
            folder=str(folder),
        )


def _broken_file(folder: Path, known: Path, error: Exception) -> str:
    """Name the file that does not parse, or all of them with what the library said."""
    for file in _tokenizer_files(folder):
        content = file.read_bytes()
        if not content:
            return f"{file.name} is empty"
        if content.startswith(b"version https://git-lfs"):
            return f"{file.name} is a Git LFS pointer, not the file; run `git lfs pull`"
        if file.suffix == ".json":
            problem = _json_problem(file.name, content)
            if problem:
                return problem
    reason = _unloadable(folder)
    if reason:
        return reason
    names = ", ".join(file.name for file in _tokenizer_files(folder))
    said = str(error).replace(str(known), str(folder))
    said = textwrap.shorten(said, 400, placeholder=" ...")
    return f"{type(error).__name__}: {said} (files: {names})"


def _unloadable(folder: Path) -> str | None:
    """What transformers says in many lines, in one."""
    file = folder / "tokenizer_config.json"
    config = orjson.loads(file.read_bytes()) if file.is_file() else None
    if config is not None and not isinstance(config, dict):
        return f"{file.name} holds a {type(config).__name__}, not an object"
    if config and "auto_map" in config:
        return (
            f"{file.name} asks for code of its own (auto_map), which packhouse never runs; save "
            "it as a fast tokenizer, with tokenizer.json"
        )
    if (folder / "tokenizer.json").is_file():
        return None
    if (folder / "vocab.json").is_file() and not (folder / "merges.txt").is_file():
        return "merges.txt is missing beside vocab.json (or give tokenizer.json)"
    if config is None and not (folder / "config.json").is_file():
        return f"{file.name} is missing, which names the tokenizer's class (or give tokenizer.json)"
    return _unknown_class(config or {})


def _unknown_class(config: Mapping[str, object]) -> str | None:
    import transformers

    name = config.get("tokenizer_class")
    if name is None or (isinstance(name, str) and hasattr(transformers, name)):
        return None
    return (
        f"tokenizer_config.json names the class {name!r}, which transformers "
        f"{version('transformers')} does not have; give tokenizer.json"
    )


def _json_problem(name: str, content: bytes) -> str | None:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError as error:
        return f"{name}, line {error.lineno}, column {error.colno}: {error.msg}"
    if name == "tokenizer.json":
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises plain Exception or ValueError
            return f"{name}: {error}"
    return None


def _snapshot_of(
    tokenizer: "PreTrainedTokenizerFast", fingerprint: str, folder: Path
) -> TokenizerSnapshot:
    engine = tokenizer.backend_tokenizer
    engine.no_truncation()  # `tokenizer(text)` ignores what tokenizer.json says of these
    engine.no_padding()
    backend = engine.to_str()
    pipeline = read_pipeline(backend)
    if pipeline.model_size < engine.get_vocab_size(with_added_tokens=False):
        raise TokenizerError(
            f"tokenizer '{folder}': `tokenizers` cannot write its vocabulary, since tokenizer.json "
            f"gives a token an id of {2**32 - 1:,} or so; ids must be under {MAX_IDS:,}. Number "
            "the tokens from 0 on",
            folder=str(folder),
            limit=MAX_IDS,
        )
    if pipeline.dropout:
        raise TokenizerError(
            f"tokenizer '{folder}' has BPE dropout {pipeline.dropout}: its ids are random; "
            "set model.dropout to null in tokenizer.json",
            folder=str(folder),
        )
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
    first_ids = tokenizer("a")["input_ids"][:1]
    return TokenizerSnapshot(
        fingerprint=fingerprint,
        class_name=type(tokenizer).__name__,
        backend=backend,
        vocab_size=len(pipeline.is_added),
        added_tokens={token.text: token.id for token in pipeline.added},
        special_tokens={name: str(text) for name, text in special.items() if text is not None},
        adds_bos=first_ids[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id),
        chat_template=_chat_template(getattr(tokenizer, "chat_template", None), folder),
    )


def _chat_template(stated: object, folder: Path) -> str | None:
    template = stated.get("default") if isinstance(stated, dict) else stated
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"tokenizer '{folder}': chat_template in tokenizer_config.json must be text, got "
            f"{template!r}; put the Jinja source there or in chat_template.jinja",
            folder=str(folder),
        )
    return template


def _read_snapshot(file: Path, fingerprint: str) -> TokenizerSnapshot | None:
    fields = read_checked(file)
    if fields is None or fields.pop("format") != _SNAPSHOT_FORMAT:
        return None
    return TokenizerSnapshot(**fields) if fields["fingerprint"] == fingerprint else None
