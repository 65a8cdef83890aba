"""Prove on your own model and batch that packed records do not see each other.

Tokens of some records are changed, and the logits of all others must not move. The check runs the
real model on the real batch, so it covers the attention kernel, the collator and any wrapper. It
needs 2 + N + 2 log2(N) forward passes for N records. Run it once before training, not at every
step.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from packhouse.addons.torch.enable_packing import record_starts
from packhouse.errors import ContractError
from packhouse.system.wording import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rounding error as a share of the largest logit. A leak is as large as the logits themselves.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2

_NOT_INPUTS = ("labels", "shift_labels", "loss_weights", "seq_lengths", "record_ids")

_WEIGHTS = (
    "If the weights of the attention output or of the head are zero, no effect is visible. Set "
    "them to other values for the check, or check a trained model."
)

Record = tuple[int, int, int]
"""Row of the batch, first token, end (exclusive)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingReport:
    """Result of `check_packing` or `check_ranks`: its measurements, in units of logits.

    Those of `check_ranks` are over all ranks.
    """

    max_difference: float | None = None
    """Largest |packed - alone| over all records; None from `check_ranks`."""
    max_leak: float
    """Largest change of a record's logits when only other records change; 0.0 if there is no
    leak."""
    max_response: float
    """Largest change of a record's later logits when its own first token changes. If it is about 0,
    a leak could not show, for example because attention's output weights start as zeros."""
    max_logit: float
    """Largest |logit| of records run alone, for scale."""
    tolerance: float
    """Largest change that rounding can cause."""
    num_records: int
    num_rows: int = 1
    """Rows with records. If each has one record, there is nothing to separate. 1 from
    `check_ranks`."""
    num_ranks: int = 1

    @property
    def has_neighbours(self) -> bool:
        """True if any row contains two or more records; otherwise nothing was tested."""
        return self.num_records > self.num_rows

    @property
    def is_safe(self) -> bool:
        """True if no record sees another and its logits are the same as when it runs alone.

        False if a logit is not finite, if no row contains two records, or if tokens do not respond
        even to tokens of their own record.
        """
        is_same = self.max_difference is None or self.max_difference <= self.tolerance
        is_apart = is_same and self.max_leak <= self.tolerance
        return is_apart and self.has_neighbours and not self._is_blind

    def __str__(self) -> str:
        verdict = "records are kept apart" if self.is_safe else "RECORDS SEE EACH OTHER"
        if not self.has_neighbours:
            verdict = "INCONCLUSIVE, no row contains two records"
        elif not math.isfinite((self.max_difference or 0.0) + self.max_leak):
            verdict = "INCONCLUSIVE, logits are not finite"
        elif self._is_blind:
            verdict = "INCONCLUSIVE, no token affects later tokens of its own record"
        compared = f" on {counted(self.num_ranks, 'rank')}"
        if self.max_difference is not None:
            compared = f", |packed - alone| <= {self.max_difference:.2g}"
        return (
            f"{verdict}: {counted(self.num_records, 'record')}{compared}, leak {self.max_leak:.2g}"
            f", tolerance {self.tolerance:.2g}, logits up to {self.max_logit:.2g}"
        )

    def require_safe(self) -> None:
        """Raise ContractError unless `is_safe`."""
        if not self.has_neighbours:
            raise ContractError(f"{self}. Check a batch of packs")
        if self._is_blind:
            raise ContractError(f"{self}. {_WEIGHTS}")
        if not self.is_safe:
            raise ContractError(
                f"{self}. Call enable_packing(model), or leave out attention_mask and set "
                "use_cache=False."
            )

    @property
    def _is_blind(self) -> bool:
        """True if no token moved any other, even in its own record: a leak would not show."""
        return max(self.max_leak, self.max_response) <= self.tolerance


def check_packing(
    model: torch.nn.Module, batch: Mapping[str, Any], *, tolerance: float | None = None
) -> PackingReport:
    """Compare the logits of a packed batch with each record alone, and with other records changed.

    The model gets the batch unchanged, including its mask, so the check covers what is trained.
    Takes 2 + N + 2 log2(N) forward passes for N records, without gradients or dropout.

    Args:
        model: a causal language model; its training mode is restored.
        batch: a batch from `PackedCollator`. Records end where `position_ids` restart, and wherever
            a mask of record numbers, `cu_seq_lens_q`, `seq_idx` or `seq_lengths` marks an end.
        tolerance: in units of logits. Default: 1e-4 of the largest logit in float32, 3e-2 in half
            precision.

    Raises:
        ContractError: nothing in the batch marks where records end.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packhouse import PackedCollator, enable_packing
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=1)
        >>> pack = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "seq_lengths": [2, 2]}
        >>> batch = PackedCollator()([pack])
        >>> model = LlamaForCausalLM(config)
        >>> with enable_packing(model):
        ...     check_packing(model, batch).num_records
        2
    """
    parameter = next(model.parameters())
    inputs = {
        name: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in _NOT_INPUTS
    }
    records = _find_records(batch)
    with _inference(model):
        input_ids, packed = inputs["input_ids"], _logits(model, inputs)
        difference = largest = 0.0
        for row, start, end in records:
            ids = input_ids[row : row + 1, start:end]
            positions = torch.arange(end - start, device=ids.device)[None]
            alone = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            logits = _logits(model, alone)[0]
            difference = _larger(difference, (packed[row, start:end] - logits).abs())
            largest = _larger(largest, logits.abs())
        numbers = _number(records, input_ids)
        leak, response = map(float, _find_moves(model, inputs, packed, numbers, len(records)))
    share = _TOLERANCE.get(parameter.dtype, _HALF_TOLERANCE)
    return PackingReport(
        max_difference=difference,
        max_leak=leak,
        max_response=response,
        max_logit=largest,
        tolerance=share * max(1.0, largest) if tolerance is None else tolerance,
        num_records=len(records),
        num_rows=len({row for row, _, _ in records}),
    )


def check_ranks(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    records: torch.Tensor | None = None,
    group: "ProcessGroup | None" = None,
    tolerance: float | None = None,
) -> PackingReport:
    """Change records on all ranks at once, and check that no logits of other records change.

    Call it on every rank of `group` with that rank's data, as in training: its batch for data
    parallelism, its part of every record for context parallelism. All ranks make the same number of
    forward passes, 2 + 2 log2(N) for N records in total, so collectives inside the model match.

    Args:
        model: the model as training calls it, with its wrappers; called with the batch's inputs, it
            returns logits [rows, tokens, vocabulary] or an object with `logits`.
        batch: the batch of this rank, as for `check_packing`.
        records: record number of each token in `input_ids`, the same on all ranks that share a
            record, -1 for padding. Default: each rank has its own records (data parallelism).
        group: a torch.distributed group. Default: all ranks.
        tolerance: in units of logits. Default: as in `check_packing`.

    Raises:
        ContractError: nothing in the batch marks where records end, and `records` is not given.

    Example:
        >>> import torch.distributed as dist
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packhouse import PackedCollator, enable_packing
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=1)
        >>> pack = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "seq_lengths": [2, 2]}
        >>> batch = PackedCollator()([pack])
        >>> model = LlamaForCausalLM(config)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with enable_packing(model):
        ...     check_ranks(model, batch).num_records
        2
        >>> dist.destroy_process_group()
    """
    import torch.distributed as dist

    if records is None:
        own = _find_records(batch)
        counts: list[int] = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, len(own), group=group)
        # Numbered across ranks: rank 0 has records [0, 0, 1], rank 1 has [2, 3, 3].
        records = _number(own, batch["input_ids"], sum(counts[: dist.get_rank(group)]))
    bounds = torch.stack([records.max(), records.max() * 0 + dist.get_world_size(group)])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    num_records = int(bounds[0]) + 1
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    with _inference(model):
        packed = _logits(model, inputs)
        moves = _find_moves(model, inputs, packed, records, num_records)
        found = torch.stack([*moves, packed.abs().max()])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    leak, response, largest = found.tolist()
    share = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
    return PackingReport(
        max_leak=leak,
        max_response=response,
        max_logit=largest,
        tolerance=share * max(1.0, largest) if tolerance is None else tolerance,
        num_records=num_records,
        num_ranks=int(bounds[1]),
    )


def _number(records: list[Record], input_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the record number of each token, counted from `first`; -1 for padding."""
    numbers = torch.full_like(input_ids, -1)
    for number, (row, start, end) in enumerate(records, start=first):
        numbers[row, start:end] = number
    return numbers


@contextmanager
def _inference(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:  # per module, as frozen parts may be in eval mode
            module.training = mode


def _find_records(batch: Mapping[str, Any]) -> list[Record]:
    """Return the records of a batch, cut at every mark of any input, without padding."""
    marks = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    mask = marks.get("attention_mask")
    # A mask over pairs of tokens, [rows, 1, tokens, tokens], has no record numbers.
    if mask is not None and mask.ndim != 2:
        mask = None
    is_start = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    numbers = [marks[name] for name in ("seq_idx",) if name in marks]
    if mask is not None and mask.dtype != torch.bool and (mask > 1).any():
        numbers.append(mask)  # [1, 1, 2, 2, 0]: records 1 and 2, and padding
    bounds = [marks[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in marks]
    if batch.get("seq_lengths") is not None:
        bounds.append(torch.as_tensor(batch["seq_lengths"]).flatten().cumsum(0))
    if "position_ids" in marks:
        is_start |= record_starts(marks["position_ids"])
    elif not numbers and not bounds:
        raise ContractError("check_packing needs position_ids that restart at each record")
    for each in numbers:
        is_start[:, 1:] |= torch.diff(each, dim=-1) != 0
    for each in bounds:
        is_start.view(-1)[each[each < is_start.numel()].long()] = True
    is_start[:, 0] = True

    is_token = torch.ones_like(is_start) if mask is None else mask != 0
    records = []
    for row, starts in enumerate(is_start):
        for first, last in pairwise([*starts.nonzero().flatten().tolist(), len(starts)]):
            tokens = is_token[row, first:last].nonzero().flatten().tolist()
            if tokens:
                records.append((row, first + tokens[0], first + tokens[-1] + 1))
    return records


def _larger(largest: float, values: torch.Tensor) -> float:
    """Return the larger of both, or NaN if either is NaN (Python's `max` may ignore NaN)."""
    found = float(values.max())
    return math.nan if math.isnan(found + largest) else max(largest, found)


def _logits(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    if isinstance(output, torch.Tensor):
        return output.float()
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float()


def _find_moves(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    packed: torch.Tensor,
    records: torch.Tensor,
    num_records: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far logits move if other records change, and if their own record changes.

    Half of the records change at a time: for each bit of the record number, first the records with
    0, then those with 1. This way every record is observed while each other one changes. Finally,
    the first token of each record changes, which must move the later ones.

    Args:
        model: called `1 + 2 log2(num_records)` times.
        inputs: inputs of the model.
        packed: its logits, [rows, tokens, vocabulary].
        records: record number of each token, [rows, tokens], -1 for padding.
        num_records: the largest number on all ranks, plus one.
    """
    ids, is_token = inputs["input_ids"], records >= 0

    def move(is_changed: torch.Tensor) -> torch.Tensor:
        """Change these tokens and return the largest move of any other; infinite for NaN."""
        # Any other valid id will do: 5 -> 4, and 0 -> 1.
        changed = torch.where(is_changed, (ids - 1).abs(), ids)
        moved = (_logits(model, {**inputs, "input_ids": changed}) - packed).abs().amax(-1)
        moved = torch.nan_to_num(moved, nan=math.inf)
        return torch.where(is_token & ~is_changed, moved, 0).max()

    # For records 0 to 3, bit 0 changes 0 2, then 1 3; bit 1 changes 0 1, then 2 3. Two records
    # always differ in some bit, so each is observed once while the other one changes.
    leak = torch.zeros_like(packed[0, 0, 0])
    for bit in range((num_records - 1).bit_length()):
        for half in (0, 1):
            leak = leak.maximum(move(is_token & (records >> bit & 1 == half)))
    before = torch.nn.functional.pad(records[:, :-1], (1, 0), value=-1)
    # A model whose head or attention output begins as zeros never leaks, so it would prove nothing.
    return leak, move(is_token & (records != before))
