"""Single-turn templates give the ids of the same prompt tokenized at inference."""

import pytest

from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render import make_renderer
from packhouse.tokenize import tokenize_table
from tests.templates.toys import make_table

TOKENIZERS = ["mistral-7b-instruct-v0.3", "qwen3"]

# The second begins with a space, the third with a line break, the last not with a word.
ROWS = [
    [("user", "Below is a word\n"), ("assistant", "Yes, it is.")],
    [("user", " Why is the sky blue?\n"), ("assistant", "Light scatters.")],
    [("user", "\nWhy?\n"), ("assistant", "So.")],
    [("user", "  Two spaces\n"), ("assistant", " And one.")],
    [("system", "Be brief."), ("user", "Name a river.\n"), ("assistant", "The Elbe.")],
    [("user", "### 1 + 1?\n"), ("assistant", "2")],
]


def tokenized(snapshot, template, rows):
    renderer = make_renderer(FormatConfig(template=template), snapshot)
    formatted = renderer.render(make_table(rows)).formatted
    done = tokenize_table(formatted, snapshot, TokenizeConfig())
    assert not done.quarantined.num_rows
    assert "inexact_round_trip" not in done.notes
    return formatted.to_pylist(), done.tokenized.to_pylist()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", ["alpaca", "completion"])
def test_ids_are_those_of_prompt_and_answer_in_one_call_and_eos(
    load_tokenizer, load_real, name, template
):
    """TRL's result for a prompt and a completion: `tokenizer(prompt + completion)`, then EOS."""
    real = load_tokenizer(name)
    texts, rows = tokenized(load_real(name), template, ROWS)
    for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
        whole = text["text"].removeprefix(real.bos_token or "").removesuffix(real.eos_token)
        has_own_space = template == "completion" and number in (1, 3)
        if name.startswith("mistral") and not has_own_space:
            assert whole[0] == " "
            whole = whole[1:]
        assert row["input_ids"] == [*real(whole)["input_ids"], real.eos_token_id], whole


def test_a_text_or_an_answer_that_comes_first_is_trained_from_its_first_word(load_real):
    for template in ("text", "completion"):
        rows = [[("assistant", "Below is a word")], [("assistant", " Below is a word")]]
        texts, (plain, spaced) = tokenized(load_real(TOKENIZERS[0]), template, rows)
        assert [text["text"] for text in texts] == ["<s> Below is a word</s>"] * 2
        assert plain["input_ids"] == spaced["input_ids"]
        first = 0 if template == "text" else 1
        for row in (plain, spaced):
            assert row["trained_ranges"] == [{"start": first, "end": len(row["input_ids"])}]
