"""Turn rows into batches that a model cannot misread.

| rows are | use | attention between records |
|---|---|---|
| packs, or records to lay behind one another | `PackedCollator` | cut at every boundary |
| one record each, padded to a rectangle | `PaddedCollator` | there is none |
| one text and one class each | `ClassificationCollator` | there is none |

A packed batch never holds an `attention_mask`: an all-ones one switches off the detection of
boundaries in transformers 5 and every record sees those before it (`docs/training.md` measures
it). Pads are found by length, never by id: where the pad token is EOS, an EOS stays trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.loaders.rows import Row, read_row
from packhouse.packing.layout import IGNORE_INDEX, position_ids

__all__ = ["ClassificationCollator", "PackedCollator", "PaddedCollator", "shift_left"]

Batch = dict[str, Any]
Weights = Literal["column", "record", "ignore"]


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Lay all records of a batch behind one another in one row, without padding.

    The batch holds, for T tokens in N records:

    - `input_ids`, `labels`, `position_ids`: int64 [1, T]; positions restart at each record;
    - `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [N + 1], `max_length_q`, `max_length_k`: int;
    - with `seq_idx`: int32 [1, T], the record's number, for state-space layers;
    - with `shift_labels`: int64 [1, T], the target of each position (transformers uses it as is);
    - with `loss_weights`: float32 [1, T], unshifted as `labels` are.

    Example:
        >>> batch = PackedCollator()([{"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]}])
        >>> batch["position_ids"].tolist(), batch["labels"].tolist()
        ([[0, 1, 2, 0, 1]], [[-100, 8, 9, -100, 6]])
        >>> batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        ([0, 3, 5], 3)
    """

    pad_to_multiple_of: int | None = None
    """Fill T up to a multiple with a record of its own that is not trained (for fp8, compile)."""

    pad_token_id: int = 0
    """Id of that filling; any id does, it is attended to by nothing."""

    whole_rows: bool = False
    """Rows without boundaries are one record each. Off, such rows are refused (see `read_row`)."""

    seq_idx: bool = False
    """Add `seq_idx`."""

    shift_labels: bool = False
    """Add `shift_labels`."""

    loss_weights: Weights | None = None
    """`record`: the trained tokens of a record weigh 1 together; `column`: as the rows say;
    `ignore`: each weighs 1, whatever the rows say. None refuses rows that bring weights."""

    def __post_init__(self) -> None:
        _check_choice("loss_weights", self.loss_weights, (None, "column", "record", "ignore"))
        _check_multiple(self.pad_to_multiple_of)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row does not say where its records end, or its lengths do not fit.
        """
        read = _read(rows, self.whole_rows)
        ids = np.concatenate([row.input_ids for row in read])
        labels = np.concatenate([row.labels for row in read])
        lengths = np.concatenate([row.seq_lengths for row in read])
        pad = -len(ids) % (self.pad_to_multiple_of or 1)
        if pad:
            ids = np.pad(ids, (0, pad), constant_values=self.pad_token_id)
            labels = np.pad(labels, (0, pad), constant_values=IGNORE_INDEX)
            lengths = np.append(lengths, pad)
        batch = _packed_batch(ids, labels, lengths)
        if self.seq_idx:
            numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            batch["seq_idx"] = torch.from_numpy(numbers)[None]
        if self.shift_labels:
            batch["shift_labels"] = shift_left(batch["labels"])
        weights = _weights(read, self.loss_weights)
        if weights is not None:
            flat = np.pad(np.concatenate(weights), (0, pad))
            batch["loss_weights"] = torch.from_numpy(flat)[None]
        return batch


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """Pad rows of one record each to a rectangle of B rows and T columns.

    The batch holds `input_ids`, `labels`, `attention_mask`: int64 [B, T], and on request
    `shift_labels` and `loss_weights` as `PackedCollator` has them.

    Example:
        >>> collate = PaddedCollator(pad_token_id=2, side="left")
        >>> batch = collate([{"input_ids": [7, 8, 2]}, {"input_ids": [5, 2]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[7, 8, 2], [2, 5, 2]], [[-100, 8, 2], [-100, -100, 2]])
    """

    pad_token_id: int
    """Id of pads; may be the id of EOS."""

    padding: Literal["longest", "max_length"] = "longest"
    """Pad to the longest row of the batch, or to `max_length` always (for compiled graphs)."""

    max_length: int | None = None
    """Window of the model in tokens, prefix tokens included; None: no limit."""

    side: Literal["left", "right"] = "right"
    """Where pads go; left for generation."""

    pad_to_multiple_of: int | None = None
    """Make what the model sees, prefix tokens included, a multiple of this."""

    prefix_tokens: int = 0
    """Room for prompt-tuning's virtual tokens, which the model itself puts in front."""

    too_long: Literal["error", "truncate"] = "error"
    """A row over the window: fail, or cut its end (which trains an answer that does not stop)."""

    shift_labels: bool = False
    """Add `shift_labels`."""

    loss_weights: Weights | None = None
    """As in `PackedCollator`."""

    def __post_init__(self) -> None:
        _check_choice("padding", self.padding, ("longest", "max_length"))
        _check_choice("side", self.side, ("left", "right"))
        _check_choice("too_long", self.too_long, ("error", "truncate"))
        _check_choice("loss_weights", self.loss_weights, (None, "column", "record", "ignore"))
        _check_multiple(self.pad_to_multiple_of)
        _check_padding(self.padding, self.max_length, self.prefix_tokens)
        _check_window(self.max_length, self.pad_to_multiple_of)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row holds several records; a mask of pads cannot keep them apart.
            SequenceTooLongError: a row does not fit, and `too_long` is `error`.
        """
        read = [self._fit(row, n) for n, row in enumerate(_read(rows, whole_rows=True))]
        width = self._width(max(len(row.input_ids) for row in read))

        def rectangle(parts: list[npt.NDArray[Any]], fill: float) -> torch.Tensor:
            return torch.from_numpy(_pad(parts, width, fill, self.side))

        ids = [row.input_ids for row in read]
        batch = {
            "input_ids": rectangle(ids, self.pad_token_id),
            "labels": rectangle([row.labels for row in read], IGNORE_INDEX),
            "attention_mask": rectangle([np.ones_like(i) for i in ids], 0),
        }
        if self.shift_labels:
            batch["shift_labels"] = shift_left(batch["labels"])
        weights = _weights(read, self.loss_weights)
        if weights is not None:
            batch["loss_weights"] = rectangle(weights, 0.0)
        return batch

    def _fit(self, row: Row, number: int) -> Row:
        if len(row.seq_lengths) > 1:
            raise ContractError(
                f"row {number} holds {len(row.seq_lengths)} records; use PackedCollator for packs, "
                "or strategy 'none' for rows to be padded",
                row=number,
            )
        if self.max_length is None or len(row.input_ids) <= self.max_length - self.prefix_tokens:
            return row
        room = self.max_length - self.prefix_tokens
        if self.too_long == "error":
            raise SequenceTooLongError(
                f"row {number} has {len(row.input_ids):,} tokens, over the window of {room:,} "
                f"(max_length {self.max_length:,} less {self.prefix_tokens} prefix tokens). Set "
                "too_long='truncate', raise max_length, or prepare with a smaller seq_len",
                row=number,
            )
        weights = None if row.loss_weights is None else row.loss_weights[:room]
        lengths = np.array([room], dtype=np.int64)
        return Row(row.input_ids[:room], row.labels[:room], lengths, weights, row.label)

    def _width(self, longest: int) -> int:
        wanted = self.max_length if self.padding == "max_length" else longest + self.prefix_tokens
        assert wanted is not None
        wanted += -wanted % (self.pad_to_multiple_of or 1)
        return wanted - self.prefix_tokens


@dataclass(frozen=True, kw_only=True)
class ClassificationCollator:
    """Pad texts to a rectangle, with one class each: `labels` int64 [B].

    Example:
        >>> rows = [{"input_ids": [101, 7, 102], "label": 1}, {"input_ids": [101, 102], "label": 0}]
        >>> batch = ClassificationCollator(pad_token_id=0)(rows)
        >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
        ([1, 0], [[1, 1, 1], [1, 1, 0]])
    """

    pad_token_id: int
    padding: Literal["longest", "max_length"] = "longest"
    max_length: int | None = None
    side: Literal["left", "right"] = "right"
    pad_to_multiple_of: int | None = None
    too_long: Literal["error", "truncate"] = "error"

    def __post_init__(self) -> None:
        self._padded()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row has no `label`, or one that is no whole number.
        """
        classes = [_class(row, number) for number, row in enumerate(rows)]
        texts = [{k: v for k, v in row.items() if k not in _NOT_TEXT} for row in rows]
        return self._padded()(texts) | {"labels": torch.tensor(classes, dtype=torch.int64)}

    def _padded(self) -> PaddedCollator:
        return PaddedCollator(
            pad_token_id=self.pad_token_id,
            padding=self.padding,
            max_length=self.max_length,
            side=self.side,
            pad_to_multiple_of=self.pad_to_multiple_of,
            too_long=self.too_long,
        )


_NOT_TEXT = ("label", "labels", "trained_ranges", "loss_weights")


def _class(row: Mapping[str, Any], number: int) -> int:
    label = row.get("label")
    if label is None:
        raise ContractError(f"row {number} has no label; is this classification data?", row=number)
    value = np.asarray(label)
    if value.ndim or value.dtype.kind not in "iub":
        raise ContractError(
            f"row {number} has label {label!r}; a class is one whole number, so number the names "
            "of classes first",
            row=number,
        )
    return int(value)


def shift_left(labels: torch.Tensor) -> torch.Tensor:
    """Unshifted labels [..., T] to targets: position t gets the label of t + 1, the last -100.

    Example:
        >>> shift_left(torch.tensor([[-100, 8, 9, -100, 6]])).tolist()
        [[8, 9, -100, 6, -100]]
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def _packed_batch(
    ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Batch:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = position_ids(lengths).astype(np.int64)
    longest = int(lengths.max())
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "cu_seq_lens_q": torch.from_numpy(ends),
        "cu_seq_lens_k": torch.from_numpy(ends.copy()),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _read(rows: Sequence[Mapping[str, Any]], whole_rows: bool) -> list[Row]:
    if not rows:
        raise ContractError("a batch needs at least one row")
    return [read_row(row, whole_rows=whole_rows, where=f"row {n}") for n, row in enumerate(rows)]


def _weights(rows: Sequence[Row], kind: Weights | None) -> list[npt.NDArray[np.float32]] | None:
    if kind is None:
        brings = [number for number, row in enumerate(rows) if row.loss_weights is not None]
        if brings:
            raise ContractError(
                f"row {brings[0]} brings loss_weights, which nobody would apply. Set "
                "loss_weights='column' and use token_loss, or loss_weights='ignore' to train each "
                "token alike",
                row=brings[0],
            )
    if kind in (None, "ignore"):
        return None
    return [_row_weights(row, kind) for row in rows]


def _row_weights(row: Row, kind: Weights | None) -> npt.NDArray[np.float32]:
    trained = row.labels != IGNORE_INDEX
    if kind == "column":
        if row.loss_weights is None:
            raise ContractError("loss_weights='column' needs rows with a loss_weights column")
        return np.where(trained, row.loss_weights, np.float32(0))
    record = np.repeat(np.arange(len(row.seq_lengths)), row.seq_lengths)
    num_trained = np.bincount(record[trained], minlength=len(row.seq_lengths))
    share = 1.0 / np.maximum(num_trained, 1)
    return np.where(trained, share[record], 0).astype(np.float32)


def _pad(parts: list[npt.NDArray[Any]], width: int, fill: float, side: str) -> npt.NDArray[Any]:
    out = np.full((len(parts), width), fill, dtype=parts[0].dtype)
    for line, part in zip(out, parts, strict=True):
        if side == "right":
            line[: len(part)] = part
        else:
            line[width - len(part) :] = part
    return out


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{name} {value!r} is not known; use one of {', '.join(map(repr, known))}"
        )


def _check_multiple(multiple: int | None) -> None:
    if multiple is not None and multiple < 1:
        raise ConfigError(f"pad_to_multiple_of is {multiple}; it must be at least 1")


def _check_window(max_length: int | None, multiple: int | None) -> None:
    """Rounding up must not pad over the window."""
    if max_length is not None and multiple is not None and max_length % multiple:
        raise ConfigError(
            f"max_length {max_length} is no multiple of pad_to_multiple_of {multiple}, so batches "
            f"would be padded over it; set max_length to a multiple, or leave the other out"
        )


def _check_padding(padding: str, max_length: int | None, prefix_tokens: int) -> None:
    if prefix_tokens < 0:
        raise ConfigError(f"prefix_tokens is {prefix_tokens}; it must not be negative")
    if padding == "max_length" and max_length is None:
        raise ConfigError("padding='max_length' needs max_length")
    if max_length is not None and max_length <= prefix_tokens:
        raise ConfigError(f"max_length {max_length} leaves no room beside {prefix_tokens} prefix")
