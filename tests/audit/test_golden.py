"""Golden conversations are pinned, checked in every run, and readable when they differ."""

import json
from pathlib import Path

import orjson
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from packhouse.addons.golden import check_pinned, pin, read_golden, write_golden
from packhouse.cli import cli
from packhouse.errors import AuditError, ConfigError
from packhouse.recipe import load_recipe, parse_recipe
from tests.audit.conftest import DEMO, Sums

CHAT = {
    "name": "ants",
    "messages": [
        {"role": "user", "content": "How many legs has an ant?"},
        {"role": "assistant", "content": "Six."},
    ],
}


@pytest.fixture
def golden(tmp_path):
    """A recipe that pins one conversation, with its current output in the golden file."""
    recipe = {
        "dataset": "ants",
        "sources": [{"path": "ants.jsonl", "format": "chat"}],
        "tokenizer": str(DEMO / "tokenizer"),
        "golden": "golden.jsonl",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    write_golden(tmp_path / "golden.jsonl", pin([CHAT], loaded))
    return loaded


def change(recipe, **values):
    (item,) = read_golden(recipe.golden)
    with Path(recipe.golden).open("wb") as file:
        file.write(orjson.dumps(item | values))


def test_text_ids_and_trained_tokens_are_pinned(golden):
    (item,) = read_golden(golden.golden)
    assert item["text"] == (
        "<|im_start|>user\nHow many legs has an ant?<|im_end|>\n"
        "<|im_start|>assistant\nSix.<|im_end|>\n"
    )
    assert item["trained_text"] == ["Six.<|im_end|>"]
    ((start, end),) = item["trained"]
    assert item["input_ids"][end - 1] == 2  # <|im_end|>
    assert end == len(item["input_ids"]) - 1
    assert start > 10
    assert check_pinned(golden).total == 1


@pytest.mark.parametrize("name", ["text", "input_ids", "trained", "trained_text"])
def test_each_of_them_is_compared(golden, name):
    (item,) = read_golden(golden.golden)
    change(golden, **{name: item[name][:-1]})
    with pytest.raises(AuditError, match=rf"conversation 0 \(ants\): {name} differ"):
        check_pinned(golden)


def test_the_difference_is_shown(golden):
    change(golden, input_ids=[1, 2, 3])
    with pytest.raises(AuditError) as caught:
        check_pinned(golden)
    (item,) = pin([CHAT], golden)
    assert f"\n    - [1, 2, 3]\n    + {item['input_ids'][:4]}" in str(caught.value)
    assert "1 of 1 golden conversations" in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "options",
    [
        {"format": {"turns": "alone"}},
        {"pack": {"over_length": "window", "seq_len": 24}},
    ],
    ids=str,
)
def test_every_example_and_window_of_a_conversation_is_pinned(golden, options):
    turns = [*CHAT["messages"], *CHAT["messages"], {"role": "user", "content": "Really?"}]
    answers = [turns[1], {**turns[3], "content": "Six!"}, {"role": "assistant", "content": "Yes."}]
    answers[0] = {**answers[0], "weight": 0.5}
    talk = {"name": "talk", "messages": []}
    for asked, answer in zip(turns[::2], answers, strict=True):
        talk["messages"] += [asked, answer]
    recipe = parse_recipe({**golden.model_dump(by_alias=True), **options})

    write_golden(Path(recipe.golden), pin([talk], recipe))
    assert check_pinned(recipe).total == 1
    (item,) = read_golden(recipe.golden)
    trained = [text for example in item["examples"] for text in example["trained_text"]]
    assert trained == ["Six.<|im_end|>", "Six!<|im_end|>", "Yes.<|im_end|>"]

    for number in range(len(item["examples"])):  # an error in any of them is found
        examples = [*item["examples"]]
        examples[number] = {**examples[number], "trained": [[0, 1]]}
        change(recipe, examples=examples)
        with pytest.raises(AuditError, match=f"example {number}: trained differ"):
            check_pinned(recipe)
        write_golden(Path(recipe.golden), [item])
    assert item["examples"][0]["weights"] == [0.5]
    change(recipe, examples=[{**item["examples"][0], "weights": [1.0]}, *item["examples"][1:]])
    with pytest.raises(AuditError, match="example 0: weights differ"):
        check_pinned(recipe)
    with pytest.raises(AuditError, match=r"now 1|was \d examples"):
        check_pinned(parse_recipe(golden.model_dump(by_alias=True)))


def test_a_conversation_that_is_refused_may_be_pinned_as_such(golden):
    alpaca = golden.model_copy(
        update={"format": golden.format.model_copy(update={"template": "alpaca"})}
    )
    chat = {**CHAT, "tools": '[{"type": "function"}]'}
    (item,) = pin([chat], alpaca)
    assert item["refused"].startswith("template: tools")
    write_golden(Path(golden.golden), [item])
    assert check_pinned(alpaca).total == 1
    with pytest.raises(AuditError, match=r"was template: tools.* now accepted"):
        check_pinned(golden)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": "x"}, "conversation 0 has no list of messages"),
        ({"messages": [{"rolle": "user"}]}, "message 0: unknown key 'rolle'; known: role, content"),
        ({"messages": CHAT["messages"], "ids": []}, "unknown key 'ids'"),
        ({"messages": [{"role": "user", "content": 3}]}, "conversation 0: "),
        ({"messages": CHAT["messages"][:1] * 2}, "no_assistant"),
    ],
)
def test_a_file_of_something_else_is_refused(golden, item, message):
    with Path(golden.golden).open("wb") as file:
        file.write(orjson.dumps(item))
    with pytest.raises(ConfigError, match=message):
        check_pinned(golden)


def test_a_conversation_without_anything_pinned_is_a_fault(golden):
    with Path(golden.golden).open("wb") as file:
        file.write(orjson.dumps(CHAT))
    with pytest.raises(AuditError, match="nothing is pinned"):
        check_pinned(golden)


texts = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=30)
@given(texts)
def test_yaml_keeps_every_text_and_id(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("golden") / "golden.yaml"
    item = {**CHAT, "text": text, "input_ids": [1, 2, 3], "trained": [[0, 1]]}
    item["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    write_golden(path, [item])
    assert read_golden(path) == [item]


@pytest.fixture
def project(tmp_path):
    return Sums(tmp_path, golden="pinned.yaml")


def call(project, *arguments, code=0):
    everything = ["golden", *arguments, "--cache", str(project.cache)]
    result = CliRunner().invoke(cli, everything)
    assert result.exit_code == code, result.output
    return result


def test_write_then_build_then_break_then_accept(project):
    recipe = str(project.path)
    output = call(project, "write", recipe, "--count", "2", "--row", "sums/sums.jsonl:7").stdout
    assert "sums/sums.jsonl:7: ['8.<|im_end|>" in output
    assert json.loads(call(project, "check", recipe, "--json").stdout) == {"golden": 3}

    first = project.prepare()
    assert first.golden == 3
    without = project.prepare("golden=null")
    assert (without.version, without.created) == (first.version, False)

    with pytest.raises(AuditError, match="3 of 3 golden conversations"):
        project.prepare("format.system=Be brief.")
    call(project, "write", recipe, "--set", "format.system=Be brief.")
    assert project.prepare("format.system=Be brief.").golden == 3


def test_a_row_that_is_not_there_is_named(project):
    result = call(project, "write", str(project.path), "--row", "sums/sums.jsonl:999", code=2)
    assert "no row 'sums/sums.jsonl:999' passed validation" in result.stderr
