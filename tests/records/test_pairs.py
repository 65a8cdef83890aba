"""Tokens of pairs: joined into one record, checked, and split again."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.pack.gather_tokens import gather
from packhouse.pack.pack_columns import check_packed
from packhouse.pack.strategies import plan_packs
from packhouse.records.preference_pairs import (
    as_sequences,
    both_sides,
    check_answers,
    cut_behind_answers,
    join_sides,
    keep_both,
    split_sides,
)
from packhouse.records.table_schemas import (
    FORMATTED,
    QUARANTINED,
    TOKENIZED,
    VALIDATED,
    refused_rows,
)

VOCABULARY = 50


def side(sequences: list[tuple[list[int], list[int]]]) -> pa.Table:
    rows = [
        {
            "record_id": f"{row:020x}",
            "source": "a/a",
            "row": row,
            "input_ids": prompt + answer,
            "trained_ranges": [{"start": len(prompt), "end": len(prompt) + len(answer)}],
            "num_tokens": len(prompt) + len(answer),
            "num_trained": len(answer),
            "group_key": f"{row:020x}",
        }
        for row, (prompt, answer) in enumerate(sequences)
    ]
    return pa.Table.from_pylist(rows, TOKENIZED)


ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
pairs = st.tuples(ids, ids, ids).filter(lambda pair: pair[1] != pair[2])


@settings(max_examples=30)
@given(st.lists(pairs, max_size=8), st.integers(0, 3))
def test_pairs_come_apart_as_they_were_joined(rows, skipped):
    chosen = side([(prompt, answer) for prompt, answer, _ in rows]).slice(skipped)
    rejected = side([(prompt, answer) for prompt, _, answer in rows]).slice(skipped)

    joined, faults = join_sides(chosen, rejected)

    assert not faults
    expected = [p + a + p + b for p, a, b in rows[skipped:]]
    assert joined["input_ids"].to_pylist() == expected
    assert joined["num_tokens"].to_pylist() == [len(each) for each in expected]
    assert [each.to_pylist() for each in split_sides(joined)] == [
        chosen.to_pylist(),
        rejected.to_pylist(),
    ]


@settings(max_examples=30)
@given(st.lists(pairs, min_size=1, max_size=8))
def test_a_pair_is_whole_in_one_pack_with_the_bounds_of_both_sides(rows):
    joined, _ = join_sides(
        side([(prompt, answer) for prompt, answer, _ in rows]),
        side([(prompt, answer) for prompt, _, answer in rows]),
    )
    lengths = joined["num_tokens"].to_numpy().astype(np.int32)
    plan = plan_packs(lengths, 24)

    seen = []
    for batch in gather([joined], plan, lengths):
        packs = as_sequences(batch)
        check_packed(packs, 24, VOCABULARY)
        for pack in packs.to_pylist():
            names, sizes = pack["record_ids"], pack["seq_lengths"]
            assert names[::2] == names[1::2]
            ends = np.cumsum(sizes).tolist()
            assert ends == [each["end"] for each in pack["trained_ranges"]]
            pieces = np.split(pack["input_ids"], ends[:-1])
            for number, name in enumerate(names[::2]):
                prompt, answer, other = rows[int(name, 16)]
                assert pieces[2 * number].tolist() == prompt + answer
                assert pieces[2 * number + 1].tolist() == prompt + other
                seen.append(name)
    assert sorted(seen) == joined["record_id"].to_pylist()


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (([5, 6], [7]), ([5, 8], [9]), "prompt_differs"),
        (([5, 6], [7]), ([5], [6, 8]), "prompt_differs"),
        (([5, 6], [7]), ([5, 6], [7]), "same_answers"),
        (([], [7]), ([], [8]), "not_one_answer"),
    ],
)
def test_an_invalid_pair_is_refused(chosen, rejected, reason):
    good = ([1, 2], [3]), ([1, 2], [4])
    joined, faults = join_sides(side([good[0], chosen]), side([good[1], rejected]))

    assert {row: why for row, (why, _) in faults.items()} == {1: reason}
    assert joined["row"].to_pylist() == [0]
    bad = refused_rows(side([good[0], chosen]), faults, "tokenize")
    assert bad.schema.equals(QUARANTINED)
    assert bad.select(["source", "row", "reason"]).to_pylist() == [
        {"source": "a/a", "row": 1, "reason": reason}
    ]


@pytest.mark.parametrize(
    "ranges",
    [[], [(1, 2), (3, 4)], [(1, 3)], [(0, 4)]],
    ids=["nothing", "two answers", "a tail", "no prompt"],
)
def test_an_answer_is_one_run_up_to_the_end(ranges):
    table = side([([1, 2, 3], [4])])
    spans = pa.array(
        [[{"start": start, "end": end} for start, end in ranges]],
        TOKENIZED.field("trained_ranges").type,
    )
    place = TOKENIZED.get_field_index("trained_ranges")

    assert check_answers(table) == {}
    changed = table.set_column(place, TOKENIZED.field("trained_ranges"), spans)
    assert [why for why, _ in check_answers(changed).values()] == ["not_one_answer"]
    joined, faults = join_sides(table, changed)
    assert joined.num_rows == 0
    assert faults[0][1].startswith("rejected: ")


def formatted(text: str, trained: tuple[int, int], content: list[tuple[int, int]]) -> pa.Table:
    spans = [[{"start": start, "end": end} for start, end in part] for part in (content, [trained])]
    row = {"record_id": "a", "source": "a/a", "row": 0, "text": text, "group_key": "a"}
    row |= {"content_spans": spans[0], "trained_spans": spans[1]}
    return pa.Table.from_pylist([row], FORMATTED)


def test_texts_end_where_their_answer_ends():
    table = pa.concat_tables(
        [
            formatted("<u>é</u><a>ß</a>\n", (9, 18), [(3, 5), (12, 14)]),
            formatted("<u>é</u><a>ß</a> more", (9, 18), [(3, 5), (19, 23)]),  # content after it
        ]
    )
    cut = cut_behind_answers(table.slice(0, 2))

    assert cut["text"].to_pylist() == ["<u>é</u><a>ß</a>", "<u>é</u><a>ß</a> more"]
    assert cut.drop_columns("text").equals(table.drop_columns("text"))
    assert cut_behind_answers(table.slice(1))["text"].to_pylist() == ["<u>é</u><a>ß</a> more"]
    assert cut_behind_answers(table.slice(0, 0)).num_rows == 0


def test_both_sides_are_messages_of_one_conversation():
    def rows(*texts):
        return pa.Table.from_pylist(
            [
                {
                    "record_id": text,
                    "source": "a/a",
                    "row": row,
                    "messages": [{"role": "assistant", "content": text}],
                    "group_key": text,
                }
                for row, text in enumerate(texts)
            ],
            VALIDATED,
        )

    both = both_sides(rows("a", "b"), rows("c", "d"))
    contents = [[m["content"] for m in row] for row in both["messages"].to_pylist()]
    assert contents == [["a", "c"], ["b", "d"]]
    assert both["record_id"].to_pylist() == ["a", "b"]


def test_a_pair_of_which_a_side_was_refused_is_refused_once():
    def bad(*rows):
        table = refused_rows(
            side([([1], [2])] * 4), {row: ("template", "no") for row in rows}, "tokenize"
        )
        return table

    whole = side([([1], [2])] * 4)
    chosen, rejected = whole.take(pa.array([1, 3])), whole.take(pa.array([0, 3]))
    kept = keep_both(chosen, rejected, bad(0, 2), bad(1, 2))

    assert [each["row"].to_pylist() for each in kept] == [[3], [3], [0, 1, 2]]
    assert kept[2]["detail"].to_pylist() == ["no", "rejected: no", "no"]
