"""The whole chain, publishing to stores of every kind."""

from pathlib import Path

import pytest

import schemas
from packhouse.errors import StoreError
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version, verify_version

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


def test_a_run_reads_and_publishes_there_and_the_version_verifies_and_loads(
    root, any_store, tmp_path, monkeypatch
):
    from packhouse import load_packed

    rows = (DEMO.parent / "instructions.jsonl").read_bytes()
    any_store.put_create("raw/instructions.jsonl", rows)
    sources = f"sources=[{{path: {root}/raw/instructions.jsonl, format: alpaca}}]"
    recipe = load_recipe(DEMO, (f"publish.store={root}", sources))
    workspace = Workspace(cache=tmp_path / "cache", check=schemas.check)

    def publish():
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    prepared = publish()

    assert prepared.created
    assert prepared.ledger[0].rows_in == 204
    assert verify_version(open_version(root, "demo")).is_intact
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "loader"))
    loaded = load_packed(f"{root}/demo", split="train")
    assert len(loaded) == prepared.published.statistics["train"].num_packs
    assert not publish().created


def test_a_store_that_is_not_there_stops_the_run_before_any_work(use, s3_server, tmp_path):
    use(s3_server)
    recipe = load_recipe(DEMO, ("publish.store=s3://no-such-bucket/store",))
    asked = []

    with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
        prepare(recipe, asked.append, tmp_path / "cache")

    assert asked == []
    assert not (tmp_path / "cache").exists()
