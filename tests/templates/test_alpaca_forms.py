"""Alpaca's three forms: Stanford's, one with a line break after the header, and dart-math's."""

import pytest

from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.templates.toys import make_snapshot, make_table, pieces

WITHOUT_INPUT = """\
Below is an instruction that describes a task. Write a response that appropriately completes the \
request.

### Instruction:
Say hi.

### Response:"""
WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
Add.

### Input:
1 and 2

### Response:"""
WITHOUT_BLOCK = """\
Below is an instruction that describes a task. Write a response that appropriately completes the \
request.

### Instruction:
Add.
1 and 2

### Response:"""


@pytest.mark.parametrize(
    ("template", "without_input", "with_input"),
    [
        ("alpaca", WITHOUT_INPUT, WITH_INPUT),
        ("alpaca_newline", WITHOUT_INPUT + "\n", WITH_INPUT + "\n"),
        ("dart-math/alpaca", WITHOUT_INPUT + "\n", WITHOUT_BLOCK + "\n"),
    ],
)
def test_the_text_of_each_form_is_as_published(template, without_input, with_input):
    asked = {"role": "user", "content": "Add.", "context": "1 and 2"}
    rows = [
        [("user", "Say hi."), ("assistant", "Hi!")],
        [asked, {"role": "assistant", "content": "3"}],
    ]
    renderer = make_renderer(FormatConfig(template=template), make_snapshot(adds_bos=False))
    rendered = renderer.render(make_table(rows)).formatted

    assert rendered["text"].to_pylist() == [f"{without_input}Hi!</s>", f"{with_input}3</s>"]
    assert pieces(rendered) == [["Hi!</s>"], ["3</s>"]]
    contents = [["Say hi.", "Hi!"], ["Add.", "1 and 2", "3"]]
    if template == "dart-math/alpaca":
        contents[1][:2] = ["Add.\n1 and 2"]
    assert pieces(rendered, "content_spans") == contents


def test_further_turns_repeat_the_header_with_its_line_break():
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    renderer = make_renderer(FormatConfig(template="alpaca_newline"), make_snapshot())
    rendered = renderer.render(make_table([[*turns, ("assistant", "d")], turns[1:3] * 2]))

    assert rendered.formatted["text"].to_pylist()[0] == (
        "<s>Be brief.\n\n### Instruction:\na\n\n### Response:\nb</s>"
        "\n\n### Instruction:\nc\n\n### Response:\nd</s>"
    )
    assert pieces(rendered.formatted) == [["b</s>", "d</s>"], ["b</s>", "b</s>"]]
