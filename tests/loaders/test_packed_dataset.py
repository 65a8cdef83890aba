import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from packhouse import (
    PackedCollator,
    PackedDataset,
    load_packed,
)
from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.pack.strategies import plan_packs


def test_rows_of_a_version_are_tensors_with_boundaries(make_version, tmp_path):
    data = load_packed(make_version(), cache=tmp_path)
    packs = PackedDataset(data)

    assert len(packs) == len(data)
    for index, row in enumerate(data):
        item = packs[index]
        assert set(item) == {"input_ids", "labels", "position_ids", "seq_lengths"}
        for name, tensor in item.items():
            assert tensor.dtype == torch.int64
            assert tensor.tolist() == row[name]
    with pytest.raises(IndexError):
        packs[len(packs)]
    assert packs[-1]["input_ids"].tolist() == data[len(data) - 1]["input_ids"]


def test_stat_counts_the_contents_of_the_version(make_version, tmp_path):
    stat = PackedDataset(load_packed(make_version(), cache=tmp_path)).stat()

    assert (stat.num_rows, stat.num_records, stat.num_dropped) == (16, 60, 0)
    assert stat.num_tokens == 962
    assert stat.padded_ratio == 60 / 16
    assert str(stat).startswith("60 records in 16 rows of up to 64 tokens: 962 tokens, 93.95% full")


RECORDS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"input_ids": [4, 5, 0], "labels": [-100, 5, -100], "attention_mask": [1, 1, 0]},
    {"input_ids": [6, 7, 8], "labels": [-100, -100, 8], "attention_mask": [1, 1, 1]},
]


def _as_dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize("kind", [list, pa.Table.from_pylist, _as_dataset])
def test_tokenized_rows_of_any_kind_are_packed_without_their_padding(kind):
    packs = PackedDataset(kind(RECORDS), seq_len=5)

    rows = sorted((item["seq_lengths"].tolist(), item["labels"].tolist()) for item in packs)
    assert rows in (
        [([3], [-100, -100, 8]), ([3, 2], [-100, 2, 3, -100, 5])],
        [([3], [-100, 2, 3]), ([3, 2], [-100, -100, 8, -100, 5])],
    )
    assert packs.stat().num_tokens == 8
    assert packs.stat().fill == 0.8


def test_its_packs_are_those_of_the_pipelines_plan(make_records):
    records = make_records(50)
    packs = PackedDataset([{"input_ids": r["input_ids"]} for r in records], seq_len=64, seed=3)
    lengths = np.array([r["num_tokens"] for r in records])
    plan = plan_packs(lengths, 64, "best_fit", 3)

    for number in range(plan.num_packs):
        order = plan.order[plan.pack_offsets[number] : plan.pack_offsets[number + 1]]
        expected = [token for i in order for token in records[i]["input_ids"]]
        assert packs[number]["input_ids"].tolist() == expected


def test_records_over_seq_len_are_an_error_or_dropped_and_counted():
    with pytest.raises(SequenceTooLongError, match="3 tokens, more than seq_len 2"):
        PackedDataset(RECORDS, seq_len=2)
    packs = PackedDataset(RECORDS, seq_len=2, over_length="drop")
    assert [item["input_ids"].tolist() for item in packs] == [[4, 5]]
    assert packs.stat().num_dropped == 2


def test_invalid_arguments_are_refused(make_version, tmp_path):
    with pytest.raises(ConfigError, match="cannot cut"):
        PackedDataset(RECORDS, seq_len=5, strategy="concat")
    data = load_packed(make_version(), cache=tmp_path)
    with pytest.raises(ContractError, match=r"records. Remove seq_len"):
        PackedDataset(data, seq_len=128)
    with pytest.raises(ContractError, match="has no record boundaries"):
        PackedDataset([{"input_ids": [1, 2]}])[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("./store/demo", r"'./store/demo' is a string instead of rows. .* pass load_packed\("),
        (["rows.parquet"], r"row 0 is a str instead of a dict. .* Parquet files, datasets.load_"),
        ([Path("rows.parquet")], "row 0 is a PosixPath instead of a dict"),
        (Path(__file__), r"test_packed_dataset.py' is not an Arrow file. .* pass load_packed\("),
        ({"train": RECORDS}, "a dict of train is not a sequence of rows"),
        ((row for row in RECORDS), "a generator has no length or cannot be indexed"),
    ],
)
def test_an_object_that_is_not_a_sequence_of_rows_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        PackedDataset(rows)


def test_workers_and_pickles_see_the_same_rows(make_version, tmp_path):
    packs = PackedDataset(load_packed(make_version(), cache=tmp_path))
    expected = [item["input_ids"].tolist() for item in packs]

    copy = pickle.loads(pickle.dumps(packs))  # noqa: S301
    assert [item["input_ids"].tolist() for item in copy] == expected
    for workers in (0, 2):
        loader = DataLoader(packs, batch_size=1, num_workers=workers, collate_fn=PackedCollator())
        assert [batch["input_ids"][0].tolist() for batch in loader] == expected


@pytest.mark.parametrize(
    "kind",
    [pa.list_view(pa.int32()), pa.large_list_view(pa.int64()), pa.list_(pa.int64(), 3)],
)
def test_lists_of_any_arrow_kind_are_read(kind):
    ids = pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], kind)
    table = pa.table({"input_ids": ids, "seq_lengths": pa.array([[2, 1]] * 3)}).slice(1)
    packs = PackedDataset(table)

    assert [item["input_ids"].tolist() for item in packs] == [[4, 5, 6], [7, 8, 9]]
    plain = PackedDataset(table.select(["input_ids"]), seq_len=3, strategy="none")
    assert sorted(item["input_ids"].tolist() for item in plain) == [[4, 5, 6], [7, 8, 9]]


def test_rows_of_a_generator_are_packed_and_empty_ones_counted():
    rows = [*RECORDS, {"input_ids": []}, {"input_ids": [5], "attention_mask": [0]}]
    packs = PackedDataset((row for row in rows), seq_len=5)

    assert packs.num_empty == 2
    assert packs.stat().num_records == 3
    for kind in (_as_dataset, pa.Table.from_pylist):
        packs = PackedDataset(kind([{"input_ids": []}, {"input_ids": [5, 6]}]), seq_len=5)
        assert (packs.num_empty, packs[0]["input_ids"].tolist()) == (1, [5, 6])


def test_a_mask_that_hides_a_trained_end_token_is_refused():
    # If pad and EOS are the same token (2), `input_ids != pad` hides the EOS of every record.
    ids = torch.tensor([5, 6, 2])
    row = {"input_ids": ids, "labels": ids, "attention_mask": ids != 2}

    with pytest.raises(
        ContractError, match="row 0 trains tokens that attention_mask marks as padding"
    ):
        PackedDataset([row], seq_len=8)
    row["attention_mask"] = torch.ones(3, dtype=torch.bool)
    assert PackedDataset([row], seq_len=8)[0]["input_ids"].tolist() == [5, 6, 2]
