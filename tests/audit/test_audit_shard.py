"""Defects that others shipped, each made on purpose and found by the audit of one shard."""

import copy
import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.auditing import shard as shard_module
from packhouse.auditing.shard import audit_shard
from packhouse.auditing.tokens import Intervals, Side
from packhouse.recipe import FormatConfig
from packhouse.tokenize import load_snapshot
from tests.audit.conftest import CHATS, DEMO, Tables, turns

IM_START, IM_END = 1, 2

FINDINGS = {
    "untrained_answer_bytes",
    "trained_prompt_bytes",
    "unterminated_turns",
    "leaked_headers",
    "double_ends",
    "double_bos",
    "missing_bos",
    "unknown_tokens",
    "untrained_rows",
    "unlocated_rows",
}


def audited(tables, snapshot=None):
    return audit_shard(
        [Side(tables.validated, tables.formatted, tables.tokenized)],
        snapshot or tables.snapshot,
        tables.config,
    )


def found(tables, snapshot=None):
    """Findings that are not zero."""
    counts = audited(tables, snapshot)["counts"]
    return {name: counts[name] for name in FINDINGS if counts[name]}


def test_sound_rows_have_no_finding(tables):
    assert found(tables) == {}
    counts = audited(tables)["counts"]
    assert (counts["rows"], counts["turns"]) == (3, 4)
    answers = ["Six.", "The Danube.", "The Elbe, for example.", "Scattering."]
    assert counts["answer_bytes"] == sum(map(len, answers))


THOUGHTS = [turns("Why?", "So. <think>hm</think> And <think>ha</think> so.", "And?", "Yes.")]


def test_a_thought_left_out_within_a_turn_ends_no_turn(snapshot):
    tables = Tables(THOUGHTS, snapshot, FormatConfig(reasoning="train_last"))
    assert len(tables.formatted["trained_spans"][0]) == 4
    assert "unterminated_turns" not in found(tables)

    def without_an_end(row):  # the turn's last range; those before it have none
        row["trained_ranges"][2]["end"] -= 1

    tables.sabotage(without_an_end)
    assert found(tables)["unterminated_turns"] == 1


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_no_way_to_train_is_a_finding_by_itself(snapshot, train_on, template):
    config = FormatConfig(template=template, train_on=train_on)
    assert found(Tables(CHATS, snapshot, config)) == {}


def test_messages_of_weight_zero_are_not_due(snapshot):
    chat = turns("Name a river.", "The Danube.", "And another?", "The Elbe.")
    chat[1]["weight"] = 0.0
    tables = Tables([chat], snapshot)
    assert found(tables) == {}
    assert audited(tables)["counts"]["answer_bytes"] == len("The Elbe.")


def template_file(folder, answer):
    """A ChatML template with `answer` for assistant turns, generation tags and all."""
    path = folder / "own.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    return FormatConfig(template=str(path))


def test_axolotl_3754_an_end_token_outside_of_the_generation_block(snapshot, tmp_path):
    """https://github.com/axolotl-ai-cloud/axolotl/issues/3754: Gemma's turn terminator was never
    trained while "loss curves look perfectly healthy"."""
    config = template_file(
        tmp_path,
        "<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
    )
    tables = Tables(CHATS, snapshot, config)
    assert found(tables) == {}
    for ids, ranges in zip(
        *(tables.tokenized[n].to_pylist() for n in ("input_ids", "trained_ranges")), strict=True
    ):
        end = snapshot.added_tokens["<|im_end|>"]
        assert {ids[each["end"] - 1] for each in ranges} == {end}


def test_of_a_generation_block_around_the_header_the_answer_is_trained(snapshot, tmp_path):
    config = template_file(
        tmp_path,
        "{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endgeneration %}\n",
    )
    assert found(Tables(CHATS, snapshot, config)) == {}


def test_trl_1623_a_masked_end_token(tables):
    """https://github.com/huggingface/trl/issues/1623: pad == eos masked the EOS, and the model
    never stopped."""

    def mask_ends(row):
        for span in row["trained_ranges"]:
            span["end"] -= 1

    tables.sabotage(mask_ends)
    assert found(tables) == {"unterminated_turns": 4}


def test_praisonai_4358_prompts_that_were_never_masked(tables):
    """https://github.com/MervinPraison/PraisonAI/issues/4358"""

    def train_all(row):
        row["trained_ranges"] = [{"start": 0, "end": len(row["input_ids"])}]

    tables.sabotage(train_all)
    prompts = ["How many legs has an ant?", "Name a river.", "And another?", "Be brief."]
    prompts.append("Why is the sky blue?")
    assert found(tables)["trained_prompt_bytes"] == sum(map(len, prompts))
    assert found(tables)["leaked_headers"] == 3


def test_unsloth_1290_labels_that_are_all_ignored(tables):
    """https://github.com/unslothai/unsloth/issues/1290"""

    def train_nothing(row):
        row["trained_ranges"] = []

    tables.sabotage(train_nothing)
    assert found(tables)["untrained_rows"] == 3
    assert found(tables)["untrained_answer_bytes"] == audited(tables)["counts"]["answer_bytes"]


def test_axolotl_2089_half_an_answer_is_trained(tables):
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2089: wrong assistant spans."""
    whole = tables.tokenized.to_pylist()[1]["trained_ranges"][1]

    def start_late(row):
        if row["row"] == 1:
            row["trained_ranges"][1]["start"] += 3

    tables.sabotage(start_late)
    assert whole["end"] - whole["start"] > 4
    assert 0 < found(tables)["untrained_answer_bytes"] < len("The Elbe, for example.")
    assert [row["row"] for row in audited(tables)["worst"]["untrained_answer_bytes"]] == [1]


def test_openrlhf_393_two_bos(tables):
    """https://github.com/OpenRLHF/OpenRLHF/issues/393: the template's BOS and the tokenizer's."""
    with_bos = replace(
        tables.snapshot,
        special_tokens={**tables.snapshot.special_tokens, "bos_token": "<|endoftext|>"},
        adds_bos=True,
    )
    assert found(tables, with_bos) == {"missing_bos": 3}

    def put_bos(row):
        row["input_ids"] = [0, 0, *row["input_ids"]]
        for span in row["trained_ranges"]:
            span["start"] += 2
            span["end"] += 2

    tables.sabotage(put_bos)
    # The tokens no longer spell the text, so what lies where cannot be told.
    assert found(tables, with_bos) == {"double_bos": 3, "unlocated_rows": 3}


@pytest.fixture
def opens_turns(tables):
    """A tokenizer whose BOS opens every turn."""
    special = {**tables.snapshot.special_tokens, "bos_token": "<|im_start|>"}
    return replace(tables.snapshot, special_tokens=special)


def test_a_bos_that_the_template_writes_at_every_turn_is_due(tables, opens_turns):
    assert found(tables, opens_turns) == {}


def test_a_bos_right_behind_another_is_double_and_counts_its_row_once(tables, opens_turns):
    def open_twice(row):
        row["input_ids"] = [
            t for i in row["input_ids"] for t in ([i] * (3 if i == IM_START else 1))
        ]
        row["trained_ranges"] = []

    tables.sabotage(open_twice)
    counts = audited(tables, opens_turns)["counts"]
    assert counts["double_bos"] == counts["rows"] == 3


def test_a_bos_that_nobody_wrote_is_double_where_places_are_not_known(tables, opens_turns):
    def put_bos(row):
        if row["row"] == 1:  # between two words of the last answer
            row["input_ids"].insert(len(row["input_ids"]) - 4, IM_START)
            row["trained_ranges"][-1]["end"] += 1

    tables.sabotage(put_bos)
    assert found(tables, opens_turns)["double_bos"] == 1


def test_no_share_exceeds_the_whole(tables):
    def end_often(row):
        at = row["trained_ranges"][-1]["end"]
        row["input_ids"][at:at] = [IM_END] * 5

    tables.sabotage(end_often)
    counts = audited(tables)["counts"]
    assert counts["double_ends"] == counts["rows"] == 3


def test_answers_without_a_range_are_turns_that_have_no_end(tables):
    def drop_ranges(row):
        row["trained_ranges"] = row["trained_ranges"][:1]

    tables.sabotage(drop_ranges)
    counts = audited(tables)["counts"]
    assert (counts["turns"], counts["unterminated_turns"]) == (4, 1)


def test_an_end_token_twice(tables):
    def end_twice(row):
        if row["row"] == 0:
            row["input_ids"].insert(row["trained_ranges"][0]["end"], IM_END)

    tables.sabotage(end_twice)
    assert found(tables) == {"double_ends": 1, "unlocated_rows": 1}


def test_trained_bos_is_a_leak(shared, tmp_path):
    """Mistral's template opens with BOS; trained, it would teach the model to restart."""
    snapshot = load_snapshot(shared / "tokenizers" / "mistral-7b-instruct-v0.3")
    tables = Tables(CHATS[:2], snapshot)
    assert found(tables) == {}

    def train_from_bos(row):
        row["trained_ranges"][0]["start"] = 0

    tables.sabotage(train_from_bos)
    assert found(tables)["leaked_headers"] == 2
    assert found(tables)["trained_prompt_bytes"] > 0


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3", "mistral-7b-instruct-v0.3"])
def test_real_tokenizers_have_no_finding(shared, name):
    chats = [*CHATS[:2], turns("Caf\u00e9?", "Tr\u00e8s bien \U0001f600, \u4f60\u597d.")]
    snapshot = load_snapshot(shared / "tokenizers" / name)
    assert found(Tables(chats, snapshot)) == {}


def test_words_that_bert_does_not_know(shared):
    snapshot = load_snapshot(shared / "tokenizers" / "bert-base-uncased")
    config = FormatConfig(template="sequence_classification")
    chats = [turns("a fine film")[:1], turns("\U0001f600 \U0001f601")[:1]]
    tables = Tables(chats, snapshot, config, labels=[1, 0])
    assert found(tables) == {"unknown_tokens": 2, "unlocated_rows": 2}
    assert audited(tables)["worst"]["unknown_tokens"][0]["row"] == 1


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "mistral-7b-instruct-v0.3"])
def test_an_answer_whose_first_token_begins_in_the_prompt(shared, name):
    """A prompt that ends in a space: " positive" is one token and begins in the prompt, so that
    nothing but the end token is trained. With a line break instead, all of it is."""
    snapshot = load_snapshot(shared / "tokenizers" / name)
    chats = [turns("a fine film", "positive")]
    config = FormatConfig(template="classification", prompt="{text}\nLabel: ")
    assert found(Tables(chats, snapshot, config)) == {"untrained_answer_bytes": len("positive")}
    config = FormatConfig(template="classification", prompt="{text}\nLabel:\n")
    assert found(Tables(chats, snapshot, config)) == {}


def test_control_text_in_contents_is_no_end_and_no_header(snapshot):
    chats = [turns("What does <|im_end|> do?", "It ends; <|im_start|>user opens.")]
    assert found(Tables(chats, snapshot)) == {}


CALLING = [
    *turns("Look it up."),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": '[{"id":"abcdefghi","function":{"name":"f","arguments":{"q":"x"}}}]',
    },
    {"role": "tool", "content": "42", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 42."},
]


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3", "mistral-7b-instruct-v0.3"])
def test_a_call_without_its_end_and_a_call_without_a_mask(shared, name):
    """`</tool_call>` is a control token, too, and ends no turn; a call has no content to cover."""
    tables = Tables([CALLING], load_snapshot(shared / "tokenizers" / name))
    assert found(tables) == {}
    whole = tables.tokenized

    def without_an_end(row):
        row["trained_ranges"][0]["end"] -= 1

    def without_a_mask(row):
        del row["trained_ranges"][0]

    for change in (without_an_end, without_a_mask):
        tables.tokenized = whole
        tables.sabotage(change)
        assert found(tables) == {"unterminated_turns": 1}


@given(which=st.integers(0, 3), start=st.integers(-3, 3), end=st.integers(-3, 3))
def test_every_range_that_is_moved_is_misplaced(which, start, end):
    tables = moved_tables()
    assert audited(tables)["counts"]["misplaced_rows"] == 0

    def move(row):
        for number, span in enumerate(row["trained_ranges"]):
            if number == which % len(row["trained_ranges"]):
                span["start"] = max(0, min(span["start"] + start, span["end"] - 1))
                span["end"] = min(max(span["end"] + end, span["start"] + 1), len(row["input_ids"]))

    before = tables.tokenized["trained_ranges"].to_pylist()
    tables.sabotage(move)
    after = tables.tokenized["trained_ranges"].to_pylist()
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    assert audited(tables)["counts"]["misplaced_rows"] == changed


@functools.cache
def sound_tables():
    with tempfile.TemporaryDirectory() as cache:
        snapshot = load_snapshot(DEMO / "tokenizer", cache=Path(cache))
    return Tables(CHATS, snapshot)


def moved_tables():
    return copy.copy(sound_tables())


QWEN = "qwen2.5-instruct"
MISTRAL = "mistral-7b-instruct-v0.3"
DECOMPOSED = [turns("Cafe\u0301?", "Tre\u0300s bien.", "A\u0300 la?", "Oui.")]  # Qwen's is NFC


@pytest.mark.parametrize("never", [[], ["user"]])
def test_rows_that_a_tokenizer_normalises_end_behind_the_last_end_token(shared, never):
    """All is trained, so the line break behind the last end token is, too: it cuts nothing off."""
    snapshot = load_snapshot(shared / "tokenizers" / QWEN)
    tables = Tables(DECOMPOSED, snapshot, FormatConfig(train_on="all", never_train=never))
    assert found(tables) == {"unlocated_rows": 1}

    def without_ends(row):
        for span in row["trained_ranges"]:
            span["end"] -= 2

    tables.sabotage(without_ends)
    assert found(tables)["unterminated_turns"] == len(tables.tokenized["trained_ranges"][0])


def test_a_system_turn_that_the_template_does_not_end_needs_no_end(shared):
    """Mistral's stands in the user's turn: no token is there that could be trained."""
    snapshot = load_snapshot(shared / "tokenizers" / MISTRAL)
    system = {"role": "system", "content": "Be brief.", "weight": 1.0}
    chat = [system, *turns("Name a river.", "The Danube.")]
    chat[1]["weight"] = 0.0
    template = "mistral_system"
    for config in (
        FormatConfig(template=template),
        FormatConfig(template=template, train_on="all"),
        FormatConfig(template=template, train_on="all", never_train=["user"]),
    ):
        tables = Tables([chat], snapshot, config)
        assert len(tables.tokenized["trained_ranges"][0]) == 2
        assert found(tables) == {}

        def without_an_end(row):
            row["trained_ranges"][1]["end"] -= 1

        tables.sabotage(without_an_end)
        assert found(tables) == {"unterminated_turns": 1}


def test_tool_definitions_are_trained_with_the_system_turn_that_holds_them(shared):
    snapshot = load_snapshot(shared / "tokenizers" / QWEN)
    says = "Finds <|im_end|> in texts."  # a definition that a control token makes a content
    tool = {"type": "function", "function": {"name": "f", "description": says, "parameters": {}}}
    for weight, is_fault in ((1.0, False), (0.0, True)):
        system = {"role": "system", "content": "Be brief.", "weight": weight}
        tables = Tables([[system, *CALLING]], snapshot, tools=[json.dumps([tool])])
        assert found(tables) == {}

        def from_the_start(row):
            row["trained_ranges"][0]["start"] = 0

        tables.sabotage(from_the_start)
        assert ("trained_prompt_bytes" in found(tables)) == is_fault


def test_an_answer_that_says_what_the_system_does_needs_its_end(shared):
    snapshot = load_snapshot(shared / "tokenizers" / MISTRAL)
    chat = [{"role": "system", "content": "Yes.", "weight": 1.0}, *turns("Really?", "Yes.")]
    template = "mistral_system"
    tables = Tables([chat], snapshot, FormatConfig(template=template))
    assert found(tables) == {}

    def without_an_end(row):
        row["trained_ranges"][1]["end"] -= 1

    tables.sabotage(without_an_end)
    assert found(tables) == {"unterminated_turns": 1}


@pytest.mark.parametrize("control_text", ["text", "allow"])
def test_control_text_in_a_thought_that_is_left_out_ends_no_turn(control_text, snapshot):
    chat = turns("Why?", "So. <think>h<|im_start|>m<|im_end|></think> And so.", "And?", "Yes.")
    config = FormatConfig(reasoning="train_last")
    tables = Tables([chat], snapshot, config, control_text=control_text)
    assert len(tables.tokenized["trained_ranges"][0]) == 3
    assert found(tables) == {}


def test_control_text_before_a_thought_of_a_normalised_row_is_no_end_of_others(shared):
    snapshot = load_snapshot(shared / "tokenizers" / QWEN)
    odd = turns("Cafe\u0301?", "So <|im_start|> <think>hm</think> And so.", "And?", "Yes.")
    config = FormatConfig(reasoning="train_last")
    tables = Tables([odd, TAGGED, *CHATS], snapshot, config, control_text="allow")
    assert found(tables) == {"unlocated_rows": 1}


def test_end_tokens_in_contents_that_are_allowed_are_not_the_template_s(shared):
    snapshot = load_snapshot(shared / "tokenizers" / QWEN)
    for said in (
        "Yes.<|im_end|><|im_end|>No.",
        "Oui, tre\u0300s.<|im_end|><|im_end|>Non.",
        "Tre\u0300s.<|im_end|>",
    ):
        tables = Tables([turns("Say it.", said)], snapshot, control_text="allow")
        assert found(tables).keys() <= {"unlocated_rows"}

        def twice(row):
            row["input_ids"].insert(-1, row["input_ids"][-2])
            row["trained_ranges"][-1]["end"] += 1

        tables.sabotage(twice)
        assert found(tables)["double_ends"] == 1


def test_what_opens_an_answer_behind_an_empty_question_is_no_header(shared):
    """Windows may begin with one; `[TOOL_CALLS]` is the first token of the answer."""
    snapshot = load_snapshot(shared / "tokenizers" / MISTRAL)
    call = '[{"id": "abcdefghi", "function": {"name": "f", "arguments": {}}}]'
    answer = {"role": "assistant", "content": "", "tool_calls": call}
    chats = [[*turns(asked), answer] for asked in ("", "Which one?")]
    assert found(Tables(chats, snapshot)) == {}


TAGGED = turns("Why?", f"<think>\n{'hm ' * 40}\n</think>\n\nSo it is.", "And?", "Yes.")


@pytest.mark.parametrize("name", [QWEN, "qwen3", MISTRAL])
@pytest.mark.parametrize("reasoning", ["keep", "strip", "train_last"])
def test_thinking_that_is_left_out_is_not_due(shared, name, reasoning):
    """By the recipe, or by the template, as Qwen3's leaves out earlier thinking."""
    snapshot = load_snapshot(shared / "tokenizers" / name)
    tables = Tables([TAGGED], snapshot, FormatConfig(reasoning=reasoning))
    assert found(tables) == {}
    thought = len(("hm " * 40).strip()) if reasoning == "keep" else 0
    due = thought + len("So it is.") + len("Yes.")
    assert audited(tables)["counts"]["answer_bytes"] == due
    assert len(tables.tokenized) == (2 if name == "qwen3" and reasoning != "strip" else 1)


def test_slices_change_nothing(tables, monkeypatch):
    whole = audited(tables)
    monkeypatch.setattr(shard_module, "SLICE_TOKENS", 10)
    assert audited(tables) == whole


def test_rows_that_fell_on_the_way_are_not_looked_for(tables):
    before = audited(tables)["counts"]
    tables.tokenized = tables.tokenized.slice(1)
    counts = audited(tables)["counts"]
    assert counts["answer_bytes"] == before["answer_bytes"] - len("Six.")
    assert found(tables) == {}


def test_a_shard_without_rows(tables):
    tables.tokenized = tables.tokenized.slice(0, 0)
    assert found(tables) == {}


edges = st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True).map(sorted)


@given(edges=edges, queries=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_bytes_within_intervals_equal_those_counted_one_by_one(edges, queries):
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    held = {byte for start, end in pairs for byte in range(start, end)}
    intervals = Intervals.of(*(np.array(list(side)) for side in zip(*pairs, strict=True)))
    starts = np.array([start for start, _ in queries], np.int64)
    ends = starts + np.array([size for _, size in queries], np.int64)
    counted = [
        len(held & set(range(a, b))) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    assert intervals.within(starts, ends).tolist() == counted
