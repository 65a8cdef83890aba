from pathlib import Path

import pytest

from packhouse.recipe import Recipe, load_recipe

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
RECIPES = [*sorted(DEPLOYMENTS.glob("recipes/*.yaml")), DEPLOYMENTS / "demo" / "recipe.yaml"]


def load(path: Path) -> Recipe:
    return load_recipe(path)


def test_there_is_one_recipe_per_real_file_and_the_demo():
    names = [path.stem for path in RECIPES]

    assert names == [
        "alpaca", "fastchat", "gsm8k", "messages", "oasst", "sst2-bert", "sst2", "recipe",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_and_sets_a_fraction_for_evaluation(path):
    recipe = load(path)

    assert recipe.split.eval_fraction or recipe.split.eval_count
    assert all(source.format != "auto" for source in recipe.sources)


@pytest.mark.parametrize("path", RECIPES[:-1], ids=lambda path: path.stem)
def test_dataset_is_named_like_its_recipe(path):
    assert load(path).dataset == path.stem


@pytest.mark.parametrize("path", RECIPES[:-1], ids=lambda path: path.stem)
def test_the_recipe_names_existing_sources_and_tokenizers(path, shared, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_SHARED", str(shared))
    recipe = load(path)

    assert [s.path for s in recipe.sources if not Path(s.path).is_file()] == []
    assert (Path(recipe.tokenizer) / "tokenizer_config.json").is_file()


def test_without_the_variable_paths_are_next_to_the_checkout(monkeypatch):
    monkeypatch.delenv("PACKHOUSE_SHARED", raising=False)
    recipe = load(DEPLOYMENTS / "recipes" / "alpaca.yaml")

    beside = DEPLOYMENTS.parents[1] / "shared"
    assert recipe.sources[0].path == str(beside / "data" / "alpaca_data.json")
    assert recipe.tokenizer == str(beside / "tokenizers" / "qwen2.5-instruct")


def test_demo_recipe_uses_only_files_of_its_folder_and_a_local_store():
    recipe = load(DEPLOYMENTS / "demo" / "recipe.yaml")

    files = [Path(source.path) for source in recipe.sources]
    assert [file.name for file in files] == ["instructions.jsonl", "chats.jsonl"]
    assert {file.parent for file in files} == {DEPLOYMENTS / "demo"}
    assert Path(recipe.tokenizer) == DEPLOYMENTS / "demo" / "tokenizer"
    assert recipe.publish.store == "./.packhouse/demo-store"
    assert (recipe.pack.seq_len, recipe.split.eval_fraction) == (512, 0.1)
    assert recipe.validate_.max_quarantined == 0.05
