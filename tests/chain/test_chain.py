import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.errors import QuarantineLimitError, SequenceTooLongError
from packhouse.records.table_schemas import PACKED
from packhouse.store import open_version
from tests.prepared import python

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"
STEPS = [*("validate", "format", "tokenize", "pack", "split", "audit", "files", "publish")]


def test_rows_become_a_version_with_every_record_in_exactly_one_pack(project):
    prepared = project.prepare()

    opened = open_version(prepared.store, "sums")
    assert opened.version == prepared.version
    packed = []
    for entry in opened.files("data"):
        table = pq.read_table(project.folder(prepared) / entry.key)
        packed += [record for row in table["record_ids"].to_pylist() for record in row]
        for row in table.to_pylist():
            assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"]) <= 256
    (records,) = opened.files("records")
    known = pq.read_table(project.folder(prepared) / records.key)["record_id"].to_pylist()
    assert len(packed) == 60
    assert sorted(packed) == sorted(known)


def test_another_seq_len_redoes_pack_and_what_follows(project):
    first = project.prepare()
    second = project.prepare("pack.seq_len=128")

    assert second.version != first.version
    assert project.cached_steps(second) == ["validate", "format", "tokenize"]
    audits = [receipt for receipt in second.receipts if receipt.step == "audit"]
    assert [receipt.facts.of for receipt in audits if receipt.cached] == ["shard"]


def test_another_store_ref_encoder_or_limit_is_the_same_version(project, tmp_path):
    first = project.prepare()
    second = project.prepare(
        f"publish.store={tmp_path / 'other'}",
        "publish.ref=prod",
        "tokenize.encoder=hf",
        "validate.max_quarantined=0.5",
    )
    assert second.version == first.version
    assert second.created
    assert project.cached_steps(second) == STEPS[:-1]
    assert open_version(str(tmp_path / "other"), "sums", "prod").version == first.version


def test_appended_rows_redo_only_new_shards_up_to_tokenize(project, monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 1000)
    first = project.prepare()
    jobs = [receipt for receipt in first.receipts if receipt.step == "tokenize"]
    assert len(jobs) > 3

    project.write_rows(range(70))
    second = project.prepare()

    for step in ("validate", "format", "tokenize"):
        receipts = [receipt for receipt in second.receipts if receipt.step == step]
        assert sum(receipt.cached for receipt in receipts) >= len(jobs) - 1
        assert not receipts[-1].cached
    assert project.cached_steps(second) == []
    assert second.ledger[0].rows_in == 70


def test_shard_size_and_file_order_do_not_change_published_bytes(project, monkeypatch):
    first = project.prepare()
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 1500)
    second = project.prepare()

    contents = [open_version(p.store, "sums", p.version).manifest for p in (first, second)]
    assert contents[0].content_id == contents[1].content_id
    digests = [[e.sha256 for e in each.files if e.kind != "report"] for each in contents]
    assert digests[0] == digests[1]  # the report names the version


def fails_with(project, error, message, *overrides):
    with pytest.raises(error, match=message):
        project.prepare(*overrides)
    assert not list((project.root / "store").rglob("manifest.json"))


def test_too_many_bad_rows_publish_nothing(project):
    project.write_rows(range(10))
    with project.rows.open("a") as file:
        file.write("{broken\n{broken\n")
    fails_with(
        project,
        QuarantineLimitError,
        r"^2 of 12 rows \(16\.67%\) are bad \(json 2\); the limit is 1\.00%\. Fix the rows, or "
        r"raise validate\.max_quarantined; first 'json': rows/rows\.jsonl line 11, .+ To see "
        r"the bad rows, run `packhouse quarantine show RECIPE`\.$",
    )


def test_a_record_that_is_too_long_fails_if_the_policy_is_error(project):
    overrides = ("pack.over_length=error", "pack.seq_len=32")
    fails_with(project, SequenceTooLongError, "seq_len 32", *overrides)


def test_a_template_that_prints_the_date_is_rendered_again_on_another_day(project, monkeypatch):
    template = project.root / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    overrides = (f"format.template={template}",)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    first = project.prepare(*overrides)
    assert project.cached_steps(project.prepare(*overrides)) == STEPS

    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(2 * 86400))
    assert project.cached_steps(project.prepare(*overrides)) == ["validate"]
    assert project.prepare(*overrides).version != first.version


def test_order_and_grouping_of_sources_decide_nothing(project):
    folder = project.root / "many"
    folder.mkdir()
    project.write_rows(range(20), folder / "a.jsonl")
    project.write_rows(range(20, 40), folder / "b.jsonl")
    a, b = (f"{{path: {folder / name}.jsonl, name: s}}" for name in "ab")
    versions = set()
    for number, sources in enumerate(
        [f"[{a}, {b}]", f"[{b}, {a}]", f"[{{path: {folder}, name: s}}]"]
    ):
        store = project.root / f"store{number}"
        prepared = project.prepare(f"sources={sources}", f"publish.store={store}")
        manifest = (store / "sums" / "v" / prepared.version / "manifest.json").read_bytes()
        versions.add((prepared.version, manifest))
        assert prepared.ledger[0].rows_in == 40
    assert len(versions) == 1


def test_validate_that_loses_a_row_is_noticed(project, monkeypatch):
    from dataclasses import replace

    from packhouse.errors import ContractError
    from packhouse.read import read_shard

    def lose_one(*arguments):
        rows = read_shard(*arguments)
        return replace(rows, validated=rows.validated.slice(1))

    monkeypatch.setattr("packhouse.run.steps.validate.read_shard", lose_one)
    fails_with(project, ContractError, "'validate' lost 1 of 60 rows")


def _with_bad_id(batch):
    ids = batch["input_ids"]
    bad = pa.ListArray.from_arrays(ids.offsets, pa.array([-1] * len(ids.flatten()), pa.int32()))
    return batch.set_column(0, PACKED.field("input_ids"), bad.cast(ids.type))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_with_bad_id, r"packed row 0: input_ids\[0\] = -1 is outside the vocabulary"),
        (
            lambda batch: batch.drop_columns(["label"]),
            "packed: column 'label' must have type 'int64'",
        ),
    ],
    ids=["a value", "a column"],
)
def test_packs_are_checked_before_they_are_written(project, monkeypatch, spoil, said):
    from packhouse.errors import ContractError
    from packhouse.pack.gather_tokens import gather

    monkeypatch.setattr(
        "packhouse.run.packs_and_records.gather",
        lambda *given, **options: map(spoil, gather(*given, **options)),
    )
    # The report would find a bad value, too, when it reads the files.
    fails_with(project, ContractError, said, "publish.report=false")


def files_of_demo(folder: Path, said: str) -> dict[str, bytes]:
    version = folder / "store" / "demo" / "v" / json.loads(said)["version"]
    return {str(p.relative_to(version)): p.read_bytes() for p in version.rglob("*") if p.is_file()}


def test_processes_with_other_hash_seeds_publish_the_same_bytes(tmp_path, real_reports):
    """This process has a random seed, unless PYTHONHASHSEED is set."""

    def command(name: str) -> list[str]:
        folder = tmp_path / name
        places = ("--cache", str(folder / "cache"), "--set", f"publish.store={folder / 'store'}")
        return ["prepare", str(DEMO), "--json", *places]

    seeded = {**os.environ, "PYTHONHASHSEED": "1"}
    other = python("-m", "packhouse", *command("other"), cwd=ROOT, env=seeded)
    own = CliRunner().invoke(cli, command("own"))

    files = files_of_demo(tmp_path / "own", own.stdout)
    assert files == files_of_demo(tmp_path / "other", other.stdout)
    assert {"manifest.json"} < set(files)
