"""`packhouse ci` as a pipeline runs it: exit codes, gates, summaries, a cache shared by jobs."""

import json
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

from packhouse.addons.ci.command import GATES
from packhouse.addons.mirrors import StepMirror
from packhouse.cli import cli
from packhouse.errors import ConfigError, StoreError, TransientError
from packhouse.records import table_schemas
from packhouse.run.step_cache import StepStore
from packhouse.store import load_ref, open_store
from packhouse.store.store_requests import RetryPolicy
from tests.moto_s3 import s3_client
from tests.prepared import DEMO

ORDER = ["failure", "error", "ok", "skipped"]
ROW = {"instruction": "Name a prime.", "input": "", "output": "Seven."}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A cache with the demo's first run, copied by the tests that need it."""
    place = tmp_path_factory.mktemp("finished")
    run(place, place / "cache")
    return place / "cache"


@pytest.fixture
def place(tmp_path, finished):
    for name in ("chats.jsonl", "instructions.jsonl", "recipe.yaml"):
        shutil.copy(DEMO / name, tmp_path / name)
    shutil.copytree(DEMO / "tokenizer", tmp_path / "tokenizer")
    shutil.copytree(finished, tmp_path / "cache")
    return tmp_path


@pytest.fixture
def small(tmp_path):
    """The same with 25 good rows and an empty cache."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for name, num_rows in (("chats.jsonl", 10), ("instructions.jsonl", 15)):
        rows = (tmp_path / name).read_bytes().splitlines(keepends=True)
        (tmp_path / name).write_bytes(b"".join(rows[:num_rows]))
    return tmp_path


def run(place, cache, *options):
    return CliRunner().invoke(cli, [*arguments(place, cache), *options])


def arguments(place, cache):
    recipe = place / "recipe.yaml" if (place / "recipe.yaml").exists() else DEMO / "recipe.yaml"
    store = f"publish.store={place / 'store'}"
    files = ["--summary", f"{place}/s.md", "--junit", f"{place}/j.xml", "--json-file"]
    return ["ci", str(recipe), "--set", store, "--cache", str(cache), *files, f"{place}/f.json"]


def facts(place):
    return json.loads((place / "f.json").read_text())


def cases(place):
    """Gate -> text in the JUnit file; of several limits, the worst case."""
    found = {}
    for case in ET.parse(place / "j.xml").getroot().iter("testcase"):
        tags = {child.tag for child in case} & {"failure", "skipped", "error"}
        gate = case.get("name").partition(".")[0]
        found[gate] = min(tags.pop() if tags else "ok", found.get(gate, "skipped"), key=ORDER.index)
    return found


def ref(place, name="latest"):
    found = load_ref(open_store(str(place / "store")), "demo", name)
    return found.version if found else None


def add_row(place):
    with (place / "instructions.jsonl").open("a") as file:
        file.write(json.dumps(ROW) + "\n")


def test_a_plan_shows_the_result_and_publishes_nothing(place):
    done = run(place, place / "cache", "--plan-only")
    assert done.exit_code == 0, done.output
    assert not (place / "store" / "demo").exists()
    page = (place / "s.md").read_text()
    assert page.startswith("### packhouse plan: demo\n")
    assert "the ref does not exist yet. Size: 294 rows, 29,487 tokens" in page
    assert "| tokenize | 2 of 2 |" in page
    assert facts(place)["outcome"] == "planned"


def test_published_then_unchanged_then_changed_each_with_code_0(place):
    assert run(place, place / "cache").exit_code == 0
    first = ref(place)
    assert facts(place)["outcome"] == "published"
    assert set(cases(place).values()) == {"ok", "skipped"}
    assert cases(place)["golden"] == "skipped"

    again = run(place, place / "cache")
    assert (again.exit_code, facts(place)["outcome"]) == (0, "unchanged")
    assert f"'latest' already points to {first}" in again.output
    assert "**Nothing changed**" in (place / "s.md").read_text()
    assert cases(place) == {
        "plan": "ok",
        "golden": "skipped",
        "quarantine": "ok",
        "audit": "ok",
        "schema": "skipped",
        "drift": "skipped",
        "publish": "skipped",
    }

    add_row(place)
    done = run(place, place / "cache", "--set", "pack.seq_len=256")
    assert (done.exit_code, facts(place)["outcome"]) == (0, "published")
    page = (place / "s.md").read_text()
    assert "- changed: `instructions/instructions.jsonl`" in page
    assert "| pack.seq_len | 512 | 256 |" in page
    assert "| audit.max_duplicates | passed | " in page
    assert "| drift.lengths | passed | " in page
    assert ref(place) != first


def test_small_steps_of_a_candidate_add_up_to_its_distance_from_latest(place):
    """204 of 304 rows are instructions; 190 of 290 is a drift of 0.016, 176 of 276 of 0.033."""
    assert run(place, place / "cache").exit_code == 0
    latest = ref(place)
    rows = (place / "instructions.jsonl").read_bytes().splitlines(keepends=True)

    def refresh_with(num_rows):
        (place / "instructions.jsonl").write_bytes(b"".join(rows[:num_rows]))
        limit = ("--set", "publish.max_source_drift=0.02")
        done = run(place, place / "cache", "--approval", *limit)
        assert ref(place) == latest
        (drift,) = (gate for gate in facts(place)["gates"] if gate["name"] == "drift.sources")
        assert drift["limit"] == 0.02
        return done.exit_code, facts(place)["outcome"], round(drift["value"], 3)

    assert refresh_with(190) == (0, "waiting", 0.016)
    first = facts(place)["version"]
    assert ref(place, "latest.candidate") == first

    assert refresh_with(176) == (7, "held", 0.033)  # 0.018 from the first candidate
    second = facts(place)["version"]
    assert ref(place, "latest.candidate") == second
    assert cases(place)["drift"] == "failure"
    command = f"packhouse ref set {place}/store/demo latest {second}"
    assert facts(place)["message"] == (
        f"{second} is published, "
        "but 'latest' did not move: source drift is 0.0334; the limit is 0.0200. "
        f"To move it: {command}"
    )

    assert refresh_with(176) == (7, "held", 0.033)  # nothing changed, and it still waits
    assert facts(place)["message"].startswith(
        f"nothing changed: {second} is published, but 'latest'"
    )
    assert cases(place)["drift"] == "failure"

    assert refresh_with(190) == (0, "waiting", 0.016)  # the sources went back
    assert ref(place, "latest.candidate") == first


def test_a_candidate_that_would_break_readers_of_latest_is_held(place):
    assert run(place, place / "cache").exit_code == 0
    latest = ref(place)
    compact = ("--approval", "--set", "publish.layout=compact")
    for _ in range(2):  # nothing changed the second time
        assert run(place, place / "cache", *compact).exit_code == 7
        assert cases(place)["schema"] == "failure"
        assert f"readers of {latest} would break: column " in facts(place)["message"]
        assert ref(place) == latest
        assert ref(place, "latest.candidate") == facts(place)["version"] != latest
    allowed = (*compact, "--set", "publish.allow_breaking_schema=true")
    assert run(place, place / "cache", *allowed).exit_code == 0


@pytest.mark.parametrize(
    ("override", "code", "gate", "outcome"),
    [
        ("validate.max_quarantined=0", 4, "quarantine", "refused"),
        ("audit.max_duplicates=0", 4, "audit", "refused"),
        ("pack.sequence_length=1", 2, "plan", "failed"),
        ("sources.0.path=/nowhere.jsonl", 3, "plan", "failed"),
    ],
)
def test_every_refusal_has_a_code_a_gate_and_summaries(override, code, gate, outcome, place):
    done = run(place, place / "cache", "--set", override)
    assert done.exit_code == code, done.output
    found = cases(place)
    assert [name for name, state in found.items() if state == "failure"] == [gate]
    later = list(found)[list(found).index(gate) + 1 :]
    assert {found[name] for name in later} == {"skipped"}
    assert facts(place)["outcome"] == outcome
    assert facts(place)["exit_code"] == code
    assert re.search(rf"\| {gate}[a-z_.]* \| \*\*FAILED\*\* \|", (place / "s.md").read_text())
    assert ref(place) is None


@pytest.mark.parametrize(
    ("override", "code", "gate", "cached"),
    [
        ("validate.max_quarantined=0.01", 4, "quarantine", False),
        ("audit.max_duplicates=0", 4, "audit", True),
        ("golden=golden.jsonl", 2, "golden", True),
    ],
)
def test_a_published_version_is_checked_against_the_current_limits(
    override, code, gate, cached, place
):
    (place / "golden.jsonl").write_text("garbage")
    assert run(place, place / "cache").exit_code == 0
    before = published(place)
    cache = place / "cache" if cached else place / "another"
    override = override.replace("=golden", f"={place}/golden")
    done = run(place, cache, "--set", override)
    assert done.exit_code == code, done.output
    assert [name for name, state in cases(place).items() if state == "failure"] == [gate]
    assert "is already published and remains" in done.output
    assert published(place) == before
    page = (place / "s.md").read_text()
    assert "**Nothing changed**: only the gates are checked." in page


def test_a_gate_shows_its_value_its_limit_and_its_time(place):
    assert run(place, place / "cache").exit_code == 0
    assert "| quarantine | passed | 2.96% | at most 5.00% |" in (place / "s.md").read_text()
    suite = ET.parse(place / "j.xml").getroot()[0]
    seconds = {case.get("name"): float(case.get("time")) for case in suite}
    assert seconds["plan"] > 0
    assert sum(seconds.values()) == pytest.approx(float(suite.get("time")), abs=0.02)
    (quarantine,) = (case for case in suite if case.get("name") == "quarantine")
    assert quarantine.findtext("system-out") == "2.96% (at most 5.00%)"
    (gate,) = (gate for gate in facts(place)["gates"] if gate["name"] == "quarantine")
    assert (gate["value"], gate["limit"], gate["total"]) == (9 / 304, 0.05, 304)


def test_a_store_that_is_not_reached_passes_no_gate(place, monkeypatch):
    monkeypatch.setattr("packhouse.addons.ci.refresh.check_sources", unreachable)
    assert run(place, place / "cache").exit_code == 6
    assert cases(place) == {"plan": "failure"} | dict.fromkeys(GATES[1:], "skipped")
    monkeypatch.undo()
    monkeypatch.setattr("packhouse.run.chain.check_usable", unreachable)
    assert run(place, place / "cache").exit_code == 6
    assert cases(place) == {
        "plan": "ok",
        **dict.fromkeys(GATES[1:], "skipped"),
        "publish": "failure",
    }


def unreachable(*arguments):
    raise TransientError("no answer")


def test_a_job_that_a_signal_ends_in_the_middle_leaves_summaries(place):
    """A pipeline stops a job with SIGTERM when its time is up."""
    shutil.rmtree(place / "cache")
    program = (
        "import os, signal, sys, time; from packhouse import cli\n"
        "from packhouse.run import step\n"
        "execute = step.execute\n"
        "def stops(job, *rest):\n"
        "    if job.step.name == 'tokenize':\n"
        "        print('here', flush=True)\n"
        "        time.sleep(600)\n"  # never sleeps to the end, because the signal comes first
        "    return execute(job, *rest)\n"
        "step.execute = stops\n"
        "sys.argv[0] = 'packhouse'\n"
        "cli.main()\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", program, *arguments(place, place / "cache")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout.readline() == "here\n", job.communicate()
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode == 143
    assert "stopped by SIGTERM; finished steps are kept. To continue, run:" in said
    assert said.splitlines()[-1].startswith(f"  packhouse ci {place}/recipe.yaml --set ")
    assert (facts(place)["outcome"], facts(place)["exit_code"]) == ("interrupted", 143)
    assert cases(place) == {"plan": "ok", **dict.fromkeys(GATES[1:], "skipped"), "run": "error"}
    page = (place / "s.md").read_text()
    assert "### packhouse: stopped by SIGTERM before the run ended" in page
    assert "| publish | not reached |  |  | stopped by SIGTERM |" in page
    assert not (place / "store" / "demo" / "v").exists()
    assert run(place, place / "cache").exit_code == 0
    steps = {row["step"]: row for row in facts(place)["result"]["steps"]}
    assert steps["format"]["cached"] == steps["format"]["jobs"]


def test_who_waits_for_a_store_is_told_of_each_try(place, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(
        "packhouse.store.store_requests.RetryPolicy", partial(RetryPolicy, deadline_s=1)
    )
    done = run(place, place / "cache", "--set", "publish.store=s3://nowhere/x")
    assert done.exit_code == 6
    told = re.findall(
        r"store 's3://nowhere/x' does not respond \(s3://nowhere/x/demo/refs/latest.json: .*\): "
        r"attempt (\d+) in \d\.\d s, giving up \d s after that\n",
        done.stderr,
    )
    assert [int(number) for number in told] == list(range(2, 2 + len(told))) != []
    assert done.stderr.index("checking the store ...") < done.stderr.index("does not respond")


def test_a_table_that_breaks_its_contract_is_refused_by_that_gate(place, monkeypatch):
    def wrong(table):
        yield "this is wrong", np.ones(table.num_rows, np.bool_)

    monkeypatch.setattr(table_schemas, "broken_rules", wrong)
    done = run(place, place / "none")
    assert done.exit_code == 4
    assert cases(place)["schema"] == "failure"
    assert "values break the contract: this is wrong in row 0" in (place / "s.md").read_text()
    assert not (place / "store" / "demo" / "refs").exists()


def test_an_unwritable_summary_is_reported_before_any_work(place):
    done = run(place, place / "cache", "--summary", str(place / "no" / "s.md"))
    assert done.exit_code == 2
    assert "Create it first" in done.output


@pytest.mark.parametrize(
    ("option", "override", "code"),
    [
        ("--summary", "pack.seq_len=512", 5),
        ("--json-file", "pack.seq_len=512", 5),
        ("--junit", "audit.max_duplicates=0", 4),
    ],
)
def test_a_summary_that_cannot_be_written_keeps_no_other_from_it(override, code, option, place):
    done = run(place, place / "cache", "--set", override, option, "/dev/full")
    assert done.exit_code == code, done.output
    assert type(done.exception) is SystemExit
    said = "cannot write to the summary '/dev/full': No space left on device"
    assert f"DiskError: {said}" in done.stderr
    written = {"--summary": "s.md", "--junit": "j.xml", "--json-file": "f.json"}
    del written[option]
    assert all((place / name).stat().st_size for name in written.values())
    if option != "--json-file":
        assert facts(place)["exit_code"] == code
        assert said in facts(place)["notes"][0]
    assert bool(ref(place)) is (code == 5)


@pytest.mark.parametrize(
    ("key", "secret"),
    [("publish.store", "s3://KEY:can/ary@b/x"), ("sources.0.path", "s3://KEY:canary@b/x")],
)
def test_a_password_in_a_place_is_in_no_summary(key, secret, place):
    """Passwords with a slash too: summaries become comments that everybody can read."""
    if key == "sources.0.path":
        text = (place / "recipe.yaml").read_text()
        (place / "recipe.yaml").write_text(text.replace("chats.jsonl", secret))
    done = run(place, place / "cache", *(["--set", f"{key}={secret}"] * (key == "publish.store")))
    assert done.exit_code in (2, 3), done.output
    for text in (
        done.output,
        *((place / name).read_text() for name in ("s.md", "j.xml", "f.json")),
    ):
        assert "credentials" in text
        assert not {"can/ary", "canary", "KEY:"} & set(re.findall("can/ary|canary|KEY:", text))


@pytest.fixture
def bucket():
    with s3_client("ci-cache") as client:
        yield client


def test_jobs_without_a_common_disk_share_their_steps(small, bucket, monkeypatch):
    place, mirror = small, "s3://ci-cache/pre/steps"
    monkeypatch.setenv("PACKHOUSE_CACHE", str(place / "cache"))
    assert run(place, mirror).exit_code == 0
    shutil.rmtree(place / "store")
    monkeypatch.setenv("PACKHOUSE_CACHE", str(place / "another"))
    done = run(place, mirror)
    assert done.exit_code == 0, done.output
    steps = {row["step"]: row for row in facts(place)["result"]["steps"]}
    assert all(row["cached"] == row["jobs"] for name, row in steps.items() if name != "publish")
    assert facts(place)["notes"] == []
    keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="ci-cache")["Contents"]]
    assert any(key.startswith("pre/steps/tokenize/") for key in keys)


def published(place):
    root = place / "store" / "demo" / "v"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_key_that_may_only_read_the_mirror_costs_the_writing_and_not_the_run(small, monkeypatch):
    place = small
    mirror = f"file://{place / 'mirror'}"
    monkeypatch.setenv("PACKHOUSE_CACHE", str(place / "new"))
    monkeypatch.setattr("packhouse.addons.mirrors.file_body", refuse)
    done = run(place, mirror)
    assert done.exit_code == 0, done.output
    assert ref(place)
    (note,) = facts(place)["notes"]
    assert "this run no longer writes to the step mirror" in note


def refuse(*arguments):
    raise StoreError("s3://bucket: access denied (AccessDenied). Check the credentials")


@pytest.mark.parametrize("damage", ["flip", "outside"])  # others: test_hostile_stores.py
def test_a_damaged_or_planted_step_of_the_mirror_is_not_used(damage, tmp_path):
    def hello(folder):
        (folder / "a.arrow").write_bytes(b"hello")
        return {"rows": 1}

    store, remote = open_store(str(tmp_path / "mirror")), tmp_path / "mirror" / "s" / "k"
    here = StepStore(tmp_path / "here")
    StepMirror(store=store, steps=here).write(here.run("s", "k", hello))
    for file in remote.iterdir():
        file.chmod(0o644)
    receipt = json.loads((remote / "receipt.json").read_text())
    if damage == "flip":
        (remote / "a.arrow").write_bytes(b"hellp")
    else:
        receipt["files"] = {"../../a.arrow": receipt["files"]["a.arrow"]}
        (remote / "receipt.json").write_text(json.dumps(receipt))
    there = StepStore(tmp_path / "there")
    mirror = StepMirror(store=store, steps=there)
    assert mirror.fetch("s", "k") is False
    assert len(mirror.notes) == 1
    assert there.find("s", "k") is None
    assert sorted(p.name for p in (tmp_path / "there").rglob("*") if p.is_file()) == []


def failing(error):
    """A store whose every call fails, with a counter of its calls."""
    calls = []

    class Store:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                calls.append(name)
                raise error

            return call

    return Store(), calls


@pytest.mark.parametrize(
    "error",
    [TransientError("no answer"), StoreError("no bucket"), ConfigError("no credentials")],
)
def test_a_mirror_that_fails_is_asked_nothing_more(error, tmp_path, monkeypatch):
    monkeypatch.setattr("packhouse.addons.mirrors._RETRY", RetryPolicy(deadline_s=0))
    store, calls = failing(error)
    steps = StepStore(tmp_path)
    mirror = StepMirror(store=store, steps=steps)
    assert mirror.fetch("s", "k") is False
    assert calls == ["get"]
    assert mirror.fetch("s", "other") is False
    assert mirror.holding([("s", "k"), ("s", "other")]) == set()
    mirror.write(steps.run("s", "k", lambda folder: {"rows": 0}))
    assert calls == ["get"]
    assert len(mirror.notes) == 1
