"""A trainer learns from an export exactly what the version contains, token by token."""

import functools
import importlib.util
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import msgpack
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from packhouse.addons import exports as writing
from packhouse.addons.exports import FORMATS, export as export_command, export_version
from packhouse.errors import ConfigError, IntegrityError, VersionNotFoundError
from packhouse.recipe import load_recipe
from packhouse.run.chain import plan_jobs
from tests.exports import readers
from tests.prepared import DEMO

SPLITS = ["train", "eval"]


GOLDEN = Path(__file__).parents[1] / "golden" / "versions"


@pytest.fixture(scope="module")
def exported(opened, cache, tmp_path_factory):
    @functools.cache
    def export(export_format: str) -> Path:
        folder = tmp_path_factory.mktemp("exported") / "out"
        return export_version(opened, export_format, folder, cache=cache).folder

    return export


@pytest.fixture(scope="module")
def compact(publish):
    return publish(layout="compact", file_format="jsonl")


@pytest.mark.parametrize("split", SPLITS)
def test_trl_learns_the_targets_through_its_own_collator(exported, targets, split):
    sft_trainer = pytest.importorskip("trl.trainer.sft_trainer", reason="TRL is not installed")
    rows = pq.read_table(exported("trl") / f"{split}.parquet").to_pylist()
    collate = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    for row, expected in zip(rows, targets(split), strict=True):
        batch = collate([row])
        assert "attention_mask" not in batch
        ids, labels, positions = (
            batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids")
        )
        assert readers.unshifted(ids, labels, readers.restarts(positions)) == expected
        assert positions == row["position_ids"]


@pytest.mark.parametrize("split", SPLITS)
def test_axolotl_gets_one_record_a_row_so_that_its_mask_of_ones_leaks_nothing(
    exported, targets, split
):
    rows = pq.read_table(exported("axolotl") / f"{split}.parquet").to_pylist()

    assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in rows)
    assert [len(row["input_ids"]) for row in rows] == {"train": [3, 2, 5, 1, 4, 2], "eval": [4]}[
        split
    ]
    learnt = [
        readers.unshifted(row["input_ids"], row["labels"], [len(row["input_ids"])]) for row in rows
    ]
    assert list(chain(*learnt)) == list(chain(*targets(split)))


@pytest.mark.parametrize("split", SPLITS)
def test_megatron_bridge_learns_the_targets_after_its_own_slicing(exported, targets, split):
    table = pq.read_table(exported("megatron") / f"{split}.idx.parquet")

    assert table.column_names == ["input_ids", "loss_mask", "seq_start_id"]
    for row, expected in zip(table.to_pylist(), targets(split), strict=True):
        assert readers.megatron(*row.values()) == expected
        assert row["seq_start_id"][0] == 0


@pytest.mark.slow
def test_mds_shards_are_read_by_mosaicml_streaming(exported, targets):
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed")
    folder = exported("mds")
    folders = [str(folder / split) for split in SPLITS]
    reader = Path(__file__).with_name("mds_reader.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(reader), *folders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]

    for split, place in zip(SPLITS, folders, strict=True):
        own = [row for row in rows if row["folder"] == place]
        learnt = [
            readers.unshifted(row["input_ids"], row["labels"], row["seq_lengths"]) for row in own
        ]
        assert learnt == targets(split)
        assert [readers.restarts(row["position_ids"]) for row in own] == [
            row["seq_lengths"] for row in own
        ]


def msgpack_rows(data):
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return unpacker


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["msgpack", "jsonl"])
def test_streams_of_maps_hold_the_targets(exported, targets, split, kind):
    data = (exported(kind) / f"{split}.{kind}").read_bytes()
    rows = msgpack_rows(data) if kind == "msgpack" else map(json.loads, data.splitlines())

    for row, expected in zip(rows, targets(split), strict=True):
        assert list(row) == ["input_ids", "labels", "position_ids"]
        boundaries = readers.restarts(row["position_ids"])
        assert readers.unshifted(row["input_ids"], row["labels"], boundaries) == expected


def test_msgpack_without_its_package_is_refused_with_what_to_install(
    opened, cache, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.setattr(writing, "run_in_worker", lambda call, **_: call())  # it lacks the package
    with pytest.raises(
        ConfigError, match=r"needs msgpack, which is not installed: pip install .*\[ms"
    ):
        export_version(opened, "msgpack", tmp_path / "out", cache=cache)
    recipe = load_recipe(DEMO / "recipe.yaml", ["publish.exports=[msgpack]"])
    with pytest.raises(ConfigError, match="needs msgpack"):
        plan_jobs(recipe)  # before any work


@pytest.mark.parametrize("split", SPLITS)
def test_arrow_files_are_mapped_by_datasets(exported, targets, split):
    from datasets import Dataset

    data = Dataset.from_file(str(exported("arrow") / f"{split}.arrow"))

    assert "record_ids" in data.column_names
    for row, expected in zip(data, targets(split), strict=True):
        learnt = readers.unshifted(row["input_ids"], row["labels"], row["seq_lengths"])
        assert learnt == expected


@pytest.mark.parametrize("export_format", FORMATS)
def test_layouts_and_file_formats_export_the_same_bytes(
    opened, compact, cache, tmp_path, export_format
):
    first = export_version(opened, export_format, tmp_path / "a", cache=cache)
    other = export_version(compact, export_format, tmp_path / "b", cache=cache)
    assert other.files == first.files


def test_an_export_describes_itself_and_a_failed_one_leaves_nothing(publish, cache, tmp_path):
    opened = publish(layout="compact")
    export_version(opened, "trl", tmp_path / "out", cache=cache)
    facts = json.loads((tmp_path / "out" / ".packhouse.json").read_text())
    assert facts["version"] == "0a1b.g0"
    assert set(facts["files"]) == {"train.parquet", "eval.parquet"}

    with pytest.raises(ConfigError, match=r"is not empty\. Export to a new folder"):
        export_version(opened, "trl", tmp_path / "out", cache=cache)
    for name, message in (("tfrecord", "known: trl, axolotl"), ("megatorn", "did you mean 'meg")):
        with pytest.raises(ConfigError, match=f"unknown export format '{name}'; {message}"):
            export_version(opened, name, tmp_path / "new", cache=cache)
    with pytest.raises(VersionNotFoundError, match=r"no split 'test'[.] Use one of: train, eval"):
        export_version(opened, "trl", tmp_path / "new", splits=["test"], cache=cache)

    entry = opened.files(split="eval")[0]
    file = Path(opened.uri(entry))
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        export_version(opened, "trl", tmp_path / "new", cache=tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "out"]


def test_the_command_writes_an_export(opened, cache, tmp_path):
    out = tmp_path / "out"
    address = f"{opened.store.uri}/made@latest"
    arguments = [address, str(out), "--to", "jsonl", "--split", "train", "--cache", str(cache)]

    done = CliRunner().invoke(export_command, arguments)

    assert done.exit_code == 0, done.output
    assert done.output == f"made 0a1b.g0 as jsonl:\n  {out / 'train.jsonl'}\n"
    assert len((out / "train.jsonl").read_text().splitlines()) == 3
    again = CliRunner().invoke(
        export_command, [*arguments[:1], str(tmp_path / "b"), *arguments[2:], "--json"]
    )
    assert json.loads(again.output)["files"].keys() == {"train.jsonl"}


def test_several_versions_are_written_in_one_call(cache, tmp_path):
    stores = [str(GOLDEN / name) for name in ("labels-parquet", "labels-arrow")]
    arguments = [str(tmp_path / "out"), "--to", "jsonl", "--cache", str(cache), "--json"]
    done = CliRunner().invoke(export_command, [*stores, *arguments])
    assert done.exit_code == 0, done.output
    written = [(each["dataset"], each["folder"]) for each in json.loads(done.output)]
    assert written == [(Path(s).name, str(tmp_path / "out" / Path(s).name)) for s in stores]
    alone = CliRunner().invoke(export_command, [stores[0], str(tmp_path / "alone"), *arguments[1:]])
    assert json.loads(alone.output)["files"] == json.loads(done.output)[0]["files"]
    twice = CliRunner().invoke(export_command, [stores[0], stores[0], *arguments])
    assert "would hold two versions. Export them in separate calls" in str(twice.exception)


def test_places_that_cannot_take_an_export_are_refused_in_a_sentence(
    opened, cache, tmp_path, monkeypatch
):
    def export(dest):
        return export_version(opened, "jsonl", dest, splits=["train", "train"], cache=cache)

    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for dest, message in (
        (".", "cannot be replaced"),
        ("sub/..", "cannot be replaced"),
        (tmp_path / "link", "is a symbolic link"),
        (tmp_path / "file" / "out", "cannot write in"),
        (Path(opened.store.uri) / "out", "is inside the store"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(dest)
    assert export("new/../out").splits == ("train",)
