"""No field with text is dropped silently: it is read, or the recipe lists it."""

import json

import pytest

from packhouse.errors import SourceError
from packhouse.read import read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig


def read(tmp_path, *rows, **config):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(path), **config)
    (shard,) = scan_source(source)
    return read_shard(shard, source, ValidateConfig(), "prompt")


def said(shard):
    rows = shard.validated["messages"].to_pylist()
    return [[(m["role"], m["content"], m["context"]) for m in row] for row in rows]


def unread(tmp_path, *rows, **config):
    return {name: found.rows for name, found in read(tmp_path, *rows, **config).unread_text.items()}


def test_input_with_response_is_the_context_of_the_question(tmp_path):
    row = {"instruction": "Sum up.", "input": "A long text.", "response": "Short."}
    assert said(read(tmp_path, row)) == [
        [("user", "Sum up.", "A long text."), ("assistant", "Short.", None)]
    ]


def test_system_prompt_is_the_system_turn(tmp_path):
    row = {"system_prompt": "Be brief.", "question": "Why?", "response": "So.", "id": 7}
    mapping = {"question": "question", "answer": "response"}
    found = said(read(tmp_path, row, format="question_answer", fields=mapping))
    assert found[0][0] == ("system", "Be brief.", None)


def test_a_bad_answer_of_kto_is_not_trained_as_a_good_one(tmp_path):
    good, bad = ({"prompt": "1+1?", "completion": str(n), "label": n == 2} for n in (2, 3))
    with pytest.raises(SourceError, match=r"line 2 has `label: false`.*`where: label`.*`format: k"):
        read(tmp_path, good, bad)
    ways = [
        {"where": "label"},
        {"format": "kto"},
        {"format": "prompt_completion"},
        {"ignored_fields": ["label"]},
    ]
    assert [read(tmp_path, good, bad, **way).validated.num_rows for way in ways] == [1, 2, 2, 2]


LONG = "The sky is blue because of the air."
MESSAGES = [{"role": "user", "content": "Why is it so?"}, {"role": "assistant", "content": "So."}]
TOOLS = [{"name": "add", "description": "Add two numbers and return the sum."}]


@pytest.mark.parametrize(
    ("row", "config", "names"),
    [
        (  # a class is trained, and the text it refers to is not read
            {"query": LONG, "completion": "It is, by day.", "text": "A sky", "label": "good"},
            {"format": "classification", "label_names": ["good", "bad"]},
            ["completion", "query"],
        ),
        (  # the first candidate is trained, whatever `winner` says
            {"prompt": "Why?", "candidate_a": "So.", "candidate_b": LONG, "winner": "candidate_b"},
            {"format": "prompt_completion", "fields": {"completion": "candidate_a"}},
            ["candidate_b"],
        ),
        (  # the first of all answers is trained, although another is called the best
            {"question": "Why?", "answers": ["So.", LONG], "best_answer": LONG},
            {"format": "squad"},
            ["best_answer"],
        ),
        (
            {"question": "Why?", "answer": "Air.", "thoughts": LONG, "whole_reply": f"{LONG} Air."},
            {"format": "question_answer"},
            ["thoughts", "whole_reply"],
        ),
        ({"prompt": "1+1?", "completion": "add(1, 1)", "tools": TOOLS}, {}, ["tools"]),
        ({"prompt": "1+1?", "completion": "2", "tools": json.dumps(TOOLS)}, {}, ["tools"]),
        (  # answers without their question
            {"input": {"messages": MESSAGES, "tools": TOOLS}, "preferred_output": MESSAGES[1:]},
            {"select": {"messages": "preferred_output"}},
            ["input", "input.messages", "input.tools"],
        ),
        (
            {"input": {"messages": MESSAGES, "tools": TOOLS}, "n": 1},
            {"select": {"messages": "input.messages"}},
            ["input", "input.tools"],
        ),
        ({"messages": [{**MESSAGES[0], "hint": LONG}, MESSAGES[1]]}, {}, ["messages[].hint"]),
        ({"question": "Why?", "answer": "So.", "背景": "天空是蓝色的因为空气很多"}, {}, ["背景"]),
        ({"question": "Why?", "answer": "So.", "options": ["A: so", "B: not"]}, {}, ["options"]),
        ({"input_ids": [5, 6], "labels": [5, 6], "text": LONG}, {}, ["text"]),
    ],
)
def test_a_field_with_text_that_nobody_reads_is_counted(tmp_path, row, config, names):
    assert unread(tmp_path, row, row, **config) == dict.fromkeys(names, 2)
    outer = [name for name in names if "." not in name.replace("[].", "")]
    assert unread(tmp_path, row, row, ignored_fields=outer, **config) == {}


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ({"messages": MESSAGES, "prompt": "Why is it so?"}, {}),  # a part of what is read
        ({"messages": json.dumps(MESSAGES), "prompt": "Why is it  so?\n"}, {}),
        ({"messages": MESSAGES, "conversations": MESSAGES}, {}),
        ({"question": LONG, "answer": "So.", "both": f"{LONG}\n\nSo."}, {}),
        ({"question": "Why?", "answer": "So.", "note": LONG}, {"where": "length(note) > 9"}),
        ({"question": "Why?", "answer": "So.", "made": "2026-11-27 10:00 UTC", "n": 1.5}, {}),
        ({"question": "Why?", "answer": "So.", "tags": ["sky", "air", "blue", "why"]}, {}),
        ({"prompt": "Why is it so?", "chosen": "So.", "rejected": LONG}, {}),
    ],
)
def test_repeated_or_explanatory_text_may_be_ignored(tmp_path, row, config):
    assert unread(tmp_path, row, row, row, **config) == {}


def test_a_template_around_the_text_may_be_ignored_but_not_reasoning(tmp_path):
    def row(n, text):
        return {"instruction": f"Add one to {n}", "output": f"It is {n + 1}", "text": text}

    written = "Below is a task. Write what completes it.\n### Task: Add one to {}\n### It is {}"
    rows = [row(n, written.format(n, n + 1)) for n in range(5)]
    assert unread(tmp_path, *rows) == {}
    thought = "Add one to {}: we take the number {} and count on by one, so It is {}"
    rows = [row(n, thought.format(n, n, n + 1)) for n in range(5)]
    assert unread(tmp_path, *rows) == {"text": 5}
    assert unread(tmp_path, *[rows[0]] * 5) == {"text": 5}  # equal rows are not a template
