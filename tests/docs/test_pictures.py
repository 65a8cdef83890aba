"""The pictures of docs/architecture.md match the code: a wrong picture is worse than none."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


def behind(step: str, reads: dict[str, set[str]]) -> set[str]:
    """Return all steps that a step depends on, directly or indirectly."""
    return set().union(*({before} | behind(before, reads) for before in reads[step]))


def test_the_arrows_between_steps_are_those_of_a_run(tmp_path):
    recipe = load_recipe(
        ROOT / "deployments" / "demo" / "recipe.yaml",
        (f"publish.store={tmp_path / 'store'}", "validate.max_quarantined=0.05"),
    )
    run = LocalRunner(recipe=recipe, workspace=Workspace(cache=tmp_path / "cache"))
    reads: dict[str, set[str]] = {}

    def watched(jobs):
        for job in jobs:
            own = {name for name, _ in job.inputs} - {job.step.name}
            reads.setdefault(job.step.name, set()).update(own)
        return run(jobs)

    prepare(recipe, watched, tmp_path / "cache")

    # An arrow from each of the last steps that a step reads; publish reads all of them.
    arrows = {
        f"{before}-{step}"
        for step, own in reads.items()
        for before in own
        if not any(before in behind(other, reads) for other in own)
    }
    drawn = re.findall(
        r'<path id="([a-z]+-[a-z]+)"', (PICTURES / "way-of-the-data.svg").read_text()
    )
    assert len(drawn) == len(set(drawn))
    # Files finds the tokens through the plan: `places.arrow` names the jobs of tokenize.
    assert set(drawn) == arrows | {"tokenize-files"}


def test_the_layers_stand_as_the_linter_holds_them():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (inside,) = (each for each in contracts if each.get("containers") == ["packhouse"])
    layer_of = {
        name.strip(): number
        for number, names in enumerate(inside["layers"])
        for name in names.split(":")
    }
    texts = re.findall(r'font-size="15"[^>]*>([^<]+)<', (PICTURES / "layers.svg").read_text())
    boxes = [[layer_of[name] for name in text.split(", ")] for text in texts]

    assert len(boxes) > 5
    for above, below in pairwise(boxes):
        assert max(above) < min(below), (above, below)
