"""Repack a published version: other lengths, other epochs, the same tokens."""

import pickle

import pytest

from packhouse import PackedDataset, load_packed
from packhouse.errors import ConfigError
from packhouse.pack.strategies import round_up


def records(packs: PackedDataset) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    for pack in (packs[index] for index in range(len(packs))):
        sizes = pack["seq_lengths"].tolist()
        ids, labels = (pack[name].split(sizes) for name in ("input_ids", "labels"))
        found += [(tuple(i.tolist()), tuple(n.tolist())) for i, n in zip(ids, labels, strict=True)]
    return found


@pytest.mark.parametrize("layout", ["labels", "compact"])
def test_other_packs_hold_the_same_records_with_the_same_labels(make_version, tmp_path, layout):
    data = load_packed(make_version(layout=layout), cache=tmp_path)
    plain = PackedDataset(data)
    long = PackedDataset(data, seq_len=256, repack=True, pad_record_to_multiple_of=16)

    assert sorted(records(long)) == sorted(records(plain))
    assert len(long) < len(plain)
    for index in range(len(long)):
        assert round_up(long[index]["seq_lengths"].numpy(), 16).sum() <= 256
    again = pickle.loads(pickle.dumps(long))  # noqa: S301 - as a worker gets it
    assert records(again) == records(long)


def test_each_epoch_has_packs_of_its_own_and_the_same_number(make_version, tmp_path):
    data = load_packed(make_version(num_records=200), cache=tmp_path)
    packs = PackedDataset(data, seq_len=64, repack=True)
    first = records(packs)

    packs.set_epoch(1)
    second = records(packs)
    packs.set_epoch(0)

    assert records(packs) == first
    assert second != first
    assert sorted(second) == sorted(first)
    assert records(PackedDataset(data, seq_len=64, repack=True, epoch=1)) == second
    assert len(PackedDataset(data, seq_len=64, repack=True, epoch=7)) == len(packs)


def test_epochs_of_published_packs_are_refused_without_repacking(make_version, tmp_path):
    data = load_packed(make_version(), cache=tmp_path)

    PackedDataset(data).set_epoch(3)  # as accelerate calls it
    with pytest.raises(ConfigError, match="Set seq_len"):
        PackedDataset(data, epoch=1)
    with pytest.raises(ConfigError, match="epoch is -1"):
        PackedDataset(data, seq_len=64, repack=True, epoch=-1)
