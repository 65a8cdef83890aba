"""Records padded to multiples: planned, laid out, and invisible to other records."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from packhouse import PackedCollator, PackedDataset, check_packing, enable_packing
from packhouse.errors import ConfigError
from packhouse.pack.strategies import plan_packs, round_up
from tests.loaders.models import tiny_model

LENGTHS = st.lists(st.integers(1, 64), max_size=60)
MULTIPLES = st.sampled_from([1, 2, 8, 16, 64])


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit", "next_fit"])
@given(lengths=LENGTHS, multiple=MULTIPLES, seed=st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_padded_records_fit_and_tokens_are_counted_without_pads(strategy, lengths, multiple, seed):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_packs(lengths, 64, strategy, seed, multiple)

    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.num_tokens == lengths.sum()
    padded = round_up(lengths, multiple)[plan.order]
    for first, last in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True):
        assert padded[first:last].sum() <= 64


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), multiple=MULTIPLES)
@settings(deadline=None, max_examples=50)
def test_a_batch_holds_each_record_at_its_padded_place(lengths, multiple):
    ids = np.arange(3, 3 + sum(lengths))
    row = {"input_ids": ids.tolist(), "seq_lengths": lengths}
    plain = PackedCollator()([row])
    batch = PackedCollator(pad_record_to_multiple_of=multiple, pad_token_id=1)([row])

    if multiple == 1:
        assert "cu_seqlens" not in batch
        return
    real, padded = batch["cu_seqlens"].tolist(), batch["cu_seqlens_padded"].tolist()
    assert real == plain["cu_seq_lens_q"].tolist()
    assert np.diff(padded).tolist() == round_up(np.array(lengths), multiple).tolist()
    assert batch["cu_seq_lens_q"].tolist() == padded
    is_real = torch.zeros(padded[-1], dtype=torch.bool)
    for start, length in zip(padded, lengths, strict=False):
        is_real[start : start + length] = True
    for name in ("input_ids", "labels", "position_ids"):
        assert batch[name][0, is_real].tolist() == plain[name][0].tolist()
    assert (batch["labels"][0, ~is_real] == -100).all()
    assert (batch["input_ids"][0, ~is_real] == 1).all()


def test_the_filling_of_a_batch_is_a_record_without_a_real_token():
    collate = PackedCollator(pad_record_to_multiple_of=4, pad_to_multiple_of=16)
    batch = collate([{"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]}])

    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 5]
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 8, 16]
    with pytest.raises(ConfigError, match="pad_record_to_multiple_of is 0"):
        PackedCollator(pad_record_to_multiple_of=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_pads_of_records_change_no_logit_and_no_loss(make_records):
    records = [{"input_ids": r["input_ids"]} for r in make_records(12)]
    packs = PackedDataset(records, seq_len=64, pad_record_to_multiple_of=16)
    model = tiny_model("llama", "sdpa").eval()
    pack = max((packs[n] for n in range(len(packs))), key=lambda row: len(row["seq_lengths"]))
    plain = PackedCollator()([pack])
    padded = PackedCollator(pad_record_to_multiple_of=16)([pack])

    assert padded["input_ids"].shape[1] <= 64
    with enable_packing(model), torch.no_grad():
        assert float(model(**padded).loss) == pytest.approx(float(model(**plain).loss), abs=1e-5)
        check_packing(model, padded).require_safe()


def test_a_length_that_is_no_multiple_is_refused(make_records):
    with pytest.raises(ConfigError, match="multiples of 16 in best_fit packs of 60 tokens"):
        PackedDataset(make_records(3), seq_len=60, pad_record_to_multiple_of=16)
