"""Rows of preferences in trainers of supervised rows: each refuses them, and trains no bad answer.

The same rows under the names of supervised ones do train, which shows that the names stop them.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset

import packhouse
from packhouse import PackedCollator, load_preferences
from packhouse.addons.exports.writing import export_version
from packhouse.errors import ContractError
from packhouse.pack.layout import PREFERENCE_NAMES
from packhouse.recipe import Recipe
from packhouse.store.read import open_address
from tests.loaders.models import tiny_model

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DEMO = str(Path(__file__).parents[2] / "deployments" / "demo" / "tokenizer")
COLLATORS = [
    *("none", "default_data_collator", "DataCollatorWithFlattening", "PackedCollator"),
    *("DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DataCollatorWithPadding"),
]
SETTINGS_OF_TRL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "packing": {"packing": True, "max_length": 256},
    "skip": {"dataset_kwargs": {"skip_prepare_dataset": True}},
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """All that a version of pairs and one of verdicts give to a trainer, by kind."""
    root = tmp_path_factory.mktemp("names")
    pairs = [
        {"prompt": f"What is {n} + 1?\n", "chosen": f"{n + 1}", "rejected": f"{n + 2}"}
        for n in range(20)
    ]
    rows = {
        "pairs": pairs,
        "kto": [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in pairs
            for side in ("chosen", "rejected")
        ],
    }
    made = {}
    for form, lines in rows.items():
        path = root / f"{form}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        recipe = {
            "dataset": form,
            "sources": [{"path": str(path), "format": form}],
            "tokenizer": DEMO,
            "format": {"template": "completion"},
            "pack": {"seq_len": 256, "strategy": "none" if form == "kto" else "best_fit"},
            "split": {"eval_fraction": 0.0},
            "publish": {"store": str(root / "store"), "report": False},
        }
        given = Recipe.model_validate(recipe)
        version = packhouse.prepare(given, cache=root / "cache", progress=False)
        made[form] = _forms(version, form, root / form)
    return made


def published(version, root: Path) -> Dataset:
    opened = open_address(version.uri)
    files = [str(opened.store.path(opened.key(entry))) for entry in opened.files(split="train")]
    return load_dataset("parquet", data_files=files, split="train", cache_dir=str(root))


def exported(version, root: Path, name: str) -> Dataset:
    opened = open_address(version.uri)
    folder = export_version(opened, name, root / name, cache=root / "cache").folder
    if name == "arrow":
        return Dataset.from_file(str(folder / "train.arrow"))
    return load_dataset(
        "parquet", data_files=str(folder / "train.parquet"), split="train", cache_dir=str(root)
    )


def _forms(version, kind: str, root: Path) -> dict[str, Dataset]:
    made = {
        "load_preferences": version.train,
        "packed": load_preferences(version.uri, form="packed"),
        "published Parquet": published(version, root),
        "export arrow": exported(version, root, "arrow"),
        "export trl": exported(version, root, "trl"),
    }
    if kind == "pairs":
        made["reward"] = load_preferences(version.uri, form="reward")
    return made


def plain(rows: Dataset) -> Dataset:
    """The same rows under the names that trainers of supervised rows look for."""
    return rows.rename_columns({theirs: ours for ours, theirs in PREFERENCE_NAMES.items()})


@functools.cache
def model_and_tokenizer() -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return tiny_model("llama", "sdpa", vocabulary=len(tokenizer)), tokenizer


def train(
    rows: Dataset, trainer: str, way: str, folder: Path, *, keeps_columns: bool = False
) -> None:
    import transformers

    model, tokenizer = model_and_tokenizer()
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": rows,
        "processing_class": tokenizer,
    }
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2 if way == "padding_free" else 1,
        "max_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    if trainer == "SFTTrainer":
        trl = pytest.importorskip("trl", reason="TRL is not installed")
        args = trl.SFTConfig(bf16=False, **settings, **SETTINGS_OF_TRL[way])
        trl.SFTTrainer(args=args, **given).train()
        return
    if way == "PackedCollator":
        given["data_collator"] = PackedCollator()
    elif way != "none":
        kind = getattr(transformers, way)
        more = {"mlm": False} if "LanguageModeling" in way else {}
        is_plain = way in ("default_data_collator", "DataCollatorWithFlattening")
        given["data_collator"] = (
            (kind if way.islower() else kind()) if is_plain else kind(tokenizer, **more)
        )
    args = transformers.TrainingArguments(remove_unused_columns=not keeps_columns, **settings)
    transformers.Trainer(args=args, **given).train()


# What each says that finds no ids: a column, or that of texts. With all columns kept, the default
# collator stops at the record ids before.
MISSING = "input_ids|^'text'$|No columns in the dataset match|too many dimensions 'str'"
WAYS = [("Trainer", way) for way in COLLATORS]
WAYS += [("SFTTrainer", way) for way in SETTINGS_OF_TRL]


@pytest.mark.parametrize("kind", ["pairs", "kto"])
@pytest.mark.parametrize(("trainer", "way"), WAYS)
def test_no_trainer_of_supervised_rows_takes_preferences(forms, tmp_path, kind, trainer, way):
    for name, rows in forms[kind].items():
        assert not {"input_ids", "labels"} & {*rows.column_names}, name
        # What stops a trainer are the names of the columns: one form each shows it, and two all.
        if name != "published Parquet" and way not in ("none", "defaults"):
            continue
        for keeps in (False, True):
            with pytest.raises((KeyError, ValueError, ContractError), match=MISSING):
                train(rows, trainer, way, tmp_path / "out", keeps_columns=keeps)


@pytest.mark.parametrize(
    ("trainer", "way"),
    [
        ("Trainer", "PackedCollator"),
        ("Trainer", "DataCollatorWithFlattening"),
        ("SFTTrainer", "padding_free"),
    ],
)
def test_under_the_names_of_supervised_rows_bad_answers_would_be_trained(
    forms, tmp_path, trainer, way
):
    train(plain(forms["pairs"]["published Parquet"]), trainer, way, tmp_path / "out")
