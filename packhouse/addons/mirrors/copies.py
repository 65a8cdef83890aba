"""Copies of a version on the Hub or in W&B, as `publish.also` names them."""

from collections.abc import Sequence
from functools import partial

from packhouse.addons.mirrors.hub import mirror_to_hub
from packhouse.addons.mirrors.wandb import log_to_wandb
from packhouse.recipe import Recipe
from packhouse.store import OpenVersion
from packhouse.tokenize import load_snapshot, run_tokenizer
from packhouse.tokenize.encoders import decode


def copy_version(opened: OpenVersion, uri: str, recipe: Recipe) -> str:
    """Bring a version to `hf://datasets/ORG/NAME` or `wandb://PROJECT`; return its name there.

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
    load = partial(load_snapshot, recipe.tokenizer, pipeline=recipe.tokenize.pipeline)

    def as_text(ids: Sequence[int]) -> str:
        return str(run_tokenizer(partial(decode, load, [ids]), recipe.tokenizer)[0])

    project, _, files = uri.removeprefix("wandb://").partition("?")
    return str(log_to_wandb(opened, project, decode=as_text, files=bool(files))["artifact"])
