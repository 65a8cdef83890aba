"""Ids equal those of transformers, and exactly the answer and its end token are trained."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings as hypothesis_settings, strategies as st
from tokenizers import Tokenizer

from packhouse.recipe import TokenizeConfig
from packhouse.records.table_schemas import QUARANTINED, TOKENIZED
from packhouse.tokenize import tokenize_table

HF = TokenizeConfig(encoder="hf")


def test_a_row_is_counted_token_by_token(byte_level, make_formatted):
    table = make_formatted([[("<|start|>a b", "template"), (" c", "answer"), ("<|end|>", "end")]])

    done = tokenize_table(table, byte_level, HF)

    tokenizer = Tokenizer.from_str(byte_level.backend)
    (row,) = done.tokenized.to_pylist()
    pieces = [tokenizer.id_to_token(index) for index in row["input_ids"]]
    assert pieces == ["<|start|>", "a", "\u0120b", "\u0120c", "<|end|>"]
    assert row["trained_ranges"] == [{"start": 3, "end": 5}]
    assert (row["num_tokens"], row["num_trained"]) == (5, 2)
    assert done.notes == {}
    assert done.tokenized.schema == TOKENIZED
    assert done.quarantined.schema == QUARANTINED


def test_a_token_across_a_border_is_trained_only_if_it_begins_inside(byte_level, make_formatted):
    # " the" is one token: its space belongs to the prompt in row 0, its other letters in row 1.
    rows = [
        [("a ", "template"), ("the", "answer"), ("<|end|>", "end")],
        [("a", "template"), (" th", "answer"), ("e<|end|>", "template")],
    ]

    done = tokenize_table(make_formatted(rows), byte_level, HF)

    tokenizer = Tokenizer.from_str(byte_level.backend)
    first, second = done.tokenized.to_pylist()
    assert [tokenizer.id_to_token(i) for i in first["input_ids"]] == ["a", "\u0120the", "<|end|>"]
    assert first["trained_ranges"] == [{"start": 2, "end": 3}]
    assert second["trained_ranges"] == [{"start": 1, "end": 2}]
    assert done.notes == {"straddles_start": 1, "straddles_end": 1}


def test_rows_that_teach_nothing_are_quarantined_unless_they_have_a_label(
    byte_level, make_formatted
):
    rows = [
        [("", "content")],
        [("a prompt", "content"), ("", "answer")],
        [("a prompt", "content")],
        [("a", "answer")],
    ]

    done = tokenize_table(make_formatted(rows, labels=[None, None, 3, None]), byte_level, HF)

    assert done.quarantined["reason"].to_pylist() == ["empty", "nothing_trained"]
    assert done.quarantined["row"].to_pylist() == [0, 1]
    assert done.quarantined["raw"].to_pylist() == [b"", b""]  # the source has them
    assert done.quarantined["step"].to_pylist() == ["tokenize", "tokenize"]
    assert done.tokenized["row"].to_pylist() == [2, 3]
    assert done.tokenized["label"].to_pylist() == [3, None]


def test_text_that_the_normaliser_changes_takes_offsets_from_hf(byte_level, make_formatted):
    # "e" and a combining acute, 3 bytes, become one character of 2 bytes under NFC.
    rows = [[("e\u0301 e\u0301:", "template"), (" the", "answer")], [("a", "answer")]]

    done = tokenize_table(make_formatted(rows), byte_level, HF)

    tokenizer = Tokenizer.from_str(byte_level.backend)
    first, _ = done.tokenized.to_pylist()
    (span,) = first["trained_ranges"]
    assert tokenizer.decode(first["input_ids"][span["start"] : span["end"]]) == " the"
    assert done.notes == {"inexact_round_trip": 1}


PARTS = st.lists(
    st.tuples(
        st.text(max_size=12)
        | st.sampled_from([" the", "  ", "\n\n", "<|end|>", "\u2581", "<0x0A>"]),
        st.sampled_from(["template", "content", "answer", "end"]),
    ),
    min_size=1,
    max_size=6,
)


@hypothesis_settings(max_examples=30, deadline=None)
@given(rows=st.lists(PARTS, min_size=1, max_size=8))
def test_ranges_agree_with_a_loop_over_hf_offsets(rows, trained, make_formatted):
    table = make_formatted(rows)

    done = tokenize_table(table, trained, TokenizeConfig(encoder="hf", control_text="allow"))

    tokenizer = Tokenizer.from_str(trained.backend)
    tokenizer.post_processor = None
    kept = {row["row"]: row for row in done.tokenized.to_pylist()}
    for number, record in enumerate(table.to_pylist()):
        encoding = tokenizer.encode(record["text"], add_special_tokens=False)
        expected = expected_ranges(record, encoding.offsets)
        if number in kept:
            assert kept[number]["input_ids"] == encoding.ids
            assert kept[number]["trained_ranges"] == expected
        else:
            assert not expected
    assert done.tokenized.num_rows + done.quarantined.num_rows == len(rows)


def expected_ranges(record, offsets):
    text = record["text"]
    begins = np.maximum.accumulate([len(text[:start].encode()) for start, _ in offsets] or [0])
    ranges = []
    for span in record["trained_spans"]:
        inside = [
            index for index in range(len(offsets)) if span["start"] <= begins[index] < span["end"]
        ]
        if inside:
            ranges.append({"start": inside[0], "end": inside[-1] + 1})
    return ranges


def test_slices_and_chunks_do_not_show_in_the_rows(byte_level, make_formatted, monkeypatch):
    rows = [[("p", "template"), (f" the cat {n}", "answer")] for n in range(50)]
    table = make_formatted(rows)
    whole = tokenize_table(table, byte_level, HF)

    monkeypatch.setattr("packhouse.tokenize.text_to_tokens._SLICE_BYTES", 40)
    pieces = pa.concat_tables([table.slice(3, 20), table.slice(23)])
    cut = tokenize_table(pieces, byte_level, HF)

    assert cut.tokenized.equals(whole.tokenized.slice(3))
    assert cut.notes == whole.notes
