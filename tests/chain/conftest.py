"""A small dataset and a runner for tests of the whole chain."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from packhouse.recipe import Recipe, load_recipe
from packhouse.run.chain import Prepared, prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.prepared import DEMO


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
        self.path = root / "recipe.yaml"

    def write_rows(self, numbers: range, path: Path | None = None) -> None:
        lines = [json.dumps(question(number)) for number in numbers]
        (path or self.rows).write_text("\n".join(lines) + "\n")

    def write(self, rows: Iterable[Any], name: str = "rows.jsonl") -> None:
        (self.root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def recipe(self, *overrides: str) -> Recipe:
        if not self.path.exists():
            self.write_recipe(split={"eval_fraction": 0.2})
        return load_recipe(self.path, (f"publish.store={self.root / 'store'}", *overrides))

    def write_recipe(self, **sections: Any) -> None:
        base = {
            "dataset": "sums",
            "sources": [{"path": "rows.jsonl", "format": "alpaca"}],
            "tokenizer": str(DEMO / "tokenizer"),
            "format": {"template": "alpaca"},
            "pack": {"seq_len": 256},
        }
        self.path.write_text(yaml.safe_dump(base | sections))

    def edit(self, **sections: Any) -> None:
        self.path.write_text(yaml.safe_dump(yaml.safe_load(self.path.read_text()) | sections))

    def prepare(self, *overrides: str, recipe: Recipe | None = None) -> Prepared:
        recipe = recipe or self.recipe(*overrides)
        workspace = Workspace(cache=self.cache)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), self.cache)

    def folder(self, prepared: Prepared) -> Path:
        return self.root / "store" / prepared.dataset / "v" / prepared.version

    def uri(self, prepared: Prepared) -> str:
        return f"{self.root / 'store'}/{prepared.dataset}@{prepared.version}"

    def records(self, prepared: Prepared) -> list[dict[str, Any]]:
        return pq.read_table(next(self.folder(prepared).glob("records/*.parquet"))).to_pylist()

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
