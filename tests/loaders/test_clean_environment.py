"""`packhouse[torch]` alone is enough to load and train: an environment of its dependencies only.

The environment is a folder of links to just those distributions that the metadata of
`packhouse[torch]` asks for, directly or not; Python runs with it and the standard library.
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def required(requirements: list[str]) -> dict[str, Distribution]:
    """Distributions that requirements ask for, directly or not, by name."""
    found: dict[str, Distribution] = {}
    todo = [(Requirement(text), frozenset({""})) for text in requirements]
    done = set()
    while todo:
        requirement, extras = todo.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        name = canonicalize_name(requirement.name)
        wanted = frozenset({"", *requirement.extras})
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            found[name] = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # of another platform or build: CUDA parts of torch, say
        todo += [(Requirement(text), wanted) for text in found[name].requires or ()]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"] + project["optional-dependencies"]["torch"]
    folder = tmp_path_factory.mktemp("site")
    for found in required(needs).values():
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = folder / top
            if not link.exists() and not top.endswith(".pth"):
                link.symlink_to(Path(found.locate_file(top)))
    (folder / "packhouse").symlink_to(ROOT / "packhouse")
    return folder


SCRIPT = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
for name in ("prefect", "fastapi", "pandera", "pytest", "moto"):
    assert importlib.util.find_spec(name) is None, name
from packhouse import PackedCollator, PackedDataset, StreamingPackedDataset, load_packed
data = load_packed(sys.argv[2], cache=sys.argv[3])
batch = PackedCollator()([PackedDataset(data)[0]])
rows = list(StreamingPackedDataset(sys.argv[2], cache=sys.argv[3]))
print(len(data), len(rows), tuple(batch["input_ids"].shape)[0])
"""


def test_loading_needs_only_what_packhouse_with_torch_declares(environment, make_version, tmp_path):
    assert not list(environment.glob("prefect*"))
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, environment, make_version(), tmp_path]
    keep = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=keep)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "16 16 1\n"
