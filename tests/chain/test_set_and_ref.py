"""A recipe changed for one run publishes a version but does not move `latest`."""

import json

import pytest
from click.testing import CliRunner

import packhouse
from packhouse.cli import cli
from packhouse.store import load_ref, open_store


@pytest.fixture
def run(project):
    """Run a command with the project's recipe and return its JSON."""
    project.recipe()
    options = [
        str(project.root / "recipe.yaml"),
        *("--set", f"publish.store={project.root / 'store'}", "--cache", str(project.cache)),
        "--json",
    ]

    def call(*more):
        done = CliRunner().invoke(cli, ["prepare", *options, *more])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["version"]

    return call


def latest(project):
    return load_ref(open_store(str(project.root / "store")), "sums", "latest").version


def test_only_move_ref_moves_latest_to_a_recipe_that_was_changed(run, project):
    first = run("--set", "pack.seq_len=128")
    assert latest(project) == first  # it did not exist yet

    changed = run("--set", "pack.seq_len=512")
    assert changed != first
    assert latest(project) == first

    assert run("--set", "pack.seq_len=512", "--move-ref") == changed
    assert latest(project) == changed

    plain = run()  # another store changes the destination, not the data
    assert latest(project) == plain


def test_a_ref_held_back_by_drift_has_its_own_exit_code(project):
    project.prepare()
    project.rows.write_text(project.rows.read_text().replace("plus", "plus " * 30))
    told = ["--set", f"publish.store={project.root / 'store'}", "--cache", str(project.cache)]
    limit = ["--set", "publish.max_length_drift=0.1"]
    done = CliRunner().invoke(cli, ["prepare", str(project.root / "recipe.yaml"), *told, *limit])
    assert done.exit_code == 7, done.output


def test_settings_over_a_recipe_in_python_leave_latest_as_set_does(project):
    project.recipe()
    path = project.root / "recipe.yaml"
    recipe = packhouse.load_recipe(path)

    def prepare(**settings):
        places = {"store": project.root / "store", "cache": project.cache, "progress": False}
        return packhouse.prepare(recipe, **places, **settings)

    first = prepare()
    changed = prepare(seq_len=512)
    assert changed.id != first.id
    assert latest(project) == first.id
    assert f"ref held back: it stays at {first.id}" in repr(changed)

    assert not prepare(seq_len=512, publish={"move_ref": True}).held_back
    assert latest(project) == changed.id

    project.write_rows(range(70))
    longer = prepare(publish={"max_length_drift": 1.0})  # does not change the data
    assert latest(project) == longer.id
