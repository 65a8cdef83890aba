"""Without any one add-on, packhouse prepares, publishes and loads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import packhouse
from packhouse.registry import COMMANDS, PUBLIC

LIBRARY = Path(packhouse.__file__).parent
TOKENIZER = LIBRARY.parent / "deployments" / "demo" / "tokenizer"
ADDONS = sorted(
    path.stem
    for path in (LIBRARY / "addons").iterdir()
    if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
)
SCRIPT = """
import packhouse
print(len(packhouse.load_packed("store/rows").with_format(None)))
for name in {names}:
    try:
        getattr(packhouse, name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} is still there")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    rows = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(LIBRARY, folder / "packhouse", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(folder, *command):
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ADDONS)
def test_all_else_works(name, place, tmp_path):
    (part,) = (place / "packhouse" / "addons").glob(f"{name}*")
    gone = tmp_path / part.name
    part.rename(gone)
    try:
        command = ["-m", "packhouse", "prepare", "rows.jsonl", "--tokenizer", str(TOKENIZER)]
        command += ["--store", "store", "--cache", "cache", "--seq-len", "128"]
        done = run(place, *command)
        assert done.returncode == 0, done.stderr
        names = [of for of, module in PUBLIC.items() if module.split(".")[2] == name]
        loaded = run(place, "-c", SCRIPT.format(names=names))
        assert loaded.returncode == 0, loaded.stderr
        help_text = run(place, "-m", "packhouse", "--help").stdout
        for command_name, (module, _) in COMMANDS.items():
            is_gone = module.split(".")[1:3] == ["addons", name]
            assert (f"\n  {command_name} " in help_text) is not is_gone
    finally:
        gone.rename(part)
