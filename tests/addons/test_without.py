"""Without its add-ons, packhouse prepares, publishes and loads.

Import walls keep add-ons apart (`make imports`), so that without any one the others work as well.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import packhouse
from packhouse.registry import COMMANDS, PUBLIC

LIBRARY = Path(packhouse.__file__).parent
TOKENIZER = LIBRARY.parent / "deployments" / "demo" / "tokenizer"
ADDONS = "packhouse.addons."
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


def test_all_else_works(tmp_path):
    rows = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(
        LIBRARY, tmp_path / "packhouse", ignore=shutil.ignore_patterns("__pycache__", "addons")
    )
    names = [name for name, module in PUBLIC.items() if module.startswith(ADDONS)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(TOKENIZER), *names],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for command, (module, _) in COMMANDS.items():
        assert (f"\n  {command} " in done.stdout) is not module.startswith(ADDONS)
