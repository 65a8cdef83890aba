"""A version with other trainers' formats: publish writes the same bytes as an export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from packhouse.addons.exports import FORMATS, MARKER, export_version
from packhouse.errors import ConfigError, IntegrityError
from packhouse.recipe import load_recipe, parse_recipe
from packhouse.run.chain import plan_jobs, prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version, pull_version, verify_version
from tests.prepared import DEMO


def recipe_of(*settings):
    return load_recipe(DEMO / "recipe.yaml", settings)


def run(recipe, folder):
    workspace = Workspace(cache=folder / "cache")
    prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache=workspace.cache)
    return open_version(recipe.publish.store, "demo")


NUM_SHARDS = {"megatron": 2}


@pytest.fixture(scope="module")
def carrying(tmp_path_factory):
    folder = tmp_path_factory.mktemp("carrying")
    store = f"publish.store={folder / 'store'}"
    exports = [{"format": name, "shards": NUM_SHARDS.get(name, 1)} for name in FORMATS]
    return run(recipe_of(store, f"publish.exports={json.dumps(exports)}"), folder)


def test_the_manifest_lists_every_file_and_all_are_intact(carrying, tmp_path):
    listed = {entry.key for entry in carrying.files("exports")}

    assert {key.split("/")[1] for key in listed} == set(FORMATS)
    assert "exports/trl/train.parquet" in listed
    assert "exports/megatron/eval-00001-of-00002.idx.parquet" in listed
    assert {"exports/mds/train/index.json", "exports/mds/train/shard.00000.mds"} <= listed
    report = verify_version(carrying)
    assert report.is_intact
    assert report.num_rows == sum(entry.rows for entry in carrying.files())
    pulled = pull_version(carrying, tmp_path / "copy")
    assert (pulled / "exports" / "arrow" / "train.arrow").is_file()


def without_exports(opened):
    files = tuple(entry for entry in opened.manifest.files if entry.kind != "exports")
    return replace(opened, manifest=replace(opened.manifest, files=files))


@pytest.mark.parametrize("export_format", FORMATS)
def test_publish_and_export_write_the_same_bytes(carrying, tmp_path, export_format):
    plain = without_exports(carrying)
    cache, shards = tmp_path / "cache", NUM_SHARDS.get(export_format, 1)
    copied = export_version(
        carrying, export_format, tmp_path / "copied", num_shards=shards, cache=cache
    )
    made = export_version(plain, export_format, tmp_path / "made", num_shards=shards, cache=cache)

    home = f"exports/{export_format}/"
    listed = {e.key.removeprefix(home): e.sha256 for e in carrying.files("exports")}
    assert copied.files == made.files
    assert copied.files.items() <= listed.items()
    markers = [(folder / MARKER).read_text() for folder in (copied.folder, made.folder)]
    assert markers[0] == markers[1]


def test_a_damaged_export_is_not_handed_out(carrying, tmp_path):
    (entry,) = (e for e in carrying.files("exports") if e.key == "exports/jsonl/eval.jsonl")
    file = Path(carrying.uri(entry))
    whole = file.read_bytes()
    file.chmod(0o644)
    try:
        file.write_bytes(whole.replace(b"1", b"2", 1))
        with pytest.raises(IntegrityError, match=r"eval\.jsonl"):
            export_version(carrying, "jsonl", tmp_path / "out", cache=tmp_path)
    finally:
        file.write_bytes(whole)
    assert not (tmp_path / "out").exists()


def test_listed_exports_are_part_of_the_version_and_their_order_is_not():
    def version(*settings):
        return plan_jobs(recipe_of(*settings)).version_id

    plain = version()
    assert version("publish.exports=[]") == plain
    both = version("publish.exports=[trl, mds]")
    assert both == version("publish.exports=[mds, trl, mds]")
    assert len({plain, both, version("publish.exports=[trl]")}) == 3


def test_more_shards_than_packs_stop_a_run_before_its_files_are_made(tmp_path):
    recipe = recipe_of(
        f"publish.store={tmp_path / 'store'}", "publish.exports=[{format: trl, shards: 999}]"
    )
    with pytest.raises(ConfigError, match=r"'eval' has 8 rows, too few for 999 shards"):
        run(recipe, tmp_path)
    assert not list((tmp_path / "cache").rglob("train-*.parquet"))


@pytest.mark.parametrize(
    ("exports", "message"),
    [
        ("[{format: mds, shards: 2}]", "mds chooses its own shards"),
        ("[{format: trl, shards: 0}]", r"exports.0.shards' must be at least 1"),
        ("[{format: trl, shards: 10001}]", r"exports.0.shards' must be at most 10,000"),
        ("[{format: trl, shards: true}]", "must not be a boolean"),
        ("[{format: trl, shard: 2}]", "did you mean 'shards'"),
        ("[{shards: 2}]", "'publish.exports.0.format' is missing"),
        ("[trl, {format: trl, shards: 2}]", "'trl' more than once with different shard counts"),
        ("[megatorn]", "did you mean 'megatron'"),
        ("[7]", "exports.0"),
    ],
)
def test_an_invalid_export_is_reported(exports, message):
    with pytest.raises(ConfigError, match=message):
        recipe_of(f"publish.exports={exports}")


def test_classes_are_refused_by_formats_without_a_place_for_them(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"t {n}", "label": n % 2}) + "\n" for n in range(40))
    )
    source = {"path": str(rows), "format": "classification", "label_names": ["no", "yes"]}

    def publish(name):
        recipe = {
            "dataset": "demo",
            "sources": [source],
            "tokenizer": str(DEMO / "tokenizer"),
            "format": {"template": "sequence_classification"},
            "pack": {"strategy": "none", "seq_len": 64},
            "audit": {"max_duplicates": 1, "min_answer_coverage": 0},
            "publish": {"store": str(tmp_path / "store"), "exports": [name]},
        }
        return run(parse_recipe(recipe), tmp_path)

    with pytest.raises(ConfigError, match="'trl' cannot store the class"):
        publish("trl")
    assert publish("arrow").files("exports")
