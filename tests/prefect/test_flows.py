"""The flows other than `prepare` on a real server: their results and their artifacts in the UI."""

import json
import logging
import re
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow, run_flow_sync
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Crashed, Paused, Running, Scheduled

from flows.backfill import backfill
from flows.collect_garbage import gc
from flows.prepare import STEPS, prepare
from flows.promote import promote
from flows.rollback import rollback
from flows.verify import verify
from packhouse.errors import (
    ConflictError,
    IntegrityError,
    PackhouseError,
    TransientError,
    VersionNotFoundError,
)
from packhouse.recipe import load_recipe
from packhouse.store import load_ref, open_store, set_ref
from tasks import steps, versions
from tasks.cleanup import end_parts
from tasks.retries import is_transient
from tasks.steps import tokenize
from tests.prepared import DEMO

ROW = {"instruction": "Name a prime.", "input": "", "output": "Seven."}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(tmp_path):
    """A copy of the demo's sources, a store, and a recipe that uses them."""
    return make_place(tmp_path)


def make_place(folder):
    for name in ("chats.jsonl", "instructions.jsonl", "recipe.yaml"):
        shutil.copy(DEMO / name, folder / name)
    shutil.copytree(DEMO / "tokenizer", folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def history(cache, tmp_path_factory):
    """Three refreshes, made once to save time: of the demo, of the same, and with another row.

    Each has its final state, the jobs that ran, its pages, and the store after it.
    """
    place, kept = make_place(tmp_path_factory.mktemp("first")), tmp_path_factory.mktemp("stores")
    jobs, execute = [], steps.execute
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "execute", lambda *a: jobs.append(a[0].step.name) or execute(*a))
        for name in ("first", "unchanged", "second"):
            jobs.clear()
            state = refresh(place, cache)
            pages = {key: newest(key) for key in ("demo-refresh", "demo-version", "demo-sources")}
            shutil.copytree(place / "store", kept / name / "store")
            found[name] = SimpleNamespace(
                state=state, jobs=list(jobs), pages=pages, place=kept / name, version=ref(place)
            )
            if name == "unchanged":
                add_row(place)
    return found


@pytest.fixture
def first(place, history):
    shutil.copytree(history["first"].place / "store", place / "store")
    return history["first"].version


@pytest.fixture
def both(place, history):
    """The first version, and the second at `latest`, with the added row."""
    shutil.copytree(history["second"].place / "store", place / "store")
    add_row(place)
    return history["first"].version, history["second"].version


def recipe_of(place, *overrides):
    return load_recipe(place / "recipe.yaml", (f"publish.store={place / 'store'}", *overrides))


def refresh(place, cache, *overrides, **options):
    from flows.refresh import refresh

    return refresh(recipe_of(place, *overrides), cache=str(cache), return_state=True, **options)


def add_row(place):
    with (place / "instructions.jsonl").open("a") as file:
        file.write(json.dumps(ROW) + "\n")


def ref(place, name="latest"):
    found = load_ref(open_store(str(place / "store")), "demo", name)
    return found.version if found else None


def run_of(state):
    with get_client(sync_client=True) as client:
        return client.read_flow_run(state.state_details.flow_run_id)


def tags_of_children(state):
    parent = FlowRunFilterParentFlowRunId(any_=[state.state_details.flow_run_id])
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
    return [run.tags for run in found]


def newest(key):
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
            sort=ArtifactSort.CREATED_DESC,
            limit=1,
        )
    return found[0].data


def test_a_refresh_publishes_then_does_nothing_until_a_source_changes(history):
    first, unchanged, second = history.values()
    assert first.state.message == f"'latest' now points to {first.version}"
    assert (first.state.name, unchanged.state.name) == ("Published", "Unchanged")
    assert unchanged.state.is_completed()
    tags = ["dataset:demo", "outcome:unchanged", f"version:{first.version}"]
    assert run_of(unchanged.state).tags == tags
    assert unchanged.state.message == (
        f"nothing changed: 'latest' already points to {first.version}"
    )
    assert (unchanged.jobs, unchanged.version) == ([], first.version)

    assert second.version != first.version
    assert second.state.message == f"'latest' moved from {first.version} to {second.version}"
    page = second.pages["demo-refresh"]
    assert "demo: published" in page
    assert "| rows.train |" in page or "train" in page
    assert "| drift.sources | passed | 0.11% |  |  |" in page


def test_the_pages_of_a_version_hold_ledger_audit_sources_and_a_picture(history):
    page = history["first"].pages["demo-version"]
    assert f"# demo {history['first'].version}" in page
    assert "| validate | 304 | 295 | 9 | - | - | - |" in page
    assert "- validate quarantined: duplicate_key 1, empty_answer 1" in page
    assert "![train: 251 records in 51 packs, 98.12% full;" in page
    assert "](data:image/svg+xml;base64," in page
    assert "/manifest.json`" in page
    sources = json.loads(history["first"].pages["demo-sources"])
    assert [(row["source"], row["rows read"], row["tokens"]) for row in sources] == [
        ("chats", 100, 15166),
        ("instructions", 204, 15080),
    ]


@pytest.fixture
def deployed(place, cache, monkeypatch):
    """Start runs of a deployment of `refresh`, and execute them as a worker would."""
    from flows.refresh import refresh

    (place / "sources.yaml").write_text("allow: {read: [.], write: [.]}")
    monkeypatch.setenv("PACKHOUSE_SOURCES", str(place / "sources.yaml"))
    monkeypatch.setattr(
        "tasks.allowed_places._is_deployed", lambda: False
    )  # a test may choose the cache

    def work(run_id, **parameters):
        with suppress(Pause):
            run_flow_sync(
                refresh,
                flow_run=client.read_flow_run(run_id),
                parameters=parameters | {"recipe": recipe_of(place), "cache": str(cache)},
                return_type="state",
            )
        return client.read_flow_run(run_id)

    def create(**parameters):
        given = {"recipe": recipe_of(place).model_dump(mode="json", by_alias=True)}
        return client.create_flow_run_from_deployment(deployment, parameters=given | parameters)

    def start(**parameters):
        return work(create(**parameters).id, **parameters)

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(refresh), name="asks")
        yield SimpleNamespace(create=create, start=start, work=work, client=client)


def test_a_deployed_run_waits_for_a_person_who_resumes_it_and_the_ref_moves(place, deployed, first):
    add_row(place)
    run = deployed.start(approval=True)
    candidate = ref(place, "latest.candidate")
    assert (run.state.type.value, run.state.name) == ("PAUSED", "WaitingForApproval")
    assert "To move 'latest', resume this run, or run the deployment promote" in run.state.message
    assert run.state.message.endswith("To leave 'latest' unchanged, cancel this run")
    assert run.tags == ["dataset:demo", "outcome:waiting", f"version:{candidate}"]
    assert ref(place) == first

    again = deployed.start(approval=True)  # another run does not ask the same
    assert (again.state.type.value, again.state.name) == ("COMPLETED", "WaitingForApproval")
    assert "outcome:waiting" in again.tags

    deployed.client.resume_flow_run(run.id)
    run = deployed.work(run.id, approval=True)
    assert (run.state.type.value, run.state.name) == ("COMPLETED", "Published")
    assert run.tags == ["dataset:demo", "outcome:published", f"version:{candidate}"]
    moved = load_ref(open_store(str(place / "store")), "demo", "latest")
    assert (moved.version, moved.note.by) == (candidate, f"run refresh demo {run.id}")
    assert moved.note.reason == "approved: someone resumed the run"
    assert newest("demo-refresh").startswith("# demo: published\n'latest' moved to")


def test_a_cancelled_question_that_is_run_again_asks_again(place, deployed, first):
    add_row(place)
    run = deployed.start(approval=True)
    deployed.client.set_flow_run_state(run.id, Cancelled())
    deployed.client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"), force=True)
    run = deployed.work(run.id, approval=True)
    assert (run.state.type.value, run.state.name) == ("PAUSED", "WaitingForApproval")
    assert ref(place) == first


def test_a_resumed_run_asks_again_if_its_sources_changed_and_ends_if_a_shell_answers(
    place, deployed, cache, first
):
    add_row(place)
    run = deployed.start(approval=True)
    add_row(place)
    deployed.client.resume_flow_run(run.id)
    run = deployed.work(run.id, approval=True)
    candidate = ref(place, "latest.candidate")
    assert (run.state.type.value, run.state.name) == ("PAUSED", "WaitingForApproval")
    assert candidate in run.state.message
    assert ref(place) == first

    set_ref(open_store(str(place / "store")), "demo", "latest", candidate)
    refresh(place, cache)  # notices it
    assert_ended_by_another(deployed, run, candidate)


def test_a_question_is_superseded_by_one_about_newer_sources_and_ends_if_promote_answers(
    place, deployed, first
):
    add_row(place)
    old = deployed.start(approval=True)
    add_row(place)
    new = deployed.start(approval=True)
    assert new.state.name == "WaitingForApproval"
    state = deployed.client.read_flow_run(old.id).state
    assert (state.type.value, state.name) == ("CANCELLED", "Superseded")

    candidate = ref(place, "latest.candidate")
    promote(str(place / "store"), "demo")
    assert_ended_by_another(deployed, new, candidate)


def assert_ended_by_another(deployed, run, candidate):
    run = deployed.client.read_flow_run(run.id)
    assert (run.state.type.value, run.state.name) == ("COMPLETED", "Published")
    assert run.state.message == f"'latest' was moved to {candidate} without this run"
    assert "outcome:published" in run.tags


def test_preparing_a_published_version_says_whether_the_ref_moved(place, cache, both):
    def again():
        return prepare(recipe_of(place), cache=str(cache), return_state=True)

    first, second = both
    (place / "store" / "demo" / "refs" / "latest.json").unlink()
    set_ref(open_store(str(place / "store")), "demo", "latest", first)  # it was never at the second
    state = again()
    assert (state.name, ref(place)) == ("Published", second)
    assert state.message == f"demo {second} was published before, 'latest' moved to it from {first}"
    assert f"Already published in `{place}/store`." in newest("demo-version")
    assert again().name == "Unchanged"
    set_ref(open_store(str(place / "store")), "demo", "latest", first)
    state = again()
    assert (state.name, ref(place)) == ("Held", first)
    assert f"but 'latest' points to {first}; publishing a version again does not move the ref" in (
        state.message
    )


def test_a_prepared_version_whose_ref_is_held_is_shown_as_held(place, cache, first):
    rows = (place / "chats.jsonl").read_text().splitlines()
    (place / "chats.jsonl").write_text("\n".join(rows[:20]) + "\n")
    recipe = recipe_of(place, "publish.max_source_drift=0.05")
    state = prepare(recipe, cache=str(cache), return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "Held")
    assert "'latest' stays: source drift" in state.message
    promote_with = (
        f"run the deployment promote/promote-version with store {place / 'store'}, dataset"
    )
    assert promote_with in state.message
    page = newest("demo-version")
    assert "## Held: `latest` stays where it is" in page
    assert "The artifact 'demo-ref-latest' shows later moves" in page
    assert "points to it" not in page
    assert f"packhouse ref set {place / 'store'}/demo latest {state.result().pinned}" in page


def test_a_refresh_never_moves_a_ref_back_to_a_published_version(place, cache, both):
    first, second = both
    shutil.copy(DEMO / "instructions.jsonl", place / "instructions.jsonl")
    back = refresh(place, cache).result()
    assert back.outcome == "held"
    assert back.message.startswith(
        f"the sources still produce {first}, which is already published, but 'latest' points to "
        f"{second} (which was published later). A refresh does not change this"
    )

    add_row(place)
    rollback(str(place / "store"), "demo")
    nightly = refresh(place, cache).result()
    assert (nightly.outcome, ref(place)) == ("held", first)
    assert nightly.message == (
        f"the sources still produce {second}, which is already published, but 'latest' points to "
        f"{first} (someone moved it back). A refresh does not change this. To move it: packhouse "
        f"ref set {place}/store/demo latest {second}"
    )


def test_a_candidate_too_far_from_what_readers_have_is_held_and_announced(
    place, cache, first, monkeypatch
):
    said = []
    monkeypatch.setattr("tasks.events.emit_event", lambda name, **facts: said.append((name, facts)))
    rows = (place / "instructions.jsonl").read_bytes().splitlines(keepends=True)
    (place / "instructions.jsonl").write_bytes(b"".join(rows[:40]))
    for _ in range(2):  # nothing changed the second time
        state = refresh(place, cache, "publish.max_source_drift=0.01", approval=True)
        assert (state.name, state.result().outcome) == ("Held", "held")
        assert "'latest' did not move: source drift is 0.3853; the limit is 0.0100" in state.message
        assert ref(place) == first
        assert ref(place, "latest.candidate") == state.result().version
        page = newest("demo-refresh")
        assert "| drift.sources | **FAILED** | 38.53% | at most 1.00% | source drift is" in page
        assert "| drift.lengths | passed | " in page
        assert "How to promote it" in page
    (payload,) = [facts["payload"] for name, facts in said if name.endswith("version.refused")]
    assert payload["reasons"] == ["source drift is 0.3853; the limit is 0.0100"]


@pytest.mark.parametrize(
    ("overrides", "name", "says"),
    [
        (["audit.max_duplicates=0"], "Refused", "refused by its audit gate"),
        (["publish.store=/elsewhere"], "Failed", "is outside the allowed prefixes"),
    ],
)
def test_a_refused_refresh_keeps_the_ref_and_gives_the_reason_without_a_traceback(
    overrides, name, says, place, cache, deployed, first, caplog, monkeypatch
):
    from flows.refresh import refresh

    for logger in ("prefect.flow_runs", "prefect.task_runs", "packhouse.flows"):
        monkeypatch.setattr(logging.getLogger(logger), "handlers", [caplog.handler])
    add_row(place)
    recipe = recipe_of(place, *overrides)
    given = {"recipe": recipe, "cache": str(cache)}
    run = deployed.create()
    with pytest.raises(PackhouseError):
        run_flow(refresh, flow_run=run, parameters=given, error_logger=flow_run_logger(run))
    assert says in caplog.text
    assert "Traceback" not in caplog.text
    assert "unexpected exception" not in caplog.text
    run = deployed.client.read_flow_run(run.id)
    assert (run.state.type.value, run.state.name) == ("FAILED", name)
    assert run.tags == ["dataset:demo", f"outcome:{name.lower()}"]
    assert ref(place) == first
    if name == "Refused":
        page = newest("demo-refused")
        assert says in page
        assert "max_duplicates" in page
        assert "Nothing was published" in page


def test_a_refusal_shows_the_first_bad_rows_their_cause_and_what_to_type(place, cache):
    from packhouse.addons.quarantine import read_quarantine

    texts = [f"![](http://x/{n}) | <b> \u001b[2J" for n in range(20)]  # has a meaning in markdown
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "instructions.jsonl").write_text(lines)
    state = refresh(place, cache)
    assert state.is_failed()
    said = (
        "instructions/instructions.jsonl line 1, .*[.] Rows of 'instructions' look like `chat`, "
        "but the recipe reads them as `alpaca`. Try `format: chat`, or `format: mixed` if rows "
        "have several shapes. To see the bad rows, open the artifact 'demo-refused' of this run"
    )
    assert re.search(said, state.message)
    assert str(cache) not in state.message
    page = newest("demo-refused")
    assert re.search(said.replace("`", "&#96;"), page)
    shown = page.partition("## The first 10 bad rows")[2].partition("##")[0].strip().splitlines()
    assert len(shown) == 2 + 10
    assert all(line.count("|") == 5 for line in shown)
    outside_code = re.sub(r"`[^`\n]*`", "", page)
    assert "![](" not in outside_code
    assert "<b>" not in outside_code
    assert str(cache) not in page
    assert "packhouse quarantine show demo.yaml --reason fields\n" in page

    settings = page.partition("```yaml\n")[2].partition("\n```")[0]
    (place / "demo.yaml").write_text(settings)  # as on the page
    found = read_quarantine(str(place / "demo.yaml"), cache)
    assert found.num_rows == 20 + 3  # all instructions, and the bad rows of the chats
    table = json.loads(newest("demo-quarantine"))
    (bad,) = [row for row in table if row["reason"] == "unknown_role"]
    assert bad["records"] == 1
    assert bad["samples"].startswith("chats/chats.jsonl line ")


def test_rollback_goes_back_and_once_only_however_often_the_move_is_retried(
    place, cache, both, monkeypatch
):
    first, second = both
    moves = []
    real = versions.set_ref

    def lossy(*args, **kwargs):
        moves.append(real(*args, **kwargs))
        if len(moves) == 1:
            raise TransientError("the answer was lost")
        return moves[-1]

    monkeypatch.setattr(versions, "set_ref", lossy)
    monkeypatch.setattr(versions.move_ref, "retry_delay_seconds", [0, 0, 0])
    state = rollback(str(place / "store"), "demo", return_state=True)
    assert (len(moves), ref(place)) == (2, first)
    assert state.message == f"'latest' of demo moved from {second} to {first}"
    page = newest("demo-ref-latest")
    assert f"`{second}`" in page
    assert "| rolled back 1 move |" in page

    state = rollback(str(place / "store"), "demo", steps=9, return_state=True)
    said = (
        "VersionNotFoundError: cannot roll back ref 'latest' of 'demo' by 9 moves: it has 2 earlier"
    )
    assert state.message.startswith(said)
    with pytest.raises(VersionNotFoundError, match="by 9 moves"):
        state.result()


def test_a_conflict_is_not_retried(place, both, monkeypatch):
    moves, real = [], versions.set_ref
    monkeypatch.setattr(versions, "set_ref", lambda *a, **k: moves.append(a) or real(*a, **k))
    with pytest.raises(ConflictError, match="try again"):
        promote(str(place / "store"), "demo", both[0], expected=both[0])
    assert len(moves) == 1


def test_all_tasks_are_retried_alike():
    """The two tests above show what that means: after transient errors, and no others."""
    others = ("look_at_sources", "datasets_of", "verify_one", "move_ref", "past_of_ref", "collect")
    tasks = [*STEPS, *(getattr(versions, name) for name in others)]
    assert {task.retries for task in tasks} == {3}
    assert {task.retry_condition_fn for task in tasks} == {is_transient}


def test_verify_reads_every_byte_of_all_datasets_and_fails_on_one_flipped(place, cache, first):
    store = place / "store"
    assert refresh(place, cache, "dataset=other").is_completed()
    state = verify(str(store), return_state=True)
    assert state.message.startswith("2 versions intact: ")
    rows = json.loads(newest("verify"))
    assert [(row["dataset"], row["intact"]) for row in rows] == [("demo", "yes"), ("other", "yes")]

    (file,) = (store / "other" / "v").glob("*/data/eval-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    damaged = verify(str(store), return_state=True)
    assert damaged.is_failed()
    with pytest.raises(
        IntegrityError,
        match=r"other: data/eval-.* is damaged: the SHA-256 of 4 reads differs from the published",
    ):
        damaged.result()
    rows = json.loads(newest("verify"))
    assert [(row["dataset"], row["intact"]) for row in rows] == [("demo", "yes"), ("other", "NO")]


def test_gc_shows_first_and_deletes_when_told(place, cache, first):
    store = place / "store"
    dead = store / "demo" / "v" / "abcd1234.g0" / "data" / "train-00000-of-00001-0.parquet"
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"x" * 100)
    shown = gc(str(store), "demo", grace_hours=0, return_state=True)
    assert shown.message == (
        "100 bytes in 1 object of interrupted publishes: nothing deleted. "
        "Run again with `delete` to delete them"
    )
    assert dead.exists()
    assert json.loads(newest("garbage"))[0]["version"] == "abcd1234.g0"
    gone = gc(str(store), grace_hours=0, delete=True, return_state=True)
    assert gone.message == "100 bytes in 1 object of interrupted publishes: 1 object deleted"
    assert not dead.exists()


def test_a_backfill_continues_when_a_recipe_fails_and_names_it(place, cache, first, caplog):
    demo, bad = recipe_of(place), recipe_of(place, "dataset=bad", "validate.max_quarantined=0")
    with caplog.at_level(logging.INFO, "packhouse.flows"):
        state = backfill([bad, demo], cache=str(cache), return_state=True)
    assert state.is_failed()
    assert state.message == "1 of 2 recipes failed: bad"
    logged = [(each.levelname, each.getMessage()) for each in caplog.records]
    said = "demo: Unchanged: nothing changed: 'latest' already points to"
    assert ("INFO", f"{said} {first}") in logged
    assert any(level == "WARNING" and text.startswith("bad: Refused: ") for level, text in logged)
    with pytest.raises(PackhouseError, match="1 of 2 recipes failed: bad"):
        state.result()
    assert run_of(state).name == "backfill 2 recipes"
    rows = json.loads(newest("backfill"))
    assert [(row["recipe"], row["state"]) for row in rows] == [
        ("bad", "Refused"),
        ("demo", "Unchanged"),
    ]
    assert rows[0]["message"].startswith("refused by its quarantine gate: 9 of 304 rows")
    assert ["dataset:bad", "outcome:refused"] in tags_of_children(state)
    add_row(place)
    asked = backfill([demo], cache=str(cache), approval=True, return_state=True)
    assert (asked.type.value, asked.name) == ("COMPLETED", "WaitingForApproval")
    assert asked.message.endswith(
        " done: 1 WaitingForApproval. The refs of demo did not move; the artifact 'backfill' of "
        "this run shows how to move each of them"
    )


def test_the_next_run_cleans_up_after_runs_that_ended_without_a_process(place, cache, first):
    """The server marked one as Crashed; a person cancelled the other while it was paused."""
    with get_client(sync_client=True) as client:
        tags = ["packhouse", "dataset:demo", "outcome:held"]
        dead = client.create_flow_run(prepare, tags=tags[:2], state=Running())
        task = client.create_task_run(tokenize, dead.id, dynamic_key="0", state=Running())
        client.set_flow_run_state(dead.id, Crashed(message="no heartbeat"), force=True)
        declined = client.create_flow_run(prepare, tags=tags, state=Paused())
        client.set_flow_run_state(declined.id, Cancelled(), force=True)
        alive = client.create_flow_run(prepare, tags=tags[:2], state=Running())
        refresh(place, cache)
        assert "outcome:crashed" in client.read_flow_run(dead.id).tags
        assert client.read_flow_run(declined.id).tags == [
            "dataset:demo",
            "outcome:cancelled",
            "packhouse",
        ]
        ended = client.read_task_run(task.id).state
        assert ended is not None
        assert (ended.name, ended.message) == ("Crashed", "its run ended: no heartbeat")
        assert client.read_flow_run(alive.id).tags == tags[:2]
        client.delete_flow_run(alive.id)


def test_a_crashed_backfill_ends_its_children():
    from flows.refresh import refresh

    with get_client(sync_client=True) as client:
        parent = client.create_flow_run(backfill, state=Running())
        task = client.create_task_run(tokenize, parent.id, dynamic_key="0", state=Running())
        child = client.create_flow_run(
            refresh, parent_task_run_id=task.id, tags=["dataset:demo"], state=Running()
        )
        below = client.create_task_run(tokenize, child.id, dynamic_key="0", state=Running())
        end_parts(backfill, parent, Crashed(message="killed"))
        crashed = client.read_flow_run(child.id)
        assert crashed.tags == ["dataset:demo", "outcome:crashed"]
        ended = crashed.state
        assert ended is not None
        assert (ended.name, ended.message) == ("Crashed", "its run crashed: killed")
        ended = client.read_task_run(below.id).state
        assert ended is not None
        assert ended.is_crashed()
