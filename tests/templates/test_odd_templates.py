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


def test_an_argument_that_only_prompts_write_is_not_a_thinking_switch():
    out = render_chat(CONTROLS, [[("user", "Two?"), ("assistant", "2.")]], added_tokens=TOKENS)

    assert pieces(out.formatted) == [["2.</s>"]]
    snapshot = make_snapshot(chat_template=CONTROLS, added_tokens=TOKENS)
    assert PlainTemplate(FormatConfig(), snapshot).switch is None


def test_advice_names_arguments_and_not_names_that_the_template_sets():
    thought = {"role": "assistant", "content": "2.", "reasoning": "Hm."}

    with pytest.raises(TemplateError, match=r"turns thinking on \(controls\), set"):
        render_chat(CONTROLS, [[("user", "Two?"), thought]], added_tokens=TOKENS)


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


def test_a_question_of_only_some_prompts_makes_another_kind_from_then_on():
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


TURN = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
TAGS = TOKENS | {"<think>": 5, "</think>": 6}


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


def test_a_tag_closes_the_thought_that_the_prompt_opened():
    opened = PROMPT.replace("assistant: ", "assistant: <think>")
    turn = TURN.replace(
        "{{ m.content }}", "{{ '<think>' * (m.role == 'assistant') }}{{ m.content }}"
    )
    out = render_chat(
        turn + opened, [[("user", "Two?"), ("assistant", "Hm.</think>2.")]], added_tokens=TAGS
    )

    assert pieces(out.formatted, "content_spans") == [["Two?", "Hm.", "2."]]
    assert pieces(out.formatted) == [["Hm.</think>2.</s>"]]


def test_a_thought_that_a_final_answer_takes_out_of_history_is_trained_as_before_a_call():
    template = (  # like Kimi K2-Thinking: reasoning stays up to the last answer without a call
        "{% set ns = namespace(last=-1) %}{% for m in messages %}"
        "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}"
        "{% endif %}"
        "{% endfor %}{% for m in messages %}<|user|>{{ m.role }}: {% if m.role == 'assistant' %}"
        "<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{% endif %}"
        "{{ m.content }}"
        "{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}" + PROMPT
    )
    call = json.dumps(
        [{"type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}]
    )
    asked = {"role": "assistant", "content": "", "reasoning": "I look.", "tool_calls": call}
    told = {"role": "assistant", "content": "Sun.", "reasoning": "It says so."}
    talk = [("user", "Rome?"), asked, ("tool", "Sunny"), told]
    out = render_chat(template, [talk], added_tokens=TAGS)

    assert pieces(out.formatted) == [
        ['<think>I look.</think>[look {"at": "a"}]</s>', "<think>It says so.</think>Sun.</s>"]
    ]


def test_stop_tokens_of_the_files_end_calls_where_the_template_ends_answers_with_another():
    template = (
        "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}<|model|>{% endfor %}"
        "{% if not m.tool_calls %}<|system|>{% endif %}{% endfor %}" + PROMPT
    )
    call = json.dumps(
        [{"type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}]
    )
    asked = {"role": "assistant", "content": "", "tool_calls": call}
    talk = [("user", "Rome?"), asked, ("tool", "Sunny"), ("assistant", "Sun.")]
    stops = {"<|model|>": "generation_config.json", "</s>": "tokenizer"}
    out = render_chat(template, [talk], added_tokens=TOKENS, stop_tokens=stops)

    assert pieces(out.formatted) == [['look{"at": "a"}<|model|>', "Sun.<|system|>"]]


def test_reasoning_is_read_by_the_names_of_all_clients():
    for name in ("reasoning", "reasoning_content", "thinking"):
        turn = TURN.replace("{{ m.content }}", f"{{{{ m.{name} or '' }}}}{{{{ m.content }}}}")
        thought = {"role": "assistant", "content": "2.", "reasoning": "Hm."}
        out = render_chat(turn + PROMPT, [[("user", "Two?"), thought]], added_tokens=TOKENS)
        assert pieces(out.formatted) == [["Hm.2.</s>"]]


def test_a_template_for_tools_alone_is_tried_with_tools():
    needs = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}"
    function = {"name": "look", "description": "Look.", "parameters": {}}
    tools = json.dumps([{"type": "function", "function": function}])
    talk = [("user", "Two?"), ("assistant", "2.")]
    out = render_chat(needs + TURN + PROMPT, [talk, talk], tools=[tools, None], added_tokens=TOKENS)

    assert pieces(out.formatted) == [["2.</s>"]]
    assert out.quarantined["reason"].to_pylist() == ["template"]


def test_a_template_that_writes_thoughts_only_where_there_are_tools_is_not_refused():
    turn = TURN.replace(
        "{{ m.content }}", "{{ m.reasoning_content or '' if tools else '' }}{{ m.content }}"
    )
    function = {"name": "look", "description": "Look.", "parameters": {}}
    tools = json.dumps([{"type": "function", "function": function}])
    talk = [("user", "Two?"), {"role": "assistant", "content": "2.", "reasoning": "Hm."}]
    template = "{{ tools | tojson }}" + turn + PROMPT
    out = render_chat(template, [talk, talk], tools=[tools, None], added_tokens=TOKENS)

    assert pieces(out.formatted) == [["Hm.2.</s>"]]
    assert out.quarantined["reason"].to_pylist() == ["thought_lost"]


CALLS = [{"type": "function", "id": "call00000", "function": {"name": "get", "arguments": {}}}]
IDS_OF_HISTORY = (  # like Apriel 1.6: the last turn has no end, and calls before it have ids
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "{% if not loop.last or messages[-1] is not sameas m %} {{ call.id }}{% endif %}]{% endfor %}"
    "{% if messages[-1] is not sameas m %}</s><|model|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}</s><|model|><|user|>assistant: {% endif %}"
)
TEXT_IS_BEGUN = (  # like Nemotron Nano v2: the prompt after an answer continues that answer
    "{% for m in messages %}{% if m.content %}<|user|>{{ m.role }}: {{ m.content }}"
    "{% if not (loop.last and add_generation_prompt and m.role == 'assistant') %}</s>{% endif %}"
    "{% endif %}{% for call in m.tool_calls or [] %}<|user|>assistant: [{{ call.function.name }}]"
    "</s>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|user|>assistant: "
    "{% endif %}"
)


def test_a_stop_token_that_only_history_has_is_no_advice():
    turns = [
        ("user", "Two?"),
        {"role": "assistant", "content": "", "tool_calls": json.dumps(CALLS)},
        {"role": "tool", "content": "2", "tool_call_id": "call00000"},
    ]
    out = render_chat(
        IDS_OF_HISTORY, [turns], config={"stop_tokens": ["</s>"]}, added_tokens=TOKENS
    )

    (refused,) = out.quarantined.to_pylist()
    assert refused["reason"] == "no_stop"
    assert "a Jinja file that ends the message" in refused["detail"]


def test_a_call_is_put_into_its_own_message_only_where_the_prompt_after_a_text_has_a_header():
    turns = [
        ("user", "Two?"),
        {"role": "assistant", "content": "Wait.", "tool_calls": json.dumps(CALLS)},
        {"role": "tool", "content": "2", "tool_call_id": "call00000"},
    ]
    headed = TEXT_IS_BEGUN.replace(" and messages[-1].role != 'assistant'", "").replace(
        "loop.last and add_generation_prompt and m.role == 'assistant'", "false"
    )
    begun, apart = (
        render_chat(template, [turns], added_tokens=TOKENS).quarantined["detail"][0].as_py()
        for template in (TEXT_IS_BEGUN, headed)
    )
    assert "Set format.template to a Jinja file" in begun
    assert "Put the text after it in a separate message" in apart


def test_stop_tokens_that_end_no_plain_answer_are_no_advice():
    template = (  # like Solar Open: reasoning ends with the token that ends plain answers
        "{% for m in messages %}<|user|>{{ m.role }}: "
        "{% if m.reasoning_content %}{{ m.reasoning_content }}</s>{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
        "{{ '<|model|>' if m.tool_calls else '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
    )
    called = {"role": "assistant", "content": "", "tool_calls": json.dumps(CALLS)}
    turns = [("user", "Two?"), {**called, "reasoning": "Hm."}, ("tool", "2")]
    config = {"stop_tokens": ["</s>", "<|model|>"]}
    (refused,) = render_chat(
        template, [turns], config=config, added_tokens=TOKENS
    ).quarantined.to_pylist()

    assert refused["reason"] == "stop_inside"
    assert "Set format.reasoning: strip, or" in refused["detail"]
    config |= {"reasoning": "strip"}
    stripped = render_chat(template, [turns], config=config, added_tokens=TOKENS)
    assert pieces(stripped.formatted) == [["[get]<|model|>"]]


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


def test_a_refused_probe_gives_no_advice_about_its_own_messages():
    template = (
        "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|model|>{% endif %}"
    )
    with pytest.raises(TemplateError, match="fails on a test question and answer") as refused:
        render_chat(template, [[("user", "Two?"), ("assistant", "2.")]], added_tokens=TOKENS)
    assert "weight" not in str(refused.value)
