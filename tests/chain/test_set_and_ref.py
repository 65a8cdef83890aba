"""A recipe that is changed for one run publishes a version, and leaves `latest` to its readers."""

import json

import pytest
from click.testing import CliRunner

from flows.command import command as flow_prepare
from packhouse.cli import cli
from packhouse.store import load_ref, open_store


@pytest.fixture(params=["packhouse prepare", "flows.prepare --local"])
def run(request, project):
    """Run a command with the project's recipe; returns its JSON."""
    project.recipe()
    options = [
        str(project.root / "recipe.yaml"),
        *("--set", f"publish.store={project.root / 'store'}", "--cache", str(project.cache)),
        "--json",
    ]

    def call(*more):
        told = [*options, *more]
        if request.param == "packhouse prepare":
            done = CliRunner().invoke(cli, ["prepare", *told])
        else:
            done = CliRunner().invoke(flow_prepare, [*told, "--local"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["version"]

    return call


def latest(project):
    return load_ref(open_store(str(project.root / "store")), "sums", "latest").version


def test_only_move_ref_moves_latest_to_a_recipe_that_was_changed(run, project):
    first = run("--set", "pack.seq_len=128")
    assert latest(project) == first  # it was nowhere yet

    changed = run("--set", "pack.seq_len=512")
    assert changed != first
    assert latest(project) == first

    assert run("--set", "pack.seq_len=512", "--move-ref") == changed
    assert latest(project) == changed

    plain = run()  # another store is where it goes, and no other data
    assert latest(project) == plain


def test_a_run_says_that_latest_stays_and_how_to_move_it(project):
    project.prepare()
    before = latest(project)
    told = ["--set", f"publish.store={project.root / 'store'}", "--cache", str(project.cache)]
    recipe = str(project.root / "recipe.yaml")

    done = CliRunner().invoke(cli, ["prepare", recipe, *told, "--seq-len", "512"])

    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert f"and ref 'latest' stays at {before}" in said
    assert "add --move-ref, or: packhouse ref set" in said
