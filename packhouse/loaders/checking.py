"""Prove on a user's own model and batch that packed records do not see each other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from packhouse.errors import ContractError
from packhouse.loaders.masks import segment_ids

__all__ = ["PackingReport", "check_packing"]

# Rounding, as a share of the largest logit; leaks are of the size of the logits themselves.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingReport:
    """What `check_packing` measured, all in units of logits."""

    max_difference: float
    """Largest |packed - alone| over all records."""
    max_leak: float
    """Largest change of a record's logits when only other records change; 0.0 where all is well."""
    max_logit: float
    """Largest |logit| alone, for scale."""
    tolerance: float
    """What rounding may do."""
    num_records: int

    @property
    def is_safe(self) -> bool:
        """Whether records do not see each other and come out as if alone."""
        return self.max_difference <= self.tolerance and self.max_leak <= self.tolerance

    def __str__(self) -> str:
        verdict = "records are kept apart" if self.is_safe else "RECORDS SEE EACH OTHER"
        return (
            f"{verdict}: {self.num_records} records, |packed - alone| <= {self.max_difference:.2g},"
            f" leak {self.max_leak:.2g}, tolerance {self.tolerance:.2g}, logits up to "
            f"{self.max_logit:.2g}"
        )

    def require_safe(self) -> None:
        """Raise ContractError unless `is_safe`."""
        if not self.is_safe:
            raise ContractError(
                f"{self}. Call enable_packing(model), or leave out attention_mask and set "
                "use_cache=False"
            )


def check_packing(
    model: Any, batch: Mapping[str, Any], *, tolerance: float | None = None
) -> PackingReport:
    """Run a packed batch, each record alone, and the batch with records exchanged, and compare.

    The batch is given to the model as it is, mask and all, so that what is proven is what is
    trained. Costs 1 + N + 2 log2(N) forward passes for N records, without gradients and dropout.

    Args:
        model: a causal language model; its mode is left as it was.
        batch: as `PackedCollator` makes it; records are where `position_ids` restart.
        tolerance: in units of logits; by default 1e-4 of the largest in float32, 3e-2 in half
            precision.

    Raises:
        ContractError: the batch has no `position_ids`.
    """
    if batch.get("position_ids") is None:
        raise ContractError("check_packing needs position_ids that restart at each record")
    device = next(model.parameters()).device
    skip = ("labels", "shift_labels", "loss_weights", "seq_lengths", "record_ids")
    inputs = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key not in skip
    }
    records = _records(inputs)
    with _inference(model):
        packed = _logits(model, inputs)
        difference, largest = _against_alone(model, inputs["input_ids"], packed, records)
        leak = _leak(model, inputs, packed, records)
    share = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
    return PackingReport(
        max_difference=difference,
        max_leak=leak,
        max_logit=largest,
        tolerance=share * max(1.0, largest) if tolerance is None else tolerance,
        num_records=len(records),
    )


Record = tuple[int, int, int]
"""Row of the batch, first token, token behind the last."""


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _records(inputs: Mapping[str, Any]) -> list[Record]:
    segments = segment_ids(inputs["position_ids"])
    mask = inputs.get("attention_mask")
    padded = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    records = []
    for row, numbers in enumerate(segments):
        _, lengths = torch.unique_consecutive(numbers, return_counts=True)
        start = 0
        for length in lengths.tolist():
            real = (
                length if padded is None else int((padded[row, start : start + length]).ne(0).sum())
            )
            if real:
                records.append((row, start, start + real))
            start += length
    return records


def _logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float()


def _against_alone(
    model: Any, ids: torch.Tensor, packed: torch.Tensor, records: list[Record]
) -> tuple[float, float]:
    difference = largest = 0.0
    for row, start, end in records:
        positions = torch.arange(end - start, device=ids.device)[None]
        alone = _logits(
            model,
            {
                "input_ids": ids[row : row + 1, start:end],
                "position_ids": positions,
                "use_cache": False,
            },
        )
        difference = max(difference, float((packed[row, start:end] - alone[0]).abs().max()))
        largest = max(largest, float(alone.abs().max()))
    return difference, largest


def _leak(
    model: Any, inputs: Mapping[str, Any], packed: torch.Tensor, records: list[Record]
) -> float:
    """Largest change of a record's logits while tokens of other records are exchanged.

    Half of the records change at a time, once for each bit of a record's number and once for its
    opposite, so that every record is watched while each other one changes.
    """
    leak = 0.0
    for bit in range((len(records) - 1).bit_length()):
        for side in (0, 1):
            ids = inputs["input_ids"].clone()
            watched = []
            for number, (row, start, end) in enumerate(records):
                if number >> bit & 1 == side:
                    ids[row, start:end] = (ids[row, start:end].roll(1) - 1).abs()
                else:
                    watched.append((row, start, end))
            moved = (_logits(model, dict(inputs) | {"input_ids": ids}) - packed).abs()
            for row, start, end in watched:
                leak = max(leak, float(moved[row, start:end].max()))
    return leak
