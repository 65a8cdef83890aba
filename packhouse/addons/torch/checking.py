"""Prove on a user's own model and batch that packed records do not see each other."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from packhouse.addons.torch.enabling import record_starts
from packhouse.errors import ContractError
from packhouse.system.wording import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rounding, as a share of the largest logit; leaks are of the size of the logits themselves.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2

_NOT_INPUTS = ("labels", "shift_labels", "loss_weights", "seq_lengths", "record_ids")

_BLIND = "NOTHING WAS PROVEN, no token moves those behind it in its own record"
_WEIGHTS = (
    "Weights that are zero (of attention's output, of the head) let nothing be seen: give them "
    "other values for the check, or check a model that was trained"
)

Record = tuple[int, int, int]
"""Row of the batch, first token, token after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingReport:
    """Made by `check_packing`: what it measured, in units of logits."""

    max_difference: float
    """Largest |packed - alone| over all records."""
    max_leak: float
    """Largest change of a record's logits when only other records change; 0.0 where all is well."""
    max_response: float
    """Largest change of a record's later logits when its own first token changes. About 0: nothing
    could leak yet, as with attention whose output weights begin as zeros."""
    max_logit: float
    """Largest |logit| alone, for scale."""
    tolerance: float
    """What rounding may do."""
    num_records: int
    num_rows: int
    """Rows that hold records; with one record in each there is nothing to keep apart."""

    @property
    def has_neighbours(self) -> bool:
        """Return True if a row held two records or more: else nothing was tested."""
        return self.num_records > self.num_rows

    @property
    def is_safe(self) -> bool:
        """Return True if it was proven that no record sees another, and each comes out as if alone.

        False if a logit was not a number, if no row held two records, or if tokens do not even see
        those of their own record.
        """
        is_apart = self.max_difference <= self.tolerance and self.max_leak <= self.tolerance
        return is_apart and self.has_neighbours and not _is_blind(self)

    def __str__(self) -> str:
        verdict = "records are kept apart" if self.is_safe else "RECORDS SEE EACH OTHER"
        if not self.has_neighbours:
            verdict = "NOTHING WAS PROVEN, no row holds two records"
        elif not math.isfinite(self.max_difference + self.max_leak):
            verdict = "NOTHING WAS PROVEN, logits are not finite"
        elif _is_blind(self):
            verdict = _BLIND
        return (
            f"{verdict}: {counted(self.num_records, 'record')}, |packed - alone| <= "
            f"{self.max_difference:.2g},"
            f" leak {self.max_leak:.2g}, tolerance {self.tolerance:.2g}, logits up to "
            f"{self.max_logit:.2g}"
        )

    def require_safe(self) -> None:
        """Raise ContractError unless `is_safe`."""
        if not self.has_neighbours:
            raise ContractError(f"{self}. Check a batch of packs")
        if _is_blind(self):
            raise ContractError(f"{self}. {_WEIGHTS}")
        if not self.is_safe:
            raise ContractError(
                f"{self}. Call enable_packing(model), or leave out attention_mask and set "
                "use_cache=False"
            )


def _is_blind(report: "PackingReport | RankReport") -> bool:
    """Return True if no token moved another, of its own record or not: a leak would not show."""
    return max(report.max_leak, report.max_response) <= report.tolerance


def check_packing(
    model: torch.nn.Module, batch: Mapping[str, Any], *, tolerance: float | None = None
) -> PackingReport:
    """Run a packed batch, each record alone, and the batch with records exchanged, and compare.

    The model gets the batch as it is, mask and all, so that what is proven is what is trained.
    Costs 2 + N + 2 log2(N) forward passes for N records, without gradients and dropout.

    Args:
        model: a causal language model; its mode is left as it was.
        batch: as `PackedCollator` makes it; records end where `position_ids` restart, and wherever
            a mask of record numbers, `cu_seq_lens_q`, `seq_idx` or `seq_lengths` says so too.
        tolerance: in units of logits; by default 1e-4 of the largest in float32, 3e-2 in half
            precision.

    Raises:
        ContractError: nothing in the batch says where records end.

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
        packed = _logits(model, inputs)
        difference, largest = _compare_alone(model, inputs["input_ids"], packed, records)
        numbers = _number(records, inputs["input_ids"])
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What `check_ranks` measured on all ranks together, in units of logits."""

    max_leak: float
    """Largest change, on any rank, of a record's logits when only other records change."""
    max_response: float
    """As in `PackingReport`, on any rank."""
    max_logit: float
    """Largest |logit|, for scale."""
    tolerance: float
    """What rounding may do."""
    num_records: int
    """Of all ranks."""
    num_ranks: int

    @property
    def is_safe(self) -> bool:
        """Return True if there were two records or more, and none saw another, but itself."""
        return self.num_records > 1 and self.max_leak <= self.tolerance and not _is_blind(self)

    def __str__(self) -> str:
        verdict = "records are kept apart" if self.is_safe else "RECORDS SEE EACH OTHER"
        if self.num_records < 2 or not math.isfinite(self.max_leak):
            verdict = "NOTHING WAS PROVEN"
        elif _is_blind(self):
            verdict = _BLIND
        return (
            f"{verdict}: {counted(self.num_records, 'record')} on "
            f"{counted(self.num_ranks, 'rank')}, leak "
            f"{self.max_leak:.2g}, tolerance {self.tolerance:.2g}, logits up to "
            f"{self.max_logit:.2g}"
        )

    def require_safe(self) -> None:
        """Raise ContractError unless `is_safe`."""
        if _is_blind(self):
            raise ContractError(f"{self}. {_WEIGHTS}")
        if not self.is_safe:
            raise ContractError(f"{self}. See docs/how-to/keep-records-apart.md")


def check_ranks(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    records: torch.Tensor | None = None,
    group: "ProcessGroup | None" = None,
    tolerance: float | None = None,
) -> RankReport:
    """Change records on all ranks at once, and see whether logits of other records move anywhere.

    Every rank of `group` calls it with its own part of the data, as in training: each data-parallel
    rank with its batch, each context-parallel rank with its part of every record. All make the same
    number of forward passes, 2 + 2 log2(N) for N records of all ranks, so that collectives inside
    the model meet.

    Args:
        model: what training calls, wrapped as it is there; called with the batch's inputs, it
            returns logits [rows, tokens, vocabulary], or an object that has `logits`.
        batch: of this rank, as for `check_packing`.
        records: the number of the record that each token of `input_ids` belongs to, the same on all
            ranks that hold parts of it, -1 for padding; by default the records of each rank are its
            own (data parallelism).
        group: of torch.distributed; by default all ranks.
        tolerance: in units of logits; by default as for `check_packing`.

    Raises:
        ContractError: nothing in the batch says where records end, and `records` is not given.

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
        # Numbered through all ranks: rank 0 has records [0, 0, 1], rank 1 has [2, 3, 3].
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
    return RankReport(
        max_leak=leak,
        max_response=response,
        max_logit=largest,
        tolerance=share * max(1.0, largest) if tolerance is None else tolerance,
        num_records=num_records,
        num_ranks=int(bounds[1]),
    )


def _number(records: list[Record], input_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the record's number of each token, from `first` on, -1 for padding."""
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
        for module, mode in modes:  # one by one: frozen parts stay in eval
            module.training = mode


def _find_records(batch: Mapping[str, Any]) -> list[Record]:
    """Cut the batch wherever anything in it says that a record begins; padding is left out."""
    marks = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    mask = marks.get("attention_mask")
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
    """Return the larger of both, or NaN if any is: Python's `max` would pass over it."""
    found = float(values.max())
    return math.nan if math.isnan(found + largest) else max(largest, found)


def _logits(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    if isinstance(output, torch.Tensor):
        return output.float()
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float()


def _compare_alone(
    model: torch.nn.Module, input_ids: torch.Tensor, packed: torch.Tensor, records: list[Record]
) -> tuple[float, float]:
    """Return the largest |packed - alone| and the largest |logit| over all records."""
    difference = largest = 0.0
    for row, start, end in records:
        ids = input_ids[row : row + 1, start:end]
        positions = torch.arange(end - start, device=ids.device)[None]
        alone = _logits(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
        difference = _larger(difference, (packed[row, start:end] - alone[0]).abs())
        largest = _larger(largest, alone.abs())
    return difference, largest


def _find_moves(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    packed: torch.Tensor,
    records: torch.Tensor,
    num_records: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far logits move while tokens of other records change, and of their own.

    Half of the records change at a time, once for each bit of a record's number and once for its
    opposite, so that every record is watched while each other one changes. Last, the first token of
    each record changes, which must move those behind it.

    Args:
        model: called `1 + 2 log2(num_records)` times.
        inputs: of the model.
        packed: its logits, [rows, tokens, vocabulary].
        records: number of each token's record, [rows, tokens], -1 for padding.
        num_records: one more than the largest number, on all ranks.
    """
    ids, is_token = inputs["input_ids"], records >= 0

    def move(is_changed: torch.Tensor) -> torch.Tensor:
        """Change these tokens; the largest move of any other, infinite if it is no number."""
        changed = torch.where(is_changed, (ids - 1).abs(), ids)
        moved = (_logits(model, {**inputs, "input_ids": changed}) - packed).abs().amax(-1)
        moved = torch.nan_to_num(moved, nan=math.inf)
        return torch.where(is_token & ~is_changed, moved, 0).max()

    # Records 0 to 3: bit 0 changes 0 2, then 1 3; bit 1 changes 0 1, then 2 3. Any two records
    # differ in some bit, so each is once unchanged while the other changes.
    leak = torch.zeros_like(packed[0, 0, 0])
    for bit in range((num_records - 1).bit_length()):
        for half in (0, 1):
            leak = leak.maximum(move(is_token & (records >> bit & 1 == half)))
    before = torch.nn.functional.pad(records[:, :-1], (1, 0), value=-1)
    return leak, move(is_token & (records != before))
