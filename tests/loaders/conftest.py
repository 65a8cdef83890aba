"""Small versions to load, published quickly by the real protocol."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from packhouse.pack.gather_tokens import gather
from packhouse.pack.strategies import plan_packs
from packhouse.recipe import PublishConfig
from packhouse.records.table_schemas import PACKED, TOKENIZED
from packhouse.store import open_store, publish_version
from tests.data_files import write_data_files

VOCABULARY = 97


@pytest.fixture(scope="session")
def make_records():
    """Records of 2 to 30 random tokens whose second half is trained."""

    def make(num_records: int, seed: int = 0) -> list[dict[str, Any]]:
        rng = np.random.default_rng(seed)
        records = []
        for row, length in enumerate(rng.integers(2, 31, num_records).tolist()):
            ids = rng.integers(3, VOCABULARY, length).tolist()
            records.append(
                {
                    "record_id": f"r{row:05d}",
                    "source": "made",
                    "row": row,
                    "input_ids": ids,
                    "trained_ranges": [{"start": max(1, length // 2), "end": length}],
                    "num_tokens": length,
                    "num_trained": length - max(1, length // 2),
                    "label": None,
                    "group_key": f"g{row:05d}",
                }
            )
        return records

    return make


@pytest.fixture(scope="session")
def make_version(tmp_path_factory, make_records):
    """Publish a version of generated records and return `<store>/<dataset>`."""

    def make(
        num_records: int = 60,
        seq_len: int = 64,
        strategy: str = "best_fit",
        seed: int = 0,
        rows_per_file: int | None = None,
        root: Path | None = None,
        **publish: Any,
    ) -> str:
        records = make_records(num_records, seed)
        table = pa.Table.from_pylist(records, TOKENIZED)
        lengths = np.array([r["num_tokens"] for r in records], dtype=np.int32)
        plan = plan_packs(lengths, seq_len, strategy, seed)
        packs = pa.Table.from_batches(list(gather([table], plan, lengths)), PACKED)
        folder = tmp_path_factory.mktemp("version")
        config = PublishConfig(**publish)
        files = []
        step = rows_per_file or packs.num_rows
        for number, start in enumerate(range(0, packs.num_rows, step)):
            part = folder / str(number)
            part.mkdir()
            files += write_data_files(packs.slice(start, step), "train", part, config)
        store = str(root or folder / "store")
        name = f"{seed:04x}{num_records:04x}"
        publish_version(open_store(store), "made", name, files, {"content_id": name}, "latest")
        return f"{store}/made"

    return make
