"""Hostile tokenizers: memory, time limits and panics end a worker, never the run's process."""

import shutil
from functools import partial
from pathlib import Path

import orjson
import pytest

from packhouse.errors import TokenizerError
from packhouse.system import worker
from packhouse.tokenize import load_snapshot, run_tokenizer

DEMO = Path(__file__).parents[2] / "deployments/demo"

TEXT = "a" * 20_000 + " c"


def encode(backend: str, text: str) -> int:
    from tokenizers import Tokenizer

    return len(Tokenizer.from_str(backend).encode(text).ids)


def replace(content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def hostile_tokenizer(folder: Path, **parts: object) -> Path:
    shutil.copytree(DEMO / "tokenizer", folder)
    file = folder / "tokenizer.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | parts))
    return folder


def test_a_replace_bomb_ends_when_a_text_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setenv(worker.MEMORY_MB, "512")
    folder = hostile_tokenizer(tmp_path / "t", normalizer=replace("a" * 1_000_000))
    backend = load_snapshot(folder).backend

    with pytest.raises(TokenizerError, match=r"'toy'.*needs more memory than its limit of 512 MB"):
        run_tokenizer(partial(encode, backend, TEXT), "toy")


def test_a_replace_bomb_ends_when_the_tokenizer_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv(worker.MEMORY_MB, "512")
    bomb = {"type": "Sequence", "normalizers": [replace("a" * 3000)] * 3}
    folder = hostile_tokenizer(tmp_path / "t", normalizer=bomb)

    with pytest.raises(TokenizerError, match="while it is loaded: needs more memory"):
        load_snapshot(folder)


def test_a_regex_that_panics_is_an_error_of_the_tokenizer(tmp_path):
    split = {
        "type": "Split",
        "pattern": {"Regex": r"(?:(?:a+)+)+b|(a|aa)+$c"},
        "behavior": "Isolated",
        "invert": False,
    }
    folder = hostile_tokenizer(tmp_path / "t", pre_tokenizer=split)
    backend = load_snapshot(folder).backend

    with pytest.raises(TokenizerError, match=r"tokenizer 'toy'.*PanicException.*retry-limit"):
        run_tokenizer(partial(encode, backend, TEXT), "toy")


def test_an_id_that_no_table_holds_is_refused_with_the_limit(tmp_path):
    largest = 2**24
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": largest}, "unk_token": "a"}
    folder = hostile_tokenizer(tmp_path / "t", model=model, added_tokens=[])

    with pytest.raises(TokenizerError, match="ids must be below 16,777,216") as caught:
        load_snapshot(folder)
    assert caught.value.limit == 2**24
    assert f"{largest:,}" in str(caught.value)
