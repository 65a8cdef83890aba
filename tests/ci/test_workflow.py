"""The GitHub Actions example is valid, pinned, and has minimal permissions."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from packhouse.cli import cli

FILE = Path(__file__).resolve().parents[2] / "deployments" / "ci" / "github-actions.yml"
WORKFLOW = yaml.safe_load(FILE.read_text())
JOBS = WORKFLOW["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]

STEP = {"name", "id", "if", "uses", "with", "run", "env"}


@pytest.mark.parametrize(("job", "step"), STEPS)
def test_a_step_runs_or_uses_and_used_actions_are_pinned(job, step):
    assert set(step) <= STEP
    assert ("uses" in step) != ("run" in step)
    if "uses" in step:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"])


def test_every_pin_names_its_version_and_one_action_has_one_pin():
    pins = re.findall(r"uses: (\S+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$", FILE.read_text(), re.M)
    assert len(pins) == sum("uses" in step for _, step in STEPS)
    assert len(set(pins)) == len({action for action, _, _ in pins})


@pytest.mark.parametrize(("job", "step"), STEPS)
def test_no_expression_is_pasted_into_a_shell(job, step):
    assert "${{" not in step.get("run", "")


def test_permissions_are_minimal():
    assert WORKFLOW["permissions"] == {}
    assert JOBS["plan"]["permissions"] == {
        "contents": "read",
        "id-token": "write",
        "pull-requests": "write",
    }
    assert JOBS["publish"]["permissions"] == {"contents": "read", "id-token": "write"}
    assert "head.repo.full_name == github.repository" in JOBS["plan"]["if"]


def test_its_commands_are_commands_of_packhouse():
    help_text = CliRunner().invoke(cli, ["ci", "--help"]).output
    runs = [step["run"] for _, step in STEPS if "packhouse ci" in step.get("run", "")]
    assert len(runs) == 2
    for run in runs:
        for option in re.findall(r"--[a-z-]+", run):
            assert option in help_text
