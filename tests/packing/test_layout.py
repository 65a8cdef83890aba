"""Published columns: labels, positions, order, and their schema."""

import numpy as np
import pyarrow as pa
import pytest

from packhouse.pack.pack_columns import (
    IGNORE_INDEX,
    expand_labels,
    published_schema,
    to_layout,
    trained_mask,
)
from packhouse.records.table_schemas import PACKED


def packed_rows() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "input_ids": [7, 8, 9, 5, 6],
                "trained_ranges": [{"start": 1, "end": 3}, {"start": 4, "end": 5}],
                "seq_lengths": [3, 2],
                "record_ids": ["a", "b"],
                "label": None,
            },
            {
                "input_ids": [4, 3],
                "trained_ranges": [{"start": 1, "end": 2}],
                "seq_lengths": [2],
                "record_ids": ["c"],
                "label": 1,
            },
        ],
        PACKED,
    )


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_trained_mask_does_not_depend_on_the_order_of_ranges(order):
    starts, ends = np.array([0, 3, 4])[order], np.array([1, 4, 6])[order]
    mask = trained_mask(starts, ends, 7)
    assert mask.tolist() == [True, False, False, True, True, True, False]
    with pytest.raises(IndexError):
        trained_mask(starts, ends, 5)


def test_layout_labels_with_positions():
    batch = to_layout(packed_rows(), published_schema("labels", position_ids=True))

    assert batch.to_pylist() == [
        {
            "input_ids": [7, 8, 9, 5, 6],
            "labels": [IGNORE_INDEX, 8, 9, IGNORE_INDEX, 6],
            "seq_lengths": [3, 2],
            "record_ids": ["a", "b"],
            "position_ids": [0, 1, 2, 0, 1],
        },
        {
            "input_ids": [4, 3],
            "labels": [IGNORE_INDEX, 3],
            "seq_lengths": [2],
            "record_ids": ["c"],
            "position_ids": [0, 1],
        },
    ]


def test_layout_compact_keeps_ranges():
    batch = to_layout(packed_rows(), published_schema("compact", with_label=True))

    assert batch.schema.names == [
        "input_ids",
        "trained_ranges",
        "seq_lengths",
        "record_ids",
        "label",
    ]
    assert expand_labels(batch).tolist() == expand_labels(packed_rows()).tolist()
    assert batch["label"].to_pylist() == [None, 1]


@pytest.mark.parametrize("layout", ["labels", "compact"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("with_label", [False, True])
def test_batches_have_the_published_schema(layout, positions, with_label):
    for batch in (packed_rows(), packed_rows().slice(1), packed_rows().slice(2)):
        published = to_layout(batch, published_schema(layout, positions, with_label))
        published.validate(full=True)
        expected = published_schema(layout, positions, with_label)
        assert published.schema.equals(expected, check_metadata=True)


def test_metadata_states_the_shift():
    assert published_schema("labels").metadata == {
        b"packhouse.contract": b"1",
        b"packhouse.layout": b"labels",
        b"packhouse.labels": b"unshifted",
        b"packhouse.ignore_index": b"-100",
    }
