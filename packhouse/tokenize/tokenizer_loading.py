"""Read a tokenizer's folder into a snapshot, using transformers only the first time.

The class that `AutoTokenizer` picks can change ids, so transformers has to read the folder. Its
import takes one to four seconds. The result is kept as JSON under the fingerprint of the files,
with a digest; later processes read that (0.02 s) and need only `tokenizers`. A kept file whose
digest does not match is rebuilt, never trusted.

Some classes build their own pipeline from the vocabulary of tokenizer.json and ignore the rest of
that file, so a wrong `tokenizer_class` silently gives other ids than the model was trained with.
When a snapshot is built, the ids of both pipelines are compared (Qwen: 0.5 s); their JSON differs
for correct classes too.

A tokenizer may also be a name on the Hugging Face Hub, `org/name`, pinned to a commit. The name is
resolved once, before any work: from the Hub client's cache if it is there (no network, 1 ms),
otherwise from the Hub. The run then uses `org/name@<commit>`, which each machine finds in its own
cache or downloads, so a push in between changes nothing. Only the files of the tokenizer are
downloaded, no weights.
"""

import hashlib
import json
import os
import re
import textwrap
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from packhouse.errors import TokenizerError
from packhouse.recipe.sections import HUB_NAME, PipelineChoice
from packhouse.system.disks import read_checked, temporary_folder, write_checked
from packhouse.system.hub import hub_options, silent_bar
from packhouse.system.wording import first_line, near_files
from packhouse.system.worker import at, limited, run_in_worker
from packhouse.tokenize import encoders
from packhouse.tokenize.encoder_choice import short_texts
from packhouse.tokenize.encoders import MAX_IDS, Pipeline, TokenizerSnapshot, bare, read_pipeline

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


# `config.json` is included because some tokenizers (BERT's) load as another class without it.
# `generation_config.json` lists the tokens that stop generation.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
    "config.json",
    "generation_config.json",
)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")
GENERATION_CONFIG = "generation_config.json"
_SNAPSHOT_FORMAT = 2  # a snapshot that was kept in another format is built again

MEMORY_PER_BYTE = 32
"""Bytes of memory that a worker may use per byte of the tokenizer's files and of its texts."""


# Shards are formatted by threads of one process, and the first `import transformers` fails if two
# threads run it at once, because the second one sees its lazy module half initialised.
_LOADING = threading.Lock()
_IN_PROCESS: dict[tuple[str, Path | None, bool], TokenizerSnapshot] = {}


def pin_tokenizer(tokenizer: str) -> str:
    """Return a folder unchanged, and a Hub name with its current commit.

    A folder takes precedence over a name; a name in the Hub client's cache is resolved there.

    Raises:
        TokenizerError: there is no such folder or name, or the Hub cannot be reached.

    Example:
        >>> pin_tokenizer("deployments/demo/tokenizer")
        'deployments/demo/tokenizer'
    """
    match = HUB_NAME.fullmatch(tokenizer)
    if match is None or Path(tokenizer).is_dir():
        return tokenizer
    repo, revision = match.groups()
    return f"{repo}@{_cached_or_downloaded(repo, revision or 'main', tokenizer).name}"


def tokenizer_folder(tokenizer: str | Path) -> Path:
    """Return the folder of a tokenizer's files: the given folder, or that of a pinned name.

    Raises:
        TokenizerError: the name's files are not on this machine and cannot be downloaded.
    """
    match = HUB_NAME.fullmatch(str(tokenizer))
    repo, revision = match.groups() if match else ("", "")
    if not _COMMIT.fullmatch(revision or "") or Path(tokenizer).is_dir():
        return Path(tokenizer)
    from huggingface_hub import constants  # 15 ms; the whole client takes 0.3 s

    folder = f"models--{repo.replace('/', '--')}/snapshots/{revision}"
    cached = Path(constants.HF_HUB_CACHE) / folder
    if (cached / "tokenizer_config.json").exists():
        return cached
    return _cached_or_downloaded(repo, revision, str(tokenizer))


def _cached_or_downloaded(repo: str, revision: str, name: str) -> Path:
    """Return the folder of a commit's tokenizer files in the Hub client's cache."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    options = hub_options()
    files = {"allow_patterns": list(TOKENIZER_FILES), "tqdm_class": silent_bar()}
    download = partial(snapshot_download, repo, revision=revision, **files, **options)
    try:
        cached = Path(download(local_files_only=True))
        if (cached / "tokenizer_config.json").exists():  # else other files of the repository
            return cached
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    try:
        # Without a network, this fails at once, while listing a commit's files retries for 23 s.
        HfApi(**options).model_info(repo, revision=revision, timeout=10)
        return Path(download())
    except errors.HFValidationError:
        reason, remedy = "it is not a valid Hub name", "check the name"
    except errors.GatedRepoError:
        reason = "its terms on the Hub have not been accepted"
        remedy = "accept them, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        denied = ", or HF_TOKEN has no access to it" if options["token"] else ""
        reason = f"the Hub has no model of this name{denied}"
        remedy = "check the name, and set HF_TOKEN if the model is private"
    except errors.RevisionNotFoundError:
        reason = f"{repo} has no revision '{revision}'"
        remedy = "use an existing branch, tag or commit"
    except Exception as error:  # whatever the client and its transport raise
        why = f"the Hub does not respond ({first_line(error, 200)})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        reason = f"it is not in the Hub's cache on this machine, and {why}"
        wanted = repo if revision == "main" else f"{repo} --revision {revision}"
        but = "--exclude '*.safetensors' --exclude '*.bin'"
        remedy = f"on a machine with network access, run `hf download {wanted} {but}` first"
    raise TokenizerError(
        f"cannot find tokenizer '{name}': it is not a folder, and {reason}. Pass a folder, or "
        f"{remedy}",
        tokenizer=name,
    )


def run_tokenizer(call: Callable[[], Any], tokenizer: str, num_bytes: int = 0) -> Any:
    """Run a call that tokenizes `num_bytes` of text in a worker."""
    what, memory = f"tokenizer '{tokenizer}'", num_bytes * MEMORY_PER_BYTE
    return run_in_worker(
        call, what=what, blames=TokenizerError, num_bytes=num_bytes, more_memory=memory
    )


def fingerprint_tokenizer(folder: str | Path) -> str:
    """Return the identity of a tokenizer: sha256 over its files and the libraries that read them.

    Reads and hashes the files (Qwen: 11 MB, 0.03 s), and again if any changed. Imports no library.

    Args:
        folder: folder written by `save_pretrained`, or a pinned name (`pin_tokenizer`). Other files
            in it, such as weights, are ignored.

    Returns:
        64 hex digits. The same files give the same digits in any folder.

    Raises:
        TokenizerError: there is no such folder, or no tokenizer in it.
    """
    if "://" in str(folder):
        raise TokenizerError(
            "a tokenizer cannot be a URI (`scheme://`). Pass a local folder or a Hugging Face "
            "Hub name (`org/name`); download other tokenizers first"
        )
    folder = tokenizer_folder(folder)
    # File states that change whenever a file's bytes do.
    stats = ((file, file.stat()) for file in _tokenizer_files(folder))
    states = ((file, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats)
    return _digest(folder, tuple(states))


@lru_cache(maxsize=4)
def _digest(folder: Path, states: object) -> str:
    return hashlib.sha256(fingerprinted_bytes(folder)).hexdigest()


def fingerprinted_bytes(folder: str | Path) -> bytes:
    """Return the bytes whose sha256 is the fingerprint, files included, to keep in the store.

    Raises:
        TokenizerError: like `fingerprint_tokenizer`.
    """
    pieces = [f"{name}={version(name)}\n".encode() for name in ("transformers", "tokenizers")]
    for file in _tokenizer_files(tokenizer_folder(folder)):
        content = file.read_bytes()
        pieces += [f"{file.name} {len(content)}\n".encode(), content]
    return b"".join(pieces)


def check_unchanged(tokenizer: str, fingerprint: str) -> None:
    """Raise an error if a tokenizer has changed since the run was planned.

    Raises:
        TokenizerError: its files changed.
    """
    if fingerprint_tokenizer(tokenizer) != fingerprint:
        raise TokenizerError(
            f"tokenizer '{tokenizer}' changed during the run, so the output of the current step "
            "was discarded. Run again"
        )


def load_snapshot(
    folder: str | Path, cache: Path | None = None, pipeline: PipelineChoice | None = None
) -> TokenizerSnapshot:
    """Read a tokenizer's folder, offline and without remote code.

    Args:
        folder: folder written by `save_pretrained`, or a pinned name (`pin_tokenizer`).
        cache: folder to keep the snapshot in; None keeps it for this process only.
        pipeline: pipeline to use: that of tokenizer.json (`file`) or of the class that it loads as
            (`class`); see `tokenize.pipeline`. Use `class` if ids do not matter: it refuses none.

    Raises:
        TokenizerError: there is no tokenizer, a file is broken (the message names it), the
            tokenizer is not a fast one or has random ids (BPE dropout), or `pipeline` is None and
            the class gives other ids than tokenizer.json.
    """
    fingerprint = fingerprint_tokenizer(folder)
    of_file = pipeline == "file"
    key = fingerprint, cache, of_file
    with _LOADING:
        snapshot = _IN_PROCESS.get(key)
        if snapshot is None and cache is not None:
            snapshot = find_snapshot(fingerprint, cache, pipeline)
        if snapshot is None:
            snapshot = _build(tokenizer_folder(folder), fingerprint, cache, of_file=of_file)
        _IN_PROCESS[key] = snapshot
    if snapshot.difference is not None and pipeline is None:
        raise _error(
            folder,
            f" {snapshot.difference}. Choose the pipeline that inference uses: tokenizer.json's "
            "with `--set tokenize.pipeline=file`, or the class's with `--set tokenize.pipeline="
            "class` (in a recipe: `tokenize: {pipeline: file}`)",
        )
    return snapshot


def _error(folder: str | Path, problem: str, **facts: Any) -> TokenizerError:
    """Return an error whose message is `tokenizer 'folder'` and the problem."""
    return TokenizerError(f"tokenizer '{folder}'{problem}", folder=str(folder), **facts)


def find_snapshot(
    fingerprint: str, cache: Path, pipeline: PipelineChoice | None = None
) -> TokenizerSnapshot | None:
    """Return the snapshot that `load_snapshot` kept in `cache` under a fingerprint, if any."""
    fields = read_checked(_kept_file(cache, fingerprint, of_file=pipeline == "file"))
    if fields is None or fields.pop("format") != _SNAPSHOT_FORMAT:
        return None
    return TokenizerSnapshot(**fields) if fields["fingerprint"] == fingerprint else None


def _kept_file(cache: Path, fingerprint: str, *, of_file: bool) -> Path:
    return cache / f"tokenizer-{fingerprint}{'-file' if of_file else ''}.json"


def _build(
    folder: Path, fingerprint: str, cache: Path | None, *, of_file: bool
) -> TokenizerSnapshot:
    # transformers also reads files outside the fingerprint (`additional_chat_templates/`,
    # `tokenizer.model.v3`), so give it a folder with only those that the fingerprint covers.
    with temporary_folder("tokenizer") as known:
        for each in _tokenizer_files(folder):
            # Links, since a tokenizer has 11 MB (Qwen) and is only read.
            (known / each.name).symlink_to(each.absolute())
        call = partial(_read_fields, folder, fingerprint, known, of_file=of_file)
        fields = run_tokenizer(call, str(folder), tokenizer_bytes(folder))
    if cache is not None:
        file = _kept_file(cache, fingerprint, of_file=of_file)
        write_checked(file, {"format": _SNAPSHOT_FORMAT, **fields})
    return TokenizerSnapshot(**fields)


def _read_fields(
    folder: Path, fingerprint: str, known: Path, *, of_file: bool
) -> dict[str, object]:
    """Return the fields of the snapshot in the form in which they are kept. Runs in a worker.

    `known` links to the files of `folder` that the fingerprint covers.
    """
    with limited(tokenizer_bytes(folder)):
        at("while it is loaded")
        tokenizer = _load_with_transformers(folder, known)
        engine = tokenizer.backend_tokenizer
        # Files saved after training may have both, and texts would be cut without a word.
        engine.no_truncation()  # `tokenizer(text)` ignores what tokenizer.json says of these
        engine.no_padding()
        by_file = _pipeline_of_file(folder, known, engine)
        if of_file and by_file is None:
            problem = " has no tokenizer.json, but tokenize.pipeline is file. Remove that setting"
            raise _error(folder, problem)
        fields = _fields_of(tokenizer, folder, by_file if of_file else None)
        difference = None
        if by_file is not None and not of_file:
            texts = short_texts(read_pipeline(fields["backend"]))
            difference = _difference(texts, bare(engine), bare(by_file), fields["class_name"])
        encoders.keep(fields["backend"], by_file if of_file and by_file is not None else engine)
    return {**fields, "fingerprint": fingerprint, "difference": difference}


def _pipeline_of_file(folder: Path, known: Path, engine: "Tokenizer") -> "Tokenizer | None":
    """Load tokenizer.json alone, with the tokens that tokenizer_config.json adds; None without it.

    Both pipelines need these tokens, because templates write them.
    """
    from tokenizers import Tokenizer

    file = known / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        by_file = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception or ValueError
        raise _error(folder, f" cannot be loaded: {file.name}: {error}") from error
    by_file.no_truncation()
    by_file.no_padding()
    own = {token.content for token in by_file.get_added_tokens_decoder().values()}
    for _, token in sorted(engine.get_added_tokens_decoder().items()):
        if token.content not in own:
            add = by_file.add_special_tokens if token.special else by_file.add_tokens
            add([token])
    return by_file


def _difference(
    texts: list[str], engine: "Tokenizer", by_file: "Tokenizer", class_name: str
) -> str | None:
    """Describe how ids of the class differ from those of tokenizer.json; None if they agree."""
    if engine.to_str() == by_file.to_str():  # the class uses the file unchanged
        return None
    ours, theirs = (
        [encoding.ids for encoding in each.encode_batch_fast(texts, add_special_tokens=False)]
        for each in (engine, by_file)
    )
    differing = [each for each in zip(texts, ours, theirs, strict=True) if each[1] != each[2]]
    if not differing:
        return None
    # The message shows the shortest printable text, because many test texts have rare characters.
    plain = [each for each in differing if each[0].isascii() and each[0].isprintable()]
    text, a, b = min(plain or differing, key=lambda each: len(each[0]))
    same = [x == y for x, y in zip(a, b, strict=False)]
    at = same.index(False) if False in same else len(same)
    return (
        f"loads as {class_name}, which gives different ids than its tokenizer.json for "
        f"{len(differing):,} of {len(texts):,} test texts: {text[:40]!r} has {a[at : at + 4]} "
        f"instead of {b[at : at + 4]} starting at token {at}"
    )


def tokenizer_bytes(folder: str | Path) -> int:
    """Return the size of a tokenizer's files, which decides how much memory a worker may use."""
    return sum(file.stat().st_size for file in _tokenizer_files(tokenizer_folder(folder)))


def _tokenizer_files(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):  # noqa: PTH112 - `Path.is_dir` raises if the name is too long
        near = near_files(folder)
        raise TokenizerError(
            f"no tokenizer folder at '{str(folder)[:200]}'{near}{'' if near[-1:] == '?' else '.'} "
            "Pass the folder that `tokenizer.save_pretrained(folder)` wrote, or a Hub name such "
            "as `Qwen/Qwen2.5-0.5B-Instruct`",
            folder=str(folder),
        )
    found = (file for file in sorted(folder.iterdir()) if file.is_file())
    files = [file for file in found if any(map(file.match, TOKENIZER_FILES))]
    if not any(file.match(pattern) for file in files for pattern in _VOCABULARIES):
        names = ", ".join(file.name for file in files) or "no tokenizer file"
        raise TokenizerError(
            f"tokenizer folder '{folder}' has no vocabulary file ({names}). It needs "
            "tokenizer.json, vocab.json + merges.txt, vocab.txt, tokenizer.model or tekken.json",
            folder=str(folder),
        )
    return files


def _load_with_transformers(folder: Path, known: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    # transformers would read the vocabulary from any file that `fast_tokenizer_files` names, in the
    # folder or outside of it.
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):  # loading it will report this
        config = None
    usual = ["tokenizer.json"]
    if isinstance(config, dict) and config.get("fast_tokenizer_files", usual) != usual:
        raise _error(
            folder,
            ": tokenizer_config.json names another vocabulary file (fast_tokenizer_files). Remove "
            "that key, and rename the file to tokenizer.json",
        )
    names = {file.name for file in known.iterdir()}
    try:
        if "tekken.json" in names and names.isdisjoint({"tokenizer.json", "tokenizer_config.json"}):
            # `AutoTokenizer` gives the same ids, but no BOS and no EOS.
            from transformers.integrations.mistral import convert_tekken_tokenizer

            file = known / "chat_template.jinja"
            template = file.read_text("utf-8") if file.is_file() else None
            # Without a template transformers asks mistral-common for one, if that is installed.
            tekken: Any = convert_tekken_tokenizer(str(known / "tekken.json"), template or "")
            tekken.chat_template = template
            return cast("PreTrainedTokenizerFast", tekken)
        # Otherwise a folder with tekken.json loads as a class without a pipeline as soon as
        # mistral-common is installed, even if it has tokenizer.json.
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(known), local_files_only=True, trust_remote_code=False, mistral_format=False
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers and tokenizers raise: the file is at fault
        problem = f" cannot be loaded: {_broken_file(folder, known, error)}"
        raise _error(folder, problem) from error
    if not tokenizer.is_fast:
        raise _error(
            folder,
            f" loads as {type(tokenizer).__name__}, which is not a fast tokenizer. Save it with a "
            "tokenizer.json (`AutoTokenizer...save_pretrained`)",
        )
    return tokenizer


def _broken_file(folder: Path, known: Path, error: Exception) -> str:
    """Describe the file that does not parse, or list all files with the library's error."""
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
    file = folder / "tokenizer_config.json"
    config = orjson.loads(file.read_bytes()) if file.is_file() else None
    if config is not None and not isinstance(config, dict):
        return f"{file.name} contains a {type(config).__name__}, not an object"
    if config and "auto_map" in config:
        return (
            f"{file.name} requires custom code (auto_map), which packhouse never runs. Save it as "
            "a fast tokenizer, with a tokenizer.json"
        )
    names = ", ".join(each.name for each in _tokenizer_files(folder))
    said = textwrap.shorten(str(error).replace(str(known), str(folder)), 400, placeholder=" ...")
    unknown = f"{type(error).__name__}: {said} (files: {names})"
    if any((folder / name).is_file() for name in ("tokenizer.json", "tekken.json")):
        return unknown
    if (folder / "vocab.json").is_file() and not (folder / "merges.txt").is_file():
        return "vocab.json has no merges.txt next to it. Add that file, or a tokenizer.json"
    if config is None and not (folder / "config.json").is_file():
        return (
            f"{file.name}, which names the tokenizer's class, is missing. Add it, or a "
            "tokenizer.json"
        )
    import transformers

    name = (config or {}).get("tokenizer_class")
    if name is None or (isinstance(name, str) and hasattr(transformers, name)):
        return unknown
    return (
        f"tokenizer_config.json names the class {name!r}, which transformers "
        f"{version('transformers')} does not have. Add a tokenizer.json"
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


def _fields_of(
    tokenizer: "PreTrainedTokenizerFast", folder: Path, by_file: "Tokenizer | None"
) -> dict[str, Any]:
    """Return the fields of a loaded tokenizer; `by_file`, if given, replaces its pipeline."""
    engine = tokenizer.backend_tokenizer if by_file is None else by_file
    backend = engine.to_str()
    pipeline = read_pipeline(backend)
    if pipeline.model_size < engine.get_vocab_size(with_added_tokens=False):
        raise _error(
            folder,
            ": `tokenizers` cannot write its vocabulary, because tokenizer.json gives a token an "
            f"id of about {2**32 - 1:,}; ids must be below {MAX_IDS:,}. Number the tokens from 0",
            limit=MAX_IDS,
        )
    if pipeline.dropout:
        raise _error(
            folder,
            f" has BPE dropout {pipeline.dropout}, so its ids are random. Set model.dropout to "
            "null in tokenizer.json",
        )
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise _error(
            folder,
            f": chat_template in tokenizer_config.json must be text, got {template!r}. Put the "
            "Jinja source there or in chat_template.jinja",
        )
    # By encoding a text, since it may come from a post-processor, `add_bos_token` or the class.
    first_ids = (tokenizer("a")["input_ids"] if by_file is None else by_file.encode("a").ids)[:1]
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
    return {
        "class_name": type(tokenizer).__name__,
        "backend": backend,
        "vocab_size": len(pipeline.is_added),
        "added_tokens": {token.text: token.id for token in pipeline.added},
        "special_tokens": {name: str(text) for name, text in special.items() if text is not None},
        # BERT has no BOS, and its CLS takes the same place.
        "adds_bos": first_ids[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id),
        "chat_template": template,
        "pipeline": "class" if by_file is None else "file",
        "stop_tokens": dict.fromkeys(_generation_stops(folder, pipeline), GENERATION_CONFIG),
    }


def _generation_stops(folder: Path, pipeline: Pipeline) -> list[str]:
    """Return the texts of added tokens that `generation_config.json` lists as stop tokens.

    Other entries of the vocabulary are left out, because their text may be encoded differently. So
    are ids that the tokenizer does not have (padding of the embedding), which many files list.
    """
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return []
    problem = _json_problem(file.name, file.read_bytes())
    config = None if problem else json.loads(file.read_bytes())
    if not problem and not isinstance(config, dict):
        problem = f"{file.name} contains a {type(config).__name__}, not an object"
    stops = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if any(type(index) is not int for index in ids):
        problem = f"{file.name}: eos_token_id must be an id or a list of ids, got {stops!r:.100}"
    if problem:
        raise _error(folder, f" cannot be loaded: {problem}")
    texts = {token.id: token.text for token in pipeline.added}
    return [texts[index] for index in ids if index in texts]
