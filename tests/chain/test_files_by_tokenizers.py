"""Prepare every real file with a real tokenizer: published with a clean audit, or refused by name.

Only the first rows of each file are used, unchanged, so that the matrix stays quick;
`test_real_data.py` reads whole files.
"""

import itertools
import json
from pathlib import Path

import pytest

import schemas
from packhouse.errors import TemplateError
from packhouse.recipe import Recipe
from packhouse.run.chain import Prepared, prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version, verify_version

pytestmark = pytest.mark.slow

NUM_ROWS = 200
LABELS = {"label_names": ["negative", "positive"]}
FILES: dict[str, dict] = {
    "alpaca_data.json": {},
    "alpaca_gpt4_eval_1000.jsonl": {},
    "fastchat_dummy_conversation.json": {},
    "glaive_toolcall_en_demo.json": {},
    "gsm8k_test.jsonl": {},
    "gsm8k_train.jsonl": {},
    "llamafactory_alpaca_zh_demo.json": {},
    "oasst_en_100_message.jsonl": {},
    "reason_tool_use_demo_50.jsonl": {},
    "sst2_dev.tsv": {"fields": {"text": "content"}, **LABELS},
    "sst2_train.tsv": {"fields": {"text": "sentence"}, **LABELS},
    "xtuner_openai_sft.jsonl": {},
}
TOKENIZERS = ["bert-base-uncased", "mistral-7b-instruct-v0.3", "qwen2.5-instruct", "qwen3"]
TOOLS = "reason_tool_use_demo_50.jsonl"
FORMATS = {
    (TOOLS, name): {"reasoning": "strip"}
    for name in ("mistral-7b-instruct-v0.3", "qwen2.5-instruct")
}
"""Settings that a file needs with a tokenizer whose template never writes reasoning; one row has
nothing but reasoning.
"""


def test_the_matrix_knows_every_file(shared):
    kinds = {".json", ".jsonl", ".tsv"}
    names = {path.name for path in (shared / "data").iterdir() if path.suffix in kinds}
    assert names - {"PROVENANCE.json"} == set(FILES)
    assert {p.name for p in (shared / "tokenizers").iterdir() if p.is_dir()} == set(TOKENIZERS)


def first_rows(path: Path, folder: Path) -> Path:
    """Write the first rows of the file in its own format."""
    head = folder / path.name
    if path.suffix == ".json":
        head.write_text(json.dumps(json.loads(path.read_bytes())[:NUM_ROWS]))
    else:
        with path.open("rb") as lines:
            head.write_bytes(b"".join(itertools.islice(lines, NUM_ROWS + 1)))
    return head


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    root = tmp_path_factory.mktemp("matrix")

    def run(name: str, tokenizer: str, template: str) -> Prepared:
        recipe = Recipe.model_validate(
            {
                "dataset": Path(name).stem.replace("_", "-"),
                "sources": [{"path": str(first_rows(shared / "data" / name, root)), **FILES[name]}],
                "tokenizer": str(shared / "tokenizers" / tokenizer),
                "validate": {"max_quarantined": 0.5},
                "format": {"template": template, **FORMATS.get((name, tokenizer), {})},
                "pack": {
                    "seq_len": 4096,
                    "over_length": "truncate_turns",
                    "strategy": "none" if template == "sequence_classification" else "best_fit",
                },
                "publish": {"store": str(root / "store"), "ref": tokenizer},
            }
        )
        workspace = Workspace(cache=root / "cache", check=schemas.check)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    return run


# Each file with the next tokenizer in turn, and labelled files with two.
@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        *zip(FILES, itertools.cycle(TOKENIZERS[1:]), strict=False),
        ("sst2_dev.tsv", TOKENIZERS[0]),
        ("gsm8k_test.jsonl", TOKENIZERS[0]),
    ],
)
def test_published_with_a_clean_audit_or_refused_by_name(run, name, tokenizer):
    has_labels = name.startswith("sst2")
    if tokenizer.startswith("bert"):
        if not has_labels:
            with pytest.raises(TemplateError, match="no chat template"):
                run(name, tokenizer, "chat")
            return
        template = "sequence_classification"
    else:
        template = "classification" if has_labels else "chat"

    prepared = run(name, tokenizer, template)

    for line in prepared.ledger:
        line.check()
    bad = sum(sum(line.quarantined.values()) for line in prepared.ledger)
    assert bad == ((name, tokenizer) in FORMATS)
    assert verify_version(open_version(prepared.store, prepared.dataset, tokenizer)).is_intact
    statistics = prepared.published.statistics.values()
    assert sum(s.num_sequences for s in statistics) == prepared.ledger[-1].rows_out
    if template != "sequence_classification":
        assert sum(s.num_trained for s in statistics) > 0
