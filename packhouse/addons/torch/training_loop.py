"""For your own training loop: split batches, weight their losses, write training receipts.

Averaging the mean losses of microbatches gives tokens a larger weight if their microbatch has few
trained tokens. Instead, divide each microbatch's summed loss by the trained tokens of the global
batch (`count_targets`, `token_loss`): the sum over microbatches, and over ranks after gradients are
summed, is then the mean over all tokens, whatever the split.

A training receipt says which version, and how much of it, a checkpoint was trained on. The state of
a `StreamingPackedDataset` gives the number of packs of an epoch that all ranks consumed together,
and their order is a function of version, seed and epoch. The records before a checkpoint therefore
follow from the state alone, at any time and for any number of ranks. This reads `record_ids` of the
consumed packs, but no tokens.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from typing_extensions import override

from packhouse.errors import ConfigError
from packhouse.load.collators import shift_left
from packhouse.load.streaming import Reader, StreamingPackedDataset
from packhouse.pack.pack_columns import IGNORE_INDEX
from packhouse.system.disks import disk_errors, write_whole

Batch = dict[str, Any]


class MicrobatchError(ConfigError, ValueError):
    """A batch cannot be split as requested. Also a ValueError, as in similar libraries."""


def split_batch_into_microbatches(
    batch: Mapping[str, Any], num_microbatches: int, enforce_divisible: bool = True
) -> list[Batch]:
    """Split a global batch into microbatches along the first dimension.

    Each tensor is split along its own first dimension. Lists as long as the batch are split at the
    same rows. Scalars, None and everything else are copied to every microbatch.

    Args:
        batch: at least one tensor; the first one with a dimension gives the batch size.
        num_microbatches: number of microbatches.
        enforce_divisible: fail if the batch size is not a multiple; otherwise sizes differ by at
            most 1.

    Raises:
        MicrobatchError: there is no tensor, or the batch size is not a multiple.

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
            f"batch size {size} is not divisible by num_microbatches {num_microbatches}. "
            "Change one of them, or set enforce_divisible=False."
        )
    parts: dict[str, Sequence[Any]] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            parts[name] = torch.tensor_split(value, num_microbatches)
        elif isinstance(value, list) and len(value) == size:
            # 7 rows in 3 parts: 3 + 2 + 2, as torch.tensor_split does it.
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
    """Take one global batch, and return its microbatches and their sequence length.

    Args:
        data_iterator: yields global batches; None on pipeline stages that read no data.
        num_microbatches: number of microbatches per global batch.
        default_seq_length: length if the batch has no tensor [batch, length] at `seq_key`.
        seq_key: name of the tensor whose second dimension is the length in tokens.

    Returns:
        An iterator over the microbatches (None if `data_iterator` is None), and the length in
        tokens.

    Raises:
        StopIteration: `data_iterator` is exhausted.
        MicrobatchError: the batch cannot be split.

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
    """Assign rows to microbatches so that each has about the same number of tokens.

    Longest first, each to the microbatch with the fewest tokens: at most 4/3 of the optimal maximum
    (Graham 1969). Every microbatch gets a row. Rows keep their order within a microbatch.

    Args:
        num_tokens: tokens per row.
        num_microbatches: number of microbatches, at most the number of rows.

    Returns:
        Row numbers of each microbatch. Every row appears once.

    Example:
        >>> balance_rows([5, 3, 2, 6], 2)
        [[2, 3], [0, 1]]
    """
    if not 1 <= num_microbatches <= len(num_tokens):
        raise MicrobatchError(
            f"{len(num_tokens)} rows cannot fill {num_microbatches} microbatches. Use fewer "
            "microbatches."
        )
    # Heap entries are (tokens, rows, microbatch). For 5 3 2 6: row 3 (6) goes to microbatch 0, row
    # 0 (5) to 1, row 1 (3) to 1 because 5 < 6, row 2 (2) to 0 because 6 < 8. Ties go to the
    # microbatch with fewer rows, so that empty rows are spread too.
    loads = [(0, 0, number) for number in range(num_microbatches)]
    dealt: list[list[int]] = [[] for _ in range(num_microbatches)]
    for row in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        tokens, rows, number = loads[0]
        dealt[number].append(row)
        heapq.heapreplace(loads, (tokens + num_tokens[row], rows + 1, number))
    return [sorted(rows) for rows in dealt]


def count_targets(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> float:
    """Count the trained tokens of a batch, or of all microbatches of a global batch.

    Counts targets after the shift: a label at the first position is never predicted, and
    `shift_labels` are counted as they are. If a batch has `loss_weights`, returns the sum of the
    weights of its targets. Sum the result over ranks before use.

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
                    "a batch has neither labels nor shift_labels. Count targets before you "
                    "remove them from the batch."
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
    """Return the cross-entropy of a microbatch as its share of the global batch's mean per token.

    Args:
        logits: [batch, T, vocabulary].
        labels: [batch, T], unshifted, -100 for untrained tokens.
        num_targets: `count_targets` of the **global** batch, with all its `loss_weights` if they
            are used here.
        loss_weights: [batch, T], unshifted.
        is_shifted: True if `labels` are already shifted (`shift_labels` of a batch).

    Returns:
        A scalar. The sum over all microbatches is the loss of the global batch. If nothing is
        trained (`num_targets` is 0), it is 0.0 with zero gradients.

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


RECEIPT = "packhouse-receipt.json"


def write_receipt(
    folder: str | Path,
    data: StreamingPackedDataset,
    state: Mapping[str, object],
    *,
    step: int | None = None,
) -> Path:
    """Write `packhouse-receipt.json` to a checkpoint folder; see `training_receipt`.

    Raises:
        ConfigError: the state does not belong to this dataset.
        DiskError: the folder cannot be written.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> write_receipt(folder / "checkpoint-7", data, data.state_dict(), step=7).name
        'packhouse-receipt.json'
    """
    path = Path(folder) / RECEIPT
    receipt = training_receipt(data, state, step=step)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(receipt, indent=2) + "\n").encode())
    return path


def training_receipt(
    data: StreamingPackedDataset, state: Mapping[str, Any], *, step: int | None = None
) -> dict[str, Any]:
    """Return what training had consumed when `state` was saved.

    Args:
        data: the training dataset, or one opened with the same arguments.
        state: result of its `state_dict` on rank 0.
        step: step of the trainer, copied into the receipt.

    Returns:
        Plain JSON: `dataset`, `version`, `content_id`, `manifest_id`, `state`, `step`; `packs` and
        `records` consumed in the current epoch, and `num_packs` per epoch; and `records_sha256`
        over the ids of these records, one per line, in training order. Earlier epochs consumed
        every pack, except those that `drop_uneven` left out.

    Raises:
        ConfigError: the state does not belong to this dataset.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> receipt = training_receipt(data, data.state_dict())
        >>> receipt["version"] == version.id, receipt["packs"]
        (True, 0)
    """
    digest, num_records = sha256(), 0
    for name in consumed_records(data, state):
        digest.update(f"{name}\n".encode())
        num_records += 1
    manifest = data.opened.manifest
    return {
        "dataset": manifest.dataset,
        "version": manifest.version,
        "content_id": manifest.content_id,
        "manifest_id": manifest.manifest_id,
        "step": step,
        "state": dict(state),
        "packs": min(state["packs"], data.num_rows),
        "num_packs": data.num_rows,
        "records": num_records,
        "records_sha256": digest.hexdigest(),
    }


def consumed_records(data: StreamingPackedDataset, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of the records that all ranks consumed in the epoch of a state, in order.

    Raises:
        ConfigError: the state does not belong to this dataset.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> list(consumed_records(data, data.state_dict()))
        []
    """
    epoch, packs, _ = data.check_state(state)
    reader = _Names(data, epoch)
    return chain.from_iterable(reader.row(place) for place in range(min(packs, data.num_rows)))


class _Names(Reader):
    """Reads the record ids of packs instead of their tokens."""

    columns: ClassVar[list[str] | None] = ["record_ids"]

    @staticmethod
    @override
    def view(table: pa.Table, order: npt.NDArray[np.int64] | None) -> Sequence[list[str]]:
        names = table["record_ids"]
        return list((names if order is None else names.take(pa.array(order))).to_pylist())
