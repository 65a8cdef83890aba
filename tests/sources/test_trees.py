"""OASST1 with one message per row: trees are assembled in any order of rows."""

import json
from typing import Any

import orjson
import pytest

from tests.sources.conftest import delimited, lines, parquet

ROWS = [
    {"message_id": "b2", "parent_id": "a", "text": "worse", "role": "assistant", "rank": 1},
    {"message_id": "c", "parent_id": "b1", "text": "and?", "role": "prompter", "rank": None},
    {"message_id": "a", "parent_id": None, "text": "q", "role": "prompter", "rank": None},
    {"message_id": "b1", "parent_id": "a", "text": "best", "role": "assistant", "rank": 0},
    {"message_id": "d", "parent_id": "c", "text": "so", "role": "assistant", "rank": 0},
    {"message_id": "x", "parent_id": None, "text": "hello", "role": "prompter", "rank": None},
    {"message_id": "y", "parent_id": "x", "text": "hi", "role": "assistant", "rank": None},
]
FIRST = [("user", "q"), ("assistant", "best"), ("user", "and?"), ("assistant", "so")]
SECOND = [("user", "hello"), ("assistant", "hi")]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("r.jsonl", lines(ROWS)),
        ("r.json", json.dumps(ROWS).encode()),
        ("r.csv", delimited(ROWS)),
        ("r.parquet", parquet(ROWS, row_group_size=2)),
    ],
)
@pytest.mark.parametrize("max_shard_bytes", [100, 2**25])
def test_the_best_path_of_each_tree_is_read_from_all_rows(name, data, max_shard_bytes, read_bytes):
    found = read_bytes(data, name, max_shard_bytes=max_shard_bytes)

    assert [shard.row_format for shard in found.shards] == ["oasst_flat"]
    assert found.texts == [FIRST, SECOND]
    assert found.validated["row"].to_pylist() == [2, 5]
    dropped = found.dropped.select(["row", "reason"]).to_pydict()
    assert dropped["row"] == [0, 1, 3, 4, 6]
    assert dropped["reason"] == ["other_path", "joined", "joined", "joined", "joined"]


def test_all_paths_are_read_if_the_recipe_asks_for_them(read_bytes):
    found = read_bytes(lines(ROWS), oasst_paths="all")

    assert found.texts == [FIRST, [("user", "q"), ("assistant", "worse")], SECOND]
    assert found.extra_paths == 1
    assert set(found.dropped["reason"].to_pylist()) == {"joined"}


def test_rows_without_a_tree_are_quarantined_with_reason(read_bytes):
    rows = [
        *ROWS,
        {"message_id": "o", "parent_id": "gone", "text": "t", "role": "assistant"},
        {"message_id": "p", "parent_id": "o", "text": "t", "role": "prompter"},
        {"message_id": "l", "parent_id": "l", "text": "t", "role": "assistant"},  # its own parent
        {"message_id": "a", "parent_id": None, "text": "again", "role": "prompter"},
        {"message_id": 7, "parent_id": None, "text": "t", "role": "prompter"},
        {"message_id": "z", "parent_id": None, "text": "t", "role": "robot"},
        {"message_id": "n", "parent_id": None, "text": "unanswered", "role": "prompter"},
    ]

    found = read_bytes(lines(rows))

    assert found.texts == [FIRST, SECOND]
    assert found.reasons == ["orphan"] * 3 + ["tree", "type", "unknown_role", "no_assistant"]
    assert found.quarantined["raw"].to_pylist() == [orjson.dumps(row) for row in rows[7:]]


def test_real_trees_give_the_same_conversations_flat_and_nested(shared, read, read_bytes):
    nested = shared / "data/oasst_en_100_message.jsonl"
    flat = []

    def walk(message: dict[str, Any]) -> None:
        flat.append({name: value for name, value in message.items() if name != "replies"})
        for reply in message["replies"]:
            walk(reply)

    for line in nested.read_bytes().splitlines():
        walk(orjson.loads(line))
    flat.sort(key=lambda row: row["role"])  # answers before questions

    for paths in ("best", "all"):
        wanted = read(nested, oasst_paths=paths)
        found = read_bytes(lines(flat), oasst_paths=paths)
        assert sorted(found.validated["record_id"].to_pylist()) == sorted(
            wanted.validated["record_id"].to_pylist()
        )
    assert len(flat) == 1167


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (
            "\n\nHuman: Hi\n\nYou?\n\nAssistant: Hello ",
            [("user", "Hi\n\nYou?"), ("assistant", "Hello")],
        ),
        (
            "Human: say Human: twice\n\nAssistant: no",
            [("user", "say Human: twice"), ("assistant", "no")],
        ),
        ("### Human: q### Assistant: a", [("user", "q"), ("assistant", "a")]),
    ],
)
def test_transcripts_are_split_at_their_speakers(text, turns, read_bytes):
    found = read_bytes(lines([{"text": text}]), format="transcript")

    assert found.texts == [turns]


def test_transcripts_are_told_by_the_field_chosen_and_no_plain_text_is_taken_for_one(read_bytes):
    text = "\n\nHuman: q\n\nAssistant: a"
    beside = {"prompt": "q", "chosen": "\n\nHuman: q\n\nAssistant: a"}

    assert read_bytes(lines([{"chosen": text}])).shards[0].row_format == "transcript"
    assert read_bytes(lines([{"text": text}])).shards[0].row_format == "text"
    assert read_bytes(lines([beside])).shards[0].row_format == "preference"


def test_a_transcript_without_a_speaker_or_an_answer_is_quarantined(read_bytes):
    texts = ["Hi", "\n\nHuman: q", "\n\nHuman: q\n\nAssistant:"]

    found = read_bytes(lines([{"chosen": text} for text in texts]), format="transcript")

    assert found.reasons == ["transcript", "no_assistant", "empty_answer"]
