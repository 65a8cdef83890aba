"""A planted pickle is never loaded: not from the cache, Prefect's results or the store."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.prepared import python

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"

# Actions forbidden to our processes; installed before any of our modules is imported.
_WATCH = """
import os, sys
def watch(event, arguments):
    if event == "pickle.find_class" and arguments[0] in ("os", "posix", "builtins", "subprocess"):
        with open(os.environ["PICKLE_CANARY"], "a") as canary:
            canary.write(f"{arguments}\\n")
sys.addaudithook(watch)
"""


class Planted:
    """Writes the canary file when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.system, (f"echo loaded >> '{self.canary}'",)


@pytest.fixture
def planted(tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Planted(canary))
    pickle.loads(payload)  # noqa: S301 - it bites
    assert canary.exists()
    canary.unlink()
    return payload, canary


def run(canary, folder, *command, **environment):
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_WATCH)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PACKHOUSE_"))}
    own = {"PYTHONPATH": f"{site}:{ROOT}", "PICKLE_CANARY": str(canary)}
    own |= {"PACKHOUSE_CACHE": str(folder / "loaded")}  # another one may contain the good bytes
    return python(*command, env=clean | own | environment, cwd=ROOT, timeout=300)


def prepare(canary, folder):
    arguments = ["--cache", str(folder / "cache"), "--set", f"publish.store={folder / 'store'}"]
    return run(canary, folder, "-m", "packhouse", "prepare", str(DEMO), "--json", *arguments)


def replace_everything(folder, payload):
    """Replace every file by the pickle, and add it under the usual names next to each."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o644)
        path.write_bytes(payload)
    for place in {path.parent for path in files}:
        for name in ("receipt.pkl", "receipt.pickle", "data.pkl", "__init__.pkl"):
            (place / name).write_bytes(payload)
    return len(files)


@pytest.mark.timeout(600)
def test_pickles_in_the_cache_and_in_the_store_are_never_loaded(tmp_path, planted):
    payload, canary = planted
    first = prepare(canary, tmp_path)
    assert first.returncode == 0, first.stderr
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "store", kept)

    assert replace_everything(tmp_path / "cache", payload) > 20
    again = prepare(canary, tmp_path)  # every step runs again
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["version"] == json.loads(first.stdout)["version"]

    assert replace_everything(tmp_path / "store", payload) > 5
    dataset = str(tmp_path / "store" / "demo")
    for command in (["verify", dataset], ["ls", str(tmp_path / "store")], ["show", dataset]):
        done = run(canary, tmp_path, "-m", "packhouse", *command)
        assert "Traceback" not in done.stderr
    load = f"from packhouse import load_packed; load_packed({dataset!r}, split='train')"
    assert run(canary, tmp_path, "-c", load).returncode != 0

    shutil.rmtree(tmp_path / "store")
    shutil.copytree(kept, tmp_path / "store")
    for data in (tmp_path / "store").rglob("data/*"):  # the manifest is unchanged
        data.chmod(0o644)
        data.write_bytes(payload)
    assert run(canary, tmp_path, "-m", "packhouse", "verify", dataset).returncode != 0
    assert run(canary, tmp_path, "-c", load).returncode != 0
    assert not canary.exists(), canary.read_text()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_pickles_in_the_results_of_prefect_are_never_loaded(deployed, planted):
    """Workers keep no results, so nobody reads pickles that an attacker puts in their place."""
    from tests.e2e.deployments import demo_recipe

    payload, canary = planted
    recipe = demo_recipe("security-pickles")
    homes = [deployed.folder / name for name in ("worker", "client", "server")]
    first = deployed.api.wait(deployed.api.start("prepare/form-prepare", recipe=recipe))
    assert first["state_type"] == "COMPLETED", first["state"]["message"]
    for storage in (home / "storage" for home in homes):
        storage.mkdir(parents=True, exist_ok=True)
        for file in [path for path in storage.rglob("*") if path.is_file()]:
            kept = json.loads(file.read_bytes())  # the error of an earlier run that failed
            assert kept.get("metadata", {}).get("serializer", {"type": "json"})["type"] == "json"
            file.write_bytes(payload)
        for name in (first["id"], first["state_id"], "result"):
            (storage / name).write_bytes(payload)
    again = deployed.api.wait(deployed.api.start("prepare/form-prepare", recipe=recipe))
    assert again["state_type"] == "COMPLETED", again["state"]["message"]
    assert not canary.exists()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_state_in_the_database_refers_to_a_pickle(deployed):
    kinds = deployed.database.ask(
        "select distinct data -> 'serializer' ->> 'type' from flow_run_state where data is not null"
        " union select distinct data -> 'serializer' ->> 'type' from task_run_state"
        " where data is not null"
    )
    assert {kind for (kind,) in kinds} <= {"", "json"}
