"""Make TRL's preference trainers accept prepared rows without tokenizing them again.

Except for RewardTrainer, TRL's trainers tokenize every dataset and have no setting to turn it off.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow.compute as pc

from packhouse.errors import ConfigError
from packhouse.pack.layout import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

_Trainer = TypeVar("_Trainer", bound=type[Any])


def enable_preferences(trainer_class: _Trainer) -> _Trainer:
    """Return a subclass of a TRL trainer that accepts prepared rows.

    Datasets with `prompt_ids` are not tokenized again; others are processed as usual. For KTO
    losses with a KL term, each row gets the answer of the previous row in its batch, as in TRL.

    Args:
        trainer_class: `trl.DPOTrainer`, `trl.KTOTrainer`, `ORPOTrainer` or `CPOTrainer` of
            `trl.experimental`, or your own subclass of one.

    Raises:
        ConfigError: `trainer_class` is not one of these; or, when a trainer is created, its
            `max_length` would cut an answer.

    Example:
        >>> from trl import DPOTrainer
        >>> trainer_class = enable_preferences(DPOTrainer)
        >>> issubclass(trainer_class, DPOTrainer)
        True
    """

    def prepare(
        self: "Trainer",
        dataset: "Dataset",
        processing_class: object,
        args: "TrainingArguments",
        dataset_name: str,
    ) -> "Dataset":
        if "prompt_ids" not in (dataset.column_names or next(iter(dataset))):
            return trainer_class._prepare_dataset(
                self, dataset, processing_class, args, dataset_name
            )
        _check_max_length(dataset, args.max_length)
        if getattr(self, "calculate_KL", False):
            size = args.per_device_train_batch_size
            dataset = dataset.map(_add_neighbours, batched=True, batch_size=size)
        return dataset

    def tokenize_row(
        self: "Trainer", feature: Mapping[str, Any], model: object = None
    ) -> dict[str, Any]:
        if "prompt_ids" not in feature:
            row: dict[str, Any] = trainer_class.tokenize_row(self, feature, model)
            return row
        return _whole_sides(feature, self.max_length)

    # DPO and KTO tokenize a dataset at once, ORPO and CPO row by row.
    for name, method in {"_prepare_dataset": prepare, "tokenize_row": tokenize_row}.items():
        if hasattr(trainer_class, name):
            return cast(_Trainer, type(trainer_class.__name__, (trainer_class,), {name: method}))
    raise ConfigError(
        f"{trainer_class.__name__} prepares rows in no way that is known; give DPOTrainer, "
        "KTOTrainer, ORPOTrainer or CPOTrainer of TRL"
    )


def _whole_sides(row: Mapping[str, Any], max_length: int) -> dict[str, list[int]]:
    """Return the columns of ORPO and CPO: the prompt, and each side with its prompt and labels."""
    prompt = row["prompt_ids"]
    columns = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for side in ("chosen", "rejected"):
        answer = row[f"{side}_ids"]
        ids = [*prompt, *answer]
        if len(ids) > max_length:
            raise _too_short(max_length, len(ids), "a number over it")
        columns |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": [1] * len(ids),
            f"{side}_labels": [IGNORE_INDEX] * len(prompt) + answer,
        }
    return columns


def _check_max_length(dataset: "Dataset", max_length: int | None) -> None:
    """Reject a limit that would cut answers. Lengths in streams are unknown, so they pass."""
    if max_length is None or not hasattr(dataset, "with_format") or not hasattr(dataset, "data"):
        return
    answers = [each for each in _ANSWERS if each in dataset.column_names]
    longest = 0
    for batch in dataset.with_format("arrow").iter(2**14):
        prompt = pc.list_value_length(batch["prompt_ids"])
        for answer in answers:
            lengths = pc.add(prompt, pc.list_value_length(batch[answer]))
            longest = max(longest, pc.max(lengths).as_py())
    if longest > max_length:
        raise _too_short(max_length, longest, "None")


def _too_short(max_length: int, longest: int, remedy: str) -> ConfigError:
    return ConfigError(
        f"max_length {max_length:,} of the trainer would cut answers, of which one has {longest:,} "
        f"tokens with its prompt; set max_length to {remedy}, or prepare with a smaller "
        "pack.seq_len",
        longest=longest,
    )


_ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")


def _add_neighbours(rows: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Pair each prompt with the answer of the previous row; the first one gets the last answer."""
    answers = rows["completion_ids"]
    return {"KL_completion_ids": [answers[-1], *answers[:-1]]}
