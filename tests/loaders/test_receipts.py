import json
from hashlib import sha256

import pytest

from packhouse import (
    StreamingPackedDataset,
    consumed_records,
    load_packed,
    training_receipt,
    write_receipt,
)


@pytest.mark.parametrize(("shuffle", "file_format"), [(True, "parquet"), (False, "arrow")])
def test_a_state_lists_the_records_that_all_ranks_took(
    make_version, tmp_path, shuffle, file_format
):
    uri = make_version(num_records=90, rows_per_file=7, file_format=file_format)
    packs = {tuple(row["input_ids"]): row["record_ids"] for row in load_packed(uri, cache=tmp_path)}

    def open_ranks(world_size: int) -> list[StreamingPackedDataset]:
        return [
            StreamingPackedDataset(
                uri, rank=rank, world_size=world_size, shuffle=shuffle, seed=3, cache=tmp_path
            )
            for rank in range(world_size)
        ]

    ranks = open_ranks(2)
    for rank in ranks:
        rank.set_epoch(1)
    taken = [[] for _ in ranks]
    for rank, rows in zip(ranks, taken, strict=True):
        stream = iter(rank)
        rows += [next(stream)["input_ids"].tolist() for _ in range(4)]
    in_order = [pack for pair in zip(*taken, strict=True) for pack in pair]

    state = ranks[0].state_dict()
    [other] = open_ranks(1)  # opened in the same way later, with another number of ranks
    names = list(consumed_records(other, state))

    assert names == [name for pack in in_order for name in packs[tuple(pack)]]
    receipt = training_receipt(other, state)
    assert (receipt["packs"], receipt["records"]) == (8, len(names))
    digest = sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()
    assert receipt["records_sha256"] == digest


def test_a_receipt_is_next_to_the_checkpoint_and_names_the_version(make_version, tmp_path):
    uri = make_version(num_records=30)
    data = StreamingPackedDataset(uri, rank=0, world_size=1, cache=tmp_path)
    rows = iter(data)
    next(rows)
    path = write_receipt(tmp_path / "checkpoint-1", data, data.state_dict(), step=1)

    told = json.loads(path.read_text())
    assert told["version"] == data.opened.version
    assert (told["step"], told["packs"], told["num_packs"]) == (1, 1, data.num_rows)
    assert told == training_receipt(data, told["state"], step=1)
    list(rows)
    whole = training_receipt(data, data.state_dict())
    assert (whole["packs"], whole["records"]) == (data.num_rows, 30)
