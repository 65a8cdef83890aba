"""Secret blocks, progress and hostile texts: what a run shows and hides."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pytest
from prefect import flow
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import FlowRun
from prefect.states import Failed
from prefect.utilities.schema_tools.validation import validate

from deployments.deploy import BLOCK, make_block
from flows.backfill import backfill
from flows.collect_garbage import gc
from flows.prepare import prepare
from flows.promote import promote
from flows.refresh import refresh
from flows.rollback import rollback
from flows.verify import verify
from packhouse.errors import ConfigError
from packhouse.recipe import Recipe
from packhouse.system import progress
from tasks.allowed_places import allowed_recipe, worker_cache
from tasks.dataset_slot import make_limit
from tests.chain.conftest import Project

CANARY = "canary-0f3a-not-to-be-seen"
FORM = {"dataset": "d", "sources": [{"path": "rows"}], "tokenizer": "t"}


@pytest.fixture
def places(tmp_path, monkeypatch):
    file = tmp_path / "sources.yaml"
    file.write_text(
        "sources: {rows: rows.jsonl}\ntokenizers: {t: t}\nstores: {main: store}\n"
        "recipes: {}\nsecrets: {PACKHOUSE_TEST_SECRET: test-secret}\n"
    )
    monkeypatch.setenv("PACKHOUSE_SOURCES", str(file))
    return file


def form():
    raw = {"dataset": "d", "sources": [{"path": "rows"}], "tokenizer": "t"}
    return Recipe.model_validate(raw | {"publish": {"store": "main"}})


def test_a_secret_block_becomes_an_environment_variable_and_no_parameter(places, monkeypatch):
    monkeypatch.delenv("PACKHOUSE_TEST_SECRET", raising=False)
    with pytest.raises(ConfigError, match="no Secret block 'test-secret'"):
        allowed_recipe(form(), deployed=True)
    Secret(value=CANARY).save("test-secret")
    resolved = allowed_recipe(form(), deployed=True)
    assert os.environ.pop("PACKHOUSE_TEST_SECRET") == CANARY
    assert CANARY not in resolved.model_dump_json()


def test_a_deployment_takes_the_workers_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("tasks.allowed_places._is_deployed", lambda: True)
    with pytest.raises(ConfigError, match="Leave `cache` empty"):
        worker_cache(str(tmp_path))


def test_a_long_step_has_a_progress_artifact_and_a_quick_one_none(monkeypatch):
    from tasks import progress as shown

    keys = ArtifactFilterKey(any_=["my-data-pack", "my-data-tokenize"])

    def artifacts():  # by key: the server returns 200 of all, and other tests made more
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(artifact_filter=ArtifactFilter(key=keys))
            return {a.key: a for a in found}

    monkeypatch.setattr(shown, "EVERY_S", 0.05)

    @flow
    def slow():
        monkeypatch.setattr(shown, "APPEARS_AFTER_S", math.inf)  # every step is quick
        with shown.progress_artifacts("my_data"):
            with progress.step_progress("pack", 1):
                progress.job_done(1)
            monkeypatch.setattr(shown, "APPEARS_AFTER_S", 0.0)  # every step is long
            with progress.step_progress("tokenize", 4):
                progress.job_done(1)
                while "my-data-tokenize" not in artifacts():
                    time.sleep(0.05)  # between two requests to the server
                progress.job_done(4)

    slow()
    found = artifacts()
    assert "my-data-pack" not in found
    assert float(found["my-data-tokenize"].data) == 100.0


def test_a_server_that_does_not_answer_costs_the_picture_and_never_the_run(monkeypatch):
    from tasks import progress as shown

    def down(**_):
        raise OSError("no answer")

    monkeypatch.setattr(shown, "APPEARS_AFTER_S", 0.0)
    monkeypatch.setattr(shown, "EVERY_S", 0.01)
    monkeypatch.setattr(shown, "create_progress_artifact", down)
    with shown.progress_artifacts("d"), progress.step_progress("pack", 2):
        time.sleep(0.1)  # the thread tries, and stops


def test_a_record_that_concat_cuts_is_one_record_on_pages_and_in_events(tmp_path, monkeypatch):
    from tasks import artifacts, events

    project = Project(tmp_path)
    project.write_rows(range(12))
    cut = ("pack.strategy=concat", "pack.seq_len=32", "audit.max_untrained_packs=1")
    prepared = project.prepare(*cut, "split.eval_fraction=0")
    said = []
    monkeypatch.setattr(events, "emit_event", lambda *_, payload, **__: said.append(payload))
    monkeypatch.setattr(events, "_announce_asset", lambda *_: None)
    events.announce_published(prepared)
    page = artifacts._version_page(prepared)
    packs = prepared.published.statistics["train"].num_packs
    assert prepared.published.statistics["train"].num_sequences > 12
    assert said[0]["records"]["train"] == 12
    assert f"| train | {packs} | 12 |" in page
    assert f"![train: 12 records in {packs} packs" in page


def test_the_event_of_a_refusal_names_the_dataset_and_not_its_recipe(places, monkeypatch, tmp_path):
    from packhouse.errors import AuditError
    from tasks import hooks

    (tmp_path / "r.yaml").write_text(json.dumps(FORM | {"dataset": "chats"}))
    places.write_text("recipes: {every-night: r.yaml}")
    said = []
    monkeypatch.setattr(hooks, "announce_refused", lambda *arguments: said.append(arguments[0]))
    error = AuditError("too many duplicates")
    for recipe in ("every-night", FORM | {"dataset": "forms"}, "no-such-recipe"):
        run = FlowRun(flow_id=uuid4(), parameters={"recipe": recipe})
        hooks._on_failure(None, run, Failed(data=error))
    hooks._on_failure(None, FlowRun(flow_id=uuid4(), parameters={"store": "s"}), Failed(data=error))
    assert said == ["chats", "forms", "no-such-recipe"]


def test_runs_that_come_together_make_one_limit_and_none_fails():
    name, together = f"packhouse.together.{uuid4().hex[:8]}", Barrier(6)

    def make(_):
        with get_client(sync_client=True) as client:
            together.wait(60)
            make_limit(client, name)

    with ThreadPoolExecutor(6) as runs:
        list(runs.map(make, range(6)))
    with get_client(sync_client=True) as client:
        assert client.read_global_concurrency_limit_by_name(name).limit == 1


@pytest.mark.parametrize(
    "secret", ["s3://KEY:canary@b/x", "s3://KEY:can/ary@b/x", "s3://b?token=x"]
)
def test_every_parameter_that_holds_a_place_refuses_credentials_before_a_run(secret):
    """Redact the parameters of the whole flow: recipe, store, cache, and the recipe's name."""
    given = {
        prepare: [{"recipe": FORM, "cache": secret}],
        refresh: [{"recipe": secret}, *({"recipe": "demo", k: secret} for k in ("store", "cache"))],
        backfill: [
            {"recipes": ["demo", secret]},
            *({"recipes": ["demo"], k: secret} for k in ("store", "cache")),
        ],
        verify: [{"store": secret}],
        gc: [{"store": secret}],
        promote: [{"store": secret, "dataset": "demo"}],
        rollback: [{"store": secret, "dataset": "demo"}],
    }
    for each, all_parameters in given.items():
        schema = each.parameters.model_dump()
        for parameters in all_parameters:
            assert validate(parameters, schema, preprocess=False), (each.name, parameters)
            fine = {key: _without(secret, value) for key, value in parameters.items()}
            assert validate(fine, schema, preprocess=False) == []


def _without(secret, value):
    if isinstance(value, list):
        return [_without(secret, each) for each in value]
    return "s3://bucket/prefix:a@b" if value == secret else value


def test_a_new_address_for_notifications_replaces_the_old_one(monkeypatch):
    for url in ("http://127.0.0.1:1/a", "mailto://127.0.0.1:1?to=a@b.org", "http://127.0.0.1:1/b"):
        monkeypatch.setenv("PACKHOUSE_NOTIFY", url)
        made = make_block()
        with get_client(sync_client=True) as client:
            found = [each.id for each in client.read_block_documents() if each.name == BLOCK]
        assert found == [made]
    monkeypatch.delenv("PACKHOUSE_NOTIFY")
    assert make_block() == made
