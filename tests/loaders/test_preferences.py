"""Pairs and verdicts as TRL reads them: the same losses as of the same rows as text."""

import importlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

import packhouse
from packhouse import (
    PackedCollator,
    StreamingPackedDataset,
    enable_preferences,
    load_packed,
    load_preferences,
)
from packhouse.addons.exports import FORMATS, export_version
from packhouse.errors import ConfigError, ContractError
from packhouse.recipe import Recipe
from packhouse.store import open_version
from tests.prepared import prepare_in

NUM_ROWS = 60
DEMO = str(Path(__file__).parents[2] / "deployments" / "demo" / "tokenizer")  # 4,096 tokens

# TRL's own default uses a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def pairs(shared):
    """Real questions with the right answer, and with the next row's."""
    rows = json.loads((shared / "data" / "alpaca_data.json").read_bytes())[: NUM_ROWS + 1]
    return [
        {
            "prompt": f"{row['instruction']}\n{row['input']}\n".replace("\n\n", "\n"),
            "chosen": row["output"],
            "rejected": other["output"],
        }
        for row, other in pairwise(rows)
    ]


@pytest.fixture(scope="module")
def verdicts(pairs):
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]


@pytest.fixture(scope="module")
def few(pairs):
    """Indices of short pairs for training: the time of a step depends on the number of logits."""
    return sorted(range(NUM_ROWS), key=lambda number: len(str(pairs[number])))[:8]


@pytest.fixture(scope="module")
def make(shared, tmp_path_factory):
    """Prepare rows with a tokenizer and a template, each combination once."""
    made = {}

    def prepare(rows, name=DEMO, template="completion", form="pairs", **settings):
        key = json.dumps([rows, name, template, form, settings])
        if key not in made:
            root = tmp_path_factory.mktemp("preferences")
            path = root / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            recipe = {
                "dataset": "prefer",
                "sources": [{"path": str(path), "format": form}],
                "tokenizer": str(shared / "tokenizers" / name),
                "format": {"template": template},
                "pack": {"seq_len": 1024, "strategy": "none" if form == "kto" else "best_fit"},
                "split": {"eval_fraction": 0.2},
                "validate": {"max_quarantined": 0.5},
                "publish": {"store": str(root / "store"), "report": False, "exports": ["trl"]},
            }
            for section, values in settings.items():
                recipe[section] = {**recipe.get(section, {}), **values}
            given = Recipe.model_validate(recipe)
            made[key] = packhouse.prepare(given, cache=root / "cache", progress=False)
        return made[key]

    return prepare


def every_row(version):
    rows = [row for split in (version.train, version.eval) if split for row in split]
    opened = open_version(*_address(version))
    (entry,) = [each for each in opened.files("records") if each.kind == "records"]
    records = pq.read_table(opened.store.path(opened.key(entry))).to_pylist()
    place = {each["record_id"]: each["row"] for each in records}
    return sorted(rows, key=lambda row: place[row["record_id"]])


def _address(version):
    root, _, name = version.uri.rpartition("/")
    dataset, _, at = name.partition("@")
    return root, dataset, at


def test_a_pair_repeats_another_only_with_both_sides(make):
    rows = [
        {"prompt": "Say 1.\n", "chosen": "one", "rejected": "two"},
        {"prompt": "Say 1.\n", "chosen": "one", "rejected": "three"},
        {"prompt": "Say 1.\n", "chosen": " one", "rejected": "two "},  # except for whitespace
        {"prompt": "Say 1.\n", "chosen": "two", "rejected": "one"},
    ]
    version = make(rows, dedup={"exact": "drop"}, split={"eval_fraction": 0.0})

    assert version.dropped == {"duplicate": 1}
    assert len(version.train) == 3


def test_alike_pairs_are_found_by_both_sides(make, pairs):
    pytest.importorskip("datasketch", reason="datasketch is not installed")
    row = max(pairs, key=lambda row: len(row["rejected"]))
    other = {**row, "chosen": row["chosen"] + " Indeed."}
    third = {**row, "rejected": "Nothing of the kind comes to mind at all just now."}
    version = make([row, other, third], dedup={"near": "drop"}, split={"eval_fraction": 0.0})

    assert version.dropped == {"near_duplicate": 1}


def test_packs_and_whole_sides_hold_the_ids_of_the_rows(make, pairs):
    version = make(pairs)
    whole = load_preferences(version.uri, form="reward")
    assert whole.column_names == ["chosen_ids", "rejected_ids", "record_id"]
    for row, split in zip(whole, version.train, strict=True):
        assert row["chosen_ids"] == split["prompt_ids"] + split["chosen_ids"]
        assert row["rejected_ids"] == split["prompt_ids"] + split["rejected_ids"]

    packs = load_preferences(version.uri, form="packed")
    rows = {row["record_id"]: row for row in version.train}

    seen = []
    assert max(len(pack["seq_lengths"]) for pack in packs) > 2
    for pack in packs:
        ends = np.cumsum(pack["seq_lengths"])
        starts = ends - pack["seq_lengths"]
        positions = np.concatenate([np.arange(n) for n in pack["seq_lengths"]])
        assert pack["position_ids"] == positions.tolist()
        for number, (first, last) in enumerate(zip(starts, ends, strict=True)):
            row = rows[pack["record_ids"][number]]
            answer = row[("chosen_ids", "rejected_ids")[number % 2]]
            assert pack["preference_ids"][first:last] == row["prompt_ids"] + answer
            trained = [-100] * len(row["prompt_ids"]) + answer
            assert pack["preference_labels"][first:last] == trained
        assert pack["record_ids"][::2] == pack["record_ids"][1::2]
        seen += pack["record_ids"][::2]
    assert sorted(seen) == sorted(rows)


def test_trl_exports_are_the_rows_that_are_loaded(make, pairs, verdicts, tmp_path):
    for number, version in enumerate([make(pairs), make(verdicts, form="kto")]):
        opened = open_version(*_address(version))
        done = export_version(opened, "trl", tmp_path / str(number), cache=tmp_path / "cache")
        for split, rows in (("train", version.train), ("eval", version.eval)):
            assert pq.read_table(done.folder / f"{split}.parquet").to_pylist() == rows.to_list()


def test_no_other_export_trains_bad_answers(make, pairs, tmp_path):
    opened = open_version(*_address(make(pairs)))

    for name in {*FORMATS} - {"trl", "arrow"}:
        with pytest.raises(ConfigError, match="would train the rejected answers"):
            export_version(opened, name, tmp_path / "out", cache=tmp_path / "cache")


def test_no_form_has_the_columns_that_trainers_of_supervised_rows_look_for(
    make, pairs, verdicts, tmp_path
):
    for rows, kind in ((pairs, "pairs"), (verdicts, "kto")):
        version = make(rows, form=kind)
        opened = open_version(*_address(version))
        (entry, *_) = opened.files(split="train")
        exports = {
            name: export_version(opened, name, tmp_path / kind / name, cache=tmp_path).folder
            for name in ("arrow", "trl")
        }
        names = {
            *version.train.column_names,
            *load_preferences(version.uri, form="packed").column_names,
            *pq.read_schema(opened.store.path(opened.key(entry))).names,
            *Dataset.from_file(str(exports["arrow"] / "train.arrow")).column_names,
            *pq.read_schema(exports["trl"] / "train.parquet").names,
        }
        assert not names & {"input_ids", "labels"}
        with pytest.raises(ContractError, match="no input_ids"):
            PackedCollator()([version.train[0]])


def test_loaders_of_other_versions_refuse_preferences(make, pairs, verdicts, tmp_path):
    version = make(pairs)
    for load in (load_packed, StreamingPackedDataset):
        with pytest.raises(ConfigError, match="load_preferences"):
            load(version.uri)
    plain = prepare_in(
        tmp_path,
        [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs],
        format={"template": "completion"},
    )
    with pytest.raises(ConfigError, match="has no preferences"):
        load_preferences(plain.uri)
    for form in ("reward", "pairs"):
        with pytest.raises(ConfigError, match="not available for `format: kto`"):
            load_preferences(make(verdicts, form="kto").uri, form=form)


@pytest.mark.parametrize(
    "settings",
    [
        {"pack": {"strategy": "concat"}},
        {"pack": {"over_length": "truncate_turns"}},
        {"pack": {"over_length": "window"}},
        {"pack": {"pad_record_to_multiple_of": 2}},
        {"format": {"train_on": "all"}},
        {"format": {"turns": "alone"}},
        {"format": {"reasoning": "strip"}},
        {"format": {"template": "text"}},
        {"publish": {"exports": ["axolotl"]}},
        {"sources": [{"path": "a", "format": "pairs", "loss_weight": 2}]},
        {"sources": [{"path": "a", "format": "pairs"}, {"path": "b", "format": "chat"}]},
        {"sources": [{"path": "a", "format": "kto"}]},  # in packs
    ],
)
def test_settings_that_part_a_pair_are_refused(settings):
    plain = {"dataset": "a", "sources": [{"path": "a", "format": "pairs"}], "tokenizer": "t"}
    Recipe.model_validate(plain)

    with pytest.raises(ValueError, match=r"pairs|kto|rejected"):
        Recipe.model_validate({**plain, **settings})


def tiny(tmp_path, **settings):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.loaders.models import tiny_model

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    folder = tmp_path / "model"  # TRL loads the reference model from there
    tiny_model("llama", "sdpa", scale=0.02, vocabulary=len(tokenizer)).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    args = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
        "save_strategy": "no",
        **settings,
    }
    return model, tokenizer, args


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("name", ["DPO", "KTO", "ORPO"])
def test_prepared_rows_have_the_losses_of_the_same_rows_as_text(
    make, pairs, verdicts, few, tmp_path, name
):
    """DPO and KTO tokenize a dataset at once, ORPO and CPO row by row."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    home = importlib.import_module("trl.experimental.orpo") if name == "ORPO" else trl
    plain, config = getattr(home, f"{name}Trainer"), getattr(home, f"{name}Config")
    if name == "KTO":
        every, given = every_row(make(verdicts, form="kto")), verdicts[:8]
        ours = every[:8]
    else:
        every = every_row(make(pairs))
        ours, given = ([rows[number] for number in few] for rows in (every, pairs))
    settings = {"max_steps": 3, "train_sampling_strategy": "sequential"}
    losses = []
    for rows, trainer_class in (
        (ours, enable_preferences(plain)),
        (given, plain),
        (given, enable_preferences(plain)),  # other rows are handled as usual
    ):
        model, tokenizer, args = tiny(tmp_path, **settings, max_length=1024)
        trainer = trainer_class(
            model=model,
            args=config(**args),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        if name == "KTO":  # trains with the answers of neighbours
            neighbours = trainer.train_dataset["KL_completion_ids"]
            assert neighbours[0] == trainer.train_dataset["completion_ids"][3]
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == losses[1] == losses[2]

    _, _, args = tiny(tmp_path, max_length=16)
    with pytest.raises(ConfigError, match="max_length 16 would cut answers"):
        enable_preferences(plain)(
            model=model,
            args=config(**args),
            train_dataset=Dataset.from_list(every),
            processing_class=tokenizer,
        )


def test_a_trainer_of_another_kind_is_refused():
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    with pytest.raises(ConfigError, match="GRPOTrainer is not supported"):
        enable_preferences(trl.GRPOTrainer)
