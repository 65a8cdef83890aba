"""Copies of a published version elsewhere: a Hub dataset, a W&B artifact."""

from collections.abc import Callable, Sequence
from functools import partial

from packhouse.foreign import decode, run_tokenizer
from packhouse.store import OpenVersion
from packhouse.store.hub import mirror_to_hub
from packhouse.store.wandb_artifact import log_to_wandb
from packhouse.tokenization import load_snapshot

__all__ = ["mirror"]


def mirror(opened: OpenVersion, uri: str, tokenizer: str) -> str:
    """Bring a version to `hf://datasets/ORG/NAME` or `wandb://PROJECT`; return what it is there.

    The Hub gets one commit, and none if it holds the version already; W&B gets a run with an
    artifact each time, whose equal contents it stores once.

    Raises:
        ConfigError: W&B is not installed.
        StoreError: the target refused.
        TransientError: the target cannot be reached.
    """
    if uri.startswith("hf://"):
        return mirror_to_hub(opened, uri)
    assert uri.startswith("wandb://"), uri  # the recipe admits no other
    logged = log_to_wandb(opened, uri.removeprefix("wandb://"), decode=_decoder(tokenizer))
    return str(logged["artifact"])


def _decoder(tokenizer: str) -> Callable[[Sequence[int]], str]:
    load = partial(load_snapshot, tokenizer)
    return lambda ids: str(run_tokenizer(partial(decode, load, [ids]), tokenizer)[0])
