"""Work grows linearly with the number of turns, counted in messages given to the template."""

import random

import pytest

from packhouse.recipe import FormatConfig, parse_recipe
from packhouse.render import chat_engine, make_renderer, text_positions as rule, trained_answers
from packhouse.render.renderer import max_record_tokens
from packhouse.tokenize.encoders import TokenLimit
from tests.templates.test_chat_toys import CHATML, MISTRAL, PHI, PHI_TOKENS, THINKING
from tests.templates.toys import chat_renderer, counting_messages, make_table, pieces

TEMPLATES = {"chatml": CHATML, "mistral": MISTRAL, "phi": PHI, "thinking": THINKING}


def turns(number):
    return [(("user", "assistant")[at % 2], f"turn {at}.") for at in range(number)]


def renderer_of(template, config):
    tokens = (
        PHI_TOKENS if "<|end|>" in template else {"<|im_end|>": 1, "<|im_start|>": 2, "</s>": 3}
    )
    return chat_renderer(template, config, added_tokens=tokens)


def rendered(template, number, **config):
    """Return the result, and the number of messages given to the template."""
    renderer = renderer_of(template + f"{{# {number} #}}", config)
    with counting_messages() as given:
        out = renderer.render(make_table([turns(number)]))
    return out, sum(given)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("phi", {"turns": "joined"}),
        ("thinking", {"turns": "joined"}),
        ("mistral", {"turns": "whole"}),
        ("chatml", {"reasoning": "train_last"}),
        ("chatml", {"train_on": "all", "never_train": ["user"]}),
    ],
    ids=str,
)
def test_a_conversation_of_ten_times_the_turns_is_ten_times_the_work(name, config):
    short, work = rendered(TEMPLATES[name], 40, **config)
    long, more_work = rendered(TEMPLATES[name], 400, **config)

    assert [len(each) for each in pieces(short.formatted)] == [20]
    assert [len(each) for each in pieces(long.formatted)] == [200]
    assert more_work <= 10 * work
    assert more_work < 10 * 400


NUMBERED = CHATML.replace("m.role + '\\n'", "m.role + loop.index|string + '\\n'").replace(
    "assistant\\n' }}{% endif %}", "assistant' + (messages|length + 1)|string + '\\n' }}{% endif %}"
)


def test_prompts_that_differ_at_each_turn_are_each_proven_as_long_as_that_is_affordable(
    monkeypatch,
):
    out, _ = rendered(NUMBERED, 20)
    assert pieces(out.formatted)[0] == [f"turn {at}.<|im_end|>" for at in range(1, 20, 2)]

    monkeypatch.setattr(rule, "FREE_MESSAGES", 0)
    out, work = rendered(NUMBERED, 200)
    assert out.quarantined["reason"].to_pylist() == ["template_limit"]
    assert "the 200 messages would need too many renderings" in out.quarantined["detail"][0].as_py()
    assert work < 80 * 200


@pytest.mark.parametrize("name", TEMPLATES)
def test_measuring_one_answer_of_each_kind_gives_the_text_of_measuring_all(name, monkeypatch):
    # Of 20 answers, of which two followed an answer, the second got two end tokens (file 1198).
    chance = random.Random(name)
    talks = []
    for _ in range(12):
        exchanges = [
            [("user", "Go."), *[("assistant", f"It is {at}.")] * chance.choice((1, 1, 2, 3))]
            for at in range(8)
        ]
        talks.append([turn for exchange in exchanges for turn in exchange])

    def texts(limit):
        for module in (chat_engine, trained_answers):
            monkeypatch.setattr(module, "MAX_PROVEN", limit)
        out = renderer_of(TEMPLATES[name], {"turns": "joined"}).render(make_table(talks))
        return out.formatted.to_pylist(), out.quarantined.to_pylist()

    assert texts(3) == texts(1000)


def thinking(number, words):
    turns = []
    for at in range(number):
        thought = f"Think {at} {'on ' * words}"
        answer = {"role": "assistant", "content": f"Answer {at}.", "reasoning": thought.strip()}
        turns += [{"role": "user", "content": f"Question {at}?"}, answer]
    return turns


@pytest.mark.parametrize("setting", ["exact", "alone"])
def test_answers_whose_records_fit_no_pack_are_counted_and_not_built(shared, setting):
    pytest.importorskip("trl", reason="TRL is not installed")
    from tests.templates.families import family, snapshot_of

    snapshot = snapshot_of(family("qwen3.jinja"))
    limit = TokenLimit(500, snapshot.backend)
    config = FormatConfig(turns=setting)
    talks = [thinking(40, 3), thinking(10, 3), thinking(30, 9)]

    def texts(talk, limit=None):
        out = make_renderer(config, snapshot, limit=limit).render(make_table(talk))
        return out.formatted["text"].to_pylist(), out.notes.get("answers_too_long", 0)

    kept = []
    for talk in talks:
        every, _ = texts([talk])
        some, left_out = texts([talk], limit)
        fitting = [text for text in every if limit.fits(text.encode())]
        assert [text for text in some if limit.fits(text.encode())] == fitting
        assert left_out == len(every) - len(some)
        assert left_out > 0 or len(talk) == 20 or setting == "exact"
        assert len(some) < len(fitting) + 3
        kept += some
    assert texts(talks, limit)[0] == kept  # two rows with the same shape, whose limits differ


def test_the_limit_of_records_is_the_same_for_most_lengths_of_packs():
    def of(**pack):
        minimal = {"dataset": "d", "tokenizer": "t", "sources": [{"path": "p"}], "pack": pack}
        return max_record_tokens(parse_recipe({**minimal, "format": {"template": "chat"}}))

    assert [of(seq_len=n) for n in (512, 8192, 8193, 40000)] == [8192, 8192, 16384, 65536]
    assert of(strategy="concat") is of(over_length="truncate_turns") is None
