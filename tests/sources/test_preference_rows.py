"""Pairs and answers with a verdict: both sides are read, and only the answer is trained."""

import json

import pyarrow as pa
import pytest
import yaml

from packhouse.read import read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig

U, A, B = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [
    {"from": speaker, "value": text}
    for speaker, text in (("human", "q"), ("gpt", "a"), ("gpt", "b"))
]
OPENAI = {
    "input": {"messages": [U], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [A],
    "non_preferred_output": [B],
}
TIES = ["b", "tie", None, "it's: a tie"]
TALK = [U, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]


def read(tmp_path, *rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(path), **{"format": "pairs", **settings})
    (shard,) = scan_source(source, 2**25)
    found = read_shard(shard, source, ValidateConfig(), "prompt")
    bad = found.quarantined.num_rows
    kept = found.validated.num_rows + found.dropped.num_rows
    assert found.num_records + found.extra_paths == kept + bad
    return found


def turns(table: pa.Table) -> list[list[tuple[str, str, float | None]]]:
    rows = table["messages"].to_pylist()
    return [[(m["role"], m["content"], m["weight"]) for m in row] for row in rows]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        {"prompt": [U], "chosen": A, "rejected": B},
        {"prompt": "q", "chosen": [U, A], "rejected": [U, B]},
        {"chosen": [U, A], "rejected": [U, B]},
        {"prompt": "q", "chosen": json.dumps([U, A]), "rejected": json.dumps([U, B])},
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"},
        {
            "chosen": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "rejected": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "b"}],
        },
        OPENAI,
        {name: json.dumps(value) for name, value in OPENAI.items()},
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[2]},
        {"messages": [U], "chosen": json.dumps(A), "rejected": json.dumps(B)},
        {"messages": [U, A], "chosen": [U, A], "rejected": [U, B]},
        {"question": "q", "candidate_a": "b", "candidate_b": "a", "winner": "b"},
        {"prompt": "q", "response_1": "a", "response_2": "b", "preferred": 1},
        {"conversation_a": [U, B], "conversation_b": [U, A], "winner": "model_b"},
    ],
)
def test_both_sides_are_read_after_a_prompt_that_is_not_trained(row, tmp_path):
    trained = read(tmp_path, row, format="auto").validated
    assert [turn[:2] for turn in turns(trained)[0]] == [("user", "q"), ("assistant", "a")]
    found = read(tmp_path, row)

    assert turns(found.validated) == [[("user", "q", 0.0), ("assistant", "a", None)]]
    assert turns(found.rejected) == [[("user", "q", 0.0), ("assistant", "b", None)]]
    for name in ("record_id", "source", "row", "group_key", "tools", "label"):
        assert found.rejected[name].equals(found.validated[name])


@pytest.mark.parametrize(
    ("row", "reason", "says"),
    [
        (
            {"response_a": "a", "response_b": "b", "winner": "tie"},
            "winner",
            "nor response_b; to leave such rows out, set `where: winner != 'tie'`",
        ),
        ({"response_1": "a", "response_2": "b", "winner": 0}, "winner", "winner is '0'"),
        (
            {"response_a": "a", "response_b": "b", "winner": None},
            "winner",
            "set `where: winner is not null`",
        ),
        (
            {"response_a": "a", "response_b": "b", "winner": "it's: a tie"},
            "winner",
            "set `where: \"winner != 'it''s: a tie'\"`",
        ),
        (
            {"messages": [U, A], "chosen": A, "rejected": B},
            "no_prompt",
            "messages ends with an answer",
        ),
    ],
)
@pytest.mark.parametrize("row_format", ["pairs", "preference"])
def test_no_answer_is_chosen_that_the_row_does_not_name(row, reason, says, row_format, tmp_path):
    (bad,) = read(
        tmp_path, {"prompt": "q"} | row if "winner" in row else row, format=row_format
    ).quarantined.to_pylist()

    assert (bad["reason"], says in bad["detail"]) == (reason, True)


def test_rows_without_a_winner_are_left_out_as_the_detail_says(tmp_path):
    rows = [{"prompt": "q", "response_a": "a", "response_b": "b", "winner": w} for w in TIES]
    where = []
    for bad in read(tmp_path, *rows).quarantined.to_pylist():
        where.append(yaml.safe_load(bad["detail"].split("`")[1])["where"])

    found = read(tmp_path, *rows, where=where)

    assert (found.validated.num_rows, found.quarantined.num_rows) == (1, 0)
    assert found.dropped.num_rows == 3


def test_without_a_rejected_answer_only_the_chosen_one_can_win(tmp_path):
    rows = [{"prompt": "q", "response_a": "a", "winner": winner} for winner in "ab"]
    fields = {"chosen": "response_a", "winner": "winner"}

    found = read(tmp_path, *rows, format="preference", fields=fields)

    assert [turn[1] for turn in turns(found.validated)[0]] == ["q", "a"]
    (bad,) = found.quarantined.to_pylist()
    assert (bad["row"], bad["detail"]) == (
        1,
        "winner is 'b', which is not response_a; "
        "to leave such rows out, set `where: winner != 'b'`",
    )


def test_turns_that_both_sides_share_are_their_prompt(tmp_path):
    found = read(tmp_path, {"chosen": [SYSTEM, *TALK, A], "rejected": [SYSTEM, *TALK, B]})

    assert [turn[2] for turn in turns(found.validated)[0]] == [0.0, 0.0, 0.0, 0.0, None]
    assert turns(found.rejected)[0][-1] == ("assistant", "b", None)


def test_a_prompt_without_the_system_turn_of_its_sides_is_not_repeated(tmp_path):
    row = {"prompt": "q", "chosen": [SYSTEM, U, A], "rejected": [SYSTEM, U, B]}
    found = read(tmp_path, row, {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"})

    assert turns(found.validated)[0] == turns(found.validated)[1]
    assert len(turns(found.validated)[0]) == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "same_answers"),
        ({"chosen": [U, A], "rejected": [U, A]}, "same_answers"),
        ({"chosen": "a", "rejected": "b"}, "no_prompt"),
        ({"chosen": [U, A], "rejected": [{"role": "user", "content": "z"}, B]}, "no_prompt"),
        ({"prompt": "other", "chosen": [U, A], "rejected": [U, B]}, "prompt_differs"),
        ({"chosen": [*TALK, A], "rejected": [U, B]}, "not_one_answer"),
        ({"chosen": [U, A, U, B], "rejected": [U, A]}, "not_one_answer"),
        ({"prompt": "q", "chosen": "a"}, "fields"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "type"),
        ({"prompt": "q", "chosen": "a", "rejected": []}, "empty_conversation"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "empty_answer"),
        ({"prompt": "q", "chosen": " ", "rejected": "  "}, "empty_answer"),
        ({"prompt": [U], "chosen": [A | {"weight": 0.5}], "rejected": [B]}, "weight"),
    ],
)
def test_a_pair_is_bad_whole_and_once(row, reason, tmp_path):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    found = read(tmp_path, good, row, good)

    assert found.quarantined["reason"].to_pylist() == [reason]
    assert found.quarantined["row"].to_pylist() == [1]
    assert found.validated["row"].to_pylist() == found.rejected["row"].to_pylist() == [0, 2]


def test_pairs_are_called_by_both_sides(tmp_path):
    found = read(
        tmp_path,
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        {"prompt": "q", "chosen": "a", "rejected": "c"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
    )
    ids, groups = (found.validated[name].to_pylist() for name in ("record_id", "group_key"))

    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert len(set(groups)) == 1  # same prompt: same split


@pytest.mark.parametrize(
    ("label", "verdict"),
    [(True, 1), (False, 0), (1, 1), (0, 0), ("True", 1), ("false", 0), (1.0, 1)],
)
@pytest.mark.parametrize("completion", ["a", [U, A]])
def test_kto_is_an_answer_with_a_verdict(label, verdict, completion, tmp_path):
    found = read(tmp_path, {"prompt": "q", "completion": completion, "label": label}, format="kto")

    assert turns(found.validated) == [[("user", "q", 0.0), ("assistant", "a", None)]]
    assert found.validated["label"].to_pylist() == [verdict]
    assert found.rejected is None


@pytest.mark.parametrize("label", [2, "good", None, [True], 0.5])
def test_a_verdict_is_true_or_false(label, tmp_path):
    row = {"prompt": "q", "completion": "a", "label": label}

    assert read(tmp_path, row, format="kto").quarantined["reason"].to_pylist() == ["label"]
