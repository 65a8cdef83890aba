"""Conversations over the limit, as windows of whole turns."""

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render import WindowRule, make_renderer
from tests.templates.toys import CHATML, make_snapshot, make_table, pieces


class ByteRule(WindowRule):
    """Counts bytes in place of tokens."""

    def num_tokens(self, formatted):
        return pc.binary_length(formatted["text"]).to_numpy().astype(np.int64)


def renderer(seq_len, **config):
    snapshot = make_snapshot(chat_template=CHATML, adds_bos=False)
    rule = ByteRule(seq_len, snapshot, TokenizeConfig(), cut_at_spans=False)
    return make_renderer(FormatConfig(**config), snapshot, None, rule)


def talk(num_exchanges, sizes=None, system="Be brief."):
    turns = [("system", system)] if system else []
    for number in range(num_exchanges):
        size = sizes[number] if sizes else 1
        turns += [("user", f"q{number}"), ("assistant", f"a{number}." + "x" * size)]
    return turns


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 120), min_size=1, max_size=9),
    seq_len=st.integers(120, 500),
    train_on=st.sampled_from(["assistant", "last_assistant"]),
)
def test_each_trained_turn_is_trained_once_and_ended_in_windows_with_the_system_turn(
    sizes, seq_len, train_on
):
    rows = [talk(len(sizes), sizes), [("user", "x"), ("assistant", "y")]]
    whole = renderer(10**9, train_on=train_on).render(make_table(rows)).formatted
    done = renderer(seq_len, train_on=train_on).render(make_table(rows))

    trained = [span for row in pieces(done.formatted) for span in row]
    assert sorted(trained) == sorted(span for row in pieces(whole) for span in row)
    assert all(span.endswith("<|im_end|>") for span in trained)
    assert done.formatted.num_rows == 2 + done.added.get("windows", 0)
    assert done.formatted["row"].to_pylist() == sorted(done.formatted["row"].to_pylist())
    ids = done.formatted["record_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    for text in done.formatted["text"].to_pylist()[:-1]:
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        if len(text.encode()) > seq_len:  # pack drops and counts it
            assert text.count("<|im_start|>user") == 1
    assert len(set(done.formatted["group_key"].to_pylist())) == 2


def test_windows_are_filled_from_the_end():
    trained = pieces(renderer(200).render(make_table([talk(4)])).formatted)

    sizes = [len(row) for row in trained]
    assert len(sizes) > 1
    assert sizes[0] <= sizes[-1]
    assert [span for row in trained for span in row] == [f"a{n}.x<|im_end|>" for n in range(4)]


def test_the_system_turn_is_trained_in_one_window_alone_where_all_is_trained():
    done = renderer(200, train_on="all").render(make_table([talk(4)])).formatted

    assert done.num_rows > 1
    assert [row for row in pieces(done) if "system" in row[0]] == [pieces(done)[0]]


@pytest.mark.parametrize("seq_len", [10, 10**6])
def test_rows_that_fit_or_cannot_be_split_are_unchanged(seq_len):
    rows = make_table([talk(1), talk(1, system=None)])
    done = renderer(seq_len).render(rows)

    assert done.added == {}
    assert done.formatted["record_id"].to_pylist() == rows["record_id"].to_pylist()
