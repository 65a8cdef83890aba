"""Alpaca, completion, classification and text: literal texts and spans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import TEMPLATES
from packhouse.render import make_renderer
from packhouse.render.single_turn import SINGLE_TURN
from tests.templates.toys import make_snapshot, make_table, pieces


def render(template, conversations, labels=None, label_names=None, snapshot=None, **config):
    renderer = make_renderer(
        FormatConfig(template=template, **config), snapshot or make_snapshot(), label_names
    )
    return renderer.render(make_table(conversations, labels=labels))


def test_alpaca_treats_empty_input_as_none():
    turn = {"role": "user", "content": "Sort.", "context": ""}
    out = render("alpaca", [[turn, {"role": "assistant", "content": "a b"}]]).formatted

    assert "### Input:" not in out["text"][0].as_py()


def test_alpaca_system_takes_the_preambles_place():
    out = render("alpaca", [[("user", "Q"), ("assistant", "A")]], system="Be brief.").formatted

    assert out["text"].to_pylist() == ["<s>Be brief.\n\n### Instruction:\nQ\n\n### Response:A</s>"]


def test_system_of_the_recipe_leaves_conversations_with_their_own_alone():
    rows = [
        [("user", "Q"), ("assistant", "A")],
        [("system", "Mine"), ("user", "Q"), ("assistant", "A")],
        [("user", "R"), ("assistant", "B")],
    ]
    out = render("alpaca", rows, system="Ours").formatted

    assert [text[3:7] for text in out["text"].to_pylist()] == ["Ours", "Mine", "Ours"]
    assert out["row"].to_pylist() == [0, 1, 2]


def test_a_message_of_weight_zero_is_not_trained():
    turns = [
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "bad", "weight": 0.0},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "good", "weight": 1.0},
    ]
    out = render("alpaca", [turns, turns[:2]])

    assert pieces(out.formatted) == [["good</s>"]]
    assert out.quarantined["reason"].to_pylist() == ["nothing_trained"]


def test_rows_that_alpaca_cannot_express_are_quarantined():
    call = '[{"function":{"name":"f","arguments":{}}}]'
    rows = [
        [("user", "Q"), ("assistant", "A")],
        [("user", "Q"), {"role": "assistant", "content": "", "tool_calls": call}],
        [("user", "Q"), ("user", "Q2"), ("assistant", "A")],
        [("user", "Q"), {"role": "assistant", "content": "A", "reasoning": "hm"}],
    ]
    out = render("alpaca", rows)

    assert out.formatted["row"].to_pylist() == [0]
    assert out.quarantined["row"].to_pylist() == [1, 2, 3]
    assert set(out.quarantined["reason"].to_pylist()) == {"template"}


def test_completion_joins_context_by_a_newline_and_nothing_else():
    turn = {"role": "user", "content": "Once", "context": "upon"}
    out = render("completion", [[turn, {"role": "assistant", "content": " a time"}]]).formatted

    assert out["text"].to_pylist() == ["<s>Once\nupon a time</s>"]
    assert pieces(out) == [[" a time</s>"]]


def test_completion_refuses_a_second_turn():
    turns = [("user", "Q"), ("assistant", "A"), ("user", "Q"), ("assistant", "A")]
    out = render("completion", [turns])

    assert out.quarantined["detail"].to_pylist() == [
        "completion takes one prompt and one answer, got user, assistant, user, assistant"
    ]


def test_classification_trains_the_name_of_the_label():
    out = render(
        "classification", [[("user", "fine film")]], labels=[1], label_names=["bad", "good"]
    ).formatted

    assert out["text"].to_pylist() == ["<s>fine film\nLabel:\ngood</s>"]
    assert pieces(out) == [["good</s>"]]
    assert out["label"].to_pylist() == [1]


def test_classification_takes_the_answer_where_labels_have_no_names():
    turns = [("user", "fine film"), ("assistant", "positive")]
    out = render("classification", [turns], prompt="Review: {text} =").formatted

    assert out["text"].to_pylist() == ["<s>Review: fine film =positive</s>"]
    assert pieces(out) == [["positive</s>"]]


def test_labels_without_a_name_are_quarantined_one_by_one():
    rows = [[("user", "a")], [("user", "b")], [("user", "c")], [("user", "d")]]
    out = render("classification", rows, labels=[0, 2, None, -1], label_names=["no", "yes"])

    assert out.formatted["row"].to_pylist() == [0]
    assert out.quarantined["reason"].to_pylist() == ["label", "template", "label"]
    assert out.quarantined["detail"][0].as_py() == "label 2 is not in 0..1"


@pytest.mark.parametrize("prompt", ["no place", "{text} {text}"])
def test_a_classification_prompt_has_one_place_for_the_text(prompt):
    with pytest.raises(ConfigError, match="exactly once"):
        make_renderer(FormatConfig(template="classification", prompt=prompt), make_snapshot())


def test_sequence_classification_puts_cls_and_sep_around_and_trains_nothing():
    bert = make_snapshot(special_tokens={"cls_token": "[CLS]", "sep_token": "[SEP]"})
    out = render(
        "sequence_classification",
        [[("user", "a")], [("user", "b")]],
        labels=[1, None],
        snapshot=bert,
    )

    assert out.formatted["text"].to_pylist() == ["[CLS]a[SEP]"]
    assert out.formatted["trained_spans"].to_pylist() == [[]]
    assert out.quarantined["detail"].to_pylist() == ["the row has no label"]


def test_text_is_trained_from_bos_to_eos():
    out = render("text", [[("assistant", "Once upon a time.")]]).formatted

    assert out["text"].to_pylist() == ["<s>Once upon a time.</s>"]
    assert pieces(out) == [["<s>Once upon a time.</s>"]]


def test_a_tokenizer_without_eos_is_refused():
    bare = make_snapshot(special_tokens={})

    with pytest.raises(TemplateError, match="would never learn to stop"):
        make_renderer(FormatConfig(template="alpaca"), bare)


@pytest.mark.parametrize("name", SINGLE_TURN)
def test_every_template_that_a_recipe_can_name_is_built_in(name):
    assert make_renderer(FormatConfig(template=name), make_snapshot())


def test_another_template_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=f"Known: {', '.join(TEMPLATES)}, or"):
        make_renderer(FormatConfig.model_construct(template="vicuna"), make_snapshot())


def test_spans_count_bytes_not_characters():
    out = render("completion", [[("user", "\u00e9\U0001f600"), ("assistant", "\u4e2d")]]).formatted

    assert out["trained_spans"].to_pylist() == [[{"start": 9, "end": 16}]]
    assert pieces(out) == [["\u4e2d</s>"]]


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.text(), st.none() | st.text(), st.text()), min_size=1, max_size=3),
        max_size=12,
    )
)
def test_every_alpaca_row_comes_back_in_order_with_its_answers_and_eos(rows):
    conversations = [
        [
            message
            for question, context, answer in turns
            for message in (
                {"role": "user", "content": question, "context": context},
                {"role": "assistant", "content": answer},
            )
        ]
        for turns in rows
    ]
    out = render("alpaca", conversations)

    assert out.quarantined.num_rows == 0
    assert pieces(out.formatted) == [[f"{answer}</s>" for *_, answer in turns] for turns in rows]
    for row in out.formatted.to_pylist():
        edges = [edge for span in row["content_spans"] for edge in (span["start"], span["end"])]
        assert edges == sorted(edges)
        assert all(span["start"] < span["end"] for span in row["content_spans"])


def test_an_empty_table_renders_to_an_empty_table():
    out = render("alpaca", [])

    assert (out.formatted.num_rows, out.quarantined.num_rows, out.notes) == (0, 0, {})
