"""Trainers set up as on the pages train each record as if it were alone."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from packhouse import load_packed
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.loaders.models import tiny_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "deployments" / "demo"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trainers_of_the_page_train_each_record_as_if_alone(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    import torch
    from transformers import Trainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(DEMO / "recipe.yaml", ("publish.store=./store", "pack.seq_len=512"))
    workspace = Workspace(cache=tmp_path / "cache")
    prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache=workspace.cache)
    shutil.copytree(DEMO / "tokenizer", "tokenizer")
    tiny_model("llama", "sdpa", vocabulary=8192).save_pretrained("tiny-model")
    packs = {tuple(row["input_ids"]): row for row in load_packed("./store/demo")}
    said = []
    plain = Trainer.training_step

    def step(trainer, model, inputs, *args):
        """Find the batch in the version, whose boundaries and labels are the reference."""
        row = packs[tuple(inputs["input_ids"][0].tolist())]
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        losses, start = [], 0
        for length in row["seq_lengths"]:
            record, start = slice(start, start + length), start + length
            with torch.no_grad():
                logits = model(input_ids=ids[:, record], use_cache=False).logits[0, :-1]
            targets = labels[0, record][1:]
            loss = torch.nn.functional.cross_entropy
            losses.append(loss(logits[targets >= 0], targets[targets >= 0], reduction="none"))
        alone = torch.cat(losses).mean().item()
        said.append((type(trainer).__name__, plain(trainer, model, inputs, *args).item(), alone))
        return torch.tensor(said[-1][1])

    monkeypatch.setattr(Trainer, "training_step", step)
    page = (ROOT / "docs" / "how-to" / "trl.md").read_text()
    Path("page.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)))
    runpy.run_path("page.py", run_name="page")

    assert [name for name, _, _ in said] == ["SFTTrainer"] * 2 + ["Trainer"] * 2
    for _, loss, alone in said:
        assert loss == pytest.approx(alone, abs=1e-4)


def test_axolotl_packs_with_an_attention_that_keeps_records_apart():
    """Without this name, Axolotl warns, keeps the mask of ones and trains across records."""
    page = (ROOT / "docs" / "how-to" / "axolotl.md").read_text()
    (block,) = re.findall(r"^```yaml[^\n]*\n(.*?)^```", page, re.M | re.S)
    settings = yaml.safe_load(block)
    apart = {"flash_attention_2", "flex_attention", "sdpa", "eager"}
    assert settings["sample_packing"]
    assert settings["attn_implementation"] in apart
