"""A forger changes one thing in a run's manifest and makes every digest again: `verify` sees it.

No ref is asked: the versions here have none, and are opened by their id.
"""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import schemas
from packhouse.chain import prepare
from packhouse.cli import cli
from packhouse.engine.local_pool import LocalRunner
from packhouse.engine.workspace import Workspace
from packhouse.recipe import load_recipe
from packhouse.store import open_store, open_version, verify_version
from packhouse.store.accounts import manifest_problems
from packhouse.store.manifest import parse_slot
from tests.store.versions import forged

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The demo as a run publishes it, with one other format."""
    place = tmp_path_factory.mktemp("published")
    exports = "publish.exports=[jsonl, {format: trl, shards: 2}]"
    overrides = (f"publish.store={place / 'store'}", exports)
    recipe = load_recipe(DEMO, overrides)
    workspace = Workspace(cache=place / "cache", check=schemas.check)
    return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)


class Version:
    """A copy of the published version, without its refs, for a test to change."""

    def __init__(self, published, root):
        shutil.copytree(Path(published.store), root)
        self.refs = shutil.move(root / "demo" / "refs", root / "refs-put-aside")
        self.root, self.name = root, published.version
        self.folder = root / "demo" / "v" / published.version

    def change(self, change):
        path = self.folder / "manifest.json"
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(forged(document))

    def problems(self):
        return verify_version(open_version(open_store(str(self.root)), "demo", self.name)).problems


@pytest.fixture
def version(published, tmp_path):
    return Version(published, tmp_path / "store")


def test_an_unchanged_version_has_no_problem(version):
    assert version.problems() == ()
    version.change(lambda document: None)
    assert version.problems() == ()


def without(kind, split=None):
    def change(document):
        document["files"] = [
            entry
            for entry in document["files"]
            if entry["kind"] != kind or split not in (None, entry["split"])
        ]

    return change


def erase(*path):
    def change(document):
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = type(document[path[-1]])()

    return change


def put(value, *path):
    def change(document):
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


def without_key(key):
    def change(document):
        assert key in [entry["key"] for entry in document["files"]]
        document["files"] = [entry for entry in document["files"] if entry["key"] != key]

    return change


def hide_bad_rows(document):
    erase("counts", "ledger", 0, "quarantined")(document)


def hide_bad_rows_and_their_file(document):
    hide_bad_rows(document)
    without("quarantine")(document)


def never_read_bad_rows(document):
    hide_bad_rows_and_their_file(document)
    document["counts"]["ledger"][0]["rows_in"] -= 9


def hide_dropped_rows(document):
    pack = document["counts"]["ledger"][3]
    pack["dropped"], pack["rows_in"] = {}, pack["rows_out"]


def hide_a_dropped_row_of_a_source(document):
    own = document["counts"]["sources"]["chats"]
    own["packed"] += own.pop("over_seq_len")


def move_rows_to_another_source(document):
    sources = document["lineage"]["sources"]
    sources[0]["rows"] += 9
    sources[1]["rows"] -= 9


def rename_a_reason(document):
    bad = document["counts"]["ledger"][0]["quarantined"]
    bad["harmless"] = bad.pop("encoding")


def no_trace_of_a_run(document):
    for name in ("counts", "audit", "lineage", "configuration", "engines", "libraries"):
        document[name] = {}


def no_trace_and_no_schema(document):
    no_trace_of_a_run(document)
    document["schema"], document["schema_fingerprint"] = {}, ""


ATTACKS = {
    "no quarantine file": (without("quarantine"), "rows quarantined: 9; in quarantine files: 0"),
    "no records file": (without("records"), "this is missing: the records file"),
    "no card": (without("card"), "the card (README.md), which every version has, is missing"),
    "no eval": (without("data", "eval"), "num_packs of split 'eval': 8; in its files: 0"),
    "no export": (without("exports"), "export 'jsonl' of train, eval is missing"),
    "half an export": (without("exports", "eval"), "export 'jsonl' of eval is missing"),
    "a shard of an export": (
        without_key("exports/trl/train-00001-of-00002.parquet"),
        "export 'trl-00001-of-00002' of train is missing",
    ),
    "bad rows": (hide_bad_rows, "step 'validate' lost 9 of 304 rows without a reason"),
    "bad rows, no file": (hide_bad_rows_and_their_file, "step 'validate' lost 9 of 304 rows"),
    "bad rows unread": (never_read_bad_rows, "rows read: 295; in lineage: 304"),
    "bad rows renamed": (
        rename_a_reason,
        "step 'validate', encoding: 0 rows by its counts; its records",
    ),
    "bad rows elsewhere": (
        move_rows_to_another_source,
        "source 'chats', quarantined: 12 rows by its counts",
    ),
    "dropped rows": (hide_dropped_rows, "'tokenize' put out 295 rows but 'pack' took in 294"),
    "dropped row of a source": (hide_a_dropped_row_of_a_source, "records packed: 294; by source"),
    "tokens": (put(None, "counts", "ledger", 3, "tokens_out"), "put out None tokens but 'split'"),
    "no counts": (erase("counts"), "this is missing: the ledger of all steps, statistics, counts"),
    "no ledger": (erase("counts", "ledger"), "this is missing: the ledger of all steps"),
    "half a ledger": (
        lambda document: document["counts"]["ledger"].pop(0),
        "this is missing: the ledger of all steps",
    ),
    "no statistics": (erase("counts", "statistics"), "this is missing: statistics"),
    "no sides": (erase("counts", "sides"), "this is missing: counts of sides"),
    "no counts of sources": (erase("counts", "sources"), "this is missing: counts of sources"),
    "no audit": (erase("audit"), "this is missing: the audit"),
    "audit of no source": (erase("audit", "sources"), "this is missing: the audit"),
    "audit of no pack": (erase("audit", "packs"), "this is missing: the audit"),
    "a finding": (
        put(0, "audit", "dataset", "control_text"),
        "control_text in the audit: 0; by source: 8",
    ),
    "no lineage": (erase("lineage"), "sources in the lineage, the tokenizer in the lineage"),
    "no tokenizer": (erase("lineage", "tokenizer"), "this is missing: the tokenizer"),
    "half the lineage": (
        lambda document: document["lineage"]["sources"].pop(0),
        "rows read: 304; in lineage: 204",
    ),
    "no configuration": (erase("configuration"), "this is missing: the configuration"),
    "seq_len": (put(4096, "configuration", "pack", "seq_len"), "seq_len of split 'eval': 512; in"),
    "no engines": (erase("engines"), "this is missing: versions of the engines"),
    "no libraries": (erase("libraries"), "this is missing: versions of the libraries"),
    "no content id": (erase("content_id"), "this is missing: the content id"),
    "no trace of a run": (no_trace_of_a_run, "a run wrote this version, and this is missing"),
    "no schema": (no_trace_and_no_schema, "schema differs from the manifest's"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_forger_erases_or_drops_is_missed_without_a_ref(version, attack):
    change, expected = ATTACKS[attack]
    version.change(change)
    assert any(expected in problem for problem in version.problems()), version.problems()
    done = CliRunner().invoke(cli, ["verify", f"{version.root}/demo@{version.name}"])
    assert done.exit_code == 5, done.output


def test_files_that_hold_other_rows_than_their_counts_say_are_found(version):
    """The forger writes a new quarantine file, under its right name and digests."""
    (path,) = (version.folder / "quarantine").iterdir()
    table = pq.read_table(path)
    fewer = path.with_name("new.parquet")
    pq.write_table(table.slice(0, 4), fewer, write_page_checksum=True)
    sha256 = hashlib.sha256(fewer.read_bytes()).hexdigest()
    name = f"all-00000-of-00001-{sha256[:12]}.parquet"

    def change(document):
        (entry,) = (each for each in document["files"] if each["kind"] == "quarantine")
        entry |= {"key": f"quarantine/{name}", "sha256": sha256, "size": fewer.stat().st_size}

    version.change(change)
    fewer.rename(path.with_name(name))
    (problem,) = version.problems()
    assert "4 rows, and the manifest says 9" in problem


def never_read_bad_rows_anywhere(document):
    """The same lie in ledger, lineage and files."""
    never_read_bad_rows(document)
    with_bad = Counter({"chats/chats.jsonl": 3, "instructions/instructions.jsonl": 6})
    for source in document["lineage"]["sources"]:
        source["rows"] -= with_bad[source["file"]]


def test_a_lie_that_is_told_everywhere_is_found_by_a_ref_only(version):
    """As docs/reliability.md says: without a ref nothing says how many rows the source had."""
    version.change(never_read_bad_rows_anywhere)
    assert version.problems() == ()
    shutil.move(version.refs, version.root / "demo" / "refs")
    (problem,) = version.problems()
    assert "a ref recorded" in problem


def test_a_version_of_an_earlier_packhouse_agrees_with_itself():
    path = Path(__file__).parent / "published" / "demo-manifest.json"
    assert manifest_problems(parse_slot(path.read_bytes())) == []
