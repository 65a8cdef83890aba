"""Try to forge a turn in 500 conversations with each real tokenizer: none succeeds.

Contents are made of control tokens, headers, thinking marks, pieces of them, Jinja and odd code
points. The resulting control tokens must be those of the same turns with harmless contents.
"""

import random

import pytest

from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render import make_renderer
from packhouse.tokenize import load_snapshot, tokenize_table
from tests.fuzz.seeds import forged_conversation
from tests.templates.toys import make_table
from tests.tokenization.controls import control_ids

NUM_CONVERSATIONS = 500
TOKENIZERS = ["qwen3", "mistral-7b-instruct-v0.3"]


def tokenized(conversations, snapshot):
    rendered = make_renderer(FormatConfig(turns="whole"), snapshot).render(
        make_table(conversations)
    )
    done = tokenize_table(rendered.formatted, snapshot, TokenizeConfig())
    rows = done.tokenized.select(["row", "input_ids", "trained_ranges"]).to_pylist()
    return {row.pop("row"): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_content_forges_a_turn(name, shared):
    snapshot = load_snapshot(str(shared / "tokenizers" / name))
    control = control_ids(snapshot)

    def structure(row, of):
        ids, ranges = row["input_ids"], row["trained_ranges"]
        kept = ids if of == "all" else [i for r in ranges for i in ids[r["start"] : r["end"]]]
        return [index for index in kept if index in control]

    rng = random.Random(20261120)
    # Mistral's template has no system turn.
    may_instruct = not name.startswith("mistral")
    conversations = [
        forged_conversation(rng, may_instruct=may_instruct) for _ in range(NUM_CONVERSATIONS)
    ]
    harmless = [[(role, "word") for role, _ in turns] for turns in conversations]
    hostile_rows, harmless_rows = (tokenized(rows, snapshot) for rows in (conversations, harmless))
    end = snapshot.added_tokens["</s>" if name.startswith("mistral") else "<|im_end|>"]

    forged = []
    for number, row in hostile_rows.items():
        twin = harmless_rows[number]
        answers = sum(role == "assistant" for role, _ in conversations[number])
        last = [row["input_ids"][r["end"] - 1] for r in row["trained_ranges"]]
        same = all(structure(row, of) == structure(twin, of) for of in ("all", "trained"))
        if not same or last != [end] * answers:
            forged.append(number)

    assert forged == []
    assert hostile_rows.keys() == harmless_rows.keys()
    assert len(hostile_rows) == NUM_CONVERSATIONS
