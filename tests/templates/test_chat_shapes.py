"""Rows rendered by shape equal rows rendered one by one, whatever they contain."""

import itertools
import json
from dataclasses import replace
from functools import cache
from itertools import count
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from packhouse.render import chat_engine, compiled_shapes
from packhouse.render.template_arguments import chat_messages, parse_template_arguments
from tests.templates.test_chat_toys import (
    CHATML,
    GENERATION,
    LLAMA3,
    MISTRAL,
    PHI,
    THINKING,
    TOOLS,
    VICUNA,
)
from tests.templates.toys import chat_renderer, make_table, pieces

TOKENS = {"<|im_end|>": 1, "<|im_start|>": 2, "<|end|>": 3, "<|eot_id|>": 4, "</s>": 5, "<s>": 6}
ASKING = (
    "{% macro body(m) %}{% if m.content.startswith('#') %}{{ '[head]' }}{% endif %}"
    "{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{% set c = body(m) %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content == 'x' %}{{ '[x]' }}{% endif %}{% if m.content.endswith('?') %}{{ '[?]' }}"
    "{% endif %}{{ c }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "generation": GENERATION,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "phi": PHI,
    "thinking": THINKING,
    "vicuna": VICUNA,
    "asking": ASKING,
}

# Texts that a template may search for, and texts that look like a mark or a token.
bits = st.sampled_from(
    [
        "x",
        " ",
        "\n",
        "<think>",
        "</think>",
        "<|im_end|>",
        "#",
        "?",
        "\u3000",
        "\u00a0",
        "\u4e2d",
        "\U000f0000",
        "\x1c",
        "assistant\n",
        "</s>",
        "a b",
    ]
)
contents = st.lists(bits, min_size=1, max_size=4).map("".join)
conversations = st.lists(
    st.lists(contents, min_size=2, max_size=2) | st.lists(contents, min_size=4, max_size=4),
    min_size=12,
    max_size=16,
)


def as_turns(texts):
    return [(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def outcome(rendered):
    return rendered.formatted.to_pylist(), rendered.quarantined.to_pylist(), rendered.notes


def rendered_alone(renderer, table):
    """Render each row by Jinja, and check its text against plain strings in Jinja."""
    with patch.object(chat_engine, "MIN_SHAPE_ROWS", 2**31):
        alone = renderer.render(table)
    rows = dict(zip(table["row"].to_pylist(), table.to_pylist(), strict=True))
    if renderer._config.turns == "whole":
        for row in alone.formatted.to_pylist():
            assert row["text"] == plain_text(renderer, rows[row["row"]])
    return outcome(alone)


def plain_text(renderer, row):
    """Render with plain strings, which do not record where they come from."""
    rows = renderer._engine._rows
    messages = [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
    return rows.template.render(
        chat_messages(messages, rows.form),
        *parse_template_arguments(row["tools"], row["arguments"]),
    )


@cache
def renderer_of(name, turns="whole"):
    return chat_renderer(TEMPLATES[name], {"turns": turns}, added_tokens=TOKENS)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=6)  # of 12 rows or more
@given(texts=conversations, turns=st.sampled_from(["whole", "joined", "exact", "alone"]))
def test_filled_rows_equal_rendered_rows_and_train_whole_answers(name, texts, turns):
    table = make_table([as_turns(row) for row in texts])
    together = renderer_of(name, turns).render(table)
    assert outcome(together) == rendered_alone(renderer_of(name, turns), table)
    check_answers(texts, together.formatted)


def test_jinja_renders_all_rows_if_a_compiled_template_differs_from_it():
    table = make_table([as_turns(["Hi", f"Hello {number}"]) for number in range(9)])
    fill = compiled_shapes.Filling.add

    def broken(self, record, rows):
        fill(self, replace(record, items=("bad",) * len(record.items)), rows)

    renderer = chat_renderer(CHATML, added_tokens=TOKENS)
    with patch.object(compiled_shapes.Filling, "add", broken):
        assert outcome(renderer.render(table)) == rendered_alone(renderer, table)


def check_answers(texts, formatted):
    """Check that every answer is in a separate trained span that ends in an end token."""
    ends = ("<|im_end|>", "<|end|>", "<|eot_id|>", "</s>")
    of_rows = {}
    for row, trained in zip(formatted["row"].to_pylist(), pieces(formatted), strict=True):
        of_rows.setdefault(row, []).extend(trained)
    for row, trained in of_rows.items():
        answers = texts[row][1::2]
        assert len(trained) == len(answers)
        for answer, span in zip(answers, trained, strict=True):
            assert span.endswith(ends)
            assert answer.split("</think>")[-1].strip() in span


PIECEMEAL = TOOLS.replace(
    "call.function.arguments | tojson",
    "call.function.arguments.items() | map('join', '=') | join(',')",
)
SLICED = TOOLS.replace("call.function.arguments | tojson +", "(call.function | tojson)[:-1] +")
names = st.sampled_from(["find", "add <|im_end|>", "\u4e2d", 'q"'])
arguments = st.dictionaries(contents, contents | st.integers(0, 9) | st.booleans(), max_size=2)


@st.composite
def tool_rows(draw):
    """Messages and tools of rows with few shapes."""
    rows = []
    for _ in range(draw(st.integers(12, 14))):
        call = {"function": {"name": draw(names), "arguments": draw(arguments)}, "id": draw(names)}
        messages = [
            {"role": "user", "content": draw(contents)},
            {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
            {"role": "tool", "content": draw(contents), "tool_call_id": call["id"]},
            {"role": "assistant", "content": draw(contents)},
        ]
        if draw(st.booleans()):
            messages[3]["reasoning"] = draw(contents)
        tool = {
            "type": "function",
            "function": {"name": draw(names), "description": draw(contents)},
        }
        rows.append((messages, json.dumps([tool]) if draw(st.booleans()) else None))
    return rows


WITH_IDS = TOOLS.replace("'<tool_call>' +", "'<tool_call>' + call.id + ' ' +").replace(
    "m.content }}", "m.content }}{% if m.tool_call_id %}{{ ' ' ~ m.tool_call_id }}{% endif %}", 1
)
INDENTED = TOOLS.replace("t | tojson", "t | tojson(indent=2)").replace(
    "arguments | tojson", "arguments | tojson(sort_keys=true, separators=(',', ':'))"
)
OPENED = SLICED.replace(
    "{{ t | tojson + '\n' }}",
    "{% for key, item in t.function.items() %}{% if item is string %}{{ key ~ ': ' ~ item }}"
    "{% else %}{{ item | tojson }}{% endif %}{% endfor %}{{ '\n' }}",
)
TOOL_TEMPLATES = {
    "tojson": TOOLS,
    "pieces": PIECEMEAL,
    "sliced": SLICED,
    "ids": WITH_IDS,
    "indented": INDENTED,
    "opened": OPENED,
}


@pytest.mark.parametrize("template", TOOL_TEMPLATES.values(), ids=TOOL_TEMPLATES)
@settings(deadline=None, max_examples=3)  # of 12 rows or more
@given(rows=tool_rows())
def test_filled_rows_with_tools_equal_rendered_rows(template, rows):
    table = make_table([messages for messages, _ in rows], tools=[tools for _, tools in rows])
    renderer = chat_renderer(template, {"turns": "whole"}, added_tokens=TOKENS)
    together = renderer.render(table)

    assert outcome(together) == rendered_alone(renderer, table)
    for row, trained in zip(
        together.formatted.to_pylist(), pieces(together.formatted), strict=True
    ):
        assert len(trained) == 2
        assert all(span.endswith("<|im_end|>") for span in trained)
        outside = row["text"].encode()
        for span in reversed(row["content_spans"]):
            outside = outside[: span["start"]] + outside[span["end"] :]
        assert outside.count(b"<|im_end|>") == 4 + (b"system" in outside)


def test_keys_of_a_tool_are_no_content_where_its_name_holds_a_token():
    named = {
        name: [{"type": "function", "function": {"name": name}}] for name in ("f", "<|im_end|>")
    }
    turns = [("user", "q"), ("assistant", "a")]
    names = ["f", "f", "<|im_end|>"]

    for order in (names, names[::-1]):
        table = make_table([turns] * 3, tools=[json.dumps(named[name]) for name in order])
        renderer = chat_renderer(OPENED, added_tokens=TOKENS)
        together = renderer.render(table)
        assert outcome(together) == rendered_alone(renderer, table)
        for row in together.formatted.to_pylist():
            spans = row["content_spans"]
            own = [row["text"].encode()[span["start"] : span["end"]].decode() for span in spans]
            assert own == [order[row["row"]], "q", "a"]


def check_any_order(renderer, conversations, tools=None):
    """Check that each row is rendered as if it were alone; return all results."""
    table = make_table(conversations, tools=tools)
    alone = [outcome(renderer().render(table.slice(row, 1)))[:2] for row in range(len(table))]
    for rows in (list(range(len(table))), list(range(len(table)))[::-1]):
        formatted, bad, _ = outcome(renderer().render(table.take(rows)))
        for row in range(len(table)):
            own = [[out for out in some if out["row"] == row] for some in (formatted, bad)]
            assert own == list(alone[row])
    return alone


def new_renderer(template, **options):
    """Make renderers forget all rows rendered before."""
    numbers = count()
    return lambda: chat_renderer(template + f"{{# {next(numbers)} #}}", **options)


def call_of(arguments, **others):
    call = {"function": {"name": "f", "arguments": arguments}, **others}
    return {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}


@pytest.mark.parametrize(
    "use",
    [
        "messages[-1].content|length > 3",
        "'/think' in messages[-1].content|trim",
        "'xhello there'.startswith(messages[-1].content)",
        "'hello there'.split(sep=messages[-1].content)|length > 1",
        "'hello there'.replace(messages[-1].content, '') == ''",
        "messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|last == 'x'",
    ],
)
def test_a_prompt_that_asks_anything_is_measured_for_each_row(use):
    empty = "<think>\n\n</think>\n\n"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{{ EMPTY }}{% endif %}{{ m.content|trim + '<|im_end|>\n' }}{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if USE %}{{ EMPTY }}{% endif %}"
        "{% endif %}"
    ).replace("EMPTY", repr(empty))
    asked = ["x ", "/", " /think", "hello there", "h", "x"]
    rows = [as_turns([text, f"a{number} "]) for number, text in enumerate(asked)]
    rows += [[*one, *rows[0]] for one in rows[1:]]
    outcomes = check_any_order(new_renderer(template.replace("USE", use)), rows)

    opened = {len(row["trained_spans"]) for (row,), _ in outcomes}
    assert opened == {1, 2}


def test_a_content_left_out_for_its_thinking_is_looked_at_in_each_row():
    template = CHATML.replace("m.content", "('' if '</think>' in m.content else m.content)")
    texts = ["<think>a</think>", "<think>a</think>b", "</think>", "a</think>b", "c"]
    outcomes = check_any_order(new_renderer(template), [as_turns(["q", t]) for t in texts * 2])

    assert [len(bad) for _, bad in outcomes] == [1, 1, 0, 1, 0] * 2
    assert outcomes[0][1][0]["reason"] == "thought_lost"


def test_arguments_left_out_are_looked_at_in_each_row():
    template = TOOLS.replace("call.function | tojson", "{'name': call.function.name} | tojson")
    template = template.replace("call.function.arguments | tojson", "'{}'")
    rows = [
        [("user", "q"), call_of(arguments), ("tool", "r"), ("assistant", "a")]
        for arguments in [{"": 1}, {"a": 1}, {"": 1}, {"": 2}, {"": "lost"}]
    ]
    outcomes = check_any_order(new_renderer(template), rows)

    assert [len(bad) for _, bad in outcomes] == [0, 1, 0, 0, 1]


def test_definitions_of_different_kinds_have_different_shapes():
    template = "{% for t in tools or [] %}{{ t.function|tojson }}{% endfor %}" + CHATML
    tools = [json.dumps([{"function": function}]) for function in ({}, "object") * 3]
    rows = [as_turns(["q", "a"])] * 6
    texts = [row["text"][:8] for (row,), _ in check_any_order(new_renderer(template), rows, tools)]

    assert texts == ["{}<|im_s", '"object"'] * 3


def test_made_ids_are_those_of_calls_and_results_alone(monkeypatch):
    needing = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id|length != 9 %}"
        "{{ raise_exception('no id') }}{% endif %}{% endfor %}{% endfor %}"
        + CHATML.replace("m.content +", "(m.content ~ m.tool_call_id) +")
    ).replace("'<|im_end|>", "(m.tool_calls|tojson if m.tool_calls else '') + '<|im_end|>")
    needing = needing.replace("m.tool_calls|tojson", "m.tool_calls[0].function|tojson")
    rows = []
    for number in range(4):
        asked = {"role": "user", "content": "q", "tool_call_id": f"id {number}"}
        rows.append([asked, call_of({"n": 1}), ("tool", "r"), ("assistant", "a")])
    rendered = watch_rendered_rows(monkeypatch)
    texts = chat_renderer(needing).render(make_table(rows)).formatted["text"].to_pylist()

    assert all(f"qid {number}<|im_end|>" in text for number, text in enumerate(texts))
    assert rendered == []


@pytest.mark.parametrize("use", [r"'\ud83d' in m.content", r"m.content.strip('\ud83d') == ''"])
def test_a_question_about_half_a_character_is_no_error(use):
    template = CHATML.replace("m.content +", "m.content + ('!' if " + use + " else '') +")
    outcomes = check_any_order(new_renderer(template), [as_turns(["q\U0001f600", "a"])] * 4)
    assert [len(formatted) for formatted, _ in outcomes] == [1] * 4


def test_no_more_shapes_are_remembered_than_the_limit():
    renderer = chat_renderer(TOOLS + "{# many shapes #}")
    with patch.object(chat_engine, "MAX_SHAPES", 8):
        for first in range(0, 60, 6):
            tools = [json.dumps([{"required": [number]}]) for number in range(first, first + 6)]
            renderer.render(make_table([as_turns(["q", "a"])] * 6, tools=tools))
            assert len(renderer._engine._numbers) <= 8 + 6


def test_answers_that_only_mention_tags_of_thoughts_are_filled(monkeypatch):
    texts = ["a", "Write </think> last", "<think> and </think>", "see <think>, </think>"]
    rows = [as_turns([f"q{n}", texts[n % 4]]) for n in range(40)]
    rendered = watch_rendered_rows(monkeypatch)
    added = {"<|im_start|>": 1, "<|im_end|>": 2, "<think>": 3, "</think>": 4}

    out = chat_renderer(CHATML, added_tokens=added).render(make_table(rows)).formatted
    assert rendered == [2, 6, 10, 14, 18, 22, 26, 30, 34, 38]  # they begin with reasoning
    assert [len(out["content_spans"][n]) for n in range(4)] == [2, 2, 2, 2]


def watch_rendered_rows(monkeypatch):
    """List of rows that are rendered by Jinja individually, without those rendered as proof."""
    rendered = []
    plain, is_proof = chat_engine.render_rows, itertools.cycle([True, False])

    def watched(renderer, all_rows, some, *limits):
        if not next(is_proof):
            rendered.extend(some)
        return plain(renderer, all_rows, some, *limits)

    monkeypatch.setattr(chat_engine, "render_rows", watched)
    return rendered
