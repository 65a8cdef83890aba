"""Torch datasets of tokenized records and packs, with padding, shuffling and concatenation.

Files are memory-mapped and not copied. Use `make_supervised_dataset` to create them.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.errors import ConfigError
from packhouse.load.dataset import PackedDataset
from packhouse.load.rows import ArrowRows, open_rows
from packhouse.pack.layout import IGNORE_INDEX, position_ids
from packhouse.pack.shuffle import permutation
from packhouse.records.ledger import LedgerLine


@dataclass(frozen=True, kw_only=True)
class _Padding:
    pad_token_id: int
    length: int
    side: Literal["left", "right"]


class PaddedPacks(PackedDataset):
    """Packs in dart-math's format: all padded to `seq_len` tokens, for collators that stack.

    `attention_mask` numbers the records, [1, 1, 2, 2, 0], which `enable_packing` reads as
    boundaries. `position_ids` restart at each record and at the padding.
    """

    def __init__(self, paths: Sequence[Path], *, pad_token_id: int) -> None:
        super().__init__(tuple(paths))
        self._pad_token_id = pad_token_id

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._row(index)
        pads = (self.seq_len or 0) - len(row.input_ids)
        numbers = np.repeat(np.arange(1, len(row.seq_lengths) + 1), row.seq_lengths)
        lengths = np.append(row.seq_lengths, pads)
        item: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.pad(row.input_ids, (0, pads), constant_values=self._pad_token_id),
            "labels": np.pad(row.labels, (0, pads), constant_values=IGNORE_INDEX),
            "attention_mask": np.pad(numbers, (0, pads)),
            "position_ids": position_ids(lengths, np.int64),
        }
        if row.loss_weights is not None:
            item["loss_weights"] = np.pad(row.loss_weights, (0, pads))
        return {name: torch.from_numpy(values) for name, values in item.items()}


class TokenizedDataset(torch.utils.data.Dataset):
    """Tokenized records, one per row: `input_ids`, `labels`, `attention_mask` as int64 tensors.

    Made by `make_supervised_dataset`. `concat`, `shuffle` and `pad` return views of the same
    mapped files without copying.
    """

    def __init__(
        self, paths: Sequence[Path], *, ledger: Sequence[LedgerLine] = (), pad_token_id: int = 0
    ) -> None:
        self.ledger = list(ledger)
        self._pad_token_id = pad_token_id
        self._paths = tuple(Path(path) for path in paths)
        self._padding: _Padding | None = None
        self._rows = open_rows(self._paths, whole_rows=True)
        self._order: npt.NDArray[np.int64] = np.arange(len(self._rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[int(self._order[index])]
        item: dict[str, npt.NDArray[Any]] = {
            "input_ids": row.input_ids,
            "labels": row.labels,
            "attention_mask": np.ones_like(row.input_ids),
        }
        if row.loss_weights is not None:
            item["loss_weights"] = row.loss_weights
        if self._padding is not None:
            num_pads = self._padding.length - len(row.input_ids)
            width = (0, num_pads) if self._padding.side == "right" else (num_pads, 0)
            fill = {"input_ids": self._padding.pad_token_id, "labels": IGNORE_INDEX}
            for name, values in item.items():
                item[name] = np.pad(values, width, constant_values=fill.get(name, 0))
        tensors = {name: torch.from_numpy(values) for name, values in item.items()}
        return tensors if row.label is None else tensors | {"label": torch.tensor(row.label)}

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each record, in order."""
        assert isinstance(self._rows, ArrowRows)
        return self._rows.num_tokens()[self._order]

    def concat(self, *others: "TokenizedDataset | list[TokenizedDataset]") -> "TokenizedDataset":
        """Return these records followed by those of the others, each in its own order.

        Args:
            others: datasets, or a list of them.

        Raises:
            ConfigError: one is not a `TokenizedDataset`, or they are padded differently.
        """
        parts = [self]
        flat = chain.from_iterable(each if isinstance(each, list) else [each] for each in others)
        for number, other in enumerate(flat, start=1):
            if not isinstance(other, TokenizedDataset):
                raise ConfigError(
                    f"concat takes TokenizedDataset, and argument {number} is a "
                    f"{type(other).__name__}; make it with make_supervised_dataset, or join rows "
                    "of other kinds with torch.utils.data.ConcatDataset"
                )
            parts.append(other)
        if len({part._padding for part in parts}) > 1:
            raise ConfigError("these records are padded differently; concat first, then pad")
        made = TokenizedDataset(
            [path for part in parts for path in part._paths],
            ledger=list(chain.from_iterable(part.ledger for part in parts)),
            pad_token_id=self._pad_token_id,
        )
        # Rows of 3 and 2 records: those of the second dataset are numbered from 3.
        starts = np.cumsum([0, *(len(part._rows) for part in parts)])
        orders = [part._order + start for part, start in zip(parts, starts, strict=False)]
        made._order = np.concatenate(orders)
        made._padding = self._padding
        return made

    def shuffle(self, seed: int = 42) -> "TokenizedDataset":
        """Return the same records in an order determined by `seed`, equal on every platform."""
        made = copy.copy(self)
        made._order = self._order[permutation(len(self), seed)]
        return made

    def pad(
        self,
        pad_token_id: int | None = None,
        length: int | Literal["longest"] = "longest",
        side: Literal["left", "right"] = "right",
    ) -> "TokenizedDataset":
        """Return the same records padded to one length; padding has label -100 and no attention.

        Args:
            pad_token_id: default: the tokenizer's pad token, or 0 if it has none.
            length: number of tokens, or "longest" for the length of the longest record.
            side: side of the padding.

        Raises:
            ConfigError: a record is longer than `length`, or the side is unknown.
        """
        if side not in ("left", "right"):
            raise ConfigError(f"side '{side}' is not known; use left or right")
        longest = int(self.num_tokens.max(initial=0))
        width = longest if length == "longest" else length
        if width < longest:
            raise ConfigError(f"a record has {longest:,} tokens, more than length {width:,}")
        made = copy.copy(self)
        pad_token_id = self._pad_token_id if pad_token_id is None else pad_token_id
        made._padding = _Padding(pad_token_id=pad_token_id, length=width, side=side)
        return made

    def __getstate__(self) -> dict[str, object]:
        # Memory maps cannot be pickled: worker processes open the files again.
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = open_rows(self._paths, whole_rows=True)
