"""Work grows linearly with the number of turns, counted in messages given to the template."""

import json
import sys

import pytest

from packhouse.render import rendering as rule
from tests.templates.test_chat_shapes import WITH_IDS
from tests.templates.test_chat_toys import CHATML, MISTRAL, PHI, PHI_TOKENS, THINKING
from tests.templates.toys import chat_renderer, counting_messages, make_table, pieces

TEMPLATES = {"chatml": CHATML, "mistral": MISTRAL, "phi": PHI, "thinking": THINKING}


def turns(number):
    return [(("user", "assistant")[at % 2], f"turn {at}.") for at in range(number)]


def rendered(template, number, **config):
    """Return the result, and the number of messages given to the template."""
    tokens = (
        PHI_TOKENS if "<|end|>" in template else {"<|im_end|>": 1, "<|im_start|>": 2, "</s>": 3}
    )
    renderer = chat_renderer(template + f"{{# {number} #}}", config, added_tokens=tokens)
    with counting_messages() as given:
        out = renderer.render(make_table([turns(number)]))
    return out, sum(given)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "config",
    [{}, {"reasoning": "train_last"}, {"train_on": "all", "never_train": ["user"]}],
    ids=["answers", "train_last", "roles"],
)
def test_a_conversation_of_ten_times_the_turns_is_ten_times_the_work(name, config):
    short, work = rendered(TEMPLATES[name], 60, **config)
    long, more_work = rendered(TEMPLATES[name], 600, **config)

    assert len(pieces(short.formatted)[0]) == 30
    assert len(pieces(long.formatted)[0]) == 300
    assert more_work <= 10 * work


@pytest.mark.parametrize("setting", ["whole", "joined"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ten_thousand_turns_are_one_record_and_each_is_rendered_a_few_times(name, setting):
    out, work = rendered(TEMPLATES[name], 10_000, turns=setting)

    assert [len(each) for each in pieces(out.formatted)] == [5_000]
    assert work < 5 * 10_000


def test_ids_of_calls_make_no_gap_another():
    def talk(number):
        call = json.dumps([{"id": f"call{number:05d}", "function": {"name": "f", "arguments": {}}}])
        asked = {"role": "assistant", "content": "", "tool_calls": call}
        return [("user", f"q{number}"), asked, ("tool", "r"), ("assistant", "a")]

    def work(number):
        config = {"train_on": "all", "never_train": ["user"]}
        renderer = chat_renderer(WITH_IDS + f"{{# {number} #}}", config)
        with counting_messages() as given:
            out = renderer.render(make_table([[turn for at in range(number) for turn in talk(at)]]))
        assert out.formatted.num_rows == 1
        return sum(given)

    assert work(100) <= 10 * work(10)


NUMBERED = CHATML.replace("m.role + '\\n'", "m.role + loop.index|string + '\\n'").replace(
    "assistant\\n' }}{% endif %}", "assistant' + (messages|length + 1)|string + '\\n' }}{% endif %}"
)


def test_prompts_that_differ_at_each_turn_are_each_proven_as_long_as_that_is_affordable(
    monkeypatch,
):
    out, _ = rendered(NUMBERED, 20)
    assert pieces(out.formatted)[0] == [f"turn {at}.<|im_end|>" for at in range(1, 20, 2)]

    monkeypatch.setattr(rule, "FREE_MESSAGES", 0)
    out, work = rendered(NUMBERED, 600)
    assert out.quarantined["reason"].to_pylist() == ["template_limit"]
    assert "the 600 messages are rendered in so many ways" in out.quarantined["detail"][0].as_py()
    assert work < 80 * 600


def lines_run(work):
    """Count the lines of Python executed, including each iteration of a comprehension."""
    number = 0

    def count(frame, event, _):
        nonlocal number
        number += event == "line"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return number


@pytest.mark.parametrize("name", ["chatml", "thinking"])
def test_the_work_per_message_does_not_grow_with_the_others(name):
    def work(number):
        config = {"turns": "joined"}
        renderer = chat_renderer(TEMPLATES[name] + f"{{# {number} #}}", config)
        return lines_run(lambda: renderer.render(make_table([turns(number)])))

    work(40)  # done once per process
    assert work(800) < 12 * work(80)
