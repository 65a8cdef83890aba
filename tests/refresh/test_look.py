"""A refresh compares ETags if it can and bytes if it must, and neither can fool it."""

import json
import shutil

import pytest

from packhouse.addons.ci import refresh
from packhouse.addons.ci.refresh import planned_version
from packhouse.read.source_files import SourceFile
from packhouse.recipe import load_recipe
from packhouse.run.chain import plan_jobs
from packhouse.system.disks import read_checked, write_checked
from tests.prepared import DEMO


@pytest.fixture
def plans(monkeypatch):
    """List of the plans made; each reads every byte of the sources."""
    calls = []

    def counted(recipe):
        calls.append(recipe)
        return plan_jobs(load_recipe(DEMO / "recipe.yaml"))

    monkeypatch.setattr(refresh, "plan_jobs", counted)
    return calls


@pytest.fixture
def bucket(monkeypatch):
    """ETags of two objects, as in a listing."""
    etags = {"s3://raw/chats.jsonl": "aa", "s3://raw/instructions.jsonl": "bb"}
    monkeypatch.setattr(
        refresh,
        "find_files",
        lambda source: [
            SourceFile(uri=source.path, name=source.path[9:], size=7, pin=etags[source.path])
        ],
    )
    return etags


def remote(tmp_path, *overrides):
    shutil.copytree(DEMO, tmp_path / "demo", dirs_exist_ok=True)
    places = ("sources.0.path=s3://raw/instructions.jsonl", "sources.1.path=s3://raw/chats.jsonl")
    return load_recipe(tmp_path / "demo" / "recipe.yaml", (*places, *overrides))


def test_a_second_look_reads_no_source_while_etags_stand(plans, bucket, tmp_path):
    first = planned_version(remote(tmp_path), tmp_path)
    assert planned_version(remote(tmp_path), tmp_path) == first
    assert planned_version(remote(tmp_path, "publish.store=/elsewhere"), tmp_path) == first
    assert len(plans) == 1


@pytest.mark.parametrize(
    "change", ["etag", "recipe", "tokenizer", "library", "engine", "answer", "no etag"]
)
def test_every_input_of_a_version_is_checked(change, plans, bucket, tmp_path, monkeypatch):
    planned_version(remote(tmp_path), tmp_path)
    overrides = []
    if change == "etag":
        bucket["s3://raw/chats.jsonl"] = "cc"
    elif change == "no etag":
        bucket["s3://raw/chats.jsonl"] = ""
    elif change == "recipe":
        overrides = ["pack.seq_len=256"]
    elif change == "tokenizer":
        config = tmp_path / "demo" / "tokenizer" / "tokenizer_config.json"
        document = json.loads(config.read_text()) | {"eos_token": "<|user|>"}
        monkeypatch.setattr(shutil, "copytree", lambda *a, **k: None)
        config.write_text(json.dumps(document))
    elif change == "library":
        monkeypatch.setattr(refresh, "library_versions", lambda names: {"pyarrow": "0"})
    elif change == "engine":
        monkeypatch.setattr(refresh, "ENGINE_VERSIONS", {"validate": "0"})
    elif change == "answer":
        (answer,) = (tmp_path / "looks").iterdir()
        answer.write_text(answer.read_text()[:-1] + " }")
    planned_version(remote(tmp_path, *overrides), tmp_path)
    assert len(plans) == 2


def test_a_template_that_prints_the_day_is_planned_again_each_day(
    plans, bucket, tmp_path, monkeypatch
):
    planned_version(remote(tmp_path), tmp_path)
    (answer,) = (tmp_path / "looks").iterdir()
    document = read_checked(answer)
    for dates, again in (([refresh.pinned_date().date().isoformat()], 0), (["2000-01-01"], 1)):
        write_checked(answer, document | {"dates": dates})
        before = len(plans)
        planned_version(remote(tmp_path), tmp_path)
        assert len(plans) - before == again


def test_local_files_are_hashed_each_time(plans, tmp_path):
    for _ in range(2):
        planned_version(load_recipe(DEMO / "recipe.yaml"), tmp_path)
    assert len(plans) == 2
