"""Training flags of Axolotl and ms-swift, in rows taken from their documentation.

`AXOLOTL` holds the tokens that Axolotl's `ChatTemplateStrategy` (067b021) labels with the same
tokenizer and template, `roles_to_train: []` and `train_on_eos: turn`.
"""

import pytest

from packhouse import load_packed
from packhouse.read.chat_messages import BadRowError, read_messages
from tests.chain.conftest import Project
from tests.templates.toys import CHATML

WELL = "I'm doing very well, thank you!"
THINK = "Let me think... The answer is 4."


def spans(*triples):
    return [{"begin_offset": a, "end_offset": b, "train": train} for a, b, train in triples]


@pytest.fixture
def publish(shared, tmp_path):
    """Publish conversations and return the trained tokens of each with their weights."""

    def published(*conversations, tokenizer="qwen2.5-instruct", template=CHATML):
        from transformers import AutoTokenizer

        (tmp_path / "chat.jinja").write_text(template or "")
        project = Project(tmp_path)
        project.write({"messages": messages} for messages in conversations)
        base = {
            "sources": [{"path": "rows.jsonl"}],
            "tokenizer": str(shared / "tokenizers" / tokenizer),
            "format": {"template": "chat.jinja" if template else "chat"},
            "pack": {"seq_len": 512, "strategy": "none"},
            "split": {"eval_fraction": 0},
            "audit": {"min_answer_coverage": 0.5},  # a token may only end inside a span
        }
        project.write_recipe(**base)
        prepared = project.prepare()
        places = {record["record_id"]: record["row"] for record in project.records(prepared)}
        decode = AutoTokenizer.from_pretrained(shared / "tokenizers" / tokenizer).decode
        found = [[] for _ in conversations]
        for row in load_packed(project.uri(prepared), cache=tmp_path / "copies"):
            weights = row.get("loss_weights") or [float(label != -100) for label in row["labels"]]
            pairs = zip(row["input_ids"], weights, strict=True)
            found[places[row["record_ids"][0]]] = [(decode([t]), w) for t, w in pairs if w]
        return found

    return published


def test_the_example_of_axolotl_is_trained_as_axolotl_trains_it(publish):
    messages = [
        {"from": "system", "value": "You are an AI assistant.", "train": False},
        {"from": "human", "value": "Hello", "train": False},
        {"from": "assistant", "value": "Hello", "train": True},
        {"from": "human", "value": "How are you?", "train": True},
        {
            "from": "assistant",
            "value": WELL,
            "train_detail": spans((0, 8, False), (9, 18, True), (19, 30, False)),
        },
        {"from": "human", "value": WELL, "train": True},
        {"from": "assistant", "value": "Hi there!", "train": True},
    ]
    end, well = "<|im_end|>", ["I", "'m", " doing", " very", " well", ",", " thank", " you", "!"]
    # A user turn ends with its line break, as everywhere; Axolotl leaves it out.
    asked = ["How", " are", " you", "?", end, "\n"]
    answers = [["Hello", end], [" very", " well", end], ["Hi", " there", "!", end]]
    due = [*answers[0], *asked, *answers[1], *well, end, "\n", *answers[2]]
    assert publish(messages) == [[(token, 1.0) for token in due]]


AXOLOTL = {
    ((0, 14, False), (15, 31, True)): [" The", " answer", " is", " ", "4", ".", "<|im_end|>"],
    ((0, 17, False), (18, 31, True)): [" answer", " is", " ", "4", ".", "<|im_end|>"],
    ((0, 17, True), (18, 31, False)): ["Let", " me", " think", "...", " The", "<|im_end|>"],
    ((19, 25, True),): [" answer", "<|im_end|>"],
    ((0, 15, False), (16, 31, True)): [" The", " answer", " is", " ", "4", ".", "<|im_end|>"],
    ((0, 15, True), (16, 31, False)): ["Let", " me", " think", "...", "<|im_end|>"],
}


def test_spans_are_trained_as_axolotl_trains_them(publish):
    answers = [(THINK, triples) for triples in AXOLOTL]
    answers.append(("Unbelievable!", ((4, 12, True),)))
    chats = [
        [
            {"from": "human", "value": f"Hm {number}?"},
            {"from": "gpt", "value": text, "train_detail": spans(*triples)},
        ]
        for number, (text, triples) in enumerate(answers)
    ]
    *found, last = publish(*chats)
    assert [[token for token, _ in each] for each in found] == list(AXOLOTL.values())
    # "Un", "belie", "vable", "!": "belie" begins before character 4. Axolotl trains it.
    assert [token for token, _ in last] == ["vable", "!", "<|im_end|>"]


def test_parts_of_reasoning_have_their_own_weight(publish):
    answer = {
        "role": "assistant",
        "reasoning_content": [
            {"type": "text", "text": "Hmm maybe 2+2=5.", "train": False},
            {"type": "text", "text": " Wait no, 2+2=4.", "train": True},
        ],
        "content": [{"type": "text", "text": "The answer is 4.", "train": True}],
    }
    asked = {"role": "user", "content": "What is 2+2?"}
    (found,) = publish([asked, answer], tokenizer="qwen3", template=None)
    # Axolotl trains the same except "<think>\n", "</think>" and "\n\n", which the template writes.
    assert "".join(token for token, _ in found) == (
        "<think>\n Wait no, 2+2=4.\n</think>\n\nThe answer is 4.<|im_end|>"
    )


def test_the_example_of_ms_swift_and_flags_of_any_role(publish):
    swift = [
        {"role": "user", "content": "hello!"},
        {"role": "assistant", "content": "<think>\n...\n</think>\n", "loss_scale": 1.0},
        {"role": "assistant", "content": "hi!", "loss_scale": 2.0},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "<think>\n...\n</think>\n1+1=3", "loss": False},
    ]
    flags = [
        {"role": "user", "content": "One?", "training": True},
        {"role": "assistant", "content": "Two.", "training": True},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four.", "train_detail": []},
    ]
    found, of_flags = publish(swift, flags)
    texts = {weight: "".join(t for t, own in found if own == weight) for _, weight in found}
    assert texts == {1.0: "<think>\n...\n</think>\n<|im_end|>", 2.0: "hi!<|im_end|>"}
    assert "".join(token for token, _ in of_flags) == "One?<|im_end|>\nTwo.<|im_end|>"


def read(text="Hm. Four.", **fields):
    asked = {"role": "user", "content": "2 + 2?"}
    _, answer = read_messages(
        [asked, {"role": "assistant", "content": text, **fields}], None, None
    ).turns
    return answer[-2:]


def test_overlapping_spans_train_a_token_if_any_of_them_does():
    detail = spans((4, 6, True), (0, 1, False), (5, 9, True), (5, 5, False))
    assert read(train_detail=detail) == (1.0, "[[3,0.0],[4,1.0],[2,1.0]]")


def test_spans_over_a_whole_turn_set_its_weight():
    assert read(train_detail=spans((0, 8, True))) == (1.0, None)
    assert read(train_detail=spans((0, 8, False))) == (0.0, None)
    assert read(train_detail=spans((3, 8, True)), train=False) == (0.0, "[[3,0.0],[6,1.0]]")
    assert read(train_detail=spans((3, 8, True)), weight=0.5) == (0.5, "[[3,0.0],[6,1.0]]")
    assert read(training_detail=None) == (None, None)


def test_a_turn_without_a_span_is_trained_if_a_flag_is_set_as_in_axolotl():
    assert read(train_detail=[]) == read(train_detail=[], train=False) == (0.0, None)
    assert read(train_detail=[], training=True) == (1.0, None)
    assert read(train_detail=[], training_detail=[]) == (0.0, None)


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"train_detail": spans((0, 10, True))},
            "characters 0 to 10 are not within the content, which has 9",
        ),
        ({"train_detail": spans((5, 4, True))}, "characters 5 to 4"),
        ({"train_detail": spans((-1, 4, True))}, "characters -1 to 4"),
        ({"train_detail": spans((0, 4, "yes"))}, "not {begin_offset, end_offset, train}"),
        ({"train_detail": spans((0, True, True))}, "not {begin_offset, end_offset, train}"),
        ({"train_detail": ["all"]}, "has 'all', not"),
        ({"train_detail": "0-4"}, "is '0-4', not a list of spans"),
        (
            {"train_detail": spans((0, 4, True)), "tool_calls": [CALL]},
            "spans cannot be combined with tool calls",
        ),
        ({"train_detail": True}, "is 'True', not a list of spans"),
        ({"train_detail": [], "training_detail": spans((0, 4, True))}, "contradict each other"),
        ({"loss_scale": -1}, "loss_scale is '-1', not a weight"),
        ({"loss_scale": []}, "not a weight"),
        ({"training": []}, "training is '..', not a weight"),
        ({"training": 1}, "training is '1', not a weight"),
        ({"loss_scale": 2, "loss": False}, "contradict each other"),
        ({"reasoning_content": [{"type": "tool_call", "tool_call": CALL}]}, "a part of reasoning"),
    ],
)
def test_contradictory_spans_are_a_bad_row(fields, why):
    with pytest.raises(BadRowError, match=why):
        read(**fields)


def test_the_loss_scale_of_a_question_is_refused():
    asked = {"role": "user", "content": "2 + 2?", "loss_scale": 2.0}
    with pytest.raises(BadRowError, match="only answers can have a loss_scale"):
        read_messages([asked], None, None)
    for scale in (0, 1, 1.0):
        (turn,) = read_messages([asked | {"loss_scale": scale}], None, None).turns
        assert turn[-2:] == (None, None)
