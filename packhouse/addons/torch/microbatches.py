"""Cut a global batch into microbatches, and weigh their losses so that the cut does not show.

Averaging the mean losses of microbatches weighs a token by how few trained tokens its microbatch
has. Divide each microbatch's summed loss by the trained tokens of the global batch instead
(`count_targets`, `token_loss`): the sum over microbatches, and over ranks once gradients are
summed, is the mean over all tokens, whatever the cut.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from packhouse.errors import ConfigError
from packhouse.load.collators import shift_left
from packhouse.pack.layout import IGNORE_INDEX

Batch = dict[str, Any]


class MicrobatchError(ConfigError, ValueError):
    """A batch that cannot be cut as asked; a ValueError too, as peers raise."""


def split_batch_into_microbatches(
    batch: Mapping[str, Any], num_microbatches: int, enforce_divisible: bool = True
) -> list[Batch]:
    """Cut a global batch into microbatches along the first dimension.

    Each tensor is cut along its own first dimension; a list as long as the batch is cut at the
    same rows; scalars, None and everything else go into every microbatch as they are.

    Args:
        batch: a tensor at least; the first one with a dimension sets the batch size.
        num_microbatches: how many to make.
        enforce_divisible: fail if the batch size is not a multiple; else sizes differ by one.

    Raises:
        MicrobatchError: no tensor, or a batch size that is not a multiple; also a ValueError.

    Example:
        >>> batch = {"tokens": torch.arange(8).view(4, 2), "ids": ["a", "b", "c", "d"], "lr": None}
        >>> first, second = split_batch_into_microbatches(batch, 2)
        >>> second["tokens"].tolist(), second["ids"], second["lr"]
        ([[4, 5], [6, 7]], ['c', 'd'], None)
    """
    if num_microbatches < 1:
        raise MicrobatchError(f"num_microbatches must be positive, got {num_microbatches}")
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim]
    if not tensors:
        raise MicrobatchError("a batch needs at least one tensor with a batch dimension")
    size = len(tensors[0])
    if enforce_divisible and size % num_microbatches:
        raise MicrobatchError(
            f"batch size {size} is not divisible by num_microbatches {num_microbatches}; change "
            "one of them, or set enforce_divisible=False"
        )
    parts: dict[str, Sequence[Any]] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            parts[name] = torch.tensor_split(value, num_microbatches)
        elif isinstance(value, list) and len(value) == size:
            # 7 rows in 3 parts: 3 + 2 + 2, as torch cuts them
            rows = np.array_split(np.arange(size), num_microbatches)
            parts[name] = [[value[row] for row in part] for part in rows]
        else:
            parts[name] = [value] * num_microbatches
    return [{name: part[n] for name, part in parts.items()} for n in range(num_microbatches)]


def prepare_finetuning_batch(
    data_iterator: Iterator[Mapping[str, Any]] | None,
    num_microbatches: int,
    default_seq_length: int,
    seq_key: str = "tokens",
) -> tuple[Iterator[Batch] | None, int]:
    """Take one global batch and return its microbatches and their common length.

    Args:
        data_iterator: gives global batches; None on pipeline stages that read no data.
        num_microbatches: how many to cut a global batch into.
        default_seq_length: length where the batch has no tensor [batch, length] at `seq_key`.
        seq_key: whose second dimension is the length, in tokens.

    Returns:
        An iterator over the microbatches (None if `data_iterator` is) and the length in tokens.

    Raises:
        StopIteration: `data_iterator` has no further batch, as `next` says it.
        MicrobatchError: the batch cannot be cut.

    Example:
        >>> loader = iter([{"tokens": torch.zeros(4, 240)}])
        >>> microbatches, seq_length = prepare_finetuning_batch(loader, 2, 2048)
        >>> seq_length, [m["tokens"].shape[0] for m in microbatches]
        (240, [2, 2])
    """
    if data_iterator is None:
        return None, default_seq_length
    batch = next(data_iterator)
    tokens = batch.get(seq_key)
    seq_length = default_seq_length
    if isinstance(tokens, torch.Tensor) and tokens.ndim >= 2:
        seq_length = int(tokens.shape[1])
    return iter(split_batch_into_microbatches(batch, num_microbatches)), seq_length


def balance_rows(num_tokens: Sequence[int], num_microbatches: int) -> list[list[int]]:
    """Deal rows to microbatches so that each has about as many tokens.

    Longest first, each to the microbatch with fewest tokens: at most 4/3 of the best possible
    maximum (Graham 1969). Every microbatch gets a row. Within one, rows keep their order.

    Args:
        num_tokens: tokens of each row.
        num_microbatches: how many to make, at most the number of rows.

    Returns:
        Row numbers of each microbatch; each row appears once.

    Example:
        >>> balance_rows([5, 3, 2, 6], 2)
        [[2, 3], [0, 1]]
    """
    if not 1 <= num_microbatches <= len(num_tokens):
        raise MicrobatchError(f"{len(num_tokens)} rows cannot fill {num_microbatches} microbatches")
    # Tokens, rows, microbatch: of 5 3 2 6, row 3 (6) goes to the first, row 0 (5) to the second,
    # row 1 (3) there too (5 < 6), row 2 (2) to the first (6 < 8). Of equals the one with fewer rows
    # comes first, so that rows without tokens do not all go to one.
    loads = [(0, 0, number) for number in range(num_microbatches)]
    dealt: list[list[int]] = [[] for _ in range(num_microbatches)]
    for row in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        tokens, rows, number = loads[0]
        dealt[number].append(row)
        heapq.heapreplace(loads, (tokens + num_tokens[row], rows + 1, number))
    return [sorted(rows) for rows in dealt]


def count_targets(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> float:
    """Trained tokens of a batch or of all microbatches of a global batch, each by its weight.

    Counted after the shift: a label at the first position is nobody's target, and `shift_labels`
    are counted as they are. Where a batch has `loss_weights` it is the sum of its targets' weights.
    Sum it over ranks before use.

    Raises:
        MicrobatchError: a batch has neither `labels` nor `shift_labels`.

    Example:
        >>> batch = {"labels": torch.tensor([[5, 6, -100, 8]])}
        >>> count_targets(batch)
        2
        >>> count_targets(batch | {"loss_weights": torch.tensor([[1.0, 0.5, 0.0, 2.0]])})
        2.5
    """
    total: float = 0
    for batch in [batches] if isinstance(batches, Mapping) else batches:
        targets = batch.get("shift_labels")
        if targets is None:
            if batch.get("labels") is None:
                raise MicrobatchError(
                    "a batch has neither labels nor shift_labels to count; count before you pop "
                    "them"
                )
            targets = shift_left(batch["labels"])
        is_target = targets != IGNORE_INDEX
        weights = batch.get("loss_weights")
        if weights is None:
            total += int(is_target.sum())
        else:
            total += float(shift_left(weights, 0)[is_target].double().sum())
    return total


def token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_targets: float,
    loss_weights: torch.Tensor | None = None,
    *,
    is_shifted: bool = False,
) -> torch.Tensor:
    """Cross-entropy of one microbatch, as its share of the global batch's mean per token.

    Args:
        logits: [batch, T, vocabulary].
        labels: [batch, T], unshifted, -100 where not trained.
        num_targets: `count_targets` of the **global** batch, all its `loss_weights` in it if any
            are used here.
        loss_weights: [batch, T], unshifted.
        is_shifted: `labels` are targets already (`shift_labels` of a batch).

    Returns:
        A scalar; those of all microbatches add up to the loss of the global batch. Where nothing
        is trained (`num_targets` 0) it is 0.0, with gradients of 0.

    Example:
        >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[-100, 1, 2]])
        >>> round(token_loss(logits, labels, num_targets=2).item(), 4)  # ln 4
        1.3863
    """
    targets = labels if is_shifted else shift_left(labels)
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        targets.reshape(-1).to(logits.device),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    if loss_weights is not None:
        losses = losses * shift_left(loss_weights, 0).reshape(-1).to(losses)
    return losses.sum() / (num_targets or 1)
