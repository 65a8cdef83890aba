"""Tokens of pairs: joined into one record, checked, and split again."""

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.records.preference_pairs import (
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
