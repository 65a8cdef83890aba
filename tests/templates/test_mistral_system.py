"""`mistral_system`: Mistral's template, with the system turn where the row has it."""

import json

import pytest

from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.templates.toys import make_table, pieces, snapshot_of

TALK = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "see you")]
TOOLS = json.dumps([{"type": "function", "function": {"name": "find", "description": "d"}}])


@pytest.fixture
def render(load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("mistral-7b-instruct-v0.3"))

    def render(table, template="mistral_system", **config):
        return make_renderer(FormatConfig(template=template, **config), snapshot).render(table)

    return render


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_is_mistrals_own_where_no_system_turn_is_given(render, tools):
    table = make_table([TALK, TALK[:2]], tools=[tools, tools])
    own, ours = render(table, "chat"), render(table)
    # Tools move to the last user turn, so the prompt of the second answer is different.
    assert own.formatted["row"].to_pylist() == ([0, 0, 1] if tools else [0, 1])
    assert ours.formatted.equals(own.formatted)


def test_the_system_turn_is_in_the_last_user_turn_of_each_prompt_and_not_trained(render):
    table = make_table([[("system", "Be brief."), *TALK]])
    last = "<s>[INST] hi[/INST] hello</s>[INST] Be brief.\n\nbye[/INST] see you</s>"
    out = render(table)
    assert out.formatted["text"].to_pylist() == [
        "<s>[INST] Be brief.\n\nhi[/INST] hello</s>",
        last,
    ]
    assert pieces(out.formatted) == [[" hello</s>"], [" see you</s>"]]
    assert out.added == {"turns": 1}

    whole = render(table, turns="whole").formatted
    assert whole["text"].to_pylist() == [last]
    assert pieces(whole) == [[" hello</s>", " see you</s>"]]


def test_equal_questions_do_not_write_it_twice(render):
    out = render(make_table([[("system", "Be brief."), *TALK[:2], *TALK[:2]]], tools=[TOOLS]))
    for text in out.formatted["text"].to_pylist():
        assert text.count("Be brief.") == text.count("[AVAILABLE_TOOLS]") == 1
    assert [text.count("[INST]") for text in out.formatted["text"].to_pylist()] == [1, 2]


@pytest.mark.parametrize("copies", [1, 12])
def test_a_weight_on_a_question_before_the_system_turn_is_refused(render, copies):
    asked = {"role": "user", "content": "hi", "weight": 1.0}
    out = render(make_table([[("system", "Be brief."), asked, *TALK[1:]]] * copies))
    assert (
        out.quarantined["detail"].to_pylist()
        == ["the template writes messages out of order"] * copies
    )


def rows_and_texts(rendered):
    return zip(*(rendered.formatted[name].to_pylist() for name in ("row", "text")), strict=True)


@pytest.mark.parametrize(("turns", "records"), [("joined", 69), ("alone", 110)])
def test_answers_after_tool_results_keep_their_system_turn(real_table, render, turns, records):
    """Mistral's own template omits the system turn from prompts that end in a tool result."""
    table = real_table("reasoning")
    ours = render(table, turns=turns, reasoning="strip")
    assert set(ours.quarantined["reason"].to_pylist()) == {"only_thinking"}
    assert ours.formatted.num_rows == records
    systems = [row["messages"][0]["content"] for row in table.to_pylist()]
    counts = [text.count(systems[row]) for row, text in rows_and_texts(ours)]
    assert counts == [1] * records

    own = render(table, "chat", turns=turns, reasoning="strip")
    counts = [text.count(systems[row]) for row, text in rows_and_texts(own)]
    assert (counts.count(1), counts.count(0)) == (69, 41)
