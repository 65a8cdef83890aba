"""Compare dart-math's functions on the same rows: it has no tests. Its checkout is importable."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dart_math.train import PackedDataset, preprocess
from dart_math.utils import PromptTemplate
from datasets import Dataset
from transformers import AutoTokenizer

from packhouse import make_supervised_dataset
from packhouse.pack.strategies import plan_packs

TOKENIZERS = Path(os.environ.get("PACKHOUSE_SHARED", "../shared")) / "tokenizers"
ROWS = [
    {
        "query": f"What is {n} + {n}? Answer\nplease",
        "response": f"It is {2 * n}.\nThe answer is {2 * n}",
    }
    for n in range(30)
]
TEMPLATES = (
    *("qa", "alpaca", "wizardmath-cot", "deepseekmath", "deepseekmath-tool"),
    *("xwinmath", "mammoth2-cot", "llama3-math"),
)


@pytest.mark.parametrize("given", ["name", "object"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizer", ["mistral-7b-instruct-v0.3", "qwen2.5-instruct", "qwen3"])
def test_ids_and_labels_are_those_of_preprocess(
    tokenizer: str, name: str, given: str, tmp_path: Path
) -> None:
    if not (TOKENIZERS / tokenizer).is_dir():
        pytest.skip("PACKHOUSE_SHARED has no such tokenizer")
    template = PromptTemplate.load_from_id_or_path(name)
    theirs = AutoTokenizer.from_pretrained(TOKENIZERS / tokenizer, model_max_length=4096)
    rows: Any = make_supervised_dataset(
        str(TOKENIZERS / tokenizer),
        Dataset.from_list(ROWS),
        prompt_template=f"dart-math/{name}" if given == "name" else template,
        cache=tmp_path,
        shuffle_seed=None,
    )
    sources = [template.make_full_prompt(row["query"]) for row in ROWS]
    targets = [row["response"] + theirs.eos_token for row in ROWS]
    expected = preprocess(theirs, sources, targets)

    assert len(rows) == len(ROWS)
    for number, (ids, labels) in enumerate(
        zip(expected["input_ids"], expected["labels"], strict=True)
    ):
        assert rows[number]["input_ids"].tolist() == ids.tolist()
        assert rows[number]["labels"].tolist() == labels.tolist()


@pytest.mark.parametrize("seed", range(50))
def test_packs_are_those_of_pack_dps_by_len(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 513, 500)
    plan = plan_packs(lengths, 512, "next_fit", None)

    packs = [pack.tolist() for pack in np.split(plan.order, plan.pack_offsets[1:-1])]
    assert packs == PackedDataset.pack_dps_by_len(lengths.tolist(), 512)
