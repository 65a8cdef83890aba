"""Tokenizers by name: `org/name` of the Hugging Face Hub, pinned to a commit.

A name is resolved once, before any work: from the Hub client's cache if the name is there (no
network, 1 ms), else from the Hub. What a run works with is `org/name@<commit>`, which each machine
finds in its own cache or downloads, so that a push in between changes nothing. Only the files that
make a tokenizer are downloaded, no weights.
"""

import re
from pathlib import Path

from packhouse.errors import TokenizerError
from packhouse.recipe.section import HUB_NAME
from packhouse.system.plugins import hub_options, silent_bar
from packhouse.system.wording import first_line

# `config.json` counts: without it some tokenizers (BERT's) load as another class.
# `generation_config.json` says which tokens stop generation.
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


def is_hub_name(tokenizer: str) -> bool:
    """Return True if a tokenizer's name has the form `org/name` or `org/name@revision`.

    Example:
        >>> is_hub_name("Qwen/Qwen2.5-0.5B-Instruct"), is_hub_name("gpt2/gpt2@v1")
        (True, True)
        >>> is_hub_name("./qwen"), is_hub_name("/models/qwen"), is_hub_name("a/b/c")
        (False, False, False)
    """
    return HUB_NAME.fullmatch(tokenizer) is not None


def pin_tokenizer(tokenizer: str) -> str:
    """Return a folder as it is, and a name with the commit that it stands for now.

    A folder goes before a name; a name that the Hub client's cache knows is taken from there.

    Raises:
        TokenizerError: no such folder, and no such name, or the Hub cannot be reached.

    Example:
        >>> pin_tokenizer("deployments/demo/tokenizer")
        'deployments/demo/tokenizer'
    """
    match = HUB_NAME.fullmatch(tokenizer)
    if match is None or Path(tokenizer).is_dir():
        return tokenizer
    commit = _cached_or_downloaded(match["repo"], match["revision"] or "main", tokenizer).name
    return f"{match['repo']}@{commit}"


def tokenizer_folder(tokenizer: str | Path) -> Path:
    """Return the folder of a tokenizer's files: the one given, or that of a pinned name.

    Raises:
        TokenizerError: the name's files are not on this machine and cannot be downloaded.
    """
    match = HUB_NAME.fullmatch(str(tokenizer))
    if match is None or Path(tokenizer).is_dir() or not _COMMIT.fullmatch(match["revision"] or ""):
        return Path(tokenizer)
    from huggingface_hub import constants  # 15 ms; all of the client takes 0.3 s

    folder = f"models--{match['repo'].replace('/', '--')}/snapshots/{match['revision']}"
    cached = Path(constants.HF_HUB_CACHE) / folder
    if (cached / "tokenizer_config.json").exists():
        return cached
    return _cached_or_downloaded(match["repo"], match["revision"], str(tokenizer))


def _cached_or_downloaded(repo: str, revision: str, name: str) -> Path:
    """Return the folder of a commit's tokenizer files in the Hub client's cache."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    options = hub_options()

    def snapshot(is_offline: bool) -> Path:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(TOKENIZER_FILES),
            local_files_only=is_offline,
            tqdm_class=silent_bar(),
            **options,
        )
        return Path(folder)

    try:
        cached = snapshot(is_offline=True)
        if (cached / "tokenizer_config.json").exists():  # else another file of the repository
            return cached
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    try:
        # Without network, this fails at once; a list of a commit's files is tried for 23 s.
        HfApi(**options).model_info(repo, revision=revision, timeout=10)
        return snapshot(is_offline=False)
    except errors.HFValidationError:
        reason, remedy = "the Hub has no names like this", "check the name"
    except errors.GatedRepoError:
        reason, remedy = "the Hub asks to accept its terms first", "accept them, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such name" + (
            ", or HF_TOKEN may not see it" if options["token"] else ""
        )
        remedy = "check the name; set HF_TOKEN for a private one"
    except errors.RevisionNotFoundError:
        reason = f"{repo} has no revision '{revision}'"
        remedy = "name a branch, tag or commit that it has"
    except Exception as error:  # whatever the client and its transport raise
        why = f"the Hub does not answer ({first_line(error, 200)})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        reason = f"it is not in the Hub's cache on this machine, and {why}"
        wanted = repo if revision == "main" else f"{repo} --revision {revision}"
        but = "--exclude '*.safetensors' --exclude '*.bin'"
        remedy = f"with network, run `hf download {wanted} {but}` first"
    raise TokenizerError(
        f"tokenizer '{name}' is no folder here, and taken for a name: {reason}. Give a folder, or "
        f"{remedy}",
        tokenizer=name,
    )
