"""Conversations: order rules, identities and groups, in small literal cases and as properties."""

import unicodedata
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.records.message_rules import REASONS, role_violations
from packhouse.records.reasons import TurnOrder
from packhouse.records.record_ids import conversation_ids, group_keys
from packhouse.records.table_schemas import CONVERSATION

CALL = '[{"type":"function","function":{"name":"f","arguments":{}}}]'


def conversations(*rows):
    dicts = [
        [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in row] for row in rows
    ]
    return pa.array(dicts, CONVERSATION)


def names(array, tools=None, labels=None, label_names=None):
    none = [None] * len(array)
    tools = pa.array(tools or none, pa.string())
    labels = pa.array(labels or none, pa.int64())
    return conversation_ids(array, tools, labels, label_names=label_names).to_pylist()


def groups(array):
    return group_keys(array, pa.array(names(array)), "prompt").to_pylist()


def reasons(*rows, **options):
    found = role_violations(conversations(*rows), **options)
    return {row: reason for row, (reason, _) in found.items()}


U, A, S = ("user", "q"), ("assistant", "a"), ("system", "s")
T = ("tool", "r")
C = {"role": "assistant", "content": "", "tool_calls": CALL}

ORDERS = get_args(TurnOrder)
SOUND = {
    "one turn": [U, A],
    "system first": [S, U, A],
    "two turns": [U, A, U, A],
    "tool": [U, C, T, A],
    "two results": [U, C, T, T, A],
    "call after call": [U, C, T, C, T, A],
    "question after result": [U, C, T, U, A],
    "ends on call": [U, C],
    "call in the text": [U, ("assistant", "<tool_call>\n{}</tool_call>"), T, A],
    "empty untrained answer": [U, {"role": "assistant", "content": "", "weight": 0.0}, U, A],
    "reasoning only": [U, {"role": "assistant", "content": "", "reasoning": "hm"}],
    "context only": [{"role": "user", "content": "", "context": "c"}, A],
}
BROKEN = {
    "empty": ([], "empty_conversation"),
    "unknown role": ([U, ("critic", "x"), A], "unknown_role"),
    "system later": ([U, S, A], "system_not_first"),
    "two systems": ([S, S, U, A], "system_not_first"),
    "assistant first": ([A], "starts_with_assistant"),
    "assistant after system": ([S, A, U, A], "starts_with_assistant"),
    "tool first": ([T, A], "tool_result_without_call"),
    "tool after user": ([U, T, A], "tool_result_without_call"),
    "tool after plain answer": ([U, A, T, A], "tool_result_without_call"),
    "tool after a mention": (
        [U, ("assistant", "Write <tool_call> before it."), T, A],
        "tool_result_without_call",
    ),
    "two users": ([U, U, A], "consecutive_user"),
    "two assistants": ([U, A, A], "consecutive_assistant"),
    "user after call": ([U, C, U, A], "call_without_result"),
    "no assistant": ([S, U], "no_assistant"),
    "only system": ([S], "no_assistant"),
    "ends on user": ([U, A, U], "ends_on_user"),
    "ends on tool": ([U, C, T], "ends_on_tool"),
    "blank question": ([("user", " \n\u3000"), A], "empty_prompt"),
    "blank answer": ([U, ("assistant", "\t")], "empty_answer"),
    "nul": ([U, ("assistant", "a\0b")], "control"),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_orders_pass(case):
    assert reasons(SOUND[case]) == {}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_orders_have_their_reason(case):
    row, reason = BROKEN[case]

    rows = SOUND["one turn"], row, SOUND["tool"]
    assert reasons(*rows, refused_orders=ORDERS) == {1: reason}
    if reason in ORDERS:  # a role that a template may write: bad only if the recipe forbids it
        assert reasons(*rows) == {}
        assert reasons(*rows, refused_orders=[reason]) == {1: reason}


def test_every_reason_is_tested():
    elsewhere = {"too_many_chars", "nothing_trained"}
    assert {reason for _, reason in BROKEN.values()} | elsewhere == set(REASONS)


def test_runs_of_tokens_may_stand_in_any_order_and_one_must_be_trained():
    rows = conversations([U, A, U], [A], [A, A, U], [U], [S])
    found = role_violations(rows, refused_orders=ORDERS, answers="tokens", max_chars=1)

    why = ("nothing_trained", "no token in the record is trained")
    assert found == {3: why, 4: why}


def test_the_message_at_fault_is_named():
    found = role_violations(conversations([U, A, U, A, U, U, A]), refused_orders=ORDERS)

    assert found == {
        0: ("consecutive_user", "message 5 is a user turn right after another user turn")
    }


def test_options_relax_only_the_rule_they_name():
    assert reasons([U, A, U], [U], allow_ends_on_user=True) == {1: "no_assistant"}
    assert reasons([U], [], answers="label") == {1: "empty_conversation"}
    assert reasons([A], [("assistant", "")], answers="text") == {1: "empty_answer"}


def test_length_is_counted_in_characters():
    row = [("user", "\u4e2d" * 5), ("assistant", "a" * 6)]

    assert reasons(row, max_chars=6) == {}
    assert reasons(row, max_chars=5) == {0: "too_many_chars"}


def test_names_are_pinned():
    array = conversations([("user", "Hi"), ("assistant", "Hello")])

    assert names(array) == ["c6c3e5adcc25374549f0"]
    assert names(array, tools=["[]"], labels=[1]) == ["a657b6703f47b25b2e0a"]


DIFFERENT = [
    [("user", "ab"), ("assistant", "c")],
    [("user", "a"), ("assistant", "bc")],
    [("user", "abc"), ("assistant", "")],
    [("assistant", "ab"), ("user", "c")],
    [("user", "ab"), ("assistant", "c"), ("user", "")],
    [{"role": "user", "content": "a", "context": "b"}, ("assistant", "c")],
    [
        {"role": "user", "content": "a", "context": "b"},
        {"role": "assistant", "content": "c", "name": ""},
    ],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c", "weight": 1.0}],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c", "weight": 0.0}],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "", "reasoning": "c"}],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "", "tool_calls": "c"}],
    [("user", "ab")],
    [],
]


def test_different_conversations_have_different_names():
    found = names(conversations(*DIFFERENT))
    found += names(conversations(DIFFERENT[0]), tools=["[]"])
    found += names(conversations(DIFFERENT[0]), labels=[0])
    found += names(conversations(DIFFERENT[0]), labels=[1])
    found += names(conversations(DIFFERENT[0]), labels=[1], label_names=["bad", "good"])
    found += names(conversations(DIFFERENT[0]), labels=[1], label_names=["cold", "hot"])
    found += names(conversations(DIFFERENT[0]), tools=["[]"], labels=[1])

    assert len(set(found)) == len(DIFFERENT) + 6
    assert all(len(name) == 20 and int(name, 16) >= 0 for name in found)


text = st.text(max_size=20)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": text},
    optional={
        "context": st.none() | text,
        "reasoning": st.none() | text,
        "tool_calls": st.none() | text,
        "tool_call_id": st.none() | text,
        "name": st.none() | text,
        "weight": st.none() | st.floats(0, 1, width=32),
    },
)
rows = st.lists(st.lists(message, max_size=5), max_size=8)


@settings(max_examples=15)
@given(rows)
def test_a_name_depends_on_its_own_row_only(rows):
    array = pa.array(rows, CONVERSATION)
    alone = [names(pa.array([row], CONVERSATION))[0] for row in rows]

    assert names(array) == alone
    assert names(array.slice(1)) == alone[1:]
    assert groups(array) == [groups(pa.array([row], CONVERSATION))[0] for row in rows]


@settings(max_examples=40)
@given(rows)
def test_equal_names_mean_equal_rows(rows):
    array = pa.array(rows, CONVERSATION)
    by_name = {}
    for name, row in zip(names(array), array.to_pylist(), strict=True):
        assert by_name.setdefault(name, row) == row


def plain_group(row):
    """The definition, taken literally, as a reference for the fast version."""
    asked = []
    for message in row:
        if message["role"] == "assistant" and asked:
            break
        if message["role"] == "user":
            asked.append(message)
    texts = [
        text for m in asked or row for text in (m["content"], m.get("context")) if text is not None
    ]
    folded = unicodedata.normalize("NFC", "\n".join(texts)).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


@given(rows)
def test_groups_are_as_defined(rows):
    import hashlib

    expected = [hashlib.sha256(plain_group(row).encode()).hexdigest()[:20] for row in rows]

    assert groups(pa.array(rows, CONVERSATION)) == expected


def test_content_after_the_prompt_does_not_change_the_group():
    alike = [
        [("user", "What is  it?"), ("assistant", "a")],
        [("system", "s"), ("user", "what is it?\n"), ("assistant", "b")],
        [("user", "WHAT\tis it?"), ("assistant", "a"), ("user", "more"), ("assistant", "c")],
        [{"role": "user", "content": "What is", "context": "it?"}, ("assistant", "a")],
    ]
    other = [("user", "What was it?"), ("assistant", "a")]

    found = groups(conversations(*alike, other))

    assert len(set(found[:-1])) == 1
    assert found[-1] != found[0]


def test_groups_see_through_unicode_forms():
    composed, decomposed = "Caf\u00e9 STRASSE", "cafe\u0301 stra\u00dfe"

    first, second = groups(conversations([("user", composed), A], [("user", decomposed), A]))

    assert first == second


def test_group_by_record_is_the_name():
    array = conversations([U, A])

    assert group_keys(array, pa.array(names(array)), "record").to_pylist() == names(array)
