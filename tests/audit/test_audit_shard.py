"""Plant defects that other tools shipped, and check that the audit of one shard finds each."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from packhouse.auditing import shard_audit as shard_module
from packhouse.auditing.shard_audit import audit_shard
from packhouse.auditing.token_checks import Side
from packhouse.recipe import FormatConfig
from tests.audit.conftest import CHATS, Tables, turns

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

    def without_an_end(row):  # the last range of the turn has one; earlier ranges do not
        row["trained_ranges"][2]["end"] -= 1

    tables.sabotage(without_an_end)
    assert found(tables)["unterminated_turns"] == 1


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_no_way_to_train_is_a_finding_by_itself(snapshot, train_on, template):
    config = FormatConfig(template=template, train_on=train_on)
    assert found(Tables(CHATS, snapshot, config)) == {}


def test_trl_1623_a_masked_end_token(tables):
    """https://github.com/huggingface/trl/issues/1623: pad == eos masked the EOS, and the model
    never stopped.
    """

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


def test_openrlhf_393_two_bos(tables):
    """https://github.com/OpenRLHF/OpenRLHF/issues/393: template and tokenizer both add BOS."""
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
    # The tokens no longer spell the text, so positions in the text cannot be determined.
    assert found(tables, with_bos) == {"double_bos": 3, "unlocated_rows": 3}


@pytest.fixture
def opens_turns(tables):
    """A tokenizer whose BOS opens every turn."""
    special = {**tables.snapshot.special_tokens, "bos_token": "<|im_start|>"}
    return replace(tables.snapshot, special_tokens=special)


def test_a_bos_that_the_template_writes_at_every_turn_is_due(tables, opens_turns):
    assert found(tables, opens_turns) == {}


def test_a_bos_that_nobody_wrote_is_double_where_places_are_not_known(tables, opens_turns):
    def put_bos(row):
        if row["row"] == 1:  # between two words of the last answer
            row["input_ids"].insert(len(row["input_ids"]) - 4, IM_START)
            row["trained_ranges"][-1]["end"] += 1

    tables.sabotage(put_bos)
    assert found(tables, opens_turns)["double_bos"] == 1


def test_an_end_token_twice(tables):
    def end_twice(row):
        if row["row"] == 0:
            row["input_ids"].insert(row["trained_ranges"][0]["end"], IM_END)

    tables.sabotage(end_twice)
    assert found(tables) == {"double_ends": 1, "unlocated_rows": 1}


def test_trained_bos_is_a_leak(snapshots):
    """Mistral's template opens with BOS. Training it would teach the model to restart."""
    tables = Tables(CHATS[:2], snapshots("mistral-7b-instruct-v0.3"))
    assert found(tables) == {}

    def train_from_bos(row):
        row["trained_ranges"][0]["start"] = 0

    tables.sabotage(train_from_bos)
    assert found(tables)["leaked_headers"] == 2
    assert found(tables)["trained_prompt_bytes"] > 0


def test_words_that_bert_does_not_know(snapshots):
    snapshot = snapshots("bert-base-uncased")
    config = FormatConfig(template="sequence_classification")
    chats = [turns("a fine film")[:1], turns("\U0001f600 \U0001f601")[:1]]
    tables = Tables(chats, snapshot, config, labels=[1, 0])
    assert found(tables) == {"unknown_tokens": 2, "unlocated_rows": 2}
    assert audited(tables)["worst"]["unknown_tokens"][0]["row"] == 1


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct-v0.3"])
def test_an_answer_whose_first_token_begins_in_the_prompt(snapshots, name):
    """Check a prompt that ends in a space.

    " positive" is one token that begins in the prompt, so only the end token is trained. If the
    prompt ends in a line break instead, the whole answer is trained.
    """
    snapshot = snapshots(name)
    chats = [turns("a fine film", "positive")]
    config = FormatConfig(template="classification", prompt="{text}\nLabel: ")
    assert found(Tables(chats, snapshot, config)) == {"untrained_answer_bytes": len("positive")}
    config = FormatConfig(template="classification", prompt="{text}\nLabel:\n")
    assert found(Tables(chats, snapshot, config)) == {}


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


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct-v0.3"])
def test_a_call_without_its_end_and_a_call_without_a_mask(snapshots, name):
    """`</tool_call>` is a control token but ends no turn, and a call has no content to cover."""
    tables = Tables([CALLING], snapshots(name))
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


@settings(max_examples=30)
@given(which=st.integers(0, 3), start=st.integers(-3, 3), end=st.integers(-3, 3))
def test_every_range_that_is_moved_is_misplaced(snapshot, which, start, end):
    tables = Tables(CHATS, snapshot)
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


def test_tool_definitions_are_trained_with_the_system_turn_that_holds_them(snapshots):
    snapshot = snapshots("qwen3")
    says = "Finds <|im_end|> in texts."  # a definition that a control token turns into content
    tool = {"type": "function", "function": {"name": "f", "description": says, "parameters": {}}}
    for weight, is_fault in ((1.0, False), (0.0, True)):
        system = {"role": "system", "content": "Be brief.", "weight": weight}
        tables = Tables([[system, *CALLING]], snapshot, tools=[json.dumps([tool])])
        assert found(tables) == {}

        def from_the_start(row):
            row["trained_ranges"][0]["start"] = 0

        tables.sabotage(from_the_start)
        assert ("trained_prompt_bytes" in found(tables)) == is_fault


@pytest.mark.parametrize("control_text", ["text", "allow"])
def test_control_text_in_a_thought_that_is_left_out_ends_no_turn(control_text, snapshot):
    chat = turns("Why?", "So. <think>h<|im_start|>m<|im_end|></think> And so.", "And?", "Yes.")
    config = FormatConfig(reasoning="train_last")
    tables = Tables([chat], snapshot, config, control_text=control_text)
    assert len(tables.tokenized["trained_ranges"][0]) == 3
    assert found(tables) == {}


TAGGED = turns("Why?", f"<think>\n{'hm ' * 40}\n</think>\n\nSo it is.", "And?", "Yes.")


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct-v0.3"])
@pytest.mark.parametrize("reasoning", ["keep", "strip", "train_last"])
def test_thinking_that_is_left_out_is_not_due(snapshots, name, reasoning):
    """Reasoning dropped by the recipe, or by the template (Qwen3's drops earlier thinking)."""
    tables = Tables([TAGGED], snapshots(name), FormatConfig(reasoning=reasoning))
    assert found(tables) == {}
    thought = len(("hm " * 40).strip()) if reasoning == "keep" else 0
    due = thought + len("So it is.") + len("Yes.")
    assert audited(tables)["counts"]["answer_bytes"] == due
    assert len(tables.tokenized) == (2 if name == "qwen3" and reasoning != "strip" else 1)


def test_slices_change_nothing(tables, monkeypatch):
    whole = audited(tables)
    monkeypatch.setattr(shard_module, "SLICE_TOKENS", 10)
    assert audited(tables) == whole


@pytest.mark.parametrize("row", [0, 1])
def test_tokens_of_exact_shards_are_compared_in_the_first_slice(tables, monkeypatch, row):
    """Tokens in another order: only a comparison of their bytes finds the difference."""
    monkeypatch.setattr(shard_module, "SLICE_TOKENS", 10)
    chosen = tables.tokenized["record_id"][row].as_py()

    def swap(each):
        if each["record_id"] == chosen:
            each["input_ids"][4:8] = each["input_ids"][7:3:-1]

    tables.sabotage(swap)
    side = Side(tables.validated, tables.formatted, tables.tokenized)

    def num_unlocated(**known):
        counts = audit_shard([side], tables.snapshot, tables.config, **known)["counts"]
        return counts["unlocated_rows"]

    assert num_unlocated() == 1
    assert num_unlocated(are_exact=True) == int(row == 0)


def test_rows_that_fell_on_the_way_are_not_looked_for(tables):
    before = audited(tables)["counts"]
    tables.tokenized = tables.tokenized.slice(1)
    counts = audited(tables)["counts"]
    assert counts["answer_bytes"] == before["answer_bytes"] - len("Six.")
    assert found(tables) == {}
