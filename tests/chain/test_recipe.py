import pytest

from packhouse.errors import ConfigError
from packhouse.recipe import Recipe, load_recipe

MINIMAL = """
dataset: tiny
sources:
  - path: rows.jsonl
tokenizer: tokenizer
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_fill_in_and_inputs_are_beside_the_recipe(write, tmp_path):
    recipe = load_recipe(write(MINIMAL))

    assert recipe.pack.seq_len == 2048
    assert recipe.sources[0].path == str(tmp_path / "rows.jsonl")
    assert recipe.tokenizer == str(tmp_path / "tokenizer")
    assert recipe.publish.store == "./store"


def test_overrides_reach_sections_and_list_items(write):
    overrides = ("pack.seq_len=512", "sources.0.format=chat", "split.eval_fraction=0.1")
    recipe = load_recipe(write(MINIMAL), overrides)
    assert (recipe.pack.seq_len, recipe.sources[0].format) == (512, "chat")
    assert recipe.split.eval_fraction == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: [", "line 1"),
        ("- a\n- b", "must be a mapping"),
        (MINIMAL + "pak: {seq_len: 1}", r"unknown key 'pak' \(did you mean 'pack'\?\)"),
        (MINIMAL + "pack: {seqlen: 1}", r"unknown key 'pack.seqlen' \(did you mean 'seq_len'\?\)"),
        (MINIMAL + "pack: {seq_len: 0}", "'pack.seq_len': .*greater than 0, got 0"),
        (MINIMAL + "pack: {strategy: magic}", "'pack.strategy': .*'best_fit'.*got 'magic'"),
        ("sources: [{path: a}]\ntokenizer: t", "'dataset' is missing"),
        (MINIMAL.replace("tiny", "../up"), "'dataset': "),
        (MINIMAL + "split: {eval_fraction: 0.1, eval_count: 3}", "not both"),
        (MINIMAL.replace("rows.jsonl", "${HOME}/rows"), "only PACKHOUSE_"),
        (MINIMAL.replace("rows.jsonl", "${PACKHOUSE_NOT_SET}/rows"), "PACKHOUSE_NOT_SET"),
    ],
)
def test_a_wrong_recipe_says_which_key_and_what_is_allowed(write, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(write(text))
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe at .*nowhere\.yaml"):
        load_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("override", ["seq_len", "=1", "dataset.x=1", "sources.7.path=a"])
def test_a_wrong_override_is_refused(write, override):
    with pytest.raises(ConfigError, match="--set"):
        load_recipe(write(MINIMAL), (override,))


def test_variables_have_defaults(write, monkeypatch, tmp_path):
    path = write(MINIMAL.replace("rows.jsonl", "${PACKHOUSE_ROWS:-here}/rows.jsonl"))
    assert load_recipe(path).sources[0].path == str(tmp_path / "here" / "rows.jsonl")
    monkeypatch.setenv("PACKHOUSE_ROWS", "/data")
    assert load_recipe(path).sources[0].path == "/data/rows.jsonl"


def test_the_form_of_the_recipe_is_closed_and_describes_every_field():
    def fields(schema):
        yield from schema.get("properties", {}).items()

    schema = Recipe.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        undescribed = [
            name
            for name, field in fields(section)
            if "description" not in field and "$ref" not in field
        ]
        assert undescribed == []
