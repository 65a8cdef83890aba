"""Templates of families not listed in the design, each with an earlier mistake in its training."""

import json

import pytest

from packhouse.auditing.plain_template import PlainTemplate
from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from tests.templates.toys import chat_renderer, make_snapshot, make_table, pieces, render_chat

TOKENS = {"<|system|>": 1, "<|user|>": 2, "<|model|>": 3, "</s>": 4}
LAST_WORD = (  # the last message alone decides whether the prompt or the model writes <|system|>
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' %}<|system|>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: "
    "{% if messages[-1].content.endswith('/no') %}<|system|>{% endif %}{% endif %}"
)
LAST_SWITCH = LAST_WORD.replace(  # like Nemotron Nano v2: the last switch in all texts decides
    "{% if messages[-1].content.endswith('/no') %}",
    "{% set ns = namespace(no=false) %}{% for m in messages %}{% if '/no' in m.content %}"
    "{% set ns.no = true %}{% elif '/yes' in m.content %}{% set ns.no = false %}{% endif %}"
    "{% endfor %}{% if ns.no %}",
)
OPENS = (
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' and loop.last %}<think>\n{% endif %}"
    "{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>\n{% endif %}"
)

EMPTY_THOUGHT = (  # reasoning is never written; a finished answer has an empty block instead
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>\n{% endif %}"
)
HEADERS_STOP = (  # like GLM: the header of the next turn stops the model
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|model|>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)

BUDGET = (  # like Seed-OSS: a number, of which 0 means False
    "{% if thinking_budget is defined and thinking_budget > 0 %}<|system|>Think for "
    "{{ thinking_budget }} tokens.</s>{% endif %}{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|user|>assistant: "
    "{% if thinking_budget == 0 %}<think></think>{% endif %}{% endif %}"
)
CONTROLS = (  # like Granite 3.3: an argument that only prompts use, and a name that branches set
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<|user|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant"
    "{% if controls %} {{ controls | tojson }}{% endif %}: {% endif %}"
)


TURN = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
TAGS = TOKENS | {"<think>": 5, "</think>": 6}
OPENED = TURN.replace(  # the prompt opens a thought in every turn
    "{{ m.content }}", "{{ '<think>' * (m.role == 'assistant') }}{{ m.content }}"
) + PROMPT.replace("assistant: ", "assistant: <think>")
KEPT_FOR_CALLS = (  # like Kimi K2-Thinking: reasoning stays up to the last answer without a call
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}"
    "{% endif %}"
    "{% endfor %}{% for m in messages %}<|user|>{{ m.role }}: {% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}" + PROMPT
)
CALLS_STOP = (  # calls end with a token of the files, and answers with another
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}<|model|>{% endfor %}"
    "{% if not m.tool_calls %}<|system|>{% endif %}{% endfor %}" + PROMPT
)
IF_TOOLS = "{{ m.reasoning_content or '' if tools else '' }}{{ m.content }}"
NEEDS_TOOLS = (
    "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}"
    + TURN.replace("{{ m.content }}", IF_TOOLS)
    + PROMPT
)
TOOLS = json.dumps([{"function": {"name": "look", "description": "Look.", "parameters": {}}}])


def said(content, thought=None, **arguments):
    """An answer, perhaps with reasoning, and with a call if there are arguments."""
    answer = {"role": "assistant", "content": content, "reasoning": thought}
    if not arguments:
        return answer
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {**answer, "tool_calls": json.dumps([call])}


TWO, PLAIN, THOUGHT = ("user", "Two?"), ("assistant", "2."), said("2.", "Hm.")


@pytest.mark.parametrize(
    ("template", "talk", "options", "trained"),
    [
        (CONTROLS, [TWO, PLAIN], {}, ["2.</s>"]),
        (BUDGET, [TWO, PLAIN], {}, ["2.</s>"]),
        (BUDGET, [TWO, THOUGHT], {}, ["<think>Hm.</think>2.</s>"]),
        (HEADERS_STOP, [TWO, PLAIN, TWO, PLAIN],
         {"config": {"turns": "whole", "stop_tokens": ["<|user|>"]}}, ["2.<|user|>"] * 2),
        (EMPTY_THOUGHT, [TWO, said("", "Hm.", at="a")],
         {"config": {"thought_end": "\n</think>\n\n"}},
         ['Hm.\n</think>\n\n[look {"at": "a"}]</s>']),
        (OPENED, [TWO, ("assistant", "Hm.</think>2.")], {"added_tokens": TAGS},
         ["Hm.</think>2.</s>"]),
        (KEPT_FOR_CALLS, [TWO, said("", "Hm.", at="a"), ("tool", "Sunny"),
                          said("Sun.", "It says so.")], {"added_tokens": TAGS},
         ['<think>Hm.</think>[look {"at": "a"}]</s>', "<think>It says so.</think>Sun.</s>"]),
        (CALLS_STOP, [TWO, said("", at="a"), ("tool", "Sunny"), said("Sun.")],
         {"stop_tokens": {"<|model|>": "generation_config.json", "</s>": "tokenizer"}},
         ['look{"at": "a"}<|model|>', "Sun.<|system|>"]),
        *((TURN.replace("m.content", f"(m.{name} or '') + m.content") + PROMPT, [TWO, THOUGHT], {},
           ["Hm.2.</s>"]) for name in ("reasoning", "reasoning_content", "thinking")),
        (NEEDS_TOOLS, [TWO, THOUGHT], {"tools": [TOOLS]}, ["Hm.2.</s>"]),
    ],
)  # fmt: skip
def test_the_answer_as_the_model_would_write_it_is_trained(template, talk, options, trained):
    out = render_chat(template, [talk], **{"added_tokens": TOKENS} | options)

    assert pieces(out.formatted) == [trained]


@pytest.mark.parametrize("template", [CONTROLS, BUDGET])
def test_an_argument_of_prompts_and_a_number_are_no_thinking_switch(template):
    snapshot = make_snapshot(chat_template=template, added_tokens=TOKENS)
    assert PlainTemplate(FormatConfig(), snapshot).switch is None


@pytest.mark.parametrize(
    ("template", "answer", "tools", "reason"),
    [
        (OPENS, PLAIN, None, "no_reasoning"),  # within a thought that the prompt opens
        *((EMPTY_THOUGHT, said(f"{thought}</think>\n\n2."), None, "thought_lost")
          for thought in ("<think>\nHm.\n", "<think>\n\n", "Hm.")),  # an empty one comes first
        (NEEDS_TOOLS, PLAIN, [TOOLS, None], "template"),
        (NEEDS_TOOLS.replace("{{ raise_exception('no tools') }}", ""), THOUGHT, [TOOLS, None],
         "thought_lost"),
    ],
)  # fmt: skip
def test_an_answer_that_the_model_would_not_write_is_refused(template, answer, tools, reason):
    talks = [[TWO, answer]] * len(tools or [None])
    out = render_chat(template, talks, tools=tools, added_tokens=TOKENS)

    assert out.quarantined["reason"].to_pylist() == [reason]


def test_advice_names_arguments_and_not_names_that_the_template_sets():
    with pytest.raises(TemplateError, match=r"turns thinking on \(controls\), set"):
        render_chat(CONTROLS, [[TWO, THOUGHT]], added_tokens=TOKENS)


def test_a_prompt_that_depends_on_its_last_message_makes_another_kind():
    turns = [
        (("user", "assistant")[at % 2], f"turn {at}" + " /no" * (at in (0, 50))) for at in range(80)
    ]
    renderer = chat_renderer(LAST_WORD, {"turns": "exact"}, added_tokens=TOKENS)
    out = renderer.render(make_table([turns]))

    (trained,) = pieces(out.formatted)
    assert trained == [
        f"{'' if at in (1, 51) else '<|system|>'}{turns[at][1]}</s>" for at in range(1, 80, 2)
    ]


def test_of_two_switches_in_the_text_the_later_one_counts():
    switches = {0: " /no", 2: " /yes", 4: " /no", 40: " /yes", 60: " /no"}
    turns = [(("user", "assistant")[n % 2], f"turn {n}{switches.get(n, '')}") for n in range(90)]
    renderer = chat_renderer(LAST_SWITCH, {"turns": "exact"}, added_tokens=TOKENS)
    out = renderer.render(make_table([turns]))

    (trained,) = pieces(out.formatted)
    is_off = [at < 2 or 4 <= at < 40 or at >= 60 for at in range(90)]
    assert trained == [
        f"{'' if is_off[at] else '<|system|>'}turn {at}</s>" for at in range(1, 90, 2)
    ]


def test_a_thought_in_tags_is_not_opened_twice():
    talks = [
        [("user", f"{n}?"), ("assistant", f"{tag}Hm {n}.\n</think>{n}.")]
        for n, tag in enumerate(["", "", "<think>\n", " <think>", "", "<think>\n"])
    ]
    out = render_chat(OPENS, talks, added_tokens=TOKENS)

    assert out.formatted["row"].to_pylist() == [0, 1, 4]
    assert pieces(out.formatted)[0] == ["Hm 0.\n</think>0.</s>"]
    assert out.quarantined["row"].to_pylist() == [2, 3, 5]
    assert set(out.quarantined["reason"].to_pylist()) == {"thought_lost"}
    plain = render_chat(OPENS, talks[2:3], added_tokens=TOKENS, config={"reasoning": "strip"})
    assert plain.quarantined["reason"].to_pylist() == ["no_reasoning"]


def test_tags_of_an_answer_s_thought_are_tokens_and_no_text():
    texts = ("<think>\nHm.\n</think>\n\n2.", "Say <think> and </think>.", "2.", "3.")
    talks = [[("user", "<think>Two?</think>"), ("assistant", text)] for text in texts]
    out = render_chat(TURN + PROMPT, talks, added_tokens=TAGS)

    assert pieces(out.formatted, "content_spans") == [
        ["<think>Two?</think>", "\nHm.\n", "\n\n2."],
        *[["<think>Two?</think>", text] for text in texts[1:]],
    ]
    plain = render_chat(TURN + PROMPT, talks, added_tokens=TOKENS)
    assert pieces(plain.formatted, "content_spans")[0][1] == texts[0]


@pytest.mark.parametrize(
    ("condition", "is_found"),
    [
        ("mode == 'thinking'", True),  # like DeepSeek V3.2
        ("mode in ['high', 'low'] or (mode is not defined and true)", True),
        ("mode not in ['none', 'chat']", True),
        ("mode == 4", False),
    ],
)
def test_a_thinking_switch_may_take_words_that_the_template_compares(condition, is_found):
    template = (
        f"{{% set on = {condition} %}}{{% for m in messages %}}<|user|>{{{{ m.role }}}}: "
        "{% if m.role == 'assistant' %}{% if on %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{% endif %}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant: {% if on %}<think>{% endif %}{% endif %}"
    )
    turns = [("user", "Two?"), {"role": "assistant", "content": "2.", "reasoning": "Hm."}]
    plain = [("user", "Two?"), ("assistant", "2.")]
    if not is_found:
        with pytest.raises(TemplateError, match=r"turns thinking on \(mode\)"):
            render_chat(template, [turns], added_tokens=TOKENS)
        return
    done = render_chat(template, [turns, plain], added_tokens=TOKENS)
    assert done.quarantined.to_pylist() == []
    assert pieces(done.formatted) == [["Hm.</think>2.</s>"], ["2.</s>"]]
