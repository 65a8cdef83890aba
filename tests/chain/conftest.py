"""A small dataset and a runner for tests of the whole chain."""

import json
from pathlib import Path

import pytest

import schemas
from packhouse.recipe import Recipe, load_recipe
from packhouse.run.cache import Workspace
from packhouse.run.chain import Prepared, prepare
from packhouse.run.step import LocalRunner

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo"


def question(number: int) -> dict[str, str]:
    return {
        "instruction": f"What is {number} plus {number + 1}?",
        "input": "",
        "output": f"{number} plus {number + 1} is {2 * number + 1}.",
    }


class Project:
    """A recipe over files in a temporary folder, with a separate cache and store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.rows = root / "rows.jsonl"

    def write_rows(self, numbers: range, path: Path | None = None) -> None:
        lines = [json.dumps(question(number)) for number in numbers]
        (path or self.rows).write_text("\n".join(lines) + "\n")

    def recipe(self, *overrides: str) -> Recipe:
        path = self.root / "recipe.yaml"
        if not path.exists():
            path.write_text(
                "dataset: sums\n"
                "sources: [{path: rows.jsonl, format: alpaca}]\n"
                f"tokenizer: {DEMO / 'tokenizer'}\n"
                "format: {template: alpaca}\n"
                "pack: {seq_len: 256}\n"
                "split: {eval_fraction: 0.2}\n"
            )
        return load_recipe(path, (f"publish.store={self.root / 'store'}", *overrides))

    def prepare(self, *overrides: str, recipe: Recipe | None = None) -> Prepared:
        recipe = recipe or self.recipe(*overrides)
        workspace = Workspace(cache=self.cache, check=schemas.check)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), self.cache)

    def folder(self, prepared: Prepared) -> Path:
        return self.root / "store" / prepared.dataset / "v" / prepared.version

    @staticmethod
    def cached_steps(prepared: Prepared) -> list[str]:
        """Steps whose jobs were all found in the cache."""
        steps = dict.fromkeys(receipt.step for receipt in prepared.receipts)
        return [s for s in steps if all(r.cached for r in prepared.receipts if r.step == s)]


@pytest.fixture
def project(tmp_path) -> Project:
    project = Project(tmp_path)
    project.write_rows(range(60))
    return project
