"""If a token crosses the end of the prompt, the prompt has the same ids as at inference."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

import packhouse
from packhouse.addons.golden import pin
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.recipe.recipe_file import load_recipe
from packhouse.render import make_renderer
from packhouse.tokenize import encoder_choice, tokenize_table
from packhouse.tokenize.text_to_tokens import cuts_prompts
from tests.templates.toys import make_table
from tests.tokenization.conftest import snapshot_of, train_metaspace

HF = TokenizeConfig(encoder="hf")


def encode(snapshot, text):
    return Tokenizer.from_str(snapshot.backend).encode(text, add_special_tokens=False).ids


def split(table, snapshot, config=HF, cache=None):
    return tokenize_table(table, snapshot, config, cache, cut_at_spans=True)


def legacy():
    """Metaspace as in older Llama files: a space before the text and after added tokens."""
    tokenizer = train_metaspace()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = None
    return snapshot_of(tokenizer)


def metaspace(scheme):
    tokenizer = train_metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return snapshot_of(tokenizer)


@pytest.fixture(scope="module", params=["byte_level", "first", "always", "never", "legacy"])
def any_snapshot(request, byte_level):
    """Tokenizers by where they add a space that is not in the text."""
    if request.param == "byte_level":
        return byte_level
    return legacy() if request.param == "legacy" else metaspace(request.param)


def test_prompt_and_completion_are_encoded_apart_where_a_token_crosses(byte_level, make_formatted):
    # " the" is one token, and the prompt ends with its space.
    rows = [
        [("a ", "template"), ("the", "answer"), ("<|end|>", "end")],
        [("a", "template"), (" the", "answer"), ("<|end|>", "end")],
    ]
    table = make_formatted(rows)

    whole, done = tokenize_table(table, byte_level, HF), split(table, byte_level)

    first, second = done.tokenized.to_pylist()
    assert first["input_ids"] == encode(byte_level, "a ") + encode(byte_level, "the<|end|>")
    assert first["trained_ranges"] == [{"start": 2, "end": first["num_tokens"]}]
    assert second == whole.tokenized.to_pylist()[1]
    assert done.notes == {"split_prompts": 1}
    assert whole.notes == {"straddles_start": 1}
    assert whole.tokenized["input_ids"][0].as_py() != first["input_ids"]


def test_every_prompt_is_the_beginning_of_its_record(any_snapshot, make_formatted):
    prompts = ["<|start|>a ", "<|start|>a th", "the ca", "<|start|>b<|end|>", "the", "  "]
    answers = ["the cat", "e cat<|end|>", " hat", "t", "  the", "na\u00efve caf\u00e9"]
    rows = [
        [(prompt, "template"), (answer, "end"), ("<|end|>", "end"), ("<|start|> the", "template")]
        for prompt in prompts
        for answer in answers
    ]
    done = split(make_formatted(rows), any_snapshot)

    decoder = Tokenizer.from_str(any_snapshot.backend)
    split_rows = 0
    for row, (prompt, answer) in zip(
        done.tokenized.to_pylist(), [(p, a) for p in prompts for a in answers], strict=True
    ):
        (span,) = row["trained_ranges"]
        ids = row["input_ids"]
        assert ids[: span["start"]] == encode(any_snapshot, prompt), (prompt, answer)
        rest = "<|start|> the"
        assert ids[span["end"] :] == encode(any_snapshot, rest), (prompt, answer)
        split_rows += ids != encode(any_snapshot, prompt + answer + "<|end|>" + rest)
        tokens = [decoder.id_to_token(index) for index in ids[span["start"] : span["end"]]]
        assert tokens[-1] == "<|end|>"
    assert done.notes["split_prompts"] == split_rows > 5
    assert not {"straddles_start", "inexact_round_trip"} & set(done.notes)


def test_a_completion_gets_no_space_that_the_text_does_not_hold(any_snapshot, make_formatted):
    table = make_formatted([[("say th", "template"), ("e hat<|end|>the", "end")]])

    (row,) = split(table, any_snapshot).tokenized.to_pylist()

    start = row["trained_ranges"][0]["start"]
    prompt, answer = row["input_ids"][:start], row["input_ids"][start:]
    tokenizer = Tokenizer.from_str(any_snapshot.backend)
    first = tokenizer.id_to_token(answer[0])
    assert not first.startswith(("\u2581", "\u0120"))
    assert prompt == encode(any_snapshot, "say th")
    # After an added token, the tokenizer continues as in any text.
    end = answer.index(tokenizer.token_to_id("<|end|>"))
    whole = encode(any_snapshot, "say the hat<|end|>the")
    assert answer[end:] == whole[whole.index(answer[end]) :]


def test_a_text_within_an_answer_that_is_not_trained_is_no_prompt(byte_level, make_formatted):
    parts = [("a", "template"), (" the", "answer"), (" ", "content"), ("the cat", "answer")]

    done = split(make_formatted([parts]), byte_level)

    assert done.tokenized["input_ids"].to_pylist() == [encode(byte_level, "a the the cat")]
    assert "split_prompts" not in done.notes


@pytest.mark.parametrize("prompt", ["a  ", "<|start|>  ", "<|start|>a\n  "])
def test_white_space_that_only_a_prompt_joins_is_cut_off(prompt, byte_level, make_formatted):
    # GPT-2's pattern: two final spaces are one token; before a word, one belongs to the word.
    table = make_formatted([[(prompt, "template"), ("n", "answer")]])
    whole = tokenize_table(table, byte_level, HF)

    done = split(table, byte_level)

    expected = encode(byte_level, prompt) + encode(byte_level, "n")
    assert done.tokenized["input_ids"].to_pylist() == [expected]
    assert whole.tokenized["input_ids"].to_pylist() != [expected]
    assert "straddles_start" not in whole.notes
    assert done.notes == {"split_prompts": 1}


def test_the_fast_encoder_gives_the_same_records(byte_level, make_formatted, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_choice, "FEW_BYTES", -1)
    rows = [
        [("a" + " " * (n % 3), "template"), (f"the cat {n}", "answer"), ("<|end|>", "end")]
        for n in range(60)
    ]
    table = make_formatted(rows)

    fast = split(table, byte_level, TokenizeConfig(encoder="fast"), tmp_path)

    reference = split(table, byte_level)
    assert fast.tokenized.equals(reference.tokenized)
    assert fast.notes == reference.notes
    assert fast.notes["split_prompts"] == 40


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}Q: {{ message.content }}\nA: "
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("setting", ["alone", "exact"])
def test_later_prompts_of_a_record_keep_the_tokens_that_were_generated(setting, byte_level):
    """Intern-S1's calls: the prompt is one line break, and the answer begins with another."""
    tokens = {"special_tokens": {"eos_token": "<|end|>"}, "stop_tokens": {"<|end|>": "tokenizer"}}
    snapshot = replace(byte_level, chat_template=TEMPLATE, **tokens)
    renderer = make_renderer(FormatConfig(turns=setting), snapshot)
    records = renderer.render(make_table([[*turns(1), *turns(2)]])).formatted

    last = split(records, snapshot).tokenized.to_pylist()[-1]

    pieces = ["Q: the cat 1\nA: ", "the hat 1<|end|>Q: the cat 2\nA: ", "the hat 2<|end|>"]
    if setting == "alone":  # what a server has that encodes the whole prompt
        pieces[:2] = ["".join(pieces[:2])]
    assert last["input_ids"] == [token for each in pieces for token in encode(snapshot, each)]


def recipe_of(tmp_path, tokenizer, *overrides, **sections):
    rows = [{"messages": turns(number)} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "space.jinja").write_text(TEMPLATE)
    recipe = {
        "dataset": "space",
        "tokenizer": str(tokenizer),
        "sources": [{"path": "rows.jsonl"}],
        "format": {"template": "space.jinja"},
        "publish": {"store": str(tmp_path / "store")},
        **sections,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(tmp_path / "recipe.yaml", overrides)


def turns(number):
    return [
        {"role": "user", "content": f"the cat {number}"},
        {"role": "assistant", "content": f"the hat {number}"},
    ]


@pytest.mark.parametrize(
    ("overrides", "cuts"),
    [
        ([], True),
        (["format.template=chat"], True),
        (["format.turns=exact"], True),
        (["format.turns=whole"], False),
        (["format.train_on=all"], False),
        (["format.template=alpaca"], False),
    ],
)
def test_chat_templates_are_prompted_at_inference_and_others_are_not(overrides, cuts, tmp_path):
    assert cuts_prompts(recipe_of(tmp_path, tmp_path, *overrides)) == cuts


def test_a_version_of_a_template_that_ends_inside_a_token(byte_level, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer.from_str(byte_level.backend).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pack = {"seq_len": 64, "over_length": "window"}
    recipe = recipe_of(tmp_path, folder, pack=pack, split={"eval_fraction": 0.0})

    version = packhouse.prepare(recipe, cache=tmp_path / "cache", progress=False)

    expected = {
        tuple(
            encode(byte_level, f"Q: the cat {number}\nA: ")
            + encode(byte_level, f"the hat {number}<|end|>")
        )
        for number in range(12)
    }
    found = set()
    for pack in version.train:
        bounds = np.cumsum(pack["seq_lengths"])[:-1]
        found |= {tuple(ids.tolist()) for ids in np.split(np.array(pack["input_ids"]), bounds)}
    assert found == expected
    assert version.audit["dataset"]["split_prompts"] == 12
    assert version.audit["dataset"]["straddles_start"] == 0
    (pinned,) = pin([{"messages": turns(3)}], recipe)
    assert tuple(pinned["input_ids"]) in expected
