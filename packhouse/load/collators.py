"""Turn rows into batches for training, so that records never attend to each other.

| rows are | use | attention between records |
|---|---|---|
| packs, or records to concatenate | `PackedCollator` | cut at every boundary |
| one record each, padded to a rectangle | `PaddedCollator` | none, one record per row |
| one text with a class each | `ClassificationCollator` | none, one record per row |

A packed batch never has an `attention_mask`: a mask of ones turns off the detection of boundaries
in transformers 5, so that every record attends to earlier ones (measured in
`docs/how-to/keep-records-apart.md`). Padding is found by length, never by id: if the pad token is
EOS, real EOS tokens stay trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.load.dataset import Ints, Row, read_row
from packhouse.pack.pack_columns import IGNORE_INDEX, position_ids
from packhouse.pack.strategies import round_up
from packhouse.system.wording import counted

Batch = dict[str, Any]
Weights = Literal["column", "record", "ignore"]


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Concatenate all records of a batch in one row, without padding.

    The batch has, for T tokens in N records:

    - `input_ids`, `labels`, `position_ids`: int64 [1, T]; positions restart at each record;
    - `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [N + 1], `max_length_q`, `max_length_k`: int;
    - with `seq_idx`: int32 [1, T], the number of the record, for state-space layers;
    - with `shift_labels`: int64 [1, T], the target of each position, which transformers uses
      directly;
    - with `loss_weights`: float32 [1, T], unshifted like `labels`;
    - with `pad_record_to_multiple_of`: `cu_seqlens` and `cu_seqlens_padded`, int32 [N + 1], record
      bounds without and with padding. `position_ids` and all other bounds include padding.

    Example:
        >>> batch = PackedCollator()([{"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]}])
        >>> batch["position_ids"].tolist(), batch["labels"].tolist()
        ([[0, 1, 2, 0, 1]], [[-100, 8, 9, -100, 6]])
        >>> batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        ([0, 3, 5], 3)
    """

    pad_to_multiple_of: int | None = None
    """Pad T to a multiple with an extra record that is not trained (for FP8 or compiled models)."""

    pad_record_to_multiple_of: int = 1
    """Pad each record at its end to a multiple. Padding is not trained, and no other token attends
    to it. Packs made with `pack.pad_record_to_multiple_of` have room for it."""

    pad_token_id: int = 0
    """Id of padding. Any id works, because no token of a record attends to it."""

    whole_rows: bool = False
    """Treat rows without boundaries as one record each. By default they are an error."""

    seq_idx: bool = False
    """Add `seq_idx`."""

    shift_labels: bool = False
    """Add `shift_labels`."""

    loss_weights: Weights | None = None
    """`record`: the trained tokens of each record have a total weight of 1. `column`: use the
    weights of the rows. `ignore`: every token has weight 1. None rejects rows with weights."""

    def __post_init__(self) -> None:
        _check_choices(self, loss_weights=(None, "column", "record", "ignore"))

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row does not say where its records end, or its lengths do not match.
        """
        read = _read_rows(rows, self.whole_rows)
        ids = np.concatenate([row.input_ids for row in read])
        labels = np.concatenate([row.labels for row in read])
        lengths = np.concatenate([row.seq_lengths for row in read])
        weights = _loss_weights(read, self.loss_weights)
        real = lengths
        if self.pad_record_to_multiple_of > 1:
            # Lengths 3 2, multiple 4 -> 4 4, and ids 7 8 9 5 6 -> 7 8 9 0 5 6 0 0.
            lengths = round_up(lengths, self.pad_record_to_multiple_of)
            ids = _spread(ids, real, lengths, self.pad_token_id)
            labels = _spread(labels, real, lengths, IGNORE_INDEX)
            if weights is not None:
                weights = [_spread(np.concatenate(weights), real, lengths, 0)]
        pad = -len(ids) % (self.pad_to_multiple_of or 1)
        if pad:
            ids = np.pad(ids, (0, pad), constant_values=self.pad_token_id)
            labels = np.pad(labels, (0, pad), constant_values=IGNORE_INDEX)
            lengths = np.append(lengths, pad)  # an extra record, so that no other attends to it
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        longest = int(lengths.max())
        # No attention_mask: with a mask of ones, transformers 5 lets records attend to each other.
        batch: Batch = {
            "input_ids": torch.from_numpy(ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(position_ids(lengths, np.int64))[None],
            "cu_seq_lens_q": torch.from_numpy(bounds),
            "cu_seq_lens_k": torch.from_numpy(bounds.copy()),
            "max_length_q": longest,
            "max_length_k": longest,
        }
        if self.seq_idx:
            numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            batch["seq_idx"] = torch.from_numpy(numbers)[None]
        if self.shift_labels:
            batch["shift_labels"] = shift_left(batch["labels"])
        if weights is not None:
            padded = np.pad(np.concatenate(weights), (0, pad))
            batch["loss_weights"] = torch.from_numpy(padded)[None]
        if self.pad_record_to_multiple_of > 1:
            # Both include the extra record of padding: 0 3 5 5 and 0 4 8 10 if T is 10.
            unpadded = np.concatenate([[0], np.cumsum(np.pad(real, (0, int(pad > 0))))])
            batch["cu_seqlens"] = torch.from_numpy(unpadded.astype(np.int32))
            batch["cu_seqlens_padded"] = batch["cu_seq_lens_q"].clone()
        return batch


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """Pad rows of one record each to a rectangle of B rows and T columns.

    The batch has `input_ids`, `labels` and `attention_mask`, int64 [B, T], and optionally
    `shift_labels` and `loss_weights`, as in `PackedCollator`.

    Example:
        >>> collate = PaddedCollator(pad_token_id=2, side="left")
        >>> batch = collate([{"input_ids": [7, 8, 2]}, {"input_ids": [5, 2]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[7, 8, 2], [2, 5, 2]], [[-100, 8, 2], [-100, -100, 2]])
    """

    pad_token_id: int
    """Id of padding; may be the id of EOS."""

    padding: Literal["longest", "max_length"] = "longest"
    """Pad to the longest row of the batch, or always to `max_length` (for compiled graphs)."""

    max_length: int | None = None
    """Window of the model in tokens, including prefix tokens; None: no limit."""

    side: Literal["left", "right"] = "right"
    """Side of the padding; use left for generation."""

    pad_to_multiple_of: int | None = None
    """Pad the length that the model sees, including prefix tokens, to a multiple of this."""

    prefix_tokens: int = 0
    """Reserve room for the virtual tokens that the model prepends in prompt tuning."""

    too_long: Literal["error", "truncate"] = "error"
    """Fail on rows over the window, or cut their end, which trains answers that do not stop."""

    shift_labels: bool = False
    """Add `shift_labels`."""

    loss_weights: Weights | None = None
    """As in `PackedCollator`."""

    def __post_init__(self) -> None:
        _check_choices(
            self,
            padding=("longest", "max_length"),
            side=("left", "right"),
            too_long=("error", "truncate"),
            loss_weights=(None, "column", "record", "ignore"),
        )
        if self.prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens}. Set it to 0 or more.")
        if self.max_length is None:
            if self.padding == "max_length":
                raise ConfigError("padding='max_length' requires max_length. Set it.")
            return
        if self.max_length <= self.prefix_tokens:
            raise ConfigError(
                f"max_length {self.max_length} leaves no room after {self.prefix_tokens} prefix "
                "tokens. Raise it."
            )
        if self.max_length % (self.pad_to_multiple_of or 1):
            raise ConfigError(
                f"max_length {self.max_length} is not a multiple of pad_to_multiple_of "
                f"{self.pad_to_multiple_of}, so padding would exceed it. Set max_length to a "
                "multiple, or remove pad_to_multiple_of."
            )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row holds several records, which padding cannot keep apart.
            SequenceTooLongError: a row does not fit, and `too_long` is `error`.
        """
        read = [self._fit(row, n) for n, row in enumerate(_read_rows(rows, whole_rows=True))]
        width = max(len(row.input_ids) for row in read) + self.prefix_tokens
        if self.padding == "max_length" and self.max_length is not None:
            width = self.max_length
        width += -width % (self.pad_to_multiple_of or 1)  # longest 3 + prefix 16, multiple 8 -> 24
        width -= self.prefix_tokens

        def rectangle(parts: list[npt.NDArray[Any]], fill: float) -> torch.Tensor:
            out = np.full((len(parts), width), fill, dtype=parts[0].dtype)
            for line, part in zip(out, parts, strict=True):
                start = 0 if self.side == "right" else width - len(part)
                line[start : start + len(part)] = part
            return torch.from_numpy(out)

        # Padding is masked by length, not by id: if the pad token is EOS, real EOS stay trained.
        ids = [row.input_ids for row in read]
        batch = {
            "input_ids": rectangle(ids, self.pad_token_id),
            "labels": rectangle([row.labels for row in read], IGNORE_INDEX),
            "attention_mask": rectangle([np.ones_like(i) for i in ids], 0),
        }
        if self.shift_labels:
            batch["shift_labels"] = shift_left(batch["labels"])
        weights = _loss_weights(read, self.loss_weights)
        if weights is not None:
            batch["loss_weights"] = rectangle(weights, 0.0)
        return batch

    def _fit(self, row: Row, number: int) -> Row:
        if len(row.seq_lengths) > 1:
            raise ContractError(
                f"row {number} holds {len(row.seq_lengths)} records. Use PackedCollator for packs, "
                "or prepare rows with strategy 'none' for padding.",
                row=number,
            )
        if self.max_length is None or len(row.input_ids) <= self.max_length - self.prefix_tokens:
            return row
        room = self.max_length - self.prefix_tokens
        if self.too_long == "error":
            raise SequenceTooLongError(
                f"row {number} has {counted(len(row.input_ids), 'token')}, over the window of "
                f"{room:,} (max_length {self.max_length:,} minus {self.prefix_tokens} prefix "
                "tokens). Set too_long='truncate', raise max_length, or prepare with a smaller "
                "seq_len.",
                row=number,
            )
        return replace(
            row,
            input_ids=row.input_ids[:room],
            labels=row.labels[:room],
            seq_lengths=np.array([room]),
            loss_weights=None if row.loss_weights is None else row.loss_weights[:room],
        )


@dataclass(frozen=True, kw_only=True)
class ClassificationCollator(PaddedCollator):
    """Pad texts to a rectangle as `PaddedCollator` does, with one class each: `labels` int64 [B].

    Example:
        >>> rows = [{"input_ids": [101, 7, 102], "label": 1}, {"input_ids": [101, 102], "label": 0}]
        >>> batch = ClassificationCollator(pad_token_id=0)(rows)
        >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
        ([1, 0], [[1, 1, 1], [1, 1, 0]])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift_labels or self.loss_weights is not None:
            raise ConfigError(
                "class labels have no shift_labels or loss_weights. Remove these settings."
            )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch.

        Raises:
            ContractError: a row has no `label`, or its `label` is not an integer.
            SequenceTooLongError: a row does not fit, and `too_long` is `error`.
        """
        classes = []
        for number, row in enumerate(rows):
            label = row.get("label")
            if label is None:
                raise ContractError(
                    f"row {number} has no label. Use another collator unless this is "
                    "classification data.",
                    row=number,
                )
            value = np.asarray(label)
            # `int` would make class 1 of a label of 1.7.
            if value.ndim or value.dtype.kind not in "iub":
                raise ContractError(
                    f"row {number} has a label of type {type(label).__name__}. Convert class "
                    "names to one integer per row.",
                    row=number,
                )
            classes.append(int(value))
        not_text = ("label", "labels", "trained_ranges", "loss_weights")
        texts = [{k: v for k, v in row.items() if k not in not_text} for row in rows]
        return super().__call__(texts) | {"labels": torch.tensor(classes, dtype=torch.int64)}


def _spread(values: npt.NDArray[Any], lengths: Ints, padded: Ints, fill: float) -> npt.NDArray[Any]:
    """Pad each record: 7 8 9 5 6 of lengths [3, 2], padded to [4, 4] -> 7 8 9 0 5 6 0 0."""
    out = np.full(int(padded.sum()), fill, dtype=values.dtype)
    shift = np.cumsum(padded - lengths) - (padded - lengths)
    out[np.arange(len(values)) + np.repeat(shift, lengths)] = values
    return out


def shift_left(labels: torch.Tensor, fill: float = IGNORE_INDEX) -> torch.Tensor:
    """Shift labels [..., T] left: position t gets the label of t + 1, and the last gets `fill`.

    Example:
        >>> shift_left(torch.tensor([[-100, 8, 9, -100, 6]])).tolist()
        [[8, 9, -100, 6, -100]]
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=fill)


def _read_rows(rows: Sequence[Mapping[str, Any]], whole_rows: bool) -> list[Row]:
    if not rows:
        raise ContractError("a batch of 0 rows was passed. Pass at least one row.")
    return [read_row(row, whole_rows=whole_rows, where=f"row {n}") for n, row in enumerate(rows)]


def _loss_weights(
    rows: Sequence[Row], kind: Weights | None
) -> list[npt.NDArray[np.float32]] | None:
    """Return the weight of each token of each row; None if every trained token has weight 1.

    Example:
        >>> row = read_row({"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]})
        >>> [weights.tolist() for weights in _loss_weights([row], "record")]
        [[0.0, 0.5, 0.5, 0.0, 1.0]]
    """
    weighted = [number for number, row in enumerate(rows) if row.loss_weights is not None]
    if kind is None and weighted:
        raise ContractError(
            f"row {weighted[0]} has loss_weights, but the collator has no setting for them. Set "
            "loss_weights='column' and use token_loss, or set loss_weights='ignore' to weight all "
            "tokens equally.",
            row=weighted[0],
        )
    if kind in (None, "ignore"):
        return None
    made = []
    for row in rows:
        trained = row.labels != IGNORE_INDEX
        if kind == "column":
            if row.loss_weights is None:
                raise ContractError(
                    "loss_weights='column' requires rows with a loss_weights column. Add it, or "
                    "remove the setting."
                )
            weights: npt.NDArray[Any] = row.loss_weights
        else:
            record = np.repeat(np.arange(len(row.seq_lengths)), row.seq_lengths)
            num_trained = np.bincount(record[trained], minlength=len(row.seq_lengths))
            # A record without a trained token has no target, so its weight does not matter.
            weights = (1.0 / np.maximum(num_trained, 1))[record]
        made.append(np.where(trained, weights, 0).astype(np.float32))
    return made


def _check_choices(collator: Any, **known: tuple[str | None, ...]) -> None:
    """Reject settings with unknown values, and multiples below 1."""
    for name, values in known.items():
        if getattr(collator, name) not in values:
            raise ConfigError(
                f"{name} {getattr(collator, name)!r} is unknown. Use one of "
                f"{', '.join(map(repr, values))}."
            )
    for name in ("pad_to_multiple_of", "pad_record_to_multiple_of"):
        multiple = getattr(collator, name, None)
        if multiple is not None and multiple < 1:
            raise ConfigError(f"{name} is {multiple}. Set it to 1 or more.")
