"""Tokenizers by name, from a fake Hub."""

import json
from pathlib import Path

import pytest

from packhouse.errors import TokenizerError
from packhouse.tokenize import fingerprint_tokenizer, load_snapshot
from packhouse.tokenize.tokenizer_loading import pin_tokenizer, tokenizer_folder
from tests.prepared import prepare_in
from tests.sources.hub_files import HubFiles

DEMO = Path(__file__).parents[2] / "deployments" / "demo" / "tokenizer"
NAME = "acme/demo"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    files = {file.name: file.read_bytes() for file in DEMO.iterdir()}
    with HubFiles() as server:
        server.repos[NAME] = {
            "main": files | {"model.safetensors": b"weights", "README.md": b"# demo"},
            "v1": files | {"config.json": b"{}"},
        }
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # child processes read it
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def test_a_name_is_the_same_tokenizer_as_its_folder(hub, tmp_path):
    pinned = pin_tokenizer(NAME)

    assert pinned == f"{NAME}@{hub.commit_of(NAME, 'main')}"
    assert fingerprint_tokenizer(pinned) == fingerprint_tokenizer(DEMO)
    assert load_snapshot(pinned, tmp_path / "cache") == load_snapshot(DEMO, tmp_path / "cache")
    assert not (tokenizer_folder(pinned) / "model.safetensors").exists()


def test_a_name_in_the_cache_needs_no_network(hub, monkeypatch):
    pinned = pin_tokenizer(NAME)
    num_requests = len(hub.requests)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    assert pin_tokenizer(NAME) == pin_tokenizer(pinned) == pinned
    assert tokenizer_folder(pinned).is_dir()
    assert len(hub.requests) == num_requests


def test_without_network_the_message_suggests_a_fix(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TokenizerError, match=r"does not respond .* `hf download acme/demo"):
        pin_tokenizer(NAME)


def test_names_that_the_hub_cannot_have_are_refused(hub):
    for name in ("a--b/c", "a/b.", f"a/{'b' * 200}"):
        with pytest.raises(TokenizerError, match="not a valid Hub name"):
            pin_tokenizer(name)
    for name in ("a..b/c", "a/b@x/../../y", "a/b@../c", "../a/b", "a/b@--help"):
        assert pin_tokenizer(name) == name  # a folder that does not exist
    assert hub.requests == []


def test_unknown_private_and_gated_names_suggest_a_fix(hub, monkeypatch):
    hub.repos["acme/closed"] = hub.repos["acme/gated"] = hub.repos[NAME]
    hub.private.add("acme/closed")
    hub.gated.add("acme/gated")
    for name, said in (
        ("acme/nothing", "no model of this name"),
        ("acme/closed", "set HF_TOKEN"),
        ("acme/gated", "its terms on the Hub"),
    ):
        with pytest.raises(TokenizerError, match=said):
            pin_tokenizer(name)
    monkeypatch.setenv("HF_TOKEN", "hf_standin")
    assert pin_tokenizer("acme/closed").startswith("acme/closed@")


def test_a_folder_goes_before_a_name(tmp_path, monkeypatch):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "demo").symlink_to(DEMO)
    monkeypatch.chdir(tmp_path)
    assert pin_tokenizer("acme/demo") == "acme/demo"


def test_a_version_of_a_named_tokenizer_is_that_of_its_folder(hub, tmp_path):
    rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(50)]
    named, found = (
        prepare_in(tmp_path, rows, tokenizer=tokenizer, format={"template": "alpaca"})
        for tokenizer in (NAME, DEMO)
    )

    assert (named.id, named.is_new, found.is_new) == (found.id, True, False)
    pinned = f"{NAME}@{hub.commit_of(NAME, 'main')}"
    (manifest,) = (tmp_path / "store").glob(f"*/v/{named.id}/manifest.json")
    assert json.loads(manifest.read_text())["provenance"]["tokenizer"] == pinned


def test_a_tokenizer_that_changes_during_a_run_is_refused(tmp_path, monkeypatch):
    from packhouse.run.steps import tokenize

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in DEMO.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    read = tokenize.run_tokenizer

    def change_and_read(*args):
        (folder / "config.json").write_text('{"changed": true}')
        return read(*args)

    monkeypatch.setattr(tokenize, "run_tokenizer", change_and_read)
    rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(50)]
    with pytest.raises(TokenizerError, match="changed during the run"):
        prepare_in(tmp_path, rows, tokenizer=folder, format={"template": "alpaca"})
    assert not (tmp_path / "store" / "dataset" / "refs").exists()
