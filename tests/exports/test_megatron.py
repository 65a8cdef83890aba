"""Megatron-Bridge's reader on padded records, boundaries and metadata."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.addons.exports import _parts, export_version, to_megatron, write_export
from packhouse.errors import ConfigError
from tests.exports import readers

EOS, NEWLINE = 2, 9
INT32S = pa.list_(pa.int32())
SCHEMA = pa.schema([(name, INT32S) for name in ("input_ids", "labels", "seq_lengths")])


def logical_lengths(row: dict[str, list[int]]) -> list[int]:
    """Find the end of a padded record as Megatron-Bridge does: the last input that is not EOS."""
    lengths = []
    for start, end in pairwise([*row["seq_start_id"], len(row["input_ids"])]):
        inputs = np.array(row["input_ids"][start : end - 1])
        others = np.flatnonzero(inputs != EOS)
        lengths.append(int(others[-1]) + 1 if len(others) else 0)
    return lengths


def pack(records: list[list[int]]) -> pa.RecordBatch:
    """A pack in which every token is trained except newlines and the first token of each record."""
    ids = [token for record in records for token in record]
    labels = [t if n and t != NEWLINE else -100 for r in records for n, t in enumerate(r)]
    row = {"input_ids": ids, "labels": labels, "seq_lengths": [len(r) for r in records]}
    return pa.RecordBatch.from_pylist([row], SCHEMA)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    multiple=st.sampled_from([2, 8, 16]),
    newline=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_the_reader_takes_pads_for_pads_and_learns_the_same(lengths, multiple, newline):
    # Chat templates end with <|im_end|> and a newline that is not trained.
    end = [EOS, NEWLINE] if newline else [EOS]
    records = [[5, *range(20, 20 + n), *end] for n in lengths]
    (plain,), (row,) = (to_megatron(pack(records), multiple=m).to_pylist() for m in (1, multiple))

    names = ("input_ids", "loss_mask", "seq_start_id")
    learnt, due = (readers.megatron(*(each[name] for name in names)) for each in (row, plain))
    assert learnt == due
    bounds = np.array(row["cu_seqlens_padded"])
    assert not (bounds % multiple).any()
    assert bounds[-1] == len(row["input_ids"]) - len(records)
    assert np.diff(row["cu_seqlens"]).tolist() == [len(record) - 1 for record in records]
    for record, seen, (start, behind) in zip(
        records,
        logical_lengths(row),
        pairwise([*row["seq_start_id"], len(row["input_ids"])]),
        strict=True,
    ):
        assert (behind - start - 1) % multiple == 0
        assert row["input_ids"][start : start + len(record)] == record
        assert set(row["input_ids"][start + len(record) : behind]) <= {EOS}
        mask = row["loss_mask"][start:behind]
        assert sum(mask) == len(record) - 1 - newline  # all except the first token and the newline
        assert not any(mask[seen:])


def test_metadata_says_the_most_that_a_reader_must_make_room_for(opened, cache, tmp_path):
    folder = export_version(opened, "megatron", tmp_path / "out", cache=cache).folder

    # Records of 3 + 2, 5 and 1 + 4 + 2 ids: inputs 2 + 1, 4 and 0 + 3 + 1.
    assert json.loads((folder / "train.metadata.json").read_text()) == [
        {
            "dataset_max_seqlen": 4,
            "max_samples_per_bin": 3,
            "packing_factor": 2.0,
            "packing_efficiency": 91.67,
            "pack_size": 4,
            "min_packed_seqlen": 3,
        }
    ]
    assert json.loads((folder / "eval.metadata.json").read_text())[0]["max_samples_per_bin"] == 1


def test_loss_weights_are_refused_since_the_reader_would_cut_them_to_0(tmp_path):
    batch = pack([[5, 6, EOS]])
    weights = pa.array([[0.0, 0.5, 1.0]], pa.list_(pa.float32()))

    with pytest.raises(ConfigError, match=r"integers, so 0[.]5 would become 0"):
        write_export(
            iter([batch.append_column("loss_weights", weights)]), "megatron", "train", tmp_path
        )


def read_as_a_glob(folder, pattern="train-*.idx.parquet"):
    """Read a glob as Megatron-Bridge does: files in the order of their names."""
    paths = sorted(folder.glob(pattern))
    return paths, [row for path in paths for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("num_shards", [1, 4, 10])
@pytest.mark.parametrize("num_rows", [[10], [3, 3, 3, 1]])
def test_shards_hold_all_packs_in_order_and_as_many_each(tmp_path, num_rows, num_shards):
    numbers = iter(range(5, 100))
    batches = [
        pa.concat_batches([pack([[5, next(numbers), EOS]]) for _ in range(n)]) for n in num_rows
    ]
    parts = [list(part) for part in _parts(iter(batches), 10, num_shards)]

    counts = [sum(batch.num_rows for batch in part) for part in parts]
    assert len(counts) == num_shards
    assert max(counts) - min(counts) <= 1
    rows = [row for part in parts for batch in part for row in batch.to_pylist()]
    assert rows == [row for batch in batches for row in batch.to_pylist()]


def test_a_glob_of_shards_reads_what_one_file_reads(opened, cache, tmp_path):
    one = export_version(opened, "megatron", tmp_path / "one", cache=cache, splits=["train"])
    two = export_version(
        opened, "megatron", tmp_path / "two", cache=cache, splits=["train"], num_shards=2
    )

    paths, rows = read_as_a_glob(two.folder)
    assert [path.name for path in paths] == [
        "train-00000-of-00002.idx.parquet",
        "train-00001-of-00002.idx.parquet",
    ]
    assert rows == pq.read_table(one.folder / "train.idx.parquet").to_pylist()
    (whole,) = json.loads((one.folder / "train.metadata.json").read_text())
    told = [json.loads(path.read_text())[0] for path in two.folder.glob("*.metadata.json")]
    assert max(each["max_samples_per_bin"] for each in told) == whole["max_samples_per_bin"]
    assert min(each["min_packed_seqlen"] for each in told) == whole["min_packed_seqlen"]


@pytest.mark.parametrize(
    ("name", "num_shards", "message"),
    [
        ("megatron", 99, "rows, too few for 99 shards"),
        ("megatron", 0, "num_shards is 0"),
        ("mds", 2, "1 for mds"),
    ],
)
def test_shards_and_formats_that_cannot_be_are_refused(
    opened, cache, tmp_path, name, num_shards, message
):
    with pytest.raises(ConfigError, match=message):
        export_version(opened, name, tmp_path / "out", num_shards=num_shards, cache=cache)
    assert not (tmp_path / "out").exists()
