"""The recipes in deployments/recipes on the real files they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import schemas
from packhouse.recipe import load_recipe
from packhouse.records.tables import read_table
from packhouse.run.cache import Workspace
from packhouse.run.chain import Prepared, prepare
from packhouse.run.local_pool import LocalRunner
from packhouse.store import open_version, verify_version
from packhouse.tokenize import load_snapshot

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "deployments" / "recipes"
ROWS = {
    "alpaca": (52_002, {"empty_answer": 28}),
    "gsm8k": (7_473, {}),
    "fastchat": (500, {}),
    "oasst": (100, {}),
    "messages": (128, {}),
    "sst2": (67_349, {}),
    "sst2-bert": (67_349, {}),
}


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    """Run a recipe of deployments/recipes; all share one cache and one store."""
    root = tmp_path_factory.mktemp("real")
    patch = pytest.MonkeyPatch()
    patch.setenv("PACKHOUSE_SHARED", str(shared))

    def run(name: str, *overrides: str) -> Prepared:
        recipe = load_recipe(
            RECIPES / f"{name}.yaml", (f"publish.store={root / 'store'}", *overrides)
        )
        workspace = Workspace(cache=root / "cache", check=schemas.check)
        return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

    yield run
    patch.undo()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_of_a_real_file_is_accounted_for(run, name):
    prepared = run(name)

    rows, quarantined = ROWS[name]
    assert prepared.ledger[0].rows_in == rows
    assert dict(prepared.ledger[0].quarantined) == quarantined
    opened = open_version(prepared.store, prepared.dataset)
    assert verify_version(opened).is_intact
    published = sum(side.num_sequences for side in prepared.published.statistics.values())
    assert published == prepared.ledger[-1].rows_out


@pytest.mark.parametrize("seq_len", [2048, 4096, 8192, 32768])
def test_alpaca_is_packed_within_one_pack_of_the_lower_bound(run, seq_len):
    prepared = run("alpaca", f"pack.seq_len={seq_len}", "split.eval_fraction=0")

    train = prepared.published.statistics["train"]
    assert train.num_tokens == 5_363_929
    assert train.num_packs <= -(-5_363_929 // seq_len) + 1
    opened = open_version(prepared.store, "alpaca", prepared.version)
    folder = Path(prepared.store) / "alpaca" / "v" / prepared.version
    packed = pa.concat_tables(
        pq.read_table(folder / entry.key, columns=["record_ids"]) for entry in opened.files("data")
    )
    records = pq.read_table(folder / opened.files("records")[0].key, columns=["record_id"])
    assert (
        packed["record_ids"].combine_chunks().flatten().sort()
        == records["record_id"].combine_chunks().sort()
    )


def test_what_is_trained_decodes_to_the_answer_and_its_end_token(run, shared):
    """Every row of Stanford Alpaca; a token that begins in the prompt is untrained and counted."""
    from tokenizers import Tokenizer

    prepared = run("alpaca")
    steps = {receipt.step: receipt for receipt in prepared.receipts}
    texts = read_table(steps["format"].path("formatted.arrow"))
    tokens = read_table(steps["tokenize"].path("tokenized.arrow"))
    snapshot = load_snapshot(shared / "tokenizers" / "qwen2.5-instruct")
    tokenizer = Tokenizer.from_str(snapshot.backend)
    trained_ids, answers = [], []
    for text, row in zip(texts.to_pylist(), tokens.to_pylist(), strict=True):
        (span,) = text["trained_spans"]
        (trained,) = row["trained_ranges"]
        answers.append(text["text"].encode()[span["start"] : span["end"]].decode())
        trained_ids.append(row["input_ids"][trained["start"] : trained["end"]])
    decoded = tokenizer.decode_batch(trained_ids, skip_special_tokens=False)
    differing = [(a, d) for a, d in zip(answers, decoded, strict=True) if a != d]
    straddles = steps["tokenize"].facts.notes["straddles_start"]
    assert len(differing) == straddles
    assert all(answer.endswith(text) and text.endswith("<|im_end|>") for answer, text in differing)


MEMORY = """
import pathlib, re, sys
from packhouse.cli import cli
cli(sys.argv[1:], standalone_mode=False)
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
"""


def peak_mb(shared: Path, folder: Path, source: Path) -> float:
    arguments = [
        *("prepare", str(RECIPES / "alpaca.yaml"), "--json", "--cache", str(folder / "cache")),
        *("--set", f"publish.store={folder / 'store'}", "--set", f"sources.0.path={source}"),
    ]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        cwd=ROOT,
        env={**os.environ, "PACKHOUSE_SHARED": str(shared)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stderr.splitlines()[-1]) / 1024


def test_memory_stays_under_a_gigabyte_and_does_not_grow_with_the_source(shared, tmp_path):
    rows = json.loads((shared / "data" / "alpaca_data.json").read_bytes())
    large = tmp_path / "four_times.json"
    with large.open("w") as file:
        file.write("[")
        for copy in range(4):  # no two rows are equal
            for row in rows:
                row = {**row, "output": f"{row['output']} [{copy}]" if row["output"] else ""}
                file.write(("" if file.tell() == 1 else ",\n") + json.dumps(row))
        file.write("]")
    small_mb = peak_mb(shared, tmp_path / "one", shared / "data" / "alpaca_data.json")
    large_mb = peak_mb(shared, tmp_path / "four", large)

    assert small_mb < 1024
    assert large_mb < 1.5 * small_mb  # 331 and 428 MB: the rows as objects would take 240 MB more
