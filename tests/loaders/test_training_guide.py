"""Every Python block of docs/training.md runs, in order, on the version of the demo recipe."""

import importlib.util
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from packhouse.chain import prepare
from packhouse.engine.local_pool import LocalRunner
from packhouse.engine.workspace import Workspace
from packhouse.recipe import load_recipe

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "training.md"
DEMO = ROOT / "deployments" / "demo"


def blocks(is_there):
    """Python source of the guide, without blocks that need a package that is not there."""
    found = re.findall(r"^```python ?(\w*)\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == GUIDE.read_text().count("```python")
    return [code for package, code in found if not package or is_there(package)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(DEMO / "recipe.yaml", ("publish.store=./store",))
    workspace = Workspace(cache=tmp_path / "cache")
    prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache=workspace.cache)
    shutil.copytree(DEMO / "tokenizer", "tokenizer")
    shutil.copy(DEMO / "instructions.jsonl", "instructions.jsonl")
    Path("guide.py").write_text("".join(blocks(importlib.util.find_spec)))

    torch.compiler.set_stance("force_eager")
    try:
        runpy.run_path("guide.py", run_name="guide")
    finally:
        torch.compiler.set_stance("default")

    output = capsys.readouterr().out
    assert "RECORDS SEE EACH OTHER" in output
    assert "240 [torch.Size([4, 240])" in output


def test_the_guide_names_every_format_and_public_name():
    import packhouse.exports
    import packhouse.loaders

    text = GUIDE.read_text()
    for name in packhouse.exports.FORMATS:
        assert f"`{name}`" in text
    told = set(re.findall(r"\w+", text))
    internal = {"PackingHandle", "PackingReport", "TokenizedDataset", "packed_mask_mod"}
    assert set(packhouse.loaders.__all__) - internal - told == {"split_batch_into_microbatches"}
