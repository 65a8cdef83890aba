"""The demo's rows and tokenizer match deployments/demo/README.md."""

import json
import re

import pytest

from packhouse.read import read_shard, scan_source
from packhouse.recipe import load_recipe
from tests.prepared import DEMO

BAD_ROWS = {
    "instructions.jsonl": {
        17: "json",
        48: "encoding",
        83: "duplicate_key",
        111: "fields",
        146: "empty_answer",
        190: "type",
    },
    "chats.jsonl": {12: "unknown_role", 45: "ends_on_user", 79: "number"},
}


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO / "tokenizer", local_files_only=True)


def lines(file: str) -> list[bytes]:
    return (DEMO / file).read_bytes().split(b"\n")[:-1]


@pytest.mark.parametrize(("at", "file"), list(enumerate(BAD_ROWS)))
def test_validation_refuses_exactly_the_rows_that_are_bad_on_purpose(at, file):
    recipe = load_recipe(DEMO / "recipe.yaml")
    source = recipe.sources[at]
    (shard,) = scan_source(source)

    rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)

    refused = rows.quarantined.select(["row", "reason", "raw"]).to_pylist()
    assert {row["row"]: row["reason"] for row in refused} == BAD_ROWS[file]
    assert [row["raw"] for row in refused] == [lines(file)[row] for row in BAD_ROWS[file]]
    assert rows.validated.num_rows == len(lines(file)) - len(refused)


def test_the_readme_lists_the_bad_rows():
    listed = re.findall(r"^\| `(.+)` \| (\d+) \| `(.+)` \|", (DEMO / "README.md").read_text(), re.M)

    assert listed == [
        (file, str(row), reason) for file, rows in BAD_ROWS.items() for row, reason in rows.items()
    ]


def test_the_sample_matches_the_readme():
    rows, chats = lines("instructions.jsonl"), lines("chats.jsonl")

    assert (rows[5], rows[62]) == (rows[202], rows[203])
    haikus = [json.loads(rows[number]) for number in (177, 179)]
    assert haikus[0]["instruction"] == haikus[1]["instruction"]
    assert haikus[0]["output"] != haikus[1]["output"]
    assert any(b"<|im_end|>" in line for line in chats)
    assert any(b'"tool_calls"' in line for line in chats)


def test_tokenizer_has_4096_tokens_and_the_control_tokens_first(tokenizer):
    assert len(tokenizer) == 4096
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert (tokenizer.bos_token, tokenizer.unk_token) == (None, None)
