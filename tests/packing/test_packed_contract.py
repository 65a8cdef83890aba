"""The contract of packed rows: a good table passes, and each check rejects one wrong value."""

import copy
import re

import pyarrow as pa
import pytest

from packhouse.errors import ContractError
from packhouse.pack.pack_columns import check_packed, published_schema
from packhouse.records.table_schemas import PACKED

GOOD = [
    {
        "input_ids": [7, 8, 9],
        "trained_ranges": [{"start": 1, "end": 3}],
        "range_weights": None,
        "labels": [-100, 8, 9],
        "position_ids": [0, 1, 2],
        "seq_lengths": [3],
        "record_ids": ["z"],
        "label": None,
    },
    {
        "input_ids": [7, 8, 9, 5, 6],
        "trained_ranges": [{"start": 1, "end": 3}, {"start": 4, "end": 5}],
        "range_weights": None,
        "labels": [-100, 8, 9, -100, 6],
        "position_ids": [0, 1, 2, 0, 1],
        "seq_lengths": [3, 2],
        "record_ids": ["a", "b"],
        "label": None,
    },
]
LABELS = published_schema("labels", position_ids=True)


def check(rows, layout="labels", **options):
    if layout == "compact":
        table = pa.Table.from_pylist([{k: row[k] for k in PACKED.names} for row in rows], PACKED)
    else:
        table = pa.Table.from_pylist([{k: row[k] for k in LABELS.names} for row in rows], LABELS)
    check_packed(table, seq_len=5, vocab_size=10, layout=layout, **options)


def corrupted(**columns):
    rows = copy.deepcopy(GOOD)
    rows[1].update(columns)
    return rows


@pytest.mark.parametrize("layout", ["labels", "compact"])
def test_good_rows_pass(layout):
    check(GOOD, layout)
    check([], layout)


EMPTIED = "input_ids", "trained_ranges", "seq_lengths", "record_ids"


def spans(*pairs):
    return [{"start": start, "end": end} for start, end in pairs]


@pytest.mark.parametrize(
    ("layout", "columns", "message"),
    [
        ("labels", {"labels": [-100, 8, 9, -100]}, "labels are 4, but it has 5 tokens"),
        ("labels", {"labels": [-100, 8, 9, -100, 7]}, "labels[4] = 7 is neither its token's id"),
        ("labels", {"labels": [-100, 8, 9, 5, 6]}, "seq_lengths[1] = 2 tokens long, has a trained"),
        ("labels", {"labels": [-100, 8, 9, -100, -100]}, "seq_lengths[1] = 2 tokens long, has no"),
        ("labels", {"input_ids": [7, 8, 9, 10, 6]}, "input_ids[3] = 10 is outside the vocabulary"),
        ("labels", {"input_ids": [7, 8, 9, -1, 6]}, "input_ids[3] = -1 is outside the vocabulary"),
        ("labels", {"input_ids": [7, 8, 9, 5, 6, 6]}, "input_ids has 6 tokens, more than seq_len"),
        ("labels", {"seq_lengths": [3, 1]}, "seq_lengths add up to 4, but it has 5 tokens"),
        ("labels", {"seq_lengths": [3, 2, 0]}, "seq_lengths[2] = 0 is not a positive number"),
        ("labels", {"seq_lengths": [6, -1]}, "seq_lengths[1] = -1 is not a positive number"),
        ("labels", {"record_ids": ["a"]}, "record_ids are 1, but it has 2 seq_lengths"),
        ("labels", {"position_ids": [0, 1, 2, 3, 4]}, "position_ids[3] = 3 does not count up"),
        ("labels", {"position_ids": [0, 1, 2, 0]}, "position_ids are 4, but it has 5 tokens"),
        ("compact", {"trained_ranges": spans((1, 3), (3, 5))}, "seq_lengths[1] = 2 tokens long, h"),
        ("compact", {"trained_ranges": spans((1, 3))}, "seq_lengths[1] = 2 tokens long, has no"),
        ("compact", {"trained_ranges": spans((1, 3), (2, 5))}, "trained_ranges[1] = 2 is before"),
        ("compact", {"trained_ranges": spans((-1, 3), (4, 5))}, "trained_ranges[0] = -1 is before"),
        ("compact", {"trained_ranges": spans((1, 1), (4, 5))}, "trained_ranges[0] = 1 starts an"),
        ("compact", {"trained_ranges": spans((1, 3), (4, 6))}, "trained_ranges[1] = 4 starts a"),
        ("compact", {name: [] for name in EMPTIED}, "input_ids has no token"),
    ],
)
def test_one_wrong_value_is_found_with_its_place(layout, columns, message):
    with pytest.raises(ContractError, match=re.escape(f"packed row 1: {message}")) as caught:
        check(corrupted(**columns), layout)
    assert caught.value.row == 1


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("input_ids", None, "packed row 1: input_ids is null"),
        ("labels", [-100, 8, None, -100, 6], r"packed row 1: labels\[2\] is null"),
    ],
)
def test_nulls_are_found(column, value, message):
    loose = pa.schema([pa.field(field.name, _nullable(field.type)) for field in LABELS])
    rows = [{k: row[k] for k in LABELS.names} for row in corrupted(**{column: value})]

    with pytest.raises(ContractError, match=message):
        check_packed(pa.Table.from_pylist(rows, loose), 5, 10, "labels")


def _nullable(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind.value_type))


def test_untrained_records_pass_where_they_are_allowed():
    rows = corrupted(trained_ranges=[], labels=[-100] * 5)

    check(rows, "compact", allow_untrained=True)
    check(rows, "labels", allow_untrained=True)
    with pytest.raises(ContractError, match="has no trained token"):
        check(rows, "labels")
