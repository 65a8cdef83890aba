"""Other trainers on a published version: the same loss curve packed and unpacked."""

import contextlib
import functools
import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from packhouse import (
    PackedCollator,
    PackedDataset,
    count_targets,
    enable_packing,
    load_packed,
    pack_dataset,
    token_loss,
)
from packhouse.errors import ContractError
from tests.loaders.models import tiny_model

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SETTINGS = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def uri(make_version):
    return make_version(num_records=40)


def in_order(trainer_class: Any) -> Any:
    """A Trainer without shuffling, so that runs can be compared step by step."""

    class InOrder(trainer_class):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    return InOrder


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(
    folder: Any, rows: Any, collator: Any, kind: Any = None, *, is_enabled: bool = True, **settings
) -> list[float]:
    """Train a tiny model in order with transformers' Trainer, and return the losses."""
    from transformers import Trainer, TrainingArguments

    model = tiny_model("llama", "sdpa", scale=0.02)
    handle = enable_packing(model) if is_enabled else contextlib.nullcontext()
    args = {**SETTINGS, "output_dir": str(folder), "max_grad_norm": 0, **settings}
    with handle:
        return losses(
            in_order(kind or Trainer)(
                model=model,
                args=TrainingArguments(**args),
                train_dataset=rows,
                data_collator=collator,
            )
        )


def test_a_trainer_that_drops_the_boundaries_is_told(uri, tmp_path):
    data = load_packed(uri, cache=tmp_path).remove_columns("position_ids")
    with pytest.raises(ContractError, match="remove_unused_columns=False"):
        train(tmp_path, data, PackedCollator())


def test_packs_in_memory_train_as_a_packed_dataset(tmp_path):
    """`pack_dataset` writes TRL's columns: transformers' Trainer does not know `seq_lengths`."""
    from datasets import Dataset
    from transformers import default_data_collator

    records = [[5 + n % 7, 9, 11, 6 + n % 5] for n in range(12)]
    packs = pack_dataset(Dataset.from_dict({"input_ids": records, "labels": records}), 12)

    streamed, settings = packs.to_iterable_dataset(), {"remove_unused_columns": False}
    with pytest.raises(ContractError, match="got seq_lengths without position_ids"):
        train(tmp_path, streamed, default_data_collator, max_steps=4, **settings)
    found = train(tmp_path, PackedDataset(packs), default_data_collator)
    assert found == train(tmp_path, PackedDataset(packs), PackedCollator())


@functools.cache
def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 97)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def weighted_loss_of(row: dict[str, Any]) -> float:
    """Loss of a pack by torch's own cross-entropy, over each record separately."""
    model = tiny_model("llama", "sdpa", scale=0.02)
    total, count, start = 0.0, 0.0, 0
    for length in row["seq_lengths"]:
        part = slice(start, start + length)
        ids, labels, weights = (
            torch.tensor(row[name][part]) for name in ("input_ids", "labels", "loss_weights")
        )
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")
        total += float((each * weights[1:]).sum())
        count += float(weights[1:].sum())
        start += length
    return total / count


def test_weights_are_never_lost_without_a_word(uri, tmp_path):
    from transformers import Trainer

    data = load_packed(uri, cache=tmp_path)
    weights = [
        [(0.25 + at % 3) * (label != -100) for at, label in enumerate(labels)]
        for labels in data["labels"]
    ]
    data = data.add_column("loss_weights", weights)

    def run(collator: Any, kind: Any = None, **settings: Any) -> list[float]:
        return train(tmp_path, data, collator, kind, **settings)

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            weights, labels = inputs.pop("loss_weights"), inputs.pop("labels")
            count = count_targets({"labels": labels, "loss_weights": weights})
            return token_loss(model(**inputs).logits, labels, count, loss_weights=weights)

    with pytest.raises(ContractError, match="requires rows with a loss_weights column"):
        run(PackedCollator(loss_weights="column"))
    with pytest.raises(ContractError, match="but the collator has no setting"):
        run(PackedCollator(), remove_unused_columns=False)
    with pytest.raises(ContractError, match="model got loss_weights"):
        run(PackedCollator(loss_weights="column"), remove_unused_columns=False)
    plain = run(PackedCollator(loss_weights="ignore"))
    weighted = run(PackedCollator(loss_weights="column"), Weighted, remove_unused_columns=False)
    assert weighted[0] == pytest.approx(weighted_loss_of(data[0]), abs=1e-4)
    assert weighted[0] != pytest.approx(plain[0], abs=1e-3)


def test_load_packed_warns_of_weights_where_a_trainer_is_at_hand(uri, tmp_path, monkeypatch):
    importlib.import_module("transformers.trainer")  # what the warning looks for

    from packhouse.load import mapped_rows

    plain = mapped_rows.map_rows

    def with_weights(*given: Any) -> Any:
        rows = plain(*given)
        return rows.add_column("loss_weights", [[0.5] * len(ids) for ids in rows["input_ids"]])

    monkeypatch.setattr(mapped_rows, "map_rows", with_weights)

    with pytest.warns(UserWarning, match="loss_weights, but transformers.Trainer drops"):
        load_packed(uri, cache=tmp_path)
