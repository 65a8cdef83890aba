"""Every row format, and every kind of file, plain and compressed, gives the same conversations."""

import gzip
import io
import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest

from packhouse.read.row_formats import row_formats
from packhouse.recipe.sections import ROW_FORMATS
from tests.sources.conftest import lines, parquet

TALK = [("user", "Two & two?"), ("assistant", 'It is "4",\nI think.')]
ANSWER = TALK[1][1]
CHAT = [{"role": role, "content": text} for role, text in TALK]
SHAREGPT = [
    {"from": "human", "value": TALK[0][1]},
    {"from": "gpt", "value": ANSWER},
]
PARTS = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TALK]
CALLS = [
    {"from": "system", "value": "S"},
    {"from": "human", "value": "Add 2 and 2."},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "It is 4."},
]
CALLS_TALK = [("system", "S"), ("user", "Add 2 and 2."), ("assistant", ""), ("tool", "4")]
CALLS_TALK += [("assistant", "It is 4.")]
TREE = {
    "text": TALK[0][1],
    "role": "prompter",
    "replies": [{"text": ANSWER, "role": "assistant", "rank": 0, "replies": []}],
}

# format -> a row of it, and the conversation that it must give
ROWS = {
    "alpaca": ({"instruction": TALK[0][1], "input": "", "output": ANSWER}, TALK),
    "alpaca-history": (
        {"instruction": TALK[0][1], "output": ANSWER, "system": "S", "history": [["a", "b"]]},
        [("system", "S"), ("user", "a"), ("assistant", "b"), *TALK],
    ),
    "prompt_completion": ({"prompt": TALK[0][1], "completion": ANSWER}, TALK),
    "prompt_completion-response": ({"prompt": TALK[0][1], "response": ANSWER}, TALK),
    "chat": ({"messages": CHAT}, TALK),
    "chat-conversations": ({"conversations": CHAT}, TALK),
    "chat-parts": ({"messages": PARTS}, TALK),
    "chat-system": ({"system": "S", "messages": CHAT}, [("system", "S"), *TALK]),
    "sharegpt": ({"conversations": SHAREGPT}, TALK),
    "sharegpt-calls": ({"conversations": CALLS}, CALLS_TALK),
    "messages": (CHAT, TALK),
    "oasst": (TREE, TALK),
    "dolly": (
        {"instruction": TALK[0][1], "context": "", "response": ANSWER, "category": "x"},
        TALK,
    ),
    "question_answer": ({"question": TALK[0][1], "answer": ANSWER}, TALK),
    "classification": ({"text": TALK[0][1], "label": 1}, TALK[:1]),
    "text": ({"text": ANSWER}, TALK[1:]),
    "preference": ({"prompt": TALK[0][1], "chosen": ANSWER, "rejected": "No."}, TALK),
    "preference-messages": ({"chosen": CHAT, "rejected": [CHAT[0]]}, TALK),
    "transcript": (
        {"chosen": f"\n\nHuman: {TALK[0][1]}\n\nAssistant: {ANSWER}", "rejected": "b"},
        TALK,
    ),
    "squad": (
        {
            "paragraphs": [
                {"context": "", "qas": [{"question": TALK[0][1], "answers": [{"text": ANSWER}]}]}
            ]
        },
        TALK,
    ),
}
# A list has no columns; columns of these are not told from another format or hold no JSON.
JSON_ONLY = ("messages", "transcript", "squad")


def as_json(rows):
    return json.dumps(rows, indent=2).encode()


def as_delimited(rows, delimiter):
    flat = [
        {key: v if isinstance(v, str | int) else json.dumps(v) for key, v in row.items()}
        for row in rows
    ]
    sink = io.BytesIO()
    options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    pa.csv.write_csv(pa.Table.from_pylist(flat), sink, options)
    return sink.getvalue()


def as_arrow(rows, new=pa.ipc.new_file):
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


FILES = {
    "rows.json": as_json,
    "rows.jsonl": lines,
    "rows.ndjson": lines,
    "rows.csv": lambda rows: as_delimited(rows, ","),
    "rows.tsv": lambda rows: as_delimited(rows, "\t"),
    "rows.parquet": parquet,
    "rows.arrow": as_arrow,
    "rows.feather": lambda rows: as_arrow(rows, pa.ipc.new_stream),
}
COLUMNS = ("rows.csv", "rows.tsv", "rows.parquet", "rows.arrow", "rows.feather")
COMPRESSIONS = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": partial(pa.compress, codec="zstd", asbytes=True),
}
# All formats in a file of each kind: JSON, text columns, typed columns. The reader of a format does
# not see which file or compression its rows are from, so one format goes through all of them.
CASES = [
    (case, name, "")
    for case in ROWS
    for name in ("rows.jsonl", "rows.csv", "rows.parquet")
    if not (case in JSON_ONLY and name in COLUMNS)
]
CASES += [
    ("chat-parts", name, ending)
    for name in FILES
    for ending in COMPRESSIONS
    if not (ending and name in ("rows.parquet", "rows.arrow", "rows.feather"))
]


@pytest.mark.parametrize(("case", "name", "ending"), CASES)
def test_the_conversation_is_the_same(case, name, ending, read_bytes):
    row, talk = ROWS[case]
    row_format = case.split("-")[0]
    data = COMPRESSIONS[ending](FILES[name]([row, row]))

    found = read_bytes(data, name + ending)
    stated = read_bytes(data, name + ending, format=row_format)

    assert found.texts == [talk, talk], found.quarantined.to_pylist()
    assert found.notes == {}
    assert {shard.row_format for shard in found.shards} == {row_format}
    assert stated.validated.equals(found.validated)


def test_a_recipe_can_name_every_format():
    # oasst_flat needs several rows: test_trees.py. pairs and kto are only read if named:
    # test_preference_rows.py. A format with its own kind of file has its own tests as well.
    files = Path(__file__).parent.glob("test_*_format.py")
    own = {path.stem.removeprefix("test_").removesuffix("_format") for path in files}
    names = {case.split("-")[0] for case in ROWS} | own
    names |= {"oasst_flat", "pairs", "kto", "mixed", "auto"}
    assert {*row_formats(), "auto"} == set(ROW_FORMATS) == names


def test_fields_go_by_the_names_that_the_recipe_gives(read_bytes):
    row = {"frage": TALK[0][1], "antwort": ANSWER}
    fields = {"question": "frage", "answer": "antwort"}
    for name in COLUMNS:
        source = read_bytes(FILES[name]([row]), name, format="question_answer", fields=fields)
        assert source.texts == [TALK]
        assert source.extra_fields == {}
