"""How the Hub's client of Hugging Face is called: for tokenizers, and for data at `hf://`."""

import os
from importlib import import_module
from typing import Any


def hub_options() -> dict[str, Any]:
    """Return endpoint and token from the environment, as options of the Hub's client.

    The token comes only from `HF_TOKEN`; `False` stops the client from using a login on disk.
    """
    return {"endpoint": os.environ.get("HF_ENDPOINT"), "token": os.environ.get("HF_TOKEN") or False}


def silent_bar() -> type:
    """Return a hidden progress bar for the Hub's client, because the run shows its own."""
    tqdm: Any = import_module("tqdm.auto").tqdm  # which has no types

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tqdm.__init__(self, *args, **{**kwargs, "disable": True})

    return type("Silent", (tqdm,), {"__init__": init})
