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


def test_defaults_fill_in_and_inputs_are_relative_to_the_recipe(write, tmp_path):
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
        (MINIMAL + "pak: {seq_len: 1}", r"line 6: unknown key 'pak'; did you mean 'pack'\?"),
        (MINIMAL + "pack: {seqlen: 1}", r"unknown key 'pack.seqlen'; did you mean 'seq_len'\?"),
        (MINIMAL + "seq_len: 1", r"unknown key 'seq_len'; did you mean 'pack.seq_len'\?"),
        (MINIMAL + "pack: {seq_len: 0}", "'pack.seq_len' must be above 0, got 0"),
        (
            MINIMAL + "pack: {strategy: magic}",
            "'pack.strategy' must be one of best_fit, first_fit, .*; got text of 5",
        ),
        ("sources: [{path: a}]\ntokenizer: t", "'dataset' is missing"),
        (MINIMAL.replace("tiny", "../up"), "line 2: 'dataset' may contain lower-case letters"),
        (
            MINIMAL + "pack:\n  strategy: best-fit",
            r"line 7: 'pack.strategy' cannot be 'best-fit'; did you mean 'best_fit'\?",
        ),
        (
            MINIMAL.replace("rows.jsonl", "rows.jsonl\n    format: aplaca"),
            r"line 5: 'sources.0.format' cannot be 'aplaca'; did you mean 'alpaca'\?",
        ),
        (
            MINIMAL + "split: {eval_fraction: 10}",
            r"'split.eval_fraction' must be below 1, got 10 \(0.1 means 10%\)",
        ),
        (
            MINIMAL + "format: {turns: whole, thought_end: x}",
            "Remove thought_end, or use turns: joined",
        ),
        (MINIMAL + "pack: 7", "'pack' must be a mapping of keys, got 7"),
        (MINIMAL + "pack: {seed: many}", "'pack.seed' must be a whole number, got text of 4"),
        (MINIMAL + "publish: {also: [x]}", "'publish.also.0' must be hf://datasets/ORG/NAME or"),
        (MINIMAL + "publish: {exports: [mdz]}", r"did you mean 'mds'\?"),
        (MINIMAL.replace("- path: rows.jsonl", "[]"), "'sources' must have at least 1 item"),
        (
            MINIMAL + "split: {eval_fraction: 0.1, eval_count: 3}",
            "eval_count are both set. Remove one$",
        ),
        (MINIMAL.replace("rows.jsonl", "${HOME}/rows"), "only variables named PACKHOUSE_"),
        (MINIMAL.replace("rows.jsonl", "${PACKHOUSE_NOT_SET}/rows"), "PACKHOUSE_NOT_SET"),
        (MINIMAL + "pack: {seq_len: true}", "'pack.seq_len': must not be a boolean, got true"),
        (
            MINIMAL + "pack: {seed: 1}\npack: {seed: 2}",
            "line 7, column 1: key 'pack' is already set in line 6",
        ),
        (MINIMAL.replace("tiny", "a.."), "'dataset' may contain .* single dots"),
        (MINIMAL.replace("tiny", "a" * 65), "'dataset' must have at most 64 characters"),
        (MINIMAL + "pack: &a [*a]", "an alias .* is inside its own anchor"),
        (MINIMAL + "pack: " + "[" * 1000, "nested too deeply"),
        (MINIMAL + "golden: 2024-13-45", "month must be in 1..12"),
        (MINIMAL + "pack: {seq_len: 99999999999}", "must be at most 16,777,216, got 99999999999$"),
        (MINIMAL + "1: 2", "key '1' must be text. Put it in quotes$"),
        (MINIMAL.replace("tokenizer: tokenizer", ""), "Hugging Face Hub, `org/name` or"),
        ("", "is empty"),
        (
            MINIMAL + "format: {template: sequence_classification}\n",
            r"one label per record.* Set pack\.strategy: none",
        ),
    ],
)
def test_a_wrong_recipe_names_the_key_and_the_allowed_values(write, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(write(text))
    assert "\n" not in str(caught.value)


def test_each_mistake_is_a_line_with_its_place(write):
    path = write(MINIMAL + "pack:\n  seq_len: 0\n  strategy: magic\nsplit: {seed: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ("split.eval_fraction=2",))
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"recipe '{path}'").partition(" '")[0] for line in lines] == [
        ", line 7:",
        ", line 8:",
        ":",  # set with --set
        ", line 9:",
    ]


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seq_len", "--set"),
        ("=1", "--set"),
        ("dataset.x=1", "--set"),
        ("pack=[", r"--set pack, line 1, column 2: "),
        ("sources.\u00b2=1", "The list has items 0 to 0"),
        ("sources.1.path=x", "no item '1'. The list has items 0 to 0"),
        ("pack=&a [*a]", "an alias"),
        ("pack.seed=" + "[" * 1000, "nested too deeply"),
    ],
)
def test_a_wrong_override_is_one_sentence(write, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(MINIMAL), (override,))


def test_a_recipe_that_is_no_text_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe at .*nowhere\.yaml"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"dataset: caf\xe9")
    with pytest.raises(ConfigError, match=r"latin.yaml' is not UTF-8 \(byte 12\)"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "latin.yaml" / "recipe.yaml")


def test_aliases_that_stand_for_too_much_are_refused(tmp_path):
    """Nine lines of aliases: 265 bytes that expand to hundreds of megabytes."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (tmp_path / "r.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"expands to .* characters .* limit is 1,048,576") as e:
        load_recipe(tmp_path / "r.yaml")
    assert len(str(e.value)) < 500


def test_a_value_of_an_override_has_no_line_in_the_file(write):
    path = write(MINIMAL + "pack: {seq_len: 512}")
    for override, said in (
        ("pack={seq_len: 0}", "recipe.yaml': 'pack.seq_len' must be above 0, got 0"),
        ("sources=[{path: a}, {path: b, formats: chat}]", "yaml': unknown key 'sources.1.formats'"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_recipe(path, (override,))
