"""Refuse collators and trainers of others that would drop boundaries or weights without a word.

While a handle of `enable_packing` is active, these fail on rows of several records, and on rows
with `loss_weights`, which they leave out:

| entry point | what it does to packs |
|---|---|
| `transformers.DataCollatorWithFlattening` | numbers positions through the whole row |
| `transformers.DataCollatorForLanguageModeling` | trains every token, prompts included |
| `trl` collator without `padding_free` | leaves boundaries out, adds an `attention_mask` |
| `trl.SFTTrainer` with `packing=True` | packs the packs again, as one record each |

`transformers.Trainer`, and what is made of it, drops columns before a collator sees them, unless
`remove_unused_columns` is False. It fails where a collator is to apply `loss_weights`, and where
`seq_lengths` is dropped and alone says where records end.

None of them looks at `position_ids` or `seq_lengths` (TRL's does with `padding_free`), so no data
could stop them. The model cannot either: what it is given looks like one long record.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from packhouse.errors import ContractError

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import RemoveColumnsCollator

Check = Callable[..., None]
"""Takes the arguments of a method before the method does; raises ContractError to refuse them."""

_REMEDY = "use packhouse.loaders.PackedCollator (docs/how-to/keep-records-apart.md)"

_PLAIN: list[tuple[type, str, Callable[..., object]]] = []
"""What was replaced: class, name of the method, the method."""


def refuse() -> None:
    """Guard the entry points above, those of TRL where it is imported; a second call adds these."""
    from transformers.data import data_collator

    flattening = (
        "DataCollatorWithFlattening numbers positions through a row of several records, which "
        f"would then see each other; {_REMEDY}"
    )
    _wrap(data_collator.DataCollatorWithFlattening, "__call__", _refuse_rows(flattening))
    labels = (
        "DataCollatorForLanguageModeling replaces labels, and would train prompts and the "
        f"first token of each record; {_REMEDY}"
    )
    _wrap(data_collator.DataCollatorForLanguageModeling, "torch_call", _refuse_rows(labels))
    if "transformers.trainer" in sys.modules:
        from transformers import Trainer
        from transformers.trainer_utils import RemoveColumnsCollator

        _wrap(Trainer, "_remove_unused_columns", _refuse_lost_columns)
        _wrap(RemoveColumnsCollator, "__call__", _refuse_rows_that_lose_bounds)
    if "trl" in sys.modules:
        from trl.trainer import sft_trainer

        mask = (
            "TRL's collator leaves record boundaries out unless SFTConfig(padding_free=True, "
            "max_length=None); set both (docs/how-to/trl.md)"
        )
        _wrap(sft_trainer.DataCollatorForLanguageModeling, "torch_call", _refuse_rows(mask))
        _wrap(sft_trainer.SFTTrainer, "_prepare_dataset", _refuse_repacking)


def allow() -> None:
    """Put everything back as it was."""
    while _PLAIN:
        owner, name, plain = _PLAIN.pop()
        setattr(owner, name, plain)


def _wrap(owner: type, name: str, check: Check) -> None:
    if any(each[:2] == (owner, name) for each in _PLAIN):
        return
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def checked(self: object, *args: object, **kwargs: object) -> object:
        check(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    setattr(owner, name, checked)
    _PLAIN.append((owner, name, plain))


def _refuse_lost_columns(trainer: "Trainer", dataset: object, *_: object, **__: object) -> None:
    wanted = getattr(trainer.data_collator, "loss_weights", None)
    names = getattr(dataset, "column_names", None) or []
    if "loss_weights" in names and trainer.args.remove_unused_columns and wanted is None:
        raise ContractError(
            "Trainer drops the column loss_weights of these rows: each token would be trained "
            "alike. Set remove_unused_columns=False and apply them (docs/how-to/own-loop.md), or "
            "say PackedCollator(loss_weights='ignore')"
        )
    if trainer.args.remove_unused_columns and "seq_lengths" in names:
        trainer._set_signature_columns_if_needed()
        _refuse_lost_bounds(names, trainer._signature_columns or ())


def _refuse_rows_that_lose_bounds(
    collator: "RemoveColumnsCollator", rows: Iterable[object], *_: object
) -> None:
    """Of data that is no `datasets.Dataset`, Trainer drops the columns row by row."""
    for row in rows:
        if isinstance(row, Mapping) and _is_pack(row):
            _refuse_lost_bounds(row, collator.signature_columns)


def _refuse_lost_bounds(names: Iterable[str], kept: Iterable[str]) -> None:
    if not {"seq_lengths", "position_ids"}.intersection(names).intersection(kept):
        raise ContractError(
            "Trainer drops the column seq_lengths of these rows, and they have no position_ids: "
            "records would see each other. Give it packhouse.loaders.PackedDataset(rows) "
            "(docs/how-to/pack-in-memory.md)"
        )


def _refuse_rows(problem: str) -> Check:
    """Return a check of a collator's rows: `problem` says what it does to packs."""

    def check(collator: object, rows: Iterable[object], *_: object, **__: object) -> None:
        if any(isinstance(row, Mapping) and row.get("loss_weights") is not None for row in rows):
            raise ContractError(
                "this collator leaves loss_weights out: each token would be trained alike; "
                f"{_REMEDY}"
            )
        # With it, TRL's reads `seq_lengths`; transformers' collators have no such setting.
        if not getattr(collator, "padding_free", False) and any(map(_is_pack, rows)):
            raise ContractError(problem)

    return check


def _refuse_repacking(
    trainer: object,
    dataset: object,
    processing_class: object,
    args: object,
    packing: bool,
    *_: object,
) -> None:
    rows = getattr(dataset, "column_names", None) or []
    if packing and "seq_lengths" in rows:
        raise ContractError(
            "SFTConfig(packing=True) would pack these packs again, as one record each; set "
            "packing=False, padding_free=True and max_length=None (docs/how-to/trl.md)"
        )


def _is_pack(row: object) -> bool:
    """Return True if a row says that it holds several records."""
    if not isinstance(row, Mapping):
        return False
    lengths, positions = row.get("seq_lengths"), row.get("position_ids")
    if lengths is not None:
        return len(lengths) > 1
    return positions is not None and bool((np.diff(np.asarray(positions)) != 1).any())
