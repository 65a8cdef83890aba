"""Workers without a common disk: what one has done, the next finds in the mirror."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["moto", pytest.param("ceph", marks=pytest.mark.e2e)])
@pytest.mark.parametrize("way", ["variable", "option"])
def test_a_second_worker_computes_nothing(kind, way, request, use, tmp_path):
    mirror = use(request.getfixturevalue(f"{kind}_environment"))
    first, second = (work(tmp_path / name, way, mirror, tmp_path) for name in ("one", "two"))

    assert second["version"] == first["version"]
    assert (first["created"], second["created"]) == (True, False)
    assert {step["step"]: step["cached"] for step in first["steps"]} == dict.fromkeys(
        (step["step"] for step in first["steps"]), 0
    )
    assert all(step["cached"] == step["jobs"] for step in second["steps"]), second["steps"]
    for name in ("one", "two"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["packhouse"]
        receipts = list((tmp_path / name / "packhouse" / "steps").glob("*/*/receipt.json"))
        assert len(receipts) == sum(step["jobs"] for step in first["steps"]) + 2  # fingerprints


def work(folder, way, mirror, place):
    """Run the demo in a process of its own, in a folder that is its user's cache, too."""
    folder.mkdir()
    options = ["--set", f"publish.store={place / 'store'}", "--set", "dedup.exact=drop"]
    options += ["--cache", mirror] if way == "option" else []
    done = subprocess.run(
        [sys.executable, "-m", "packhouse", "prepare", DEMO, "--json", *options],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if "PACKHOUSE_CACHE" not in name},
            **({"PACKHOUSE_CACHE": mirror} if way == "variable" else {}),
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stderr
    return json.loads(done.stdout)
