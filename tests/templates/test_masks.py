"""Trained text by role, message and reasoning."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.records.record_ids import conversation_ids
from packhouse.render import make_renderer
from packhouse.tokenize import tokenize_table
from packhouse.tokenize.encoders import load_tokenizer
from tests.templates.toys import CHATML, make_snapshot, make_table, pieces, render_chat, snapshot_of

TWO = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "see you")]


def turn(role, content, weight=None, **more):
    return {"role": role, "content": content, "weight": weight, **more}


def test_all_but_named_roles_are_trained_with_headers_and_ends():
    talk = [("system", "Be brief."), *TWO]
    out = render_chat(CHATML, [talk], config={"train_on": "all", "never_train": ["system", "user"]})

    assert pieces(out.formatted) == [
        ["<|im_start|>assistant\nhello<|im_end|>\n", "<|im_start|>assistant\nsee you<|im_end|>\n"]
    ]


def test_never_train_system_leaves_out_a_template_s_own_system_turn_too(load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("qwen2.5-instruct"))
    config = FormatConfig(train_on="all", never_train=["system"])
    out = make_renderer(config, snapshot).render(make_table([TWO[:2]])).formatted

    assert out["text"][0].as_py().startswith("<|im_start|>system\nYou are Qwen")
    assert pieces(out) == [["hi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"]]


def test_a_tool_result_is_left_out_where_a_template_shows_it_as_a_user_turn(load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("qwen3"))
    call = '[{"type":"function","function":{"name":"f","arguments":{}}}]'
    talk = [turn("user", "go"), turn("assistant", "", tool_calls=call), turn("tool", "42")]
    talk.append(turn("assistant", "It is 42."))
    config = FormatConfig(train_on="all", never_train=["tool"])
    out = make_renderer(config, snapshot).render(make_table([talk])).formatted

    trained = "".join(pieces(out)[0])
    assert "<tool_response>" not in trained
    assert "\n42\n" not in trained
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>' in trained


@pytest.mark.parametrize(
    "options",
    [
        {"never_train": ["tool"]},
        {"train_on": "all", "never_train": ["user", "assistant"]},
        {"train_on": "all", "turns": "alone"},
        {"train_on": "all", "reasoning": "train_last"},
        {"train_on": "all", "never_train": ["robot"]},
    ],
)
def test_options_that_contradict_each_other_are_refused(options):
    with pytest.raises(ValidationError):
        FormatConfig(**options)


def test_the_order_of_never_train_decides_nothing():
    one = FormatConfig(train_on="all", never_train=["tool", "system", "tool"])
    assert one == FormatConfig(train_on="all", never_train=["system", "tool"])


def test_a_weight_goes_before_train_on_for_any_role_but_a_tool_s():
    talk = [
        turn("user", "hi", 1.0),
        turn("assistant", "one", 0.5),
        turn("user", "hm"),
        turn("assistant", "two"),
    ]
    for copies in (1, 20):  # by Jinja, and by shape
        out = render_chat(CHATML, [talk] * copies, config={"train_on": "last_assistant"}).formatted
        assert pieces(out)[0] == ["hi<|im_end|>\n", "one<|im_end|>", "two<|im_end|>"]
        assert out["span_weights"].to_pylist() == [[1.0, 0.5, 1.0]] * copies


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]), min_size=2, max_size=4),
        min_size=1,
        max_size=24,
    ),
    template=st.sampled_from(["chat", "alpaca"]),
    train_on=st.sampled_from(["assistant", "last_assistant", "all"]),
)
def test_each_span_has_the_weight_of_its_message_however_rows_are_grouped(rows, template, train_on):
    talks = [
        [
            turn(("user", "assistant")[n % 2], f"m{n}.", w)
            for n, w in enumerate(row[: len(row) // 2 * 2])
        ]
        for row in rows
    ]
    config = FormatConfig(template=template, train_on=train_on)
    renderer = make_renderer(config, make_snapshot(chat_template=CHATML, adds_bos=False))
    together = renderer.render(make_table(talks))
    alone = [renderer.render(make_table([talk])).formatted for talk in talks]

    assert together.formatted["text"].to_pylist() == [
        t for a in alone for t in a["text"].to_pylist()
    ]
    for name in ("trained_spans", "span_weights"):
        each = [value for table in alone for value in table[name].to_pylist()]
        assert together.formatted[name].to_pylist() == each
    for row, spans, stated in zip(
        together.formatted["row"].to_pylist(),
        pieces(together.formatted),
        together.formatted["span_weights"].to_pylist(),
        strict=True,
    ):
        weights = stated or [1.0] * len(spans)
        if len(spans) == 1 and "m1." in spans[0] and "m0." in spans[0]:
            assert weights == [1.0]  # all of the text
            continue
        for span, weight in zip(spans, weights, strict=True):
            owned = [m for m in talks[row] if m["content"] in span]
            assert {1.0 if m["weight"] is None else m["weight"] for m in owned} == {weight}


THINKING = [
    turn("user", "1+1?"),
    turn("assistant", "2.", reasoning="One and one."),
    turn("user", "2+2?"),
    turn("assistant", "<think>\nTwo twice.\n</think>\n\n4."),
]


def test_thinking_is_stripped_from_fields_and_tags_before_rendering(load_tokenizer):
    out = make_renderer(FormatConfig(reasoning="strip"), snapshot_of(load_tokenizer("qwen3")))
    done = out.render(
        make_table([THINKING, [turn("user", "x"), turn("assistant", "<think>y</think>")]])
    )

    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"  # of the non-thinking prompt
    text = done.formatted["text"][0].as_py()
    assert text.count(empty) == text.count("<think>") == 2
    assert pieces(done.formatted) == [["2.<|im_end|>", "4.<|im_end|>"]]
    assert done.quarantined["reason"].to_pylist() == ["only_thinking"]
    assert done.quarantined["row"].to_pylist() == [1]


def test_thinking_is_trained_in_the_last_turn_alone():
    talk = [turn(m["role"], f"<think>{n}</think> {n}!") for n, m in enumerate(THINKING)]
    talk[0]["content"] = "<think>user</think> hi"
    for copies in (1, 12):
        out = render_chat(CHATML, [talk] * copies, config={"reasoning": "train_last"}).formatted
        assert pieces(out)[0] == [" 1!<|im_end|>", "<think>3</think> 3!<|im_end|>"]
        assert "<think>1</think>" in out["text"][0].as_py()


QUOTES = ["<think>a</think> b", "<think>", "</think>", "</think><think>", "<think>\n\n</think>\n"]


def quoting(quote):
    call = [{"type": "function", "function": {"name": "find", "arguments": {"q": quote}}}]
    return [
        turn("user", "Look it up."),
        turn("assistant", "", tool_calls=json.dumps(call)),
        turn("tool", "Nothing."),
        turn("assistant", "I found nothing."),
        turn("user", "Well."),
        turn("assistant", "Yes."),
    ]


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct-v0.3"])
@pytest.mark.parametrize("copies", [1, 12])  # by Jinja, and by shape
def test_tags_quoted_in_a_call_are_not_reasoning(name, copies, load_tokenizer):
    """Arguments are data: thinking in contents and fields counts, tags inside calls do not."""
    table = make_table([quoting(quote) for quote in QUOTES for _ in range(copies)])
    snapshot = snapshot_of(load_tokenizer(name))
    keep, last = (
        pieces(make_renderer(FormatConfig(reasoning=way), snapshot).render(table).formatted)
        for way in ("keep", "train_last")
    )
    assert all(json.dumps(quote)[1:-1] in keep[n * copies][0] for n, quote in enumerate(QUOTES))
    assert last == keep
    assert {len(spans) for spans in last} == {3}


@pytest.mark.parametrize("copies", [1, 12])
def test_a_thought_next_to_a_call_that_quotes_one_is_left_out_alone(copies, load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("qwen2.5-instruct"))
    call = [{"type": "function", "function": {"name": "f", "arguments": {"q": "</think>a<think>"}}}]
    said = turn("assistant", "<think>hm</think> Look:", tool_calls=json.dumps(call))
    talk = [turn("user", "go"), said, turn("tool", "42"), turn("assistant", "So."), *TWO[:2]]
    out = make_renderer(FormatConfig(reasoning="train_last"), snapshot).render(
        make_table([talk] * copies)
    )
    first = pieces(out.formatted)[0][0]
    assert first.startswith(" Look:\n<tool_call>\n")
    assert '"</think>a<think>"' in first
    assert first.endswith("<|im_end|>")


def test_a_thought_in_a_field_that_quotes_its_own_end_is_left_out_whole():
    thought = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
    wraps = CHATML.replace("m.content", f"{thought} + m.content")
    talk = [turn("user", "x"), turn("assistant", "y", reasoning="a </think> b"), *TWO[:2]]
    for copies in (1, 12):
        out = render_chat(wraps, [talk] * copies, config={"reasoning": "train_last"}).formatted
        assert pieces(out)[0] == ["y<|im_end|>", "hello<|im_end|>"]


def test_the_first_word_after_a_space_is_trained_with_it(load_real):
    """After omitted reasoning, and after a header: the token begins with the space."""
    snapshot = load_real("mistral-7b-instruct-v0.3")
    talk = [turn("user", "Well, why?"), turn("assistant", "<think>hm</think> Because."), *TWO[:2]]
    table = make_table([talk])

    def first_words(**config):
        out = make_renderer(FormatConfig(**config), snapshot).render(table).formatted
        row = tokenize_table(out, snapshot, TokenizeConfig()).tokenized.to_pylist()[0]
        text = load_tokenizer(snapshot.backend).decode
        return [
            text(row["input_ids"][span["start"] : span["end"]]) for span in row["trained_ranges"]
        ]

    assert first_words(reasoning="train_last")[0].strip().startswith("Because.")
    first = first_words(train_on="all", never_train=["assistant"])[0]
    assert first.strip().startswith("Well, why?")


def test_a_user_who_is_trained_does_not_think():
    talk = [turn("user", "a <think>b</think> c", weight=1.0), *TWO[1:]]
    for copies in (1, 12):
        out = render_chat(CHATML, [talk] * copies, config={"reasoning": "train_last"}).formatted
        assert pieces(out)[0][0] == "a <think>b</think> c<|im_end|>\n"


def answered(content, **fields):
    return [turn("user", "x"), turn("assistant", content, **fields), *TWO[:2]]


@pytest.mark.parametrize("reasoning", ["strip", "train_last"])
@pytest.mark.parametrize("turns", ["whole", "joined"])
@pytest.mark.parametrize(
    ("content", "is_refused"),
    [
        ("<think>what was never", True),
        ("Write <think> before it.", True),
        ("<think>a</think> Write <think> before it.", True),
        ("<think>a<think>b</think>said", False),
        ("a</think>said", False),
    ],
)
def test_thinking_without_an_end_is_refused(reasoning, turns, content, is_refused):
    config = {"reasoning": reasoning, "turns": turns}
    for copies in (1, 12):
        done = render_chat(CHATML, [answered(content)] * copies, config=config)
        refused = ["unclosed_thinking"] * copies * is_refused
        assert done.quarantined["reason"].to_pylist() == refused
        assert bool(done.formatted.num_rows) != is_refused


def test_rows_are_named_by_their_text_without_thinking():
    said = [turn("user", "x"), turn("assistant", "y")]
    talks = [
        [said[0], turn("assistant", "<think>a</think>y")],
        said,
        [said[0], turn("assistant", "y", reasoning="b")],
        [said[0], turn("assistant", "z", reasoning="b")],
    ]
    table = make_table(talks)
    ids = conversation_ids(
        table["messages"].combine_chunks(), pa.nulls(4, pa.string()), pa.nulls(4)
    )
    table = table.set_column(table.schema.get_field_index("record_id"), "record_id", ids)
    for keys, same in ((ids, True), (pa.array(["k", "l", "m", "n"]), False)):
        table = table.set_column(table.schema.get_field_index("group_key"), "group_key", keys)
        config = FormatConfig(reasoning="strip")
        out = make_renderer(config, make_snapshot(chat_template=CHATML)).render(table).formatted
        names = out["record_id"].to_pylist()
        assert names[0] == names[1] == names[2] == ids[1].as_py() != names[3]
        assert out["group_key"].to_pylist() == (names if same else keys.to_pylist())


def test_reasoning_of_an_untrained_answer_stops_nothing(load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("qwen2.5-instruct"))
    talk = [turn("user", "1+1?"), turn("assistant", "2.", 0.0, reasoning="One."), *TWO[:2]]
    done = make_renderer(FormatConfig(), snapshot).render(make_table([talk]))
    assert pieces(done.formatted) == [["hello<|im_end|>"]]


OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def tagged(answer):
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + OPEN
    )


def test_a_block_that_has_a_question_between_answers_refuses_the_row():
    """The probe of two turns does not show it: the block continues to the end of the row."""
    template = (
        "{% for m in messages %}{% if loop.index0 == 1 %}<|im_start|>assistant\n{% generation %}"
        "{% for n in messages[1:] %}{{ n.content }}<|im_end|>\n{% endfor %}{% endgeneration %}"
        "{% elif loop.first %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + OPEN
    )
    for turns in ("joined", "exact"):
        rendered = render_chat(template, [TWO, TWO[:2]], config={"turns": turns})
        assert pieces(rendered.formatted) == [["hello<|im_end|>"]]
        assert rendered.quarantined["row"].to_pylist() == [0]
        assert (
            rendered.quarantined["detail"][0]
            .as_py()
            .startswith("the prompt before message 3 (assistant) does not match the conversation")
        )
    whole = render_chat(template, [TWO], config={"turns": "whole"})
    assert pieces(whole.formatted) == [["hello<|im_end|>", "see you<|im_end|>"]]  # "bye" is not


def test_an_answer_is_trained_where_it_is_in_a_block_as_the_last_one():
    last_alone = tagged(
        "<|im_start|>assistant\n{% if loop.last %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    )
    answers = ["hello<|im_end|>", "see you<|im_end|>"]
    assert pieces(render_chat(last_alone, [TWO]).formatted) == [answers]
    rendered = render_chat(last_alone, [TWO], config={"train_on": "last_assistant"})
    assert pieces(rendered.formatted) == [answers[1:]]
    whole = render_chat(last_alone, [TWO], config={"turns": "whole"})
    (detail,) = whole.quarantined["detail"].to_pylist()
    assert detail.startswith("message 1 (assistant) does not end inside a generation block")


TURNS = ["joined", "exact", "alone", "whole"]


@pytest.mark.parametrize("turns", TURNS)
def test_axolotl_3754_the_stop_token_after_a_generation_block_is_trained(turns):
    # axolotl#3754: the turn's end token was never trained, although losses looked healthy.
    answer = "<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    rendered = render_chat(tagged(answer), [TWO], config={"turns": turns})
    each = [["hello<|im_end|>"], ["see you<|im_end|>"]]
    assert pieces(rendered.formatted) == (each if turns == "alone" else [each[0] + each[1]])


@pytest.mark.parametrize("turns", ["joined", "whole"])
def test_marin_7237_an_answer_outside_of_its_generation_block_is_refused(turns):
    # marin#7237: an all-zero assistant mask, without an error.
    answer = "<|im_start|>assistant\n{% generation %}{% endgeneration %}{{ m.content }}<|im_end|>\n"
    with pytest.raises(TemplateError, match=r"Put {% generation %} right after the assistant's"):
        render_chat(tagged(answer), [TWO], config={"turns": turns})


@pytest.mark.parametrize("copies", [1, 60])  # one by one, and as columns
def test_turns_of_other_roles_with_a_weight_are_trained_in_the_first_record_alone(copies):
    asked = turn("user", "hi", 1.0)
    talks = [
        [asked, turn("assistant", "hello", 0.5)],
        [turn("system", "Be brief.", 1.0), asked, *(turn(*each) for each in TWO[1:])],
        [asked, turn("assistant", "hello", 0.0)],
        [*(turn(*each, 0.0) for each in TWO), asked],
    ]
    out = render_chat(CHATML, talks * copies, config={"turns": "alone"})

    hi, hello = "hi<|im_end|>\n", "hello<|im_end|>"
    records = [
        *([hi, hello], ["Be brief.<|im_end|>\n", hi, hello], ["see you<|im_end|>"]),
        *([hi], [hi]),  # without a trained answer, the row is rendered whole
    ]
    assert pieces(out.formatted) == records * copies
    assert out.formatted["span_weights"].to_pylist() == [[1.0, 0.5], *[None] * 4] * copies
    assert out.quarantined.num_rows == 0
