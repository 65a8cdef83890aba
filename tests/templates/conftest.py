"""Real tokenizers, and real files as canonical messages."""

from functools import cache
from typing import Any

import pytest

from packhouse.read import scan_source
from packhouse.read.shard_reader import read_shard
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.tokenize import load_snapshot

FILES = {
    "fastchat": ("fastchat_dummy_conversation.json", "sharegpt"),
    "glaive": ("glaive_toolcall_en_demo.json", "sharegpt"),
    "reasoning": ("reason_tool_use_demo_50.jsonl", "chat"),
}
"""Real files and their row formats."""


@pytest.fixture(scope="session")
def load_tokenizer(shared):
    """Load a real tokenizer by folder name, each once."""
    loaded = {}

    def load(name: str) -> Any:
        if name not in loaded:
            from transformers import AutoTokenizer

            loaded[name] = AutoTokenizer.from_pretrained(
                shared / "tokenizers" / name, local_files_only=True
            )
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def load_real(shared):
    """Snapshot of a real tokenizer by folder name, each loaded once."""
    return cache(lambda name: load_snapshot(shared / "tokenizers" / name))


@pytest.fixture(scope="session")
def real_table(shared):
    """Return the first rows of a real file as a VALIDATED table."""

    @cache
    def read(name: str) -> Any:
        file, form = FILES[name]
        source = SourceConfig(path=str(shared / "data" / file), format=form)
        (shard,) = scan_source(source)
        return read_shard(shard, source, ValidateConfig(), "prompt").validated

    return lambda name, limit=None: read(name).slice(0, limit)
