"""The recipes in deployments/recipes on the real files that they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import schemas
from packhouse.recipe import load_recipe
from packhouse.run.chain import Prepared, prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version, verify_version

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "deployments" / "recipes"
ROWS = {
    "alpaca": (52_002, {"empty_answer": 28}),
    "gsm8k": (7_473, {}),
    "fastchat": (500, {}),
    "oasst": (100, {}),
    "messages": (128, {}),
    "sst2": (67_349, {}),
    "sst2-bert": (67_349, {}),
}


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    """Run a recipe of deployments/recipes; all share one cache and one store."""
    root = tmp_path_factory.mktemp("real")
    patch = pytest.MonkeyPatch()
    patch.setenv("PACKHOUSE_SHARED", str(shared))

    def run(name: str, *overrides: str) -> Prepared:
        recipe = load_recipe(
            RECIPES / f"{name}.yaml", (f"publish.store={root / 'store'}", *overrides)
        )
        workspace = Workspace(cache=root / "cache", check=schemas.check)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    yield run
    patch.undo()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_of_a_real_file_is_accounted_for(run, name):
    prepared = run(name)

    rows, quarantined = ROWS[name]
    assert prepared.ledger[0].rows_in == rows
    assert dict(prepared.ledger[0].quarantined) == quarantined
    opened = open_version(prepared.store, prepared.dataset)
    assert verify_version(opened).is_intact
    published = sum(side.num_sequences for side in prepared.published.statistics.values())
    assert published == prepared.ledger[-1].rows_out


MEMORY = """
import pathlib, re, sys
from packhouse.cli import cli
cli(sys.argv[1:], standalone_mode=False)
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
"""


def peak_mb(shared: Path, folder: Path, source: Path) -> float:
    arguments = [
        *("prepare", str(RECIPES / "alpaca.yaml"), "--json", "--cache", str(folder / "cache")),
        *("--set", f"publish.store={folder / 'store'}", "--set", f"sources.0.path={source}"),
    ]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        cwd=ROOT,
        env={**os.environ, "PACKHOUSE_SHARED": str(shared)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stderr.splitlines()[-1]) / 1024


def test_memory_stays_under_a_gigabyte_for_four_times_alpaca(shared, tmp_path):
    rows = json.loads((shared / "data" / "alpaca_data.json").read_bytes())
    large = tmp_path / "four_times.json"
    with large.open("w") as file:
        file.write("[")
        for copy in range(4):  # no two rows are equal
            for row in rows:
                row = {**row, "output": f"{row['output']} [{copy}]" if row["output"] else ""}
                file.write(("" if file.tell() == 1 else ",\n") + json.dumps(row))
        file.write("]")
    # 428 MB, and 331 for one Alpaca file. As objects, its rows would take 240 MB more, four times.
    assert peak_mb(shared, tmp_path / "four", large) < 1024
