"""Difficult chat templates of every kind, written for these tests: texts, spans and refusals."""

import json
from itertools import chain

import pytest

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.templates.toys import (
    CHATML,
    chat_renderer,
    make_snapshot,
    make_table,
    pieces,
    render_chat,
)

HI = [("user", "hi"), ("assistant", "hello")]
TWO = [*HI, ("user", "bye"), ("assistant", "see you")]

# Appends text after the last turn, so a rendering of fewer turns is not a prefix of this one.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_TOKENS = {"<|end|>": 1, "<|user|>": 2, "<|assistant|>": 3, "</s>": 4}
# Headers of two tokens, contents trimmed, BOS before the first turn.
LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}"
    "{% endif %}{{ c }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# No generation prompt; the space before an answer belongs to the answer.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "'[/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% endif %}{% endfor %}"
)
# No generation prompt, but a header.
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}{% else %}"
    "{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
)
# Like Qwen3: reasoning only in the last answer, and removed from contents.
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ c + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMMAND_TOKENS = ("<|START|>", "<|user|>", "<|assistant|>", "<|END_RESPONSE|>")
COMMAND = (
    "{% for m in messages %}{{ '<|START|><|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}<|END_RESPONSE|>{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|START|><|assistant|>{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def only(out, spans="trained_spans"):
    assert out.quarantined.num_rows == 0, out.quarantined["detail"].to_pylist()
    return pieces(out.formatted, spans)[0]


def test_chatml_trains_answers_and_their_end_tokens_without_the_newline():
    out = render_chat(CHATML, [TWO])

    assert out.formatted["text"].to_pylist() == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nsee you<|im_end|>\n"
    ]
    assert only(out) == ["hello<|im_end|>", "see you<|im_end|>"]
    assert only(out, "content_spans") == ["hi", "hello", "bye", "see you"]


PHI_START = "<|user|>\nhi<|end|>\n<|assistant|>\nhello<|end|>\n"
PHI_END = "<|user|>\nbye<|end|>\n<|assistant|>\nsee you<|end|>\n</s>"


@pytest.mark.parametrize(
    ("turns", "texts", "trained"),
    [
        # Without a generation_config.json, </s> is the only token that stops the model.
        (
            "joined",
            [f"{PHI_START}</s>{PHI_END}"],
            [["hello<|end|>\n</s>", "see you<|end|>\n</s>"]],
        ),
        (
            "exact",
            [f"{PHI_START}</s>", f"{PHI_START}{PHI_END}"],
            [["hello<|end|>\n</s>"], ["see you<|end|>\n</s>"]],
        ),
        ("whole", [f"{PHI_START}{PHI_END}"], [["hello<|end|>", "see you<|end|>\n</s>"]]),
    ],
)
def test_an_answer_ends_with_the_token_that_stops_the_model(turns, texts, trained):
    out = render_chat(PHI, [TWO], added_tokens=PHI_TOKENS, config={"turns": turns})

    assert out.formatted["text"].to_pylist() == texts
    assert pieces(out.formatted) == trained
    if turns == "joined":
        assert out.notes == {"repeated_bytes": len("</s>"), "rewritten_prompts": 1}


@pytest.mark.parametrize("turns", ["joined", "exact", "whole"])
def test_text_after_the_stop_token_is_not_trained(turns):
    config = {"turns": turns, "stop_tokens": ["<|end|>"]}
    out = render_chat(PHI, [TWO], added_tokens=PHI_TOKENS, config=config)

    assert only(out) == ["hello<|end|>", "see you<|end|>"]
    assert out.formatted["text"].to_pylist() == [PHI_START + PHI_END]


def test_eos_after_another_control_token_is_trained():
    """Command A: generation stops at the second of `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`."""
    out = render_chat(COMMAND, [TWO], added_tokens=COMMAND_TOKENS)

    assert only(out) == ["hello<|END_RESPONSE|></s>", "see you<|END_RESPONSE|></s>"]
    assert out.formatted["text"][0].as_py().count("</s>") == 4  # those of the user are not trained


@pytest.mark.parametrize("turns", ["joined", "exact", "alone", "whole"])
def test_without_a_generation_prompt_the_model_writes_the_header(turns):
    command = COMMAND.partition("{% if add")[0]
    out = render_chat(command, [TWO], added_tokens=COMMAND_TOKENS, config={"turns": turns})
    assert list(chain(*pieces(out.formatted))) == [
        "<|START|><|assistant|>hello<|END_RESPONSE|></s>",
        "<|START|><|assistant|>see you<|END_RESPONSE|></s>",
    ]
    out = render_chat(VICUNA, [TWO], config={"turns": turns})
    assert list(chain(*pieces(out.formatted))) == ["ASSISTANT: hello</s>", "ASSISTANT: see you</s>"]


@pytest.mark.parametrize("turns", ["joined", "exact", "whole"])
def test_the_eos_of_a_later_turn_does_not_end_an_answer(turns):
    """A call without EOS, and an empty tool result: the tool's header is not trained."""
    source = COMMAND.replace("</s>{% end", "{% if not m.tool_calls %}</s>{% endif %}{% end")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "tool_calls": json.dumps([call])},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "hello"},
    ]
    source = source.replace(
        "m.content }}",
        "m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}",
    )
    tokens = (*COMMAND_TOKENS, "<|tool|>")
    out = render_chat(source, [talk], added_tokens=tokens, config={"turns": turns})

    assert out.formatted.num_rows == 0
    assert out.quarantined["reason"].to_pylist() == ["no_stop"]
    assert "follows message 1 (assistant)" in out.quarantined["detail"][0].as_py()
    config = {"turns": turns, "stop_tokens": ["<|END_RESPONSE|>"]}
    named = render_chat(source, [talk], added_tokens=tokens, config=config)
    assert only(named) == ["waitf<|END_RESPONSE|>", "hello<|END_RESPONSE|>"]


def test_context_is_joined_to_content_by_a_newline():
    turn = {"role": "user", "content": "Sum up", "context": "Long"}
    out = render_chat(CHATML, [[turn, {"role": "assistant", "content": "S"}]])

    assert only(out, "content_spans") == ["Sum up\nLong", "S"]


def test_arguments_given_as_json_text_are_parsed():
    call = {"name": "add", "arguments": '{"a": 1}'}
    turn = {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    out = render_chat(TOOLS, [[("user", "hi"), turn]])

    assert only(out) == ['<tool_call>add {"a": 1}</tool_call><|im_end|>']


def test_a_header_before_a_generation_block_is_trained_where_no_prompt_has_it():
    without_prompt = GENERATION.partition("{% if add")[0]
    assert only(render_chat(without_prompt, [TWO])) == [
        "<|im_start|>assistant\nhello<|im_end|>",
        "<|im_start|>assistant\nsee you<|im_end|>",
    ]


@pytest.mark.parametrize("turns", ["joined", "exact", "alone", "whole"])
def test_a_template_whose_prompt_does_not_lead_to_the_answer_is_refused(turns):
    astray = "{% for m in messages %}{{ m.role + '>' + m.content }}{% endfor %}{{ eos_token }}"

    with pytest.raises(TemplateError, match=r"the prompt before message 1 \(assistant\)"):
        render_chat(astray, [TWO], config={"turns": turns})


def test_a_template_that_writes_contents_twice_is_refused():
    twice = CHATML.replace("m.content +", "m.content + m.content +")

    with pytest.raises(TemplateError, match="exactly once and in order"):
        render_chat(twice, [HI])


def test_broken_jinja_names_the_line():
    with pytest.raises(TemplateError, match="line 2"):
        render_chat("{% for m in messages %}\n{% oops %}{% endfor %}", [HI])


def test_no_chat_template_says_what_to_do():
    with pytest.raises(TemplateError, match=r"no chat template\. Set"):
        make_renderer(FormatConfig(), make_snapshot())


def test_a_jinja_file_is_a_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML, encoding="utf-8")
    renderer = make_renderer(FormatConfig(template=str(file)), make_snapshot(adds_bos=False))

    assert only(renderer.render(make_table([HI]))) == ["hello<|im_end|>"]
    with pytest.raises(ConfigError, match="cannot be read"):
        make_renderer(FormatConfig(template=str(tmp_path / "none.jinja")), make_snapshot())


def test_a_compiled_template_is_shared_only_by_equal_recipes():
    learnt = chat_renderer(CHATML)._engine

    assert chat_renderer(CHATML)._engine is learnt
    assert chat_renderer(CHATML + " ")._engine is not learnt
    assert chat_renderer(CHATML, {"system": "Be."})._engine is not learnt
    assert chat_renderer(CHATML, added_tokens={"<x>": 1})._engine is not learnt
    assert chat_renderer("{% broken")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only Latin') }}", r"\(rejects the row: only Latin\)"),
        ("{% for i in range(10**9) %}x{% endfor %}", r"\(.*range.*\)"),
        ("{{ messages[0].content.__class__.mro }}", r"\(.*'__class__'.*unsafe.*\)"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_its_own_words(source, message):
    with pytest.raises(TemplateError, match=message):
        render_chat(source, [HI])


def test_a_text_is_lost_although_rows_of_its_shape_lose_only_white_space():
    template = CHATML.replace("m.content", "('' if m.role == 'system' else m.content)")
    rows = [[("system", text), *TWO] for text in ("\n\n", "Be brief.", "\n\n")]

    done = render_chat(template, rows)

    assert done.formatted["row"].to_pylist() == [0, 2]
    assert done.quarantined["reason"].to_pylist() == ["content_lost"]
