"""For every reason code of the format step: a row that is refused with it, and a remedy that works.

Each remedy comes from the row's detail or from the table of reasons, followed exactly.
"""

import copy
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.records.reasons import QUARANTINE_REASONS
from packhouse.render import make_renderer, trained_answers as rule
from tests.templates.families import SHAPES, TOOLS, Family, family, snapshot_of
from tests.templates.test_chat_toys import THINKING
from tests.templates.test_model_families import CALL_STOPS, CALL_WITHOUT_END, CALLS_ONLY
from tests.templates.toys import CHATML, make_table, pieces, render_chat

pytestmark = pytest.mark.usefixtures("shared")

Rows = list[dict[str, Any]]
QWEN3, GPT_OSS, R1 = map(family, ("qwen3.jinja", "gptoss.jinja", "deepseek_r1_distill.jinja"))
MUSE, GEMMA4, GEMMA4_5 = map(family, ("muse_glimmer.jinja", "gemma4.jinja", "gemma4_v5.jinja"))
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def toy(source: str, *stops: str) -> Family:
    return QWEN3.with_template(source, *stops)


def chatml(answer: str) -> str:
    """ChatML with other text for answers."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        + HEADER
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(id: str | None, **function: Any) -> str:
    named = {} if id is None else {"id": id}
    return json.dumps([{"type": "function", **named, "function": function}])


def calls(*cities: Any, name: str = "get_weather") -> str:
    return json.dumps(
        [
            {"type": "function", "id": f"c{n}", "function": {"name": name, "arguments": own}}
            for n, own in enumerate(c if isinstance(c, dict) else {"city": c} for c in cities)
        ]
    )


def changed(messages: Rows, number: int, **fields: Any) -> Rows:
    made = copy.deepcopy(messages)
    made[number] |= fields
    return made


def unweighed(messages: Rows, number: int) -> Rows:
    return changed(messages, number, weight=0.0)


HI = [user("Hi"), answer("Hello!")]
GREETED = [answer("Welcome!"), *SHAPES["chat2"]]
THOUGHT = [user("Hi"), answer("Hello!", reasoning="They greet.")]
TAGGED = [user("Hi"), answer("<think>They greet.</think>Hello!")]
TAG_OPEN = [user("Hi"), answer("<think>They greet."), user("Well?"), answer("Hello!")]
TAG_ONLY = [user("Hi"), answer("<think>They greet.</think>"), user("Well?"), answer("Hello!")]
ONE_CALL = [user("Rome?"), answer("", tool_calls=calls("Rome"))]
RESULT = {"role": "tool", "content": "Sunny"}
CALL_TEXT = [user("Rome?"), answer("I look.", tool_calls=calls("Rome")), RESULT, answer("Sun.")]
APART = [user("Rome?"), answer("I look."), answer("", tool_calls=calls("Rome")), *CALL_TEXT[2:]]
IN_TURN = [
    *(user("Rome and Oslo?"), answer("", tool_calls=calls("Rome")), RESULT),
    *(answer("", tool_calls=calls("Oslo")), RESULT, answer("Sun.")),
]

WITH_CALLS = chatml(
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments | tojson }}{% endfor %}"
)
CALL_AFTER_STOP = chatml(
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|im_end|>' if m.content }}"
    "{{ c.function.name + c.function.arguments | tojson }}{% endfor %}"
)
THOUGHT_STOPS = chatml(
    "{% if m.reasoning_content %}{{ m.reasoning_content + '<|im_end|>' }}{% endif %}{{ m.content }}"
)
THOUGHT_ENDS = THOUGHT_STOPS.replace("<|im_end|>' }}{% endif %}", "<|end|>' }}{% endif %}")
LATE_STOP_FIRST = chatml("{{ '<|im_end|>' if '!' in m.content }}{{ m.content }}")
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
HEADERS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}" + (
    HEADER
)
STOP_FIRST = chatml("{{ '<|im_end|>' + m.content }}")
SHOUTS = chatml("{{ m.content | upper if '!' in m.content else m.content }}")
NO_PLACE = chatml("{{ m.content }}").replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.content == 'Hi' %}{{ raise_exception('no Hi') }}{% endif %}",
)
RECURSES = "{% macro f(x) %}{{ f(x) if x == 'Hi' else x }}{% endmacro %}" + CHATML.replace(
    "m.content", "f(m.content)"
)


class Case(NamedTuple):
    """A row that is refused, and the change that its remedy makes."""

    reason: str
    of: Family
    messages: Rows
    says: str
    """Text in the detail, or in the table of reasons."""
    remedy: dict[str, Any]
    """`of`, `messages` or settings of the format section."""
    config: Mapping[str, Any] = MappingProxyType({})
    tools: Any = None


# fmt: off
CASES = {
    "the template raises": Case("template", toy(NO_PLACE), HI, "Jinja file", {"of": toy(CHATML)}),
    "a system turn that it refuses": Case("template", family("gemma.jinja"), SHAPES["sys"],
        "Jinja file", {"of": family("gemma3.jinja")}),
    "two calls where it takes one": Case("template", family("llama3_1.jinja"), SHAPES["parallel"],
        "only supports single tool-calls", {"messages": IN_TURN}, tools=TOOLS),
    "a prompt that does not lead to the answer": Case("template", GEMMA4_5, SHAPES["textcall"],
        '"weight": 0', {"messages": unweighed(SHAPES["textcall"], 3)}, tools=TOOLS),
    "a text that is rewritten": Case("template", toy(SHOUTS), [user("Hi!"), answer("Hello!")],
        "Jinja file", {"of": toy(CHATML)}),
    "a turn that whole renderings tear apart": Case("template", GEMMA4, SHAPES["parallel"],
        "Set format.turns: joined", {"turns": "joined"}, {"turns": "whole"}, TOOLS),
    "a prompt that does not begin the whole rendering": Case("template",
        family("qwen3_5_think.jinja"), SHAPES["agent"], "Set format.turns: joined",
        {"turns": "joined"}, {"turns": "whole"}, TOOLS),
    "parts with weights in a text that is written as JSON": Case("template",
        toy(chatml("{{ m.content | tojson }}")), [user("Hi"), answer('"Well." Hello!',
        part_weights="[[8, 0.0], [6, 1.0]]")], "one weight", {"messages": [user("Hi"),
        answer('"Well." Hello!', weight=0.5)]}),
    "a control token in an id": Case("template", toy(WITH_CALLS.replace("c.function.name",
        "(c.id or '') + c.function.name", 1)), changed(ONE_CALL, 1,
        tool_calls=call("get<|im_start|>", name="get", arguments={})), "Remove it",
        {"messages": changed(ONE_CALL, 1, tool_calls=call("get", name="get", arguments={}))}),
    "arguments that are not an object": Case("template", toy(WITH_CALLS), [user("Rome?"), answer("",
        tool_calls=call(None, name="look", arguments="oops"))], "as an object",
        {"messages": ONE_CALL}),
    "a template that recurses": Case("template_limit", toy(RECURSES), HI, "fix a template",
        {"of": toy(CHATML)}),
    "no place for calls": Case("content_lost", family("phi3.jinja"), ONE_CALL, "Jinja file",
        {"of": toy(WITH_CALLS)}),
    "the first of two calls": Case("content_lost", GPT_OSS, SHAPES["parallel"],
        "each call, followed by its result, in a separate message", {"messages": IN_TURN},
        tools=TOOLS),
    "no text with a call": Case("content_lost", MUSE, CALL_TEXT, "the text in a separate message",
        {"messages": APART}, tools=TOOLS),
    "an id in place of a name": Case("content_lost", toy(CALLS_ONLY), ONE_CALL,
        "format.call_ids: functions", {"call_ids": "functions"}),
    "no place for tools": Case("content_lost", toy(WITH_CALLS), HI, "Jinja file", {"of": QWEN3},
        tools=TOOLS),
    "only calls have thoughts": Case("thought_lost", GEMMA4, THOUGHT, "format.reasoning: strip",
        {"reasoning": "strip"}),
    "the same, with the thought": Case("thought_lost", GEMMA4, THOUGHT,
        "between the tags that the model writes", {"messages": TAGGED}),
    "every prompt opens a thought": Case("no_reasoning", R1, HI,
        "Add reasoning and set format.thought_end", {"messages": THOUGHT,
        "thought_end": "\n</think>\n\n"}),
    "the same, in one message": Case("no_reasoning", R1, SHAPES["mixed"], '"weight": 0',
        {"messages": unweighed(SHAPES["mixed"], 1)}, {"thought_end": "\n</think>\n\n"}),
    "the same, with another template": Case("no_reasoning", R1, HI,
        "a Jinja file whose prompt does not open one",
        {"of": R1.with_template(R1.source.replace("<think>\\n", ""))}),
    "a greeting": Case("starts_with_assistant", QWEN3, GREETED, '"weight": 0',
        {"messages": unweighed(GREETED, 0)}),
    "a greeting without its question": Case("starts_with_assistant", QWEN3, GREETED,
        "Add the question before it", {"messages": [user("Hi"), *GREETED]}),
    "a call without an end": Case("no_stop", toy(CALL_WITHOUT_END), SHAPES["tools"],
        'Set format.stop_tokens: ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]',
        {"stop_tokens": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]}),
    "a whole rendering without stop tokens": Case("no_stop", GEMMA4, SHAPES["tools"],
        "Set format.turns: joined", {"turns": "joined"}, {"turns": "whole"}, TOOLS),
    "an end after each call": Case("stop_inside", GPT_OSS.with_template(CALL_STOPS, "<|im_end|>"),
        SHAPES["parallel"], "Put the text after it in a separate message", {"messages": IN_TURN}),
    "an end before a call": Case("stop_inside", toy(CALL_AFTER_STOP), CALL_TEXT,
        "Put the text after it in a separate message", {"messages": APART}),
    "an end after a thought": Case("stop_inside", toy(THOUGHT_STOPS), THOUGHT,
        "Set format.reasoning: strip", {"reasoning": "strip"}),
    "another stop token after a thought": Case("stop_inside", toy(THOUGHT_ENDS, "<|end|>"), THOUGHT,
        'Set format.stop_tokens: ["<|endoftext|>", "<|im_end|>"]', {"stop_tokens": ["<|endoftext|>",
        "<|im_end|>"]}),
    "another stop token of the template's own": Case("stop_inside", toy(LATE_STOP_FIRST),
        [user("Hi!"), answer("Hello!")], "a Jinja file that writes it only at the end",
        {"of": toy(CHATML)}),
    "a template that writes the stop token first": Case("TemplateError", toy(STOP_FIRST), HI,
        "a Jinja file that writes it only at the end", {"of": toy(CHATML)}),
    "a template without an end": Case("TemplateError", toy(NO_END), HI,
        "a template that ends each turn", {"of": toy(CHATML)}),
    "the same, trained without an end": Case("TemplateError", toy(NO_END), HI,
        "set format.train_on: all", {"train_on": "all"}),
    "a header that ends turns": Case("TemplateError", toy(HEADERS), HI,
        "set format.stop_tokens: ['<|im_start|>']", {"stop_tokens": ["<|im_start|>"]}),
    "thoughts that the template never writes": Case("TemplateError", family("qwen2_5.jinja"),
        THOUGHT, "format.reasoning: strip", {"reasoning": "strip"}),
    "thoughts that every prompt opens": Case("TemplateError", R1, THOUGHT, "Set format.thought_end",
        {"thought_end": "\n</think>\n\n"}),
    "no message with weight": Case("nothing_trained", QWEN3, unweighed(HI, 1),
        "weights of messages", {"messages": HI}),
    "nothing but a thought": Case("only_thinking", QWEN3, TAG_ONLY, "weight to 0",
        {"messages": unweighed(TAG_ONLY, 1)}, {"reasoning": "strip"}),
    "the same, kept": Case("only_thinking", QWEN3, TAG_ONLY, "format.reasoning: keep",
        {"reasoning": "keep"}, {"reasoning": "strip"}),
    "a thought without an end": Case("unclosed_thinking", QWEN3, TAG_OPEN, "close it",
        {"messages": changed(TAG_OPEN, 1, content="<think>They greet.</think>Hi.")},
        {"reasoning": "strip"}),
    "the same, untrained": Case("unclosed_thinking", QWEN3, TAG_OPEN, "its weight to 0",
        {"messages": unweighed(TAG_OPEN, 1)}, {"reasoning": "strip"}),
    "the same, kept unchanged": Case("unclosed_thinking", QWEN3, TAG_OPEN, "format.reasoning: keep",
        {"reasoning": "keep"}, {"reasoning": "strip"}),
}
# fmt: on


CODES = {*QUARANTINE_REASONS["format"]}


def refusal(of: Family, messages: Rows, tools: Any, config: Mapping[str, Any]) -> tuple[str, str]:
    renderer = make_renderer(FormatConfig(**config), snapshot_of(of))
    table = make_table([copy.deepcopy(messages)], tools=[json.dumps(tools)] if tools else None)
    try:
        rendered = renderer.render(table)
    except TemplateError as error:
        return "TemplateError", str(error)
    if not rendered.quarantined.num_rows:
        assert all(pieces(rendered.formatted))
        return "", ""
    (row,) = rendered.quarantined.to_pylist()
    return row["reason"], row["detail"]


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_of_a_refusal_works_when_it_is_followed(name):
    case = CASES[name]
    reason, detail = refusal(case.of, case.messages, case.tools, case.config)
    assert reason == case.reason, detail
    helps = [detail, *([QUARANTINE_REASONS["format"][reason].remedy] if reason in CODES else [])]
    assert any(case.says in each for each in helps), detail

    remedy = dict(case.remedy)
    of, messages = remedy.pop("of", case.of), remedy.pop("messages", case.messages)
    assert refusal(of, messages, case.tools, case.config | remedy) == ("", "")


def test_every_reason_code_has_a_case():
    elsewhere = {"label"}  # of `classification`: tests/templates/test_single_turn.py
    assert {case.reason for case in CASES.values()} - {"TemplateError"} == CODES - elsewhere


def test_a_row_of_too_large_records_is_rendered_whole(monkeypatch):
    monkeypatch.setattr(rule, "MAX_BYTES", 200)
    talk = [turn for number in range(5) for turn in (("user", f"a{number}"), THOUGHT[1])]
    refused = render_chat(THINKING, [talk])
    assert refused.quarantined["reason"].to_pylist() == ["template_limit"]
    assert "Set format.turns: whole" in refused.quarantined["detail"][0].as_py()
    assert render_chat(THINKING, [talk], config={"turns": "whole"}).formatted.num_rows == 1
