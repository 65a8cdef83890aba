"""Templates of families that the design does not list, each with what it once was trained wrong."""

import json

from packhouse.auditing.plain_template import PlainTemplate
from packhouse.recipe import FormatConfig
from packhouse.render import turns as rule
from tests.templates.test_chat_toys import THINKING
from tests.templates.toys import chat_renderer, make_snapshot, make_table, pieces, render_chat

METHARME = (  # EOS after the last turn alone; headers end the turns before
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|model|>{{ m.content }}"
    "{% if loop.last %}</s>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
TOKENS = {"<|system|>": 1, "<|user|>": 2, "<|model|>": 3, "</s>": 4}
LAST_WORD = (  # the last message alone decides whether the prompt or the model writes <|system|>
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' %}<|system|>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: "
    "{% if messages[-1].content.endswith('/no') %}<|system|>{% endif %}{% endif %}"
)
LAST_SWITCH = LAST_WORD.replace(  # as Nemotron Nano v2: the last switch of all texts decides
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

EMPTY_THOUGHT = (  # reasoning is never written; a finished answer has an empty thought in its place
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>\n{% endif %}"
)
HEADERS_STOP = (  # as GLM: the header of the next turn stops the model
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|model|>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)

BUDGET = (  # as Seed-OSS: a number, of which 0 is False
    "{% if thinking_budget is defined and thinking_budget > 0 %}<|system|>Think for "
    "{{ thinking_budget }} tokens.</s>{% endif %}{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|user|>assistant: "
    "{% if thinking_budget == 0 %}<think></think>{% endif %}{% endif %}"
)


def test_a_number_is_no_thinking_switch():
    thought = {"role": "assistant", "content": "2.", "reasoning": "Hm."}
    talks = [[("user", "Two?"), ("assistant", "2.")], [("user", "Two?"), thought]]
    out = render_chat(BUDGET, talks, added_tokens=TOKENS)

    assert out.formatted["text"].to_pylist() == [
        "<|user|>user: Two?</s><|user|>assistant: 2.</s>",
        "<|user|>user: Two?</s><|user|>assistant: <think>Hm.</think>2.</s>",
    ]
    snapshot = make_snapshot(chat_template=BUDGET, added_tokens=TOKENS)
    assert PlainTemplate(FormatConfig(), snapshot).switch is None


def test_the_next_header_is_no_end_of_a_turn():
    roles = [("system", "Be kind."), ("user", "Two?"), ("assistant", "2.")]
    out = render_chat(
        METHARME, [[*roles, ("user", "Three?"), ("assistant", "3.")]], added_tokens=TOKENS
    )

    texts = out.formatted["text"].to_pylist()
    assert [text for text in texts if text.endswith("3.</s>")] == [
        "<|system|>Be kind.<|user|>Two?<|model|>2.<|user|>Three?<|model|>3.</s>"
    ]


def test_what_a_prompt_asks_of_its_last_message_alone_makes_another_kind():
    turns = [
        (("user", "assistant")[at % 2], f"turn {at}" + " /no" * (at in (0, 50))) for at in range(80)
    ]
    renderer = chat_renderer(LAST_WORD, {"turns": "exact"}, added_tokens=TOKENS)
    out = renderer.render(make_table([turns]))

    (trained,) = pieces(out.formatted)
    assert trained == [
        f"{'' if at in (1, 51) else '<|system|>'}{turns[at][1]}</s>" for at in range(1, 80, 2)
    ]


def test_what_only_some_prompts_ask_makes_another_kind_from_then_on():
    template = LAST_WORD.replace(
        "messages[-1].content.endswith",
        "'x' in messages[-1].content and messages[-1].content.endswith",
    )
    texts = {20: "x", 30: "x", 40: "x", 50: "x /no"}
    turns = [(("user", "assistant")[n % 2], texts.get(n, f"turn {n}")) for n in range(80)]
    renderer = chat_renderer(template, {"turns": "exact"}, added_tokens=TOKENS)
    (trained,) = pieces(renderer.render(make_table([turns])).formatted)

    assert [n for n, piece in enumerate(trained) if not piece.startswith("<|system|>")] == [25]


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


def test_a_plain_answer_is_not_trained_within_a_thought_that_the_prompt_opens():
    out = render_chat(OPENS, [[("user", "Two?"), ("assistant", "2.")]], added_tokens=TOKENS)

    assert out.quarantined["reason"].to_pylist() == ["no_reasoning"]


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


def test_an_empty_thought_is_not_written_before_one_in_tags():
    talks = [
        [("user", "Two?"), ("assistant", f"{thought}</think>\n\n2.")]
        for thought in ("<think>\nHm.\n", "<think>\n\n", "Hm.")
    ]
    out = render_chat(EMPTY_THOUGHT, talks, added_tokens=TOKENS)

    assert out.quarantined["reason"].to_pylist() == ["thought_lost"] * 3


def test_a_call_keeps_what_opens_it_after_a_thought_end():
    call = [{"type": "function", "function": {"name": "look", "arguments": {"at": "Rome"}}}]
    asked = {"role": "assistant", "content": "", "reasoning": "Hm."}
    asked["tool_calls"] = json.dumps(call)
    out = render_chat(
        EMPTY_THOUGHT,
        [[("user", "Rome?"), asked]],
        config={"thought_end": "\n</think>\n\n"},
        added_tokens=TOKENS,
    )

    assert pieces(out.formatted) == [['Hm.\n</think>\n\n[look {"at": "Rome"}]</s>']]


def test_the_last_answer_of_a_whole_rendering_gets_the_stop_token_that_the_next_turn_would_write():
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    config = {"turns": "whole", "stop_tokens": ["<|user|>"]}
    out = render_chat(HEADERS_STOP, [talk], config=config, added_tokens=TOKENS)

    assert out.formatted["text"].to_pylist() == ["<|user|>a<|model|>b<|user|>c<|model|>d<|user|>"]
    assert pieces(out.formatted) == [["b<|user|>", "d<|user|>"]]


def test_a_row_whose_records_are_too_large_together_is_refused(monkeypatch):
    thought = {"role": "assistant", "content": "b", "reasoning": "Hm."}
    talk = [turn for number in range(5) for turn in (("user", f"a{number}"), thought)]
    assert render_chat(THINKING, [talk]).formatted.num_rows == 5

    monkeypatch.setattr(rule, "MAX_BYTES", 500)
    out = render_chat(THINKING + "{# again #}", [talk])
    assert out.quarantined["reason"].to_pylist() == ["template_limit"]
    assert "Set format.turns: whole" in out.quarantined["detail"][0].as_py()
