"""Commands that read a version whose files somebody wrote anew, every digest right."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import packhouse
from packhouse import StreamingPackedDataset
from packhouse.addons.exports.writing import export_version
from packhouse.api import prepare
from packhouse.cli import cli
from packhouse.errors import IntegrityError
from packhouse.records.tables import QUARANTINED
from packhouse.store import open_version
from tests.security.test_escaping import ACTIVE
from tests.store.versions import forged

pytestmark = pytest.mark.usefixtures("own_tokenizers")  # other caches ask the store for them

TOKENIZER = Path(packhouse.__file__).parents[1] / "deployments" / "demo" / "tokenizer"

Read = Callable[[str], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a version: 8 records, a duplicate, a filtered row and a bad one."""
    folder = tmp_path_factory.mktemp("tampered")
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(8)]
    rows += [rows[0], {"instruction": "Drop.", "output": "x"}, {"instruction": "a", "output": ""}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "dataset": "numbers",
        "tokenizer": str(TOKENIZER),
        "sources": [{"path": str(folder / "rows.jsonl"), "where": "instruction <> 'Drop.'"}],
        "pack": {"seq_len": 128},
        "dedup": {"exact": "drop"},
        "format": {"template": "alpaca"},
        "validate": {"max_quarantined": 0.2},
        "publish": {"store": str(folder / "store")},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    prepare(folder / "recipe.yaml", cache=folder / "cache", progress=False)
    return folder


@pytest.fixture
def version(made, tmp_path):
    shutil.copytree(made / "store", tmp_path / "store")
    return tmp_path / "store" / "numbers"


def rewrite(version: Path, kind: str, column: str, value: Any) -> None:
    """Give each row of the files of a kind `value` in a column, and forge what vouches for them."""
    (slot,) = version.glob("v/*/manifest.json")
    manifest = json.loads(slot.read_bytes())
    for entry in manifest["files"]:
        if entry["kind"] != kind:
            continue
        table = pq.read_table(slot.parent / entry["key"])
        at = table.column_names.index(column)
        table = table.set_column(at, column, pa.array([value] * len(table)))
        written = io.BytesIO()
        pq.write_table(table, written, write_page_checksum=True)
        forge_file(slot.parent, entry, written.getvalue())
    slot.write_bytes(forged(manifest))


def forge_file(folder: Path, entry: dict[str, Any], content: bytes) -> None:
    """Write a file of a version anew, and its entry in the manifest as if a run had written it."""
    sha256 = hashlib.sha256(content).hexdigest()
    stem, _, ending = entry["key"].rpartition("-")
    entry["key"] = f"{stem}-{sha256[:12]}.{ending.partition('.')[2]}"
    entry |= {"sha256": sha256, "size": len(content)}
    (folder / entry["key"]).write_bytes(content)


def call(made: Path, version: Path, *words: str) -> str:
    (slot,) = version.glob("v/*/manifest.json")  # by its name: a ref would tell of the change
    places = {"VERSION": f"{version}@{slot.parent.name}", "BEFORE": f"{made}/store/numbers"}
    places |= {"PAGE": str(version / "page.html"), "RECIPE": str(made / "recipe.yaml")}
    words = tuple(places.get(word, word) for word in words)
    done = CliRunner().invoke(cli, words, env={"PACKHOUSE_CACHE": str(made / "cache")})
    assert done.exit_code in (0, 2, 3, 4, 5), (words, done.exit_code, done.exception)
    assert not ACTIVE.search(done.output)
    return done.output


REPORTS = (
    ("report", "VERSION", "-o", "PAGE"),
    ("report", "--diff", "BEFORE", "VERSION", "-o", "PAGE"),
)
RECORDS = (
    *REPORTS,
    ("stats", "VERSION"),
    ("sql", "VERSION", "select * from records"),
    ("sql", "VERSION", "select * from dropped"),
    ("sql", "VERSION", "select * from contents"),
    ("dropped", "VERSION"),
    ("trace", "VERSION", "--file", "rows.jsonl", "--line", "3"),
    ("trace", "VERSION", "--pack", "0", "--token", "3"),
    ("inspect", "VERSION", "--records", "5"),
    ("diff", "BEFORE", "VERSION"),
)
PACKS = (
    *REPORTS,
    ("inspect", "VERSION"),
    ("inspect", "VERSION", "--json"),
    ("inspect", "VERSION", "--records", "5"),
    ("trace", "VERSION", "--pack", "0", "--token", "3"),
    ("sql", "VERSION", "select *, text from packs"),
    ("stats", "VERSION"),
    ("diff", "BEFORE", "VERSION"),
)
BAD = (
    *REPORTS,
    ("quarantine", "ls", "VERSION"),
    ("quarantine", "show", "VERSION"),
    ("inspect", "VERSION", "--quarantined"),
    ("sql", "VERSION", "select *, raw from quarantine"),
)
HOSTILE = "a\x1b[2J\u202e../../x"


@pytest.mark.parametrize(
    ("kind", "column", "value", "commands"),
    [
        ("records", "record_id", None, RECORDS),
        ("records", "record_id", HOSTILE, RECORDS),
        ("records", "source", None, RECORDS),
        ("records", "source", HOSTILE, RECORDS),
        ("records", "row", None, RECORDS),
        ("records", "row", -5, RECORDS),
        ("records", "split", None, RECORDS),
        ("records", "num_tokens", None, RECORDS),
        ("records", "num_tokens", -5, RECORDS),
        ("records", "times", -1, RECORDS),
        ("records", "times", 2**40, RECORDS),
        ("records", "times", 2**62, RECORDS),
        ("records", "row", [1], RECORDS),
        ("records", "times", float("nan"), RECORDS),
        ("records", "repeats", HOSTILE, RECORDS),
        ("data", "input_ids", None, PACKS),
        ("data", "input_ids", HOSTILE, PACKS),
        ("data", "input_ids", -5, PACKS),
        ("data", "input_ids", [2**31 - 1], PACKS),
        ("data", "seq_lengths", [-5], PACKS),
        ("data", "record_ids", [None], PACKS),
        ("data", "input_ids", [None], PACKS),
        ("quarantine", "raw", None, BAD),
        ("quarantine", "detail", HOSTILE, BAD),
        ("quarantine", "row", None, BAD),
    ],
)
def test_a_rewritten_file_is_shown_as_text_or_refused(
    kind, column, value, commands, made, version
) -> None:
    rewrite(version, kind, column, value)
    said = [call(made, version, *words) for words in commands]
    if value is None:  # no file of a run has nulls there
        assert any("null" in each for each in said), said


def test_lengths_of_many_copies_are_those_of_the_copies_one_by_one(made, version) -> None:
    rewrite(version, "records", "times", 2**40)
    (row,) = json.loads(call(made, version, "stats", "VERSION", "--json"))["sources"]
    assert row["tokens"] > 2**40
    assert row["median"] <= row["p90"] <= row["longest"] < 128


def test_a_bomb_for_a_quarantine_file_is_refused_in_little_memory(made, tmp_path) -> None:
    row = {name: "a" for name in QUARANTINED.names}
    row |= {"row": 0, "byte_offset": 0, "raw": b"", "raw_size": 0}
    table = pa.Table.from_pylist([row] * 2000, QUARANTINED)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * 2**20])
    at = QUARANTINED.names.index("detail")
    pq.write_table(
        table.set_column(at, "detail", texts),
        tmp_path / "bad.parquet",
        store_schema=False,
        dictionary_pagesize_limit=2**26,
    )
    assert (tmp_path / "bad.parquet").stat().st_size < 2**20  # of 2 GB
    done = CliRunner().invoke(cli, ["quarantine", "ls", str(tmp_path / "bad.parquet")])
    assert done.exit_code == 2
    assert "memory" in done.output


@pytest.mark.parametrize(
    "line",
    [
        {"source": 5, "row": 0, "step": "validate", "raw": "a"},
        {"source": "rows/x", "row": [1], "step": "validate", "raw": {}},
        {"source": "rows/x", "row": "z", "step": "validate", "raw": None},
        {"source": "rows/x", "row": 0, "step": {}, "raw": "a"},
    ],
)
def test_a_line_to_mend_of_other_types_is_refused(line, made, tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    recipe = {"dataset": "d", "tokenizer": str(TOKENIZER)}
    recipe |= {"sources": [{"path": str(made / "rows.jsonl")}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["quarantine", "retry", str(tmp_path / "recipe.yaml")]
    words += ["--from", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "line 1 of the mended rows has no sound" in done.output


def stream(name: str, cache: Path) -> None:
    list(StreamingPackedDataset(name, cache=cache))


def load(name: str, cache: Path) -> None:
    list(packhouse.load_packed(name, cache=cache))


def export(name: str, cache: Path) -> None:
    root, _, dataset = name.rpartition("/")
    opened = open_version(root, *dataset.split("@"))
    export_version(opened, "trl", cache / "out", cache=cache)


def test_a_file_of_packs_that_is_no_parquet_is_refused_by_name(version, tmp_path) -> None:
    (slot,) = version.glob("v/*/manifest.json")
    manifest = json.loads(slot.read_bytes())
    for entry in manifest["files"]:
        if entry["kind"] == "data":
            forge_file(slot.parent, entry, b"PAR1 and no more")
    slot.write_bytes(forged(manifest))
    for read in (stream, load, export):
        with pytest.raises(IntegrityError, match="cannot be read"):
            read(f"{version}@{slot.parent.name}", tmp_path / "cache")


LAST_RUN = (
    ("dropped", "VERSION"),
    ("explain", "RECIPE"),
    ("plan", "RECIPE"),
    ("quarantine", "ls", "RECIPE"),
    ("trace", "VERSION", "--file", "rows.jsonl", "--line", "3"),
)


@pytest.mark.parametrize("field", ["step", "label", "key", "parts", "shard"])
@pytest.mark.parametrize("value", [None, [1], -5, "../../../../etc", HOSTILE, {"uri": "\x1b[2J"}])
def test_a_rewritten_plan_of_the_last_run_is_checked(field, value, made, version) -> None:
    jobs = json.loads((made / "cache/runs/numbers.json").read_bytes())
    changed = [{**job, field: value} if field in job else job for job in jobs]
    with_last_run(made, version, json.dumps(changed))


@pytest.mark.parametrize("content", ["", "[1]", "null", '{"a": 1}', "[" * 100_000, "\xff"])
def test_a_plan_of_the_last_run_that_is_none_counts_as_none(content, made, version) -> None:
    with_last_run(made, version, content)


def with_last_run(made: Path, version: Path, content: str) -> None:
    path = made / "cache/runs/numbers.json"
    before = path.read_bytes()
    try:
        path.write_text(content, encoding="latin-1")
        for words in LAST_RUN:
            call(made, version, *words)
    finally:
        path.write_bytes(before)
