"""Rows counted per shard and added up: the same numbers and rows however shards are cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from packhouse.addons.quality import combine_quality, count_quality
from tests.audit.conftest import turns, validated_table

SOUND = turns("How many legs has an ant?", "Six.")
FAULTY = {
    "empty_answers": turns("How many?", "..."),
    "echoes": turns("How many legs has an ant?", "How many legs has an ant?"),
    "refusals": turns("Sing.", "I'm sorry, but as an AI, I can't sing."),
    "repetition": turns("Go on.", "and on " * 40),
    "html": turns("Hello.", "<P>Hello</P>"),
    "mojibake": turns("Where?", "In the caf\u00c3\u00a9."),
    "invisible": turns("Where?", "He\u200bre."),
    "emails": turns("Write to jo@mail.org, please.", "I did."),
    "phones": turns("Whom do I call?", "(212) 684-4700"),
    "cards": turns("Pay.", "With 4242 4242 4242 4242."),
    "secrets": turns("The key?", f"hf_{'Ab' * 17}"),
}


@pytest.mark.parametrize("counter", FAULTY)
def test_each_counter_names_its_row_and_no_other_counter_does(counter):
    found = combine_quality(
        [("chats", count_quality(validated_table([SOUND, FAULTY[counter], SOUND])))]
    )
    counts = {name: rows for name, rows in found["dataset"].items() if rows}
    assert counts == {"rows": 3, counter: 1}
    (row,) = found["worst"][counter]
    assert (row["source"], row["row"]) == ("chats/chats.jsonl", 1)


def call(name):
    return json.dumps([{"type": "function", "function": {"name": name, "arguments": {}}}])


def test_prompts_tools_and_reasoning_count_too():
    mail = "jo@mail.org"
    chats = [
        [{"role": "user", "content": "Hi", "context": mail}, *turns("", "Hi")[1:]],
        [*turns("Hi"), {"role": "assistant", "content": "Hi", "reasoning": mail}],
        [*turns("Hi"), {"role": "assistant", "content": "", "tool_calls": call(mail)}],
        [*turns("Hi", "Hi"), {"role": "tool", "content": mail}],
    ]
    assert count_quality(validated_table(chats))["counts"]["emails"] == 4
    refusal = "As an AI language model, I cannot."
    assert count_quality(validated_table([turns(refusal, "Fine.")]))["counts"]["refusals"] == 0


def test_an_outlier_is_long_for_its_source():
    chats = [turns("Name a river.", "The Elbe." * n) for n in (1, 1, 2, 1, 90)]
    found = count_quality(validated_table(chats))
    combined = combine_quality(
        [("a", found), ("b", count_quality(validated_table([chats[4]] * 3)))]
    )
    assert combined["sources"]["a"]["length_outliers"] == 1
    assert combined["sources"]["b"]["length_outliers"] == 0
    assert combined["worst"]["length_outliers"][0]["row"] == 4


any_chat = st.sampled_from([SOUND, *FAULTY.values(), turns("Tell.", "A long story. " * 99)])


@settings(max_examples=25)
@given(chats=st.lists(any_chat, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_shards_add_up_to_the_whole(chats, cuts):
    table = validated_table(chats)
    bounds = [0, *sorted(cut % (len(chats) + 1) for cut in cuts), len(chats)]
    shards = [table.slice(a, b - a) for a, b in pairwise(bounds)]
    whole = combine_quality([("chats", count_quality(table))])
    assert combine_quality([("chats", count_quality(shard)) for shard in shards]) == whole


def test_answers_in_other_languages():
    pytest.importorskip("py3langid")
    german = "Der Rhein ist ein Fluss, der durch mehrere Staaten in Europa flie\u00dft."
    chats = [
        turns("Which?", "The quick brown fox jumps over the lazy dog near the river."),
        turns("Which?", german),
        turns(german, "Yes."),
    ]
    found = count_quality(validated_table(chats), languages=True)
    combined = combine_quality([("chats", found)], ["en"])
    assert combined["languages"] == {"de": 1, "en": 1, "und": 1}
    assert combined["dataset"]["other_languages"] == 1
    assert combined["worst"]["other_languages"][0]["row"] == 1
    assert combine_quality([("chats", found)], ["de", "en"])["dataset"]["other_languages"] == 0
