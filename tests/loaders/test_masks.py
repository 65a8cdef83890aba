import pytest
import torch

from packhouse import (
    block_causal_mask,
    block_mask,
    cu_seqlens,
    packed_mask_mod,
    segment_ids,
)

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])
SEGMENTS = [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]


@pytest.fixture(autouse=True)
def _not_compiled():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_records_are_runs_of_rising_positions_and_may_be_one_token_long():
    assert segment_ids(POSITIONS).tolist() == SEGMENTS
    assert cu_seqlens(POSITIONS).tolist() == [0, 3, 5, 6, 7, 8, 12]
    assert cu_seqlens(POSITIONS).dtype == torch.int32


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
def test_every_form_of_mask_sees_the_same_pairs(window):
    segments = segment_ids(POSITIONS)
    expected = [
        [[q >= k and row[q] == row[k] and (window is None or q - k < window) for k in range(6)]
         for q in range(6)]
        for row in SEGMENTS
    ]  # fmt: skip

    dense = block_causal_mask(segments, torch.float32, window)
    assert dense.shape == (2, 1, 6, 6)
    assert (dense[:, 0] == 0).tolist() == expected
    assert dense.min() in (0, torch.finfo(torch.float32).min)

    mask_mod = packed_mask_mod(segments, window)
    pairs = [
        [[bool(mask_mod(b, 0, q, k)) for k in torch.arange(6)] for q in torch.arange(6)]
        for b in torch.arange(2)
    ]
    assert pairs == expected


def test_block_mask_skips_blocks_that_no_record_crosses():
    positions = torch.cat([torch.arange(128)] * 4)[None]

    mask = block_mask(segment_ids(positions))

    assert mask.shape == (1, 1, 512, 512)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert mask.sparsity() == pytest.approx(75.0)
