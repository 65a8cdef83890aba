"""How packhouse asks the Hugging Face Hub: where, with which token, and without bars of its own."""

import os
from importlib import import_module
from typing import Any


def hub_options() -> dict[str, Any]:
    """Return the endpoint and the token of the environment, as the Hub's client takes them.

    The token comes from `HF_TOKEN` only; `False` keeps the client from a login that lies on disk.
    """
    return {
        "endpoint": os.environ.get("HF_ENDPOINT"),
        "token": os.environ.get("HF_TOKEN") or False,
    }


def silent_bar() -> type:
    """Return the Hub client's progress bar, never shown: the run has one of its own."""
    tqdm: Any = import_module("tqdm.auto").tqdm  # which has no types

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tqdm.__init__(self, *args, **{**kwargs, "disable": True})

    return type("Silent", (tqdm,), {"__init__": init})
