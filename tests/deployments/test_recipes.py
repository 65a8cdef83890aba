from pathlib import Path

import pytest

from packhouse.recipe import load_recipe

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
RECIPES = [*sorted(DEPLOYMENTS.glob("recipes/*.yaml")), DEPLOYMENTS / "demo" / "recipe.yaml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_dataset_and_format_and_sets_a_fraction_for_evaluation(path):
    recipe = load_recipe(path)

    assert recipe.dataset == {"recipe": "demo"}.get(path.stem, path.stem)
    assert recipe.split.eval_fraction or recipe.split.eval_count
    assert all(source.format != "auto" for source in recipe.sources)


def test_without_the_variable_paths_are_next_to_the_checkout(monkeypatch):
    monkeypatch.delenv("PACKHOUSE_SHARED", raising=False)
    recipe = load_recipe(DEPLOYMENTS / "recipes" / "alpaca.yaml")

    beside = DEPLOYMENTS.parents[1] / "shared"
    assert recipe.sources[0].path == str(beside / "data" / "alpaca_data.json")
    assert recipe.tokenizer == str(beside / "tokenizers" / "qwen2.5-instruct")


def test_demo_recipe_uses_only_files_of_its_folder_and_a_local_store():
    recipe = load_recipe(DEPLOYMENTS / "demo" / "recipe.yaml")

    files = [Path(source.path) for source in recipe.sources]
    assert [file.name for file in files] == ["instructions.jsonl", "chats.jsonl"]
    assert {file.parent for file in files} == {DEPLOYMENTS / "demo"}
    assert Path(recipe.tokenizer) == DEPLOYMENTS / "demo" / "tokenizer"
    assert recipe.publish.store == "./.packhouse/demo-store"
    assert (recipe.pack.seq_len, recipe.split.eval_fraction) == (512, 0.1)
    assert recipe.validate_.max_quarantined == 0.05
