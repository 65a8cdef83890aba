"""Without its add-ons, packhouse prepares, publishes and loads.

Import walls keep add-ons apart (`make imports`), so that without any one the others work as well;
without `ask`, on which the report is built, both are gone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import packhouse
from packhouse.registry import BUILDS_ON, COMMANDS, PUBLIC

LIBRARY = Path(packhouse.__file__).parent
TOKENIZER = LIBRARY.parent / "deployments" / "demo" / "tokenizer"
# Arguments: the tokenizer, and the names that are gone.
SCRIPT = """
import sys
import packhouse
from packhouse.cli import cli

packhouse.prepare("rows.jsonl", tokenizer=sys.argv[1], store="store", dataset="rows",
                  cache="cache", seq_len=128, progress=False)
print(len(packhouse.load_packed("store/rows", cache="cache").with_format(None)))
for name in sys.argv[2:]:
    try:
        getattr(packhouse, name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is still there")
cli(["--help"])
"""


@pytest.mark.parametrize("gone", ["addons", "ask"])
def test_all_else_works(gone, tmp_path):
    def is_gone(module: str) -> bool:
        needed = (module, BUILDS_ON.get(module.rpartition(".")[0], ""))
        return any(gone in each.split(".")[1:3] for each in needed)

    rows = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(
        LIBRARY, tmp_path / "packhouse", ignore=shutil.ignore_patterns("__pycache__", gone)
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(TOKENIZER), *(n for n in PUBLIC if is_gone(PUBLIC[n]))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for command, (module, _) in COMMANDS.items():
        assert (f"\n  {command} " in done.stdout) is not is_gone(module)
