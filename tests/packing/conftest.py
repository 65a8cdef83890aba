"""Tokenized tables from short Python lists."""

import pyarrow as pa
import pytest

from packhouse.records.table_schemas import TOKENIZED

Record = tuple[list[int], list[tuple[int, int]]]
"""Ids and trained ranges."""


@pytest.fixture(scope="session")
def tokenized():
    """Build a TOKENIZED table of records `(ids, ranges)`; record `i` is named `rec{i}`."""

    def build(records: list[Record], labels: list[int | None] | None = None) -> pa.Table:
        rows = [
            {
                "record_id": f"rec{index}",
                "source": "demo/demo.jsonl",
                "row": index,
                "input_ids": ids,
                "trained_ranges": [{"start": start, "end": end} for start, end in ranges],
                "num_tokens": len(ids),
                "num_trained": sum(end - start for start, end in ranges),
                "label": labels[index] if labels else None,
                "group_key": f"{index:020x}",
            }
            for index, (ids, ranges) in enumerate(records)
        ]
        return pa.Table.from_pylist(rows, TOKENIZED)

    return build
