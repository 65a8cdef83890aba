"""Prove on a user's own model and batch that packed records do not see each other."""

import math
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
    num_rows: int
    """Rows that hold records; with one record in each there is nothing to keep apart."""

    @property
    def has_neighbours(self) -> bool:
        """Whether a row held two records or more: else nothing was tested."""
        return self.num_records > self.num_rows

    @property
    def is_safe(self) -> bool:
        """Whether records do not see each other and come out as if alone, as proven here.

        False where a logit was not a number, and where no row held two records.
        """
        is_apart = self.max_difference <= self.tolerance and self.max_leak <= self.tolerance
        return is_apart and self.has_neighbours

    def __str__(self) -> str:
        verdict = "records are kept apart" if self.is_safe else "RECORDS SEE EACH OTHER"
        if not self.has_neighbours:
            verdict = "NOTHING WAS PROVEN, no row holds two records"
        elif not math.isfinite(self.max_difference + self.max_leak):
            verdict = "NOTHING WAS PROVEN, logits are not finite"
        return (
            f"{verdict}: {self.num_records} records, |packed - alone| <= {self.max_difference:.2g},"
            f" leak {self.max_leak:.2g}, tolerance {self.tolerance:.2g}, logits up to "
            f"{self.max_logit:.2g}"
        )

    def require_safe(self) -> None:
        """Raise ContractError unless `is_safe`."""
        if not self.has_neighbours:
            raise ContractError(f"{self}. Check a batch of packs")
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
        batch: as `PackedCollator` makes it; records end where `position_ids` restart, and wherever
            a mask of record numbers, `cu_seq_lens_q`, `seq_idx` or `seq_lengths` says so too.
        tolerance: in units of logits; by default 1e-4 of the largest in float32, 3e-2 in half
            precision.

    Raises:
        ContractError: nothing in the batch says where records end.
    """
    device = next(model.parameters()).device
    skip = ("labels", "shift_labels", "loss_weights", "seq_lengths", "record_ids")
    inputs = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key not in skip
    }
    records = _records(batch)
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
        num_rows=len({row for row, _, _ in records}),
    )


Record = tuple[int, int, int]
"""Row of the batch, first token, token behind the last."""


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:  # one by one: frozen parts stay in eval
            module.training = mode


def _records(batch: Mapping[str, Any]) -> list[Record]:
    segments = _cuts(batch).cumsum(-1)
    mask = batch.get("attention_mask")
    padded = mask.cpu() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    records = []
    for row, numbers in enumerate(segments):
        _, lengths = torch.unique_consecutive(numbers, return_counts=True)
        start = 0
        for length in lengths.tolist():
            place = torch.arange(start, start + length)
            if padded is not None:
                place = place[padded[row, start : start + length] != 0]
            if len(place):
                records.append((row, int(place[0]), int(place[-1]) + 1))
            start += length
    return records


def _cuts(batch: Mapping[str, Any]) -> torch.Tensor:
    """Where records begin, bool [batch, T], by anything in the batch that says so."""
    cuts = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    positions, mask, numbers = (
        None if batch.get(name) is None else batch[name].cpu()
        for name in ("position_ids", "attention_mask", "seq_idx")
    )
    numbered = [] if numbers is None else [numbers]
    if mask is not None and mask.ndim == 2 and mask.dtype != torch.bool and (mask > 1).any():
        numbered.append(mask)
    ends = [batch[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in batch]
    if batch.get("seq_lengths") is not None:
        lengths = torch.as_tensor(batch["seq_lengths"]).flatten()
        ends.append(lengths.cumsum(0))
    if positions is None and not numbered and not ends:
        raise ContractError("check_packing needs position_ids that restart at each record")
    if positions is not None:
        cuts[:, 1:] |= torch.diff(segment_ids(positions), dim=-1) != 0
    for each in numbered:
        cuts[:, 1:] |= torch.diff(each, dim=-1) != 0
    for each in ends:
        places = each.cpu().long()
        cuts.view(-1)[places[places < cuts.numel()]] = True
    return cuts


def _larger(largest: float, values: torch.Tensor) -> float:
    """The larger of both, or NaN if any is: `max` of Python would pass over it."""
    found = float(values.max())
    return math.nan if math.isnan(found + largest) else max(largest, found)


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
        difference = _larger(difference, (packed[row, start:end] - alone[0]).abs())
        largest = _larger(largest, alone.abs())
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
                leak = _larger(leak, moved[row, start:end])
    return leak
