"""A guarded model refuses packs whose boundaries are lost, whoever loaded them and however many."""

import warnings

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from packhouse import (
    PackedCollator,
    PackedDataset,
    enable_packing,
    load_packed,
    make_supervised_dataset,
    prepare,
)
from packhouse.addons.exports import export_version
from packhouse.errors import ContractError
from packhouse.load import known_packs
from packhouse.store.version_reader import open_address
from tests.loaders.models import tiny_model
from tests.loaders.test_collator_table import one_step, parquet
from tests.prepared import DEMO

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LOST = "several records of a pack as one"
WAYS = [("Trainer", "DataCollatorWithFlattening"), ("TRL", "`packing=True`")]


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """A process that knows no packs yet, and has guarded no model."""
    for name in ("_KNOWN", "_LAST", "_WARNED"):
        monkeypatch.setattr(known_packs, name, set())
    made = datasets.Dataset.__init__
    monkeypatch.setattr(datasets.Dataset, "__init__", getattr(made, "__wrapped__", made))
    known_packs.watch_datasets.cache_clear()
    yield
    known_packs.watch_datasets.cache_clear()


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa").eval()


def packs(number: int, first: int = 3) -> list[dict[str, list[int]]]:
    """Packs of two records that begin alike, as those of one chat template do."""
    rng = np.random.default_rng(first)
    rows = []
    for _ in range(number):
        ids = [5, 6, *rng.integers(3, 97, 18).tolist(), 2, 5, 6, *rng.integers(3, 97, 9).tolist()]
        rows.append({"input_ids": ids, "labels": ids, "seq_lengths": [21, 11]})
    return rows


def as_one(ids) -> dict[str, torch.Tensor]:
    tokens = torch.as_tensor(ids)[None]
    return {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1])[None]}


def loaded(form: str, uri: str, folder) -> datasets.Dataset:
    opened = open_address(uri)
    if form == "published Parquet":
        files = [str(opened.store.path(opened.key(entry))) for entry in opened.files()]
        return parquet(files, folder)
    if form == "trl export":
        export_version(opened, "trl", folder / "trl", cache=folder)
        return parquet([str(folder / "trl" / "train.parquet")], folder)
    load_packed(uri, cache=folder).save_to_disk(folder / "disk")
    known_packs._KNOWN.clear()
    return datasets.load_from_disk(folder / "disk")


@pytest.mark.parametrize("is_loaded_first", [True, False])
@pytest.mark.parametrize("form", ["published Parquet", "trl export", "load_from_disk"])
def test_packs_that_datasets_loads_are_known(make_version, tmp_path, form, is_loaded_first):
    uri = make_version(num_records=40, strategy="next_fit")
    data = loaded(form, uri, tmp_path) if is_loaded_first else None
    with enable_packing(tiny_model("llama", "sdpa").config):
        for trainer, way in WAYS:
            # If it is loaded later, nothing else holds the data while the trainer runs.
            rows = data or loaded(form, uri, tmp_path / way)
            with pytest.raises(ContractError, match=LOST):
                one_step(rows, trainer, way, "sdpa", 1, tmp_path)
        rows = loaded(form, uri, tmp_path / "own")
        one_step(rows, "Trainer", "PackedCollator", "sdpa", 1, tmp_path)


def test_all_packs_are_known_and_other_rows_are_not(model):
    rows = packs(3000)
    data = datasets.Dataset.from_list(rows)
    others = packs(3000, first=4)
    with enable_packing(model):
        for number in (0, 1030, 2999):
            ids = rows[number]["input_ids"]
            padded = torch.tensor([[0, 0, *ids, 0]])
            for batch in (
                {"input_ids": torch.tensor([ids])},
                {"input_ids": padded, "attention_mask": (padded != 0).long()},
                as_one(ids),
            ):
                with pytest.raises(ContractError, match=LOST):
                    model(**batch)
            model(**PackedCollator()([rows[number]]))
            model(**as_one(ids[:21]))  # one record of the pack
        conversations = [row["input_ids"] for row in others]  # one record with two turns each
        for number in range(0, 3000, 100):
            model(**as_one(conversations[number]))
    assert len(data) <= len(known_packs._KNOWN)  # other tests may hold data sets, too


def test_a_pack_that_a_trainer_cut_is_known(model):
    row = {"input_ids": [*range(3, 80)], "seq_lengths": [30, 20, 27]}
    data = datasets.Dataset.from_list([row])
    with enable_packing(model), pytest.raises(ContractError, match=LOST):
        model(**as_one(data[0]["input_ids"][:50]))


def test_packs_made_in_memory_are_known_as_they_are_read(model):
    ids = [[5, 6, *np.random.default_rng(n).integers(3, 97, 8).tolist()] for n in range(2300)]
    data = PackedDataset([{"input_ids": each, "labels": each} for each in ids], seq_len=20)
    assert len(data) > known_packs.MOST_ROWS
    with enable_packing(model), pytest.raises(ContractError, match=LOST):
        model(**as_one(data[1100]["input_ids"]))


@pytest.mark.parametrize(
    "lengths",
    [
        pa.array([3, 4]),
        pa.array([[1, 2], None]),
        pa.array([[0, 3], [9, 1]]),
        pa.array([["a", "b"], ["c"]]),
    ],
)
def test_columns_of_others_with_the_same_name_are_left_alone(model, lengths):
    ids = pa.array([[5, 6, 7], [5, 6, 7, 8]])
    with enable_packing(model):
        before = {*known_packs._KNOWN}  # other tests may hold data sets
        datasets.Dataset(pa.table({"input_ids": ids, "seq_lengths": lengths}))
        model(**as_one([5, 6, 7, 8]))
    assert before == known_packs._KNOWN


def test_warnings_name_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setattr(known_packs, "GUARDS", set())  # none from other tests
    rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(9)]
    tokenizer = DEMO / "tokenizer"
    version = prepare(
        rows,
        tokenizer=tokenizer,
        dataset="numbers",
        format={"template": "alpaca"},
        store=tmp_path,
        progress=False,
        cache=tmp_path / "cache",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        version.train  # noqa: B018 - reading the property warns
        other, cache = pa.table({"q": ["Red", "Blue"], "a": ["Green", "Pink"]}), tmp_path / "cache"
        names = {"query_field": "q", "resp_field": "a"}
        make_supervised_dataset(tokenizer, other, **names, pack_len=512, cache=cache)
    found = [each.filename for each in caught if "several records" in str(each.message)]
    assert found == [__file__, __file__]
