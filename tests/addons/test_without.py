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
from click.testing import CliRunner
from packhouse.cli import cli
packhouse.prepare("rows.jsonl", tokenizer={tokenizer!r}, store="store", dataset="rows",
                  cache="cache", seq_len=128, progress=False)
print(len(packhouse.load_packed("store/rows", cache="cache").with_format(None)))
for name in {names}:
    try:
        getattr(packhouse, name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} is still there")
print(CliRunner().invoke(cli, ["--help"]).output)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    rows = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(LIBRARY, folder / "packhouse", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("name", ADDONS)
def test_all_else_works(name, place, tmp_path):
    (part,) = (place / "packhouse" / "addons").glob(f"{name}*")
    gone = tmp_path / part.name
    part.rename(gone)
    names = [of for of, module in PUBLIC.items() if module.split(".")[2] == name]
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(names=names, tokenizer=str(TOKENIZER))],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        gone.rename(part)
        shutil.rmtree(place / "store", ignore_errors=True)
        shutil.rmtree(place / "cache", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    for command, (module, _) in COMMANDS.items():
        is_gone = module.split(".")[1:3] == ["addons", name]
        assert (f"\n  {command} " in done.stdout) is not is_gone
