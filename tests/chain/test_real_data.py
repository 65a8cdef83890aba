"""Real files with real tokenizers, by the recipes in deployments/recipes and without."""

import itertools
import json
import os
from pathlib import Path

import pytest

import schemas
from packhouse.errors import TemplateError
from packhouse.recipe import Recipe, load_recipe
from packhouse.run.chain import Prepared, prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version, verify_version
from tests.prepared import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "deployments" / "recipes"
NUM_ROWS = 500  # enough for a side of 256 rows

# Files of shared/data that no recipe reads, each with a tokenizer.
FILES = {
    "alpaca_gpt4_eval_1000.jsonl": "mistral-7b-instruct-v0.3",
    "glaive_toolcall_en_demo.json": "qwen3",
    "llamafactory_alpaca_zh_demo.json": "qwen2.5-instruct",
    "reason_tool_use_demo_50.jsonl": "qwen2.5-instruct",
}
SETTINGS = {
    # One row has nothing but reasoning, which this tokenizer's template never writes.
    "reason_tool_use_demo_50.jsonl": {"format": {"template": "chat", "reasoning": "strip"}},
}
LIKE_OTHERS = {"gsm8k_test.jsonl", "sst2_dev.tsv"}  # recipes read other parts of the same data
HEADS = {"gsm8k": "gsm8k_train.jsonl", "sst2": "sst2_train.tsv", "sst2-bert": "sst2_train.tsv"}
ROWS = {
    "gsm8k": (NUM_ROWS, {}),
    "fastchat": (500, {}),
    "oasst": (100, {}),
    "messages": (128, {}),
    "sst2": (NUM_ROWS, {}),
    "sst2-bert": (NUM_ROWS, {}),
}


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    """Run a recipe; all share one cache and one store."""
    root = tmp_path_factory.mktemp("real")

    def run(recipe: Recipe) -> Prepared:
        workspace = Workspace(cache=root / "cache", check=schemas.check)
        place = recipe.publish.model_copy(update={"store": str(root / "store")})
        recipe = recipe.model_copy(update={"publish": place})
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    return run


def assert_sound(prepared: Prepared) -> None:
    for line in prepared.ledger:
        line.check()
    assert verify_version(open_version(prepared.store, prepared.dataset)).is_intact
    published = sum(side.num_sequences for side in prepared.published.statistics.values())
    assert published == prepared.ledger[-1].rows_out


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_a_recipe_is_accounted_for(run, shared, tmp_path, monkeypatch, name):
    """Large files by their first rows; alpaca.yaml is prepared below."""
    monkeypatch.setenv("PACKHOUSE_SHARED", str(shared))
    overrides = ()
    if name in HEADS:
        with (shared / "data" / HEADS[name]).open("rb") as lines:
            head = itertools.islice(lines, NUM_ROWS + HEADS[name].endswith(".tsv"))
            (tmp_path / HEADS[name]).write_bytes(b"".join(head))
        overrides = (f"sources.0.path={tmp_path / HEADS[name]}",)
    prepared = run(load_recipe(RECIPES / f"{name}.yaml", overrides))

    assert (prepared.ledger[0].rows_in, dict(prepared.ledger[0].quarantined)) == ROWS[name]
    assert_sound(prepared)


@pytest.mark.parametrize("name", FILES)
def test_other_real_files_are_published_with_a_clean_audit(run, shared, name):
    recipe = {
        "dataset": Path(name).stem.replace("_", "-"),
        "sources": [{"path": str(shared / "data" / name)}],
        "tokenizer": str(shared / "tokenizers" / FILES[name]),
        "validate": {"max_quarantined": 0.1},
        "pack": {"seq_len": 4096, "over_length": "truncate_turns"},
    }
    prepared = run(Recipe.model_validate(recipe | SETTINGS.get(name, {})))

    bad = sum(sum(line.quarantined.values()) for line in prepared.ledger)
    assert bad == (name == "reason_tool_use_demo_50.jsonl")
    assert_sound(prepared)


def test_a_tokenizer_without_a_chat_template_is_refused_by_name(run, shared):
    recipe = {
        "dataset": "gsm8k",
        "sources": [{"path": str(shared / "data" / "gsm8k_test.jsonl")}],
        "tokenizer": str(shared / "tokenizers" / "bert-base-uncased"),
    }
    with pytest.raises(TemplateError, match="no chat template"):
        run(Recipe.model_validate(recipe))


def test_every_real_file_is_tested(shared):
    kinds = {".json", ".jsonl", ".tsv"}
    names = {path.name for path in (shared / "data").iterdir() if path.suffix in kinds}
    of_recipes = "".join(path.read_text() for path in RECIPES.glob("*.yaml"))
    others = {name for name in names if name not in of_recipes} - {"PROVENANCE.json"}
    assert others == LIKE_OTHERS | set(FILES)


MEMORY = """
import pathlib, re, sys
from packhouse.cli import cli
cli(sys.argv[1:], standalone_mode=False)
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
"""


def peak_mb(shared: Path, folder: Path, source: Path) -> tuple[float, dict]:
    arguments = [
        *("prepare", str(RECIPES / "alpaca.yaml"), "--json", "--cache", str(folder / "cache")),
        *("--set", f"publish.store={folder / 'store'}", "--set", f"sources.0.path={source}"),
    ]
    environment = {**os.environ, "PACKHOUSE_SHARED": str(shared)}
    result = python("-c", MEMORY, *arguments, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return int(result.stderr.splitlines()[-1]) / 1024, json.loads(result.stdout)


def test_memory_does_not_hold_the_rows_of_alpaca_and_each_is_counted(shared, tmp_path):
    # 331 MB, and 428 for a file of four times the size; the rows as objects would take 240 MB more.
    peak, report = peak_mb(shared, tmp_path, shared / "data" / "alpaca_data.json")
    assert peak < 480
    validated = report["ledger"][0]
    assert (validated["rows_in"], validated["quarantined"]) == (52_002, {"empty_answer": 28})
