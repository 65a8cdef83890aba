"""Convert rows to (context, target) as each trainer does, written from its published format."""

from itertools import pairwise

Learnt = list[tuple[tuple[int, ...], int]]


def unshifted(ids: list[int], labels: list[int], seq_lengths: list[int]) -> Learnt:
    """transformers: position t predicts `labels[t + 1]` and sees only its own record."""
    learnt, start = [], 0
    begin = {}
    for length in seq_lengths:
        begin |= dict.fromkeys(range(start, start + length), start)
        start += length
    for t in range(len(ids) - 1):
        if labels[t + 1] != -100:
            learnt.append((tuple(ids[begin[t] : t + 1]), labels[t + 1]))
    return learnt


def restarts(position_ids: list[int]) -> list[int]:
    """Return the lengths between zeros."""
    starts = [t for t, position in enumerate(position_ids) if position == 0]
    return [b - a for a, b in zip(starts, [*starts[1:], len(position_ids)], strict=True)]


def megatron(ids: list[int], loss_mask: list[int], seq_start_id: list[int]) -> Learnt:
    """Megatron-Bridge: for each sequence, inputs ids[:-1], targets ids[1:], weights mask[:-1]."""
    learnt = []
    bounds = [*seq_start_id, len(ids)]
    for start, end in pairwise(bounds):
        inputs, targets = ids[start : end - 1], ids[start + 1 : end]
        for t, (target, weight) in enumerate(zip(targets, loss_mask[start : end - 1], strict=True)):
            if weight:
                learnt.append((tuple(inputs[: t + 1]), target))
    return learnt
