"""`mistral_system`: Mistral's template, with the system turn wherever a row has one."""

import json

import pytest

from packhouse.recipe import FormatConfig, SourceConfig, ValidateConfig
from packhouse.sources import read_shard, scan_source
from packhouse.templates import make_renderer
from packhouse.tokenization import load_snapshot
from tests.templates.toys import make_table, pieces

MISTRAL = "mistral-7b-instruct-v0.3"
TALK = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "see you")]
TOOLS = json.dumps([{"type": "function", "function": {"name": "find", "description": "d"}}])


@pytest.fixture
def render(shared):
    snapshot = load_snapshot(str(shared / "tokenizers" / MISTRAL))

    def render(table, template="mistral_system", **config):
        return make_renderer(FormatConfig(template=template, **config), snapshot).render(table)

    return render


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_is_mistrals_own_where_no_system_turn_is_given(render, tools):
    table = make_table([TALK, TALK[:2]], tools=[tools, tools])
    own, ours = render(table, "chat"), render(table)
    assert own.formatted.num_rows == 2
    assert ours.formatted.equals(own.formatted)


def test_the_system_turn_stands_in_the_last_user_turn_and_is_not_trained(render):
    out = render(make_table([[("system", "Be brief."), *TALK]])).formatted
    assert out["text"].to_pylist() == [
        "<s>[INST] hi[/INST] hello</s>[INST] Be brief.\n\nbye[/INST] see you</s>"
    ]
    assert pieces(out) == [[" hello</s>", " see you</s>"]]


def test_equal_questions_do_not_write_it_twice(render):
    out = render(make_table([[("system", "Be brief."), *TALK[:2], *TALK[:2]]], tools=[TOOLS]))
    (text,) = out.formatted["text"].to_pylist()
    assert text.count("Be brief.") == text.count("[AVAILABLE_TOOLS]") == 1


@pytest.mark.parametrize("copies", [1, 12])
def test_a_weight_on_a_question_before_the_system_turn_is_refused(render, copies):
    asked = {"role": "user", "content": "hi", "weight": 1.0}
    out = render(make_table([[("system", "Be brief."), asked, *TALK[1:]]] * copies))
    assert (
        out.quarantined["detail"].to_pylist()
        == ["messages are not written in their order"] * copies
    )


@pytest.mark.parametrize("per_turn", [False, True])
def test_answers_behind_tool_results_keep_their_system_turn(shared, render, per_turn):
    source = SourceConfig(path=str(shared / "data" / "reason_tool_use_demo_50.jsonl"))
    (shard,) = scan_source(source)
    table = read_shard(shard, source, ValidateConfig(), "prompt").validated
    own, ours = (
        render(table, name, one_example_per_turn=per_turn) for name in ("chat", "mistral_system")
    )
    refused = own.quarantined.to_pylist()
    assert len({row["row"] for row in refused}) == 22
    assert "message 0 (system) is not in the rendering: 'You are" in refused[0]["detail"]
    assert ours.quarantined.num_rows == 0
    assert ours.formatted.num_rows == (112 if per_turn else 50)
