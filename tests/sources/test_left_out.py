"""With `format: auto` no part of a conversation is left out in silence."""

import json
import re

import pytest

from packhouse.errors import SourceError
from packhouse.read import read_shard, scan_source
from packhouse.read.chat_messages import read_weight
from packhouse.recipe import SourceConfig, ValidateConfig


def read(tmp_path, *rows, **config):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(path), **config)
    (shard,) = scan_source(source)
    return read_shard(shard, source, ValidateConfig(), "prompt").validated["messages"].to_pylist()


def said(messages):
    return [[(m["role"], m["content"], m["context"]) for m in row] for row in messages]


def test_input_beside_response_is_the_context_of_the_question(tmp_path):
    row = {"instruction": "Sum up.", "input": "A long text.", "response": "Short."}
    assert said(read(tmp_path, row)) == [
        [("user", "Sum up.", "A long text."), ("assistant", "Short.", None)]
    ]


def test_system_prompt_is_the_system_turn(tmp_path):
    row = {"system_prompt": "Be brief.", "question": "Why?", "response": "So.", "id": 7}
    mapping = {"question": "question", "answer": "response"}
    found = said(read(tmp_path, row, format="question_answer", fields=mapping))
    assert found[0][0] == ("system", "Be brief.", None)


def test_a_part_that_is_not_read_stops_the_run_with_the_mapping_to_write(tmp_path):
    plain = {"prompt": "Why?", "response": "So.", "context": ""}
    row = {"prompt": "What of it?", "response": "So.", "context": "It is blue."}
    with pytest.raises(SourceError, match="line 2 says something in the field 'context'") as caught:
        read(tmp_path, plain, row)
    remedy = "format: question_answer` and `fields: {question: prompt, context: context, answer: re"
    assert remedy in str(caught.value)
    mapping = {"question": "prompt", "context": "context", "answer": "response"}
    found = said(read(tmp_path, plain, row, format="question_answer", fields=mapping))
    assert found[1][0] == ("user", "What of it?", "It is blue.")


def test_a_bad_answer_of_kto_is_not_trained_as_a_good_one(tmp_path):
    good, bad = ({"prompt": "1+1?", "completion": str(n), "label": n == 2} for n in (2, 3))
    with pytest.raises(SourceError, match=r"line 2 has `label: false`.*`where: label`.*`format: k"):
        read(tmp_path, good, bad)
    assert len(read(tmp_path, good, bad, where="label")) == 1
    assert len(read(tmp_path, good, bad, format="kto")) == 2
    assert len(read(tmp_path, good, bad, format="prompt_completion")) == 2
    assert len(read(tmp_path, good, bad, ignored_fields=["label"])) == 2


def test_a_part_may_be_left_out_by_name(tmp_path):
    row = {"question": "Why?", "answer": "So.", "reasoning": "Because."}
    with pytest.raises(SourceError, match=r"`ignored_fields: \[reasoning\]`"):
        read(tmp_path, row)
    assert len(read(tmp_path, row, ignored_fields=["reasoning"])) == 1


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("passage", "The sky is blue.", "context: passage"),
        ("article", "The sky is blue.", "context: article"),
        ("sql_context", "CREATE TABLE skies (colour TEXT)", "context: sql_context"),
        ("query", "Which colour?", "Join it with another field"),
        ("rationale", "Because.", "reasoning: rationale"),
        ("options", ["A: so", "B: not so"], "ignored_fields: [options]"),
        ("B", "Not so.", "ignored_fields: [B]"),
    ],
)
def test_no_part_of_a_question_is_left_out_in_silence(tmp_path, name, value, remedy):
    row = {"question": "Why?", "answer": "So.", name: value}
    with pytest.raises(SourceError, match=f"in the field '{name}'") as refused:
        read(tmp_path, row)
    assert remedy in str(refused.value)


def test_the_mapping_of_a_refusal_reads_the_reasoning(tmp_path):
    row = {"question": "Why?", "answer": "So.", "thinking": "Because."}
    with pytest.raises(SourceError, match=r"`fields: {(.*)}`") as refused:
        read(tmp_path, row)
    said = re.search(r"`fields: {(.*?)}`", str(refused.value))
    fields = dict(pair.split(": ") for pair in said[1].split(", "))
    ((_, answer),) = read(tmp_path, row, format="question_answer", fields=fields)
    assert (answer["content"], answer["reasoning"]) == ("So.", "Because.")
    assert len(read(tmp_path, row, format="question_answer")) == 1


def test_a_field_that_repeats_the_conversation_is_no_loss(tmp_path):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [
        {"prompt": "Why?", "messages": messages},
        {"prompt": "Why?", "messages": json.dumps(messages)},
    ]
    assert len(read(tmp_path, rows[0])) == 1
    assert len(read(tmp_path, rows[1])) == 1
    with pytest.raises(SourceError, match="'prompt'"):
        read(tmp_path, {"prompt": "Something else", "messages": messages})


def test_two_questions_in_a_row_are_to_be_joined(tmp_path):
    row = {"instruction": "Answer.", "question": "Why?", "output": "So."}
    with pytest.raises(SourceError, match="Join it with another field"):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("flag", "weight"),
    [
        ({"loss_scale": 0.0}, 0.0),
        ({"loss_scale": 0.5, "loss": True}, 0.5),
        ({"training": False}, 0.0),
        ({"loss_scale": 1.0}, 1.0),
        ({"training": True}, 1.0),
        ({"training": None, "loss_scale": None}, None),
    ],
)
def test_weights_of_ms_swift_and_axolotl(flag, weight):
    assert read_weight({"role": "assistant", "content": "No."} | flag, 1) == weight
