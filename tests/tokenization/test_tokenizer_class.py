"""A class whose ids differ from tokenizer.json is noticed, and the recipe chooses one."""

import json
import re

import pytest
from tokenizers import Tokenizer

import packhouse
from packhouse.errors import TokenizerError
from packhouse.recipe.recipe_file import load_recipe
from packhouse.run.chain import plan_jobs
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.tokenizer_loading import find_snapshot
from tests.tokenization.conftest import train_byte_level

NFD = "cafe\u0301"
"""NFC joins the last two characters; the toy class leaves that step out."""


@pytest.fixture
def toy(tmp_path):
    """A byte-level tokenizer with NFC, and a class that builds GPT-2's pipeline without it."""
    folder = tmp_path / "toy"
    folder.mkdir()
    train_byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of_file(folder, text):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def prepared(tmp_path, folder, *overrides):
    """Return a version of 30 rows, and the ids of all its packs in order."""
    rows = [{"instruction": f"Say {NFD} {n}.", "output": f"{NFD} {n}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "dataset": "toy",
        "tokenizer": str(folder),
        "sources": [{"path": "rows.jsonl", "format": "alpaca"}],
        "format": {"template": "alpaca"},
        "publish": {"store": str(tmp_path / "store")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    chosen = load_recipe(tmp_path / "recipe.yaml", overrides)
    version = packhouse.prepare(chosen, cache=tmp_path / "cache", progress=False)
    return version, [index for row in version.train for index in row["input_ids"]]


def test_a_refusal_is_kept_and_a_choice_lifts_it(toy, tmp_path):
    for _ in range(2):  # from the cached file the second time
        with pytest.raises(TokenizerError, match="loads as GPT2Tokenizer"):
            load_snapshot(toy, tmp_path)
    by_class, by_file = (load_snapshot(toy, tmp_path, each) for each in ("class", "file"))
    kept = [find_snapshot(by_class.fingerprint, tmp_path, each) for each in ("class", "file")]

    assert kept == [by_class, by_file]
    assert [each.pipeline for each in kept] == ["class", "file"]
    assert Tokenizer.from_str(by_file.backend).encode(NFD).ids == ids_of_file(toy, NFD)
    assert Tokenizer.from_str(by_class.backend).encode(NFD).ids != ids_of_file(toy, NFD)


def test_pipeline_file_needs_the_file(shared):
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json, .* Remove that setting"):
        load_snapshot(shared / "tokenizers" / "qwen2.5-instruct", pipeline="file")


def test_tokens_of_the_config_are_the_tokenizers_under_both_pipelines(toy):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|stop|>",
        "extra_special_tokens": ["<|more|>"],
    }
    (toy / "tokenizer_config.json").write_text(json.dumps(config))

    by_class, by_file = load_snapshot(toy), load_snapshot(toy, pipeline="file")

    assert {"<|stop|>", "<|more|>"} < set(by_class.added_tokens)
    assert by_file.added_tokens == by_class.added_tokens
    stop = by_class.added_tokens["<|stop|>"]
    assert Tokenizer.from_str(by_file.backend).encode("a<|stop|>").ids[-1] == stop


def test_the_setting_of_the_message_works_literally(toy, tmp_path):
    with pytest.raises(TokenizerError) as refused:
        prepared(tmp_path, toy)
    by_file, by_class = re.findall(r"--set (\S+?)`", str(refused.value))

    version, ids = prepared(tmp_path, toy, by_file)
    other, other_ids = prepared(tmp_path, toy, by_class)

    assert version.id != other.id
    joined = ids_of_file(toy, "\u00e9")
    assert len(joined) == 1
    assert joined[0] in ids
    assert joined[0] not in other_ids


@pytest.mark.parametrize("row_format", ["alpaca", "tokenized"])
def test_the_pipeline_is_in_the_key_of_every_step_that_reads_the_tokenizer(
    row_format, toy, tmp_path
):
    row = {"instruction": "a", "output": "b", "input_ids": [5, 6], "labels": [5, 6]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {
        "dataset": "toy",
        "tokenizer": str(toy),
        "sources": [{"path": "rows.jsonl", "format": row_format}],
        "format": {"template": "alpaca"},
        "publish": {"store": str(tmp_path / "store")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    plans = [
        plan_jobs(load_recipe(tmp_path / "recipe.yaml", [f"tokenize.pipeline={each}"]))
        for each in ("file", "class")
    ]

    for name in ("validate", "format", "tokenize"):
        (by_file,), (by_class,) = (getattr(plan, name) for plan in plans)
        is_same = name == "validate" and row_format == "alpaca"  # it does not read the tokenizer
        assert (by_file.ref == by_class.ref) == is_same, name
