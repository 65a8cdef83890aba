import pytest
import torch
from hypothesis import given, strategies as st

from packhouse import (
    PackedCollator,
    PaddedCollator,
    balance_rows,
    count_targets,
    prepare_finetuning_batch,
    split_batch_into_microbatches,
    token_loss,
)


def test_lists_are_cut_with_the_rows_and_everything_else_is_copied():
    batch = {
        "tokens": torch.zeros(4, 3),
        "names": ["a", "b", "c", "d"],
        "other": [1, 2],
        "none": None,
        "step": 7,
        "scale": torch.tensor(2.0),
    }

    first, second = split_batch_into_microbatches(batch, 2)

    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    for part in (first, second):
        assert part["other"] == [1, 2]
        assert part["none"] is None
        assert part["step"] == 7
        assert part["scale"].item() == 2.0


def test_indivisible_batches_are_an_error_or_differ_by_one():
    batch = {"tokens": torch.arange(7), "names": list("abcdefg")}

    with pytest.raises(ValueError, match="batch size 7 is not divisible by num_microbatches 3"):
        split_batch_into_microbatches(batch, 3)
    parts = split_batch_into_microbatches(batch, 3, enforce_divisible=False)
    assert [part["tokens"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part["names"] for part in parts] == [list("abc"), list("de"), list("fg")]


@pytest.mark.parametrize("batch", [{}, {"step": 3}, {"scale": torch.tensor(1.0)}])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(ValueError, match="at least one tensor"):
        split_batch_into_microbatches(batch, 1)
    with pytest.raises(ValueError, match="must be positive"):
        split_batch_into_microbatches({"tokens": torch.zeros(2)}, 0)


@pytest.mark.parametrize(
    ("batch", "key", "length"),
    [
        ({"tokens": torch.zeros(16, 240)}, "tokens", 240),
        ({"input_ids": torch.zeros(16, 100), "tokens": torch.zeros(16, 9)}, "input_ids", 100),
        ({"other": torch.zeros(16, 240)}, "tokens", 2048),
        ({"tokens": [1] * 16, "other": torch.zeros(16)}, "tokens", 2048),
        ({"tokens": torch.zeros(16)}, "tokens", 2048),
    ],
)
def test_the_length_is_the_batchs_or_the_default(batch, key, length):
    microbatches, seq_length = prepare_finetuning_batch(iter([batch]), 4, 2048, seq_key=key)

    assert seq_length == length
    assert len(list(microbatches)) == 4


def test_one_global_batch_is_taken_at_a_time_and_none_passes_through():
    loader = iter([{"tokens": torch.zeros(2, 5)}, {"tokens": torch.ones(2, 6)}])

    assert prepare_finetuning_batch(loader, 2, 2048)[1] == 5
    assert prepare_finetuning_batch(loader, 2, 2048)[1] == 6
    with pytest.raises(StopIteration):
        prepare_finetuning_batch(loader, 2, 2048)
    assert prepare_finetuning_batch(None, 2, 2048) == (None, 2048)


@given(tokens=st.lists(st.integers(1, 4096), min_size=1, max_size=64), num=st.integers(1, 16))
def test_balanced_microbatches_hold_every_row_once_and_none_is_far_over_the_mean(tokens, num):
    num = min(num, len(tokens))
    dealt = balance_rows(tokens, num)

    assert sorted(row for rows in dealt for row in rows) == list(range(len(tokens)))
    assert all(dealt)
    loads = [sum(tokens[row] for row in rows) for rows in dealt]
    # Graham's bound; the optimum is at least the mean and the longest.
    assert max(loads) <= 4 / 3 * max(sum(tokens) / num, max(tokens)) + max(tokens) / 3


def test_losses_of_microbatches_add_up_to_the_loss_of_the_global_batch():
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 50, (n,)), "seq_lengths": [n]} for n in (3, 9, 2, 30)]
    table = torch.randn(50, 50)
    whole = PackedCollator()(rows)
    total = count_targets(whole)
    global_loss = token_loss(table[whole["input_ids"]], whole["labels"], total)

    for dealt in ([[0], [1], [2], [3]], balance_rows([3, 9, 2, 30], 2)):
        parts = [PackedCollator()([rows[i] for i in each]) for each in dealt]
        assert count_targets(parts) == total == 3 + 9 + 2 + 30 - 4
        shares = [token_loss(table[p["input_ids"]], p["labels"], total) for p in parts]
        torch.testing.assert_close(sum(shares), global_loss)
        means = [token_loss(table[p["input_ids"]], p["labels"], count_targets(p)) for p in parts]
        assert abs(sum(means) / len(means) - global_loss) > 1e-3  # the usual mistake

    padded = PaddedCollator(pad_token_id=0)(rows)
    torch.testing.assert_close(
        token_loss(table[padded["input_ids"]], padded["labels"], total), global_loss
    )


def test_record_weights_make_the_mean_of_record_means():
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 50, (n,)), "seq_lengths": [n]} for n in (3, 9, 30)]
    table = torch.randn(50, 50)
    batch = PackedCollator(loss_weights="record")(rows)

    weighted = token_loss(
        table[batch["input_ids"]], batch["labels"], len(rows), batch["loss_weights"]
    )

    alone = [PackedCollator()([row]) for row in rows]
    means = [token_loss(table[b["input_ids"]], b["labels"], count_targets(b)) for b in alone]
    torch.testing.assert_close(weighted, sum(means) / len(means))


def test_a_batch_without_targets_costs_nothing():
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    labels = torch.full((1, 3), -100)
    loss = token_loss(logits, labels, count_targets({"labels": labels}))
    loss.backward()

    assert loss.item() == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_targets_that_are_shifted_already_are_counted_and_trained_as_they_are():
    rows = [{"input_ids": [5, 6, 7], "seq_lengths": [3]}, {"input_ids": [8, 9], "seq_lengths": [2]}]
    batch = PackedCollator(shift_labels=True)(rows)
    logits = torch.randn(1, 5, 50)
    shifted = {key: batch[key] for key in ("shift_labels",)}

    assert count_targets(batch) == count_targets(shifted) == 3
    whole = token_loss(logits, batch["labels"], 3)
    torch.testing.assert_close(token_loss(logits, batch["shift_labels"], 3, is_shifted=True), whole)
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        count_targets({"input_ids": batch["input_ids"]})
