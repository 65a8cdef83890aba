"""docs/how-to/keep-records-apart.md: data x collator x attention -> correct or wrong.

For every cell of the table, run one step of the trainer and compare its loss with that of the
records fed one by one.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packhouse import PackedCollator, enable_packing, load_packed
from packhouse.addons.exports import export_version
from packhouse.errors import ContractError
from packhouse.store import open_version
from tests.loaders.models import tiny_model
from tests.loaders.test_trainers import SETTINGS, in_order, losses, tiny_tokenizer

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-records-apart.md"

SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}
TRL = {
    "`padding_free=True, max_length=None`": {"padding_free": True, "max_length": None},
    "the same, `skip_prepare_dataset`": {"padding_free": True, "max_length": None, **SKIP},
    "defaults": {},
    "defaults, `skip_prepare_dataset`": SKIP,
    "`packing=True`": {"packing": True, "max_length": 4096},
    "`packing=True`, `skip_prepare_dataset`": {"packing": True, "max_length": 4096, **SKIP},
}


def table() -> list[tuple[str, str, str, str]]:
    """Return the page's table: trainer, collator or settings, result without and with a guard."""
    lines = PAGE.read_text(encoding="utf-8").split("| trainer |")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [(each[0], each[1], each[2], each[3]) for each in rows]


def parquet(files: list[str], cache: Path) -> Any:
    import datasets

    return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))


@pytest.fixture(scope="module")
def forms(make_version, tmp_path_factory):
    """One version in each form of data that trainers accept; its packs differ in length."""
    uri, cache = make_version(num_records=40, strategy="next_fit"), tmp_path_factory.mktemp("c")
    opened = open_version(str(Path(uri).parent), "made")
    published = [str(opened.store.path(opened.key(e))) for e in opened.files(split="train")]
    export_version(opened, "trl", cache / "trl", cache=cache)
    return {
        "load_packed": load_packed(uri, cache=cache),
        "published Parquet": parquet(published, cache),
        "export": parquet([str(cache / "trl" / "train.parquet")], cache),
    }


def collator(name: str) -> Callable[..., Any]:
    import transformers

    if name == "PackedCollator":
        return PackedCollator()
    if name == "default_data_collator":
        return transformers.default_data_collator
    kind = getattr(transformers, name)
    tokenizer = tiny_tokenizer()
    if name == "DataCollatorWithFlattening":
        return kind()
    return kind(tokenizer, mlm=False) if "LanguageModeling" in name else kind(tokenizer)


def one_step(data: Any, trainer: str, way: str, attention: str, size: int, folder: Path) -> float:
    from transformers import Trainer, TrainingArguments

    model = tiny_model("llama", attention)
    settings = SETTINGS | {
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "max_steps": 1,
        "learning_rate": 0.0,
    }
    if trainer.startswith("TRL"):
        trl = pytest.importorskip("trl", reason="TRL is not installed")
        args = trl.SFTConfig(bf16=False, **settings, **TRL[way])
        made = in_order(trl.SFTTrainer)(
            model=model, args=args, train_dataset=data, processing_class=tiny_tokenizer()
        )
    else:
        made = in_order(Trainer)(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=data,
            data_collator=collator(re.sub(r"[`*]", "", way)),
        )
    return losses(made)[0]


def loss_alone(rows: list[dict[str, Any]]) -> float:
    """Mean loss of all trained tokens, with each record fed separately."""
    model, total, num_trained = tiny_model("llama", "eager").eval(), 0.0, 0
    for row in rows:
        start = 0
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            start += length
            labels = torch.tensor(row["labels"][part])[None]
            if trained := int((labels[:, 1:] != -100).sum()):
                with torch.no_grad():
                    ids = torch.tensor(row["input_ids"][part])[None]
                    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
                total, num_trained = total + float(loss) * trained, num_trained + trained
    return total / num_trained


@pytest.mark.parametrize("is_enabled", [False, True], ids=["plain", "enabled"])
@pytest.mark.parametrize(
    ("trainer", "way", "plain", "enabled"), table(), ids=[f"{r[0]} {r[1]}" for r in table()]
)
def test_a_cell_of_the_table(forms, tmp_path, trainer, way, plain, enabled, is_enabled):
    said = enabled if is_enabled else plain
    runs = [("sdpa", "load_packed", 2), ("sdpa", "published Parquet", 1)]
    runs += [("eager", "export", 1)] if trainer == "Trainer" else []
    for attention, form, size in runs:
        data = forms[form]
        handle = enable_packing(tiny_model("llama", "sdpa").config) if is_enabled else None
        try:
            loss = one_step(data, trainer, way, attention, size, tmp_path)
            expected = loss_alone([data[number] for number in range(size)])
            found = "correct" if loss == pytest.approx(expected, abs=1e-3) else "**wrong**"
        except (ContractError, ValueError):
            found = "error"
        finally:
            if handle is not None:
                handle.disable()
        # Two packs of different length do not form a rectangle, so padding collators reject them.
        is_ragged = size == 2 and found == "error"
        assert found == said or is_ragged, (attention, form, size)
