"""packhouse prepares, publishes and loads without any one of its add-ons."""

import json
import os
import shutil
from pathlib import Path

import pytest

import packhouse
from packhouse.registry import BUILDS_ON, COMMANDS, PUBLIC
from tests.prepared import TOKENIZER, python

LIBRARY = Path(packhouse.__file__).parent
ADDONS = sorted(
    path.stem
    for path in (LIBRARY / "addons").iterdir()
    if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
)
# Add-on -> changes that make a recipe need it.
NEEDED = {
    "gcs_azure": {"publish": {"store": "gs://bucket/store"}},
    "message_trees": {"sources": [{"path": "rows.jsonl", "format": "oasst_flat"}]},
    "near_dedup": {"dedup": {"near": "drop"}},
    "where_select": {"sources": [{"path": "rows.jsonl", "where": "output <> '2'"}]},
    "tokenized_rows": {"sources": [{"path": "rows.jsonl", "format": "tokenized"}]},
}
# One process imports packhouse except add-ons, and sees that none of them came along. It forks once
# per add-on, while the files of that add-on are away. Arguments: the tokenizer, `NEEDED` as JSON,
# then name=FUNCTION,FUNCTION.
SCRIPT = """
import importlib, json, os, pkgutil, shutil, sys, traceback
from functools import partial
from pathlib import Path

import click.testing, datasets

def import_all(package):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name not in ("packhouse.__main__", "packhouse.addons"):
            imported = importlib.import_module(module.name)
            if module.ispkg:
                import_all(imported)

def use(tokenizer, addon, names, needed):
    importlib.invalidate_caches()
    from packhouse.cli import cli
    packhouse.prepare("rows.jsonl", tokenizer=tokenizer, store="store", dataset="rows",
                      cache="cache", seq_len=128, progress=False,
                      publish={"report": addon in ("report", "ask")})  # it uses no other
    print(len(packhouse.load_packed("store/rows", cache="cache").with_format(None)))
    for name in names:
        try:
            getattr(packhouse, name)
        except ImportError:
            continue
        raise SystemExit(f"{name} is still there")
    print(click.testing.CliRunner().invoke(cli, ["--help"]).output)
    if needed:
        raw = {"dataset": "rows", "tokenizer": tokenizer, "sources": [{"path": "rows.jsonl"}]}
        Path("needed.yaml").write_text(json.dumps(raw | needed))
        try:
            packhouse.prepare("needed.yaml", cache="cache", progress=False)
        except packhouse.PackhouseError as error:
            print(type(error).__name__, error)

def run(tokenizer, addon, names, needed):
    for number in (1, 2):
        os.dup2(os.open(f"said/{addon}.{number}", os.O_WRONLY | os.O_CREAT), number)
    try:
        use(tokenizer, addon, names, needed)
        print("done")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

os.fsync = lambda handle: None  # 54 per run, which take longer than its work
import packhouse
import_all(packhouse)
from packhouse.system import worker
forks = worker.WorkerForks(partial(importlib.import_module, "loaded"), 0, 0)
worker._forks = forks.requests, worker._environment()
assert not any(name.startswith("packhouse.addons.") for name in sys.modules)
needed = json.loads(sys.argv[2])
for argument in sys.argv[3:]:
    addon, _, names = argument.partition("=")
    (part,) = (path for path in Path("packhouse/addons").iterdir() if path.stem == addon)
    part.rename("gone")
    if (child := os.fork()) == 0:
        run(sys.argv[1], addon, names.split(",") if names else [], needed.get(addon))
    os.waitpid(child, 0)
    Path("gone").rename(part)
    shutil.rmtree("store", ignore_errors=True)
    shutil.rmtree("cache/steps", ignore_errors=True)
"""
# What workers have before they are forked: libraries, and the tokenizer.
LOADED = f"""
from pathlib import Path
import duckdb, packhouse.run.steps
from packhouse.recipe import Recipe
from packhouse.render.renderer import load_encoders
recipe = Recipe(dataset="rows", sources=[{{"path": "rows.jsonl"}}], tokenizer={str(TOKENIZER)!r})
load_encoders(recipe, Path("cache/tokenizers").absolute())
"""


def names_of(addon: str) -> list[str]:
    return [n for n, module in PUBLIC.items() if module.split(".")[1:3] == ["addons", addon]]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Output of packhouse without each add-on: stdout in `NAME.1`, stderr in `NAME.2`."""
    folder = tmp_path_factory.mktemp("without")
    rows = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(LIBRARY, folder / "packhouse", ignore=shutil.ignore_patterns("__pycache__"))
    for part in (folder / "packhouse" / "addons").iterdir():
        if part.is_dir() and not any(part.iterdir()):  # of an add-on that became one module
            part.rmdir()
    (folder / "said").mkdir()
    (folder / "loaded.py").write_text(LOADED)
    done = python(
        *("-c", SCRIPT, TOKENIZER, json.dumps(NEEDED)),
        *(f"{name}={','.join(names_of(name))}" for name in ADDONS),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder / "said"


@pytest.mark.parametrize("name", ADDONS)
def test_all_else_works(name, said):
    printed = (said / f"{name}.1").read_text()
    assert printed.endswith("done\n"), (said / f"{name}.2").read_text()
    for command, (module, _) in COMMANDS.items():
        needed = [module, BUILDS_ON.get(module.rpartition(".")[0], "")]
        is_gone = any(each.split(".")[1:3] == ["addons", name] for each in needed)
        assert (f"\n  {command}  " in printed) is not is_gone


@pytest.mark.parametrize("name", NEEDED)
def test_a_recipe_that_needs_it_says_so(name, said):
    expected = f"ConfigError this needs packhouse.addons.{name}, which is not installed. "
    assert f"{expected}Reinstall packhouse" in (said / f"{name}.1").read_text()
