"""Try to make packed records see each other through every public entry point.

Each entry point either keeps them apart once `enable_packing` holds the model, or refuses.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from packhouse import (
    ClassificationCollator,
    PackedCollator,
    PackedDataset,
    PaddedCollator,
    StreamingPackedDataset,
    check_packing,
    enable_packing,
    load_packed,
)
from packhouse.errors import ContractError
from tests.loaders.models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uri(make_version):
    return make_version(num_records=30)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(uri, cache):
    return load_packed(uri, cache=cache)


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


def _flattening(rows: Any) -> Any:
    from transformers import DataCollatorWithFlattening

    records = [
        {"input_ids": row["input_ids"][a:b].tolist(), "labels": row["labels"][a:b].tolist()}
        for row in rows
        for a, b in _spans(row)
    ]
    return DataCollatorWithFlattening()(records)


def _spans(row: Any) -> list[tuple[int, int]]:
    ends = np.cumsum(row["seq_lengths"]).tolist()
    return list(zip([0, *ends], ends, strict=False))


def _with_ones(rows: Any) -> Any:
    batch = PackedCollator()(rows)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def _default(rows: Any) -> Any:
    from transformers import default_data_collator

    return default_data_collator(rows)


DOORS = {
    "packhouse": PackedCollator(),
    "packhouse, with a mask of ones": _with_ones,
    "packhouse, padded": PackedCollator(pad_to_multiple_of=128),
    "torch's default collate": torch.utils.data.default_collate,
    "transformers' default": _default,
    "transformers' flattening": _flattening,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("streams", [False, True])
def test_collators_of_others_keep_records_apart_under_the_guard(
    uri, cache, data, model, door, streams
):
    rows = StreamingPackedDataset(uri, cache=cache) if streams else PackedDataset(data)
    (batch, *_) = DataLoader(rows, 1, collate_fn=DOORS[door])

    with enable_packing(model):
        report = check_packing(model, batch)
    assert report.has_neighbours
    report.require_safe()


def test_a_collator_that_pads_packs_loses_no_boundary_or_is_refused(data, model):
    packs = PackedDataset(data)
    with pytest.raises(ContractError, match="use PackedCollator for packs"):
        PaddedCollator(pad_token_id=0)([packs[0]])
    with pytest.raises(ContractError, match="no label"):
        ClassificationCollator(pad_token_id=0)([packs[0]])
    # Padded by hand: a row of 1s and 0s is dropped, for positions still restart.
    rows = [PackedCollator()([packs[i]]) for i in range(2)]
    width = max(row["input_ids"].shape[1] for row in rows) + 3

    def padded(name: str) -> torch.Tensor:
        parts = [row[name][0] for row in rows]
        return torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in parts])

    mask = torch.stack([torch.arange(width) < row["input_ids"].shape[1] for row in rows]).long()
    batch = {name: padded(name) for name in ("input_ids", "position_ids")}
    with enable_packing(model):
        check_packing(model, batch | {"attention_mask": mask}).require_safe()


def test_no_door_trains_the_first_token_of_a_record(uri, cache, data):
    whole = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]  # every token would be trained
    made = [
        PackedCollator()([PackedDataset(data)[0]]),
        PackedCollator()([next(iter(StreamingPackedDataset(uri, cache=cache)))]),
        PackedCollator()([PackedDataset(whole, seq_len=8)[0]]),
        PackedCollator(whole_rows=True)(whole),
        PackedCollator(pad_to_multiple_of=64, shift_labels=True)([PackedDataset(data)[1]]),
    ]
    for batch in made:
        starts = batch["cu_seq_lens_q"][:-1].long()
        assert (batch["labels"][0, starts] == -100).all()
        assert (batch["position_ids"][0, starts] == 0).all()
        shifted = batch.get("shift_labels")
        if shifted is not None:  # no record's last token has a target
            assert (shifted[0, batch["cu_seq_lens_q"][1:].long() - 1] == -100).all()
