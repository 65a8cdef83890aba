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


@pytest.fixture
def publish(root, tmp_path):
    def publish(*overrides: str):
        recipe = load_recipe(DEMO, (f"publish.store={root}", *overrides))
        workspace = Workspace(cache=tmp_path / "cache", check=schemas.check)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    return publish


def test_a_run_publishes_a_version_that_verifies_and_loads(publish, root, tmp_path, monkeypatch):
    from packhouse import load_packed

    prepared = publish()

    assert prepared.created
    assert verify_version(open_version(root, "demo")).is_intact
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "loader"))
    rows = load_packed(f"{root}/demo", split="train")
    assert len(rows) == prepared.published.statistics["train"].num_packs
    assert not publish().created


def test_sources_are_read_from_the_same_kind_of_store(publish, root, any_store, tmp_path):
    rows = (DEMO.parent / "instructions.jsonl").read_bytes()
    any_store.put_create("raw/instructions.jsonl", rows)

    prepared = publish(
        "sources=[{path: %s/raw/instructions.jsonl, format: alpaca}]" % root  # noqa: UP031
    )

    assert prepared.ledger[0].rows_in == 204


def test_a_store_that_is_not_there_stops_the_run_before_any_work(use, moto_environment, tmp_path):
    use(moto_environment)
    recipe = load_recipe(DEMO, ("publish.store=s3://no-such-bucket/store",))
    asked = []

    with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
        prepare(recipe, asked.append, tmp_path / "cache")

    assert asked == []
    assert not (tmp_path / "cache").exists()
