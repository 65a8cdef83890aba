"""Unusual orders of turns and arguments of calls, with real templates."""

import json

import pytest

from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.templates.toys import make_table, pieces, render_chat, snapshot_of

ODD = {
    "assistant behind system": (
        [("system", "Be kind."), ("assistant", "Welcome!"), ("user", "Hi"), ("assistant", "Yes?")],
        ["Welcome!<|im_end|>", "Yes?<|im_end|>"],
    ),
    "two users": ([("user", "Hi"), ("user", "You?"), ("assistant", "Yes?")], ["Yes?<|im_end|>"]),
    "two assistants": (
        [("user", "Hi"), ("assistant", "Well,"), ("assistant", "hello.")],
        ["Well,<|im_end|>", "hello.<|im_end|>"],
    ),
    "late system": (
        [("user", "Hi"), ("system", "Be brief."), ("assistant", "Yes?")],
        ["Yes?<|im_end|>"],
    ),
}


@pytest.mark.parametrize("order", ODD)
def test_orders_that_a_template_writes_are_trained(order, load_tokenizer):
    messages, trained = ODD[order]
    tokenizer = load_tokenizer("qwen2.5-instruct")
    renderer = make_renderer(FormatConfig(), snapshot_of(tokenizer))
    longer = [(role, f"{content} Really.") for role, content in messages]

    rendered = renderer.render(make_table([messages, longer, longer]))

    assert rendered.quarantined.num_rows == 0
    given = [{"role": role, "content": content} for role, content in messages]
    expected = tokenizer.apply_chat_template(given, tokenize=False)
    assert rendered.formatted["text"][0].as_py() == expected
    assert pieces(rendered.formatted)[0] == trained


def test_a_greeting_that_no_prompt_comes_before_is_refused_alone(load_tokenizer):
    greeted = [("assistant", "Welcome!"), ("user", "Hi"), ("assistant", "Hello!")]
    tokenizer = load_tokenizer("qwen2.5-instruct")
    for turns in ("joined", "exact", "alone"):
        renderer = make_renderer(FormatConfig(turns=turns), snapshot_of(tokenizer))
        rendered = renderer.render(make_table([greeted, greeted[1:], greeted, greeted[1:]]))
        (row, _) = rendered.quarantined.to_pylist()
        assert row["reason"] == "starts_with_assistant"
        assert "Add the question before it" in row["detail"]
        assert pieces(rendered.formatted) == [["Hello!<|im_end|>"]] * 2
    renderer = make_renderer(FormatConfig(turns="whole"), snapshot_of(tokenizer))
    (trained,) = pieces(renderer.render(make_table([greeted])).formatted)
    assert trained == ["Welcome!<|im_end|>", "Hello!<|im_end|>"]


JOINED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + ': ' + call.function.arguments + ' ' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
AS_JSON = JOINED.replace("arguments + ' '", "arguments | tojson")
AS_EITHER = JOINED.replace(
    "{{ call.function.name + ': ' + call.function.arguments + ' ' }}",
    "{{ call.function.name + ': ' }}{% if call.function.arguments is string %}"
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}",
)


def with_call(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]


def test_a_template_that_joins_texts_is_given_arguments_as_text():
    rows = [with_call({"a": 1, "b": [2]}), with_call({"a": 3, "b": [4]}), with_call("oops")]

    rendered = render_chat(JOINED, rows)

    assert [row[0] for row in pieces(rendered.formatted)] == [
        'add: {"a": 1, "b": [2]} <|im_end|>',
        'add: {"a": 3, "b": [4]} <|im_end|>',
        "add: oops <|im_end|>",
    ]


@pytest.mark.parametrize("num_like_it", [1, 5])
def test_arguments_that_are_no_json_are_never_written_as_json(num_like_it):
    rows = [with_call({"a": 1}), *[with_call("oops")] * num_like_it]

    refused = render_chat(AS_JSON, rows)
    written = render_chat(AS_EITHER, rows)

    assert refused.formatted.num_rows == 1
    assert set(refused.quarantined["detail"].to_pylist()) == {
        "the arguments of a tool call in message 1 are not a JSON object, but the template writes "
        "them as JSON: 'oops'. Write them as an object"
    }
    assert [row[0] for row in pieces(written.formatted)] == [
        'add: {"a": 1}<|im_end|>',
        *["add: oops<|im_end|>"] * num_like_it,
    ]
