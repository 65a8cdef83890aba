"""Recipes that newcomers get wrong: each message names place, cause and fix."""

import shutil
from pathlib import Path

import pytest

import packhouse
from packhouse.recipe.sections import TEMPLATES

HEAD = "dataset: demo\ntokenizer: ./tokenizer\n"
ROWS = "sources:\n  - path: talks.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree("deployments/demo/tokenizer", tmp_path / "tokenizer")
    turns = '{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "%d"}'
    lines = "".join(f'{{"messages": [{turns % number}]}}\n' for number in range(30))
    (tmp_path / "talks.jsonl").write_text(lines)
    (tmp_path / "answers.jsonl").write_text('{"instruction": "a", "completion": "b"}\n' * 30)
    (tmp_path / "open.csv").write_text('question,answer\na,b\na,"b\n' + "a\n" * 30)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    (tmp_path / "pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n' * 30)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            HEAD + ROWS + "format:\n  template: vicuna\n",
            "recipe 'r.yaml', line 6: 'format.template' must be one of "
            f"{', '.join(TEMPLATES)}, a path",
        ),
        (
            HEAD + ROWS + "format: {template: mime.jinja}\n",
            "no file at 'mime.jinja'; did you mean 'mine.jinja'? Built-in templates are chat, ",
        ),
        (
            HEAD + "sources: [{path: talk.jsonl}]\n",
            "source file 'talk.jsonl' does not exist; did you mean 'talks.jsonl'?",
        ),
        (
            HEAD + "sources: [{path: data/talks.jsonl}]\n",
            "source file 'data/talks.jsonl' does not exist; the folder 'data' does not exist",
        ),
        (
            "dataset: demo\ntokenizer: ./tokeniser\n" + ROWS,
            "no tokenizer folder at 'tokeniser'; did you mean 'tokenizer'? "
            "Pass the folder that `tokenizer.save_pretrained(folder)` wrote",
        ),
        (
            HEAD + ROWS + "    format: alpaca\n",
            "all 30 rows are bad (fields 30), so there is nothing to publish; first 'fields': "
            "talks/talks.jsonl line 1, no field 'instruction'; the row has 'messages'. Rows of "
            "'talks' look like `chat`, but the recipe reads them as `alpaca`. Try `format: chat`, "
            "or `format: mixed` if rows have several shapes. To see the bad rows, run "
            "`packhouse quarantine show ",
        ),
        (
            HEAD + "sources: [{path: answers.jsonl, format: alpaca}]\n",
            "first 'fields': answers/answers.jsonl line 1, no field 'output'; the row has "
            "'instruction', 'completion'; if 'completion' is meant, set `fields: {output: "
            "completion}`. To see",
        ),
        (
            HEAD + "sources: [{path: answers.jsonl, format: alpaca, fields: {output: answer}}]\n",
            "no field 'answer'; the row has 'instruction', 'completion'; if 'completion' is meant, "
            "set `fields: {output: completion}`. To see",
        ),
        (
            HEAD + "sources: [{path: answers.jsonl, format: dolly}]\n",
            "no field 'response'; the row has 'instruction', 'completion'; if",
        ),
        (
            HEAD + "sources: [{path: open.csv}]\n",
            "first 'csv': open/open.csv line 3, a quote opened in the row is never closed. Remedy: "
            "quote values that contain quotes or line breaks. The first 'fields': open/open.csv "
            "line 4, the row has 1 field, but the header has 2; if values contain line breaks, put "
            "them in quotes. To see",
        ),
        (  # a row that fits the recipe's format is not sent to another one
            HEAD + "sources: [{path: pairs.jsonl, format: pairs}]\n",
            "no_prompt': pairs/pairs.jsonl line 1, chosen has no prompt. Remedy: ",
        ),
    ],
)
def test_a_wrong_recipe_names_place_cause_and_fix(recipe: str, said: str, folder: Path) -> None:
    Path("r.yaml").write_text(recipe)
    with pytest.raises(packhouse.PackhouseError) as caught:
        packhouse.prepare("r.yaml", cache="cache", progress=False)

    assert said in str(caught.value)


def test_a_recipe_that_is_not_there_names_its_neighbours(folder: Path) -> None:
    Path("recipe.yaml").write_text(HEAD + ROWS)
    with pytest.raises(packhouse.PackhouseError, match=r"; did you mean 'recipe\.yaml'\?$"):
        packhouse.prepare("recpe.yaml")
    with pytest.raises(packhouse.PackhouseError, match=r"; found recipe\.yaml$"):
        packhouse.prepare("x.yml")
