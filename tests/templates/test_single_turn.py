"""Alpaca, completion, classification and text: literal texts and spans."""

import pytest
from hypothesis import given, settings, strategies as st

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import TEMPLATES
from packhouse.render import make_renderer
from tests.templates.toys import make_snapshot, make_table, pieces

Q = {"role": "user", "content": "Q"}
QA = [Q, ("assistant", "A")]


def render(template, conversations, labels=None, label_names=None, snapshot=None, **config):
    renderer = make_renderer(
        FormatConfig(template=template, **config), snapshot or make_snapshot(), label_names
    )
    return renderer.render(make_table(conversations, labels=labels))


FILM = [("user", "fine film")]
CONTEXT = [{"role": "user", "content": "Once", "context": "upon"}, ("assistant", " a time")]


@pytest.mark.parametrize(
    ("template", "talk", "options", "text", "trained"),
    [
        ("alpaca", [{**Q, "context": ""}, QA[1]], {"system": "Be brief."},
         "<s>Be brief.\n\n### Instruction:\nQ\n\n### Response:A</s>", "A</s>"),
        ("completion", CONTEXT, {}, "<s>Once\nupon a time</s>", " a time</s>"),
        ("completion", [("user", "\u00e9\U0001f600"), ("assistant", "\u4e2d")], {},
         "<s>\u00e9\U0001f600\u4e2d</s>", "\u4e2d</s>"),
        ("classification", FILM, {"labels": [1], "label_names": ["bad", "good"]},
         "<s>fine film\nLabel:\ngood</s>", "good</s>"),
        ("classification", [*FILM, ("assistant", "positive")], {"prompt": "Review: {text} ="},
         "<s>Review: fine film =positive</s>", "positive</s>"),
        ("text", [("assistant", "Once upon a time.")], {}, "<s>Once upon a time.</s>",
         "<s>Once upon a time.</s>"),
    ],
)  # fmt: skip
def test_a_row_is_one_text_with_its_answer_trained(template, talk, options, text, trained):
    out = render(template, [talk], **options).formatted

    assert out["text"].to_pylist() == [text]
    assert pieces(out) == [[trained]]
    assert out["label"].to_pylist() == options.get("labels", [None])


def test_system_of_the_recipe_leaves_conversations_with_their_own_alone():
    out = render("alpaca", [QA, [("system", "Mine"), *QA], QA], system="Ours").formatted

    assert [text[3:7] for text in out["text"].to_pylist()] == ["Ours", "Mine", "Ours"]


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


def test_rows_that_a_template_of_texts_cannot_express_are_quarantined():
    call = '[{"function":{"name":"f","arguments":{}}}]'
    rows = [
        QA,
        [("user", "Q"), {"role": "assistant", "content": "", "tool_calls": call}],
        [("user", "Q"), ("user", "Q2"), ("assistant", "A")],
        [("user", "Q"), {"role": "assistant", "content": "A", "reasoning": "hm"}],
    ]
    out = render("alpaca", rows)

    assert out.formatted["row"].to_pylist() == [0]
    assert out.quarantined["row"].to_pylist() == [1, 2, 3]
    assert set(out.quarantined["reason"].to_pylist()) == {"template"}
    assert render("completion", [QA + QA]).quarantined["detail"].to_pylist() == [
        "completion takes one prompt and one answer, got user, assistant, user, assistant"
    ]


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


def test_a_tokenizer_without_eos_is_refused():
    bare = make_snapshot(special_tokens={})

    with pytest.raises(TemplateError, match="would never learn to stop"):
        make_renderer(FormatConfig(template="alpaca"), bare)


def test_another_template_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=f"Known: {', '.join(TEMPLATES)}, or"):
        make_renderer(FormatConfig.model_construct(template="vicuna"), make_snapshot())


@settings(max_examples=15)
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
