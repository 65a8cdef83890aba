"""A small published version, and the targets that a trainer must learn from it."""

from typing import Any

import pyarrow as pa
import pytest

from packhouse.recipe import PublishConfig
from packhouse.records.table_schemas import PACKED
from packhouse.store import OpenVersion, open_store, open_version, publish_version
from tests.data_files import write_data_files

# Records as (ids, trained ids): a single token, ids beyond 16 bits, a trained last token.
PACKS = {
    "train": [
        [([7, 8, 9], [1, 2]), ([70_000, 6], [1])],
        [([4, 5, 6, 151_000, 8], [3, 4])],
        [([3], []), ([9, 9, 9, 2], [2, 3]), ([5, 2], [1])],
    ],
    "eval": [[([11, 12, 13, 2], [2, 3])]],
}


def pack_row(records: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    ids = [token for tokens, _ in records for token in tokens]
    ranges, start = [], 0
    for tokens, trained in records:
        if trained:
            ranges.append({"start": start + trained[0], "end": start + trained[-1] + 1})
        start += len(tokens)
    return {
        "input_ids": ids,
        "trained_ranges": ranges,
        "seq_lengths": [len(tokens) for tokens, _ in records],
        "record_ids": [f"r{i}" for i in range(len(records))],
        "label": None,
    }


@pytest.fixture(scope="session")
def publish(tmp_path_factory):
    def publish(**settings: Any) -> OpenVersion:
        folder = tmp_path_factory.mktemp("published")
        files = []
        for split, packs in PACKS.items():
            table = pa.Table.from_pylist([pack_row(p) for p in packs], PACKED)
            config = PublishConfig(**settings)
            files += write_data_files(table, split, folder, config)
        store = open_store(str(folder / "store"))
        # Records without trained tokens are pieces, as `concat` cuts them.
        facts = {"content_id": "c", "configuration": {"pack": {"strategy": "concat"}}}
        publish_version(store, "made", "0a1b", files, facts, "latest")
        return open_version(store, "made")

    return publish


@pytest.fixture(scope="session")
def opened(publish):
    return publish()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


Targets = list[list[tuple[tuple[int, ...], int]]]
"""Per pack, or per record: (the record's tokens so far, the token to predict from them)."""


@pytest.fixture(scope="session")
def targets():
    """The targets of each pack: every trained token, predicted from its own record only."""

    def of(split: str) -> Targets:
        return [
            [(tuple(ids[:t]), ids[t]) for ids, trained in pack for t in trained]
            for pack in PACKS[split]
        ]

    return of
