"""Unusual orders of turns and arguments of calls, with real templates."""

import pytest

from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.templates.toys import make_table, pieces, snapshot_of

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
