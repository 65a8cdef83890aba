"""Canary secrets appear nowhere: no table, log, artifact, manifest, file, cache or message."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store import ceph

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"


def forms_of(secret):
    """A secret in plain text and as encoded in an address or a header."""
    from urllib.parse import quote

    forms = {secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode()}
    return [form.encode() for form in forms]


def assert_absent(secrets, places):
    for place, content in places:
        for name, secret in secrets.items():
            for form in forms_of(secret):
                at = content.find(form)
                assert at < 0, (
                    f"{name} is in {place}: ...{content[max(0, at - 200) : at]!r}<secret>"
                )


def files_below(*folders):
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_socket():
                yield str(path), path.read_bytes()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("local", [True, False], ids=["local", "embedded server on SQLite"])
def test_a_failing_run_with_a_secret_in_its_endpoint_tells_nobody(tmp_path, local):
    """Make the store check fail, then search every table, log and cache file."""
    secrets = {
        "endpoint": "canary-endpoint-5f1c",
        "secret key": "canary-secret-key-77aa",
        "hub": "hf_canary11223344",
        "wandb": "canarywandb998877",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "AWS_"))}
    environment |= {
        "AWS_ENDPOINT_URL": f"http://user:{secrets['endpoint']}@127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "AKIACANARY",
        "AWS_SECRET_ACCESS_KEY": secrets["secret key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "HF_TOKEN": secrets["hub"],
        "WANDB_API_KEY": secrets["wandb"],
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PACKHOUSE_CACHE": str(tmp_path / "cache"),
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DEMO.read_text().replace("./.packhouse/demo-store", "s3://b/p"))
    for name in ("chats.jsonl", "instructions.jsonl", "tokenizer"):
        (tmp_path / name).symlink_to(DEMO.parent / name)
    program = ["packhouse", "prepare"] if local else ["flows.prepare"]
    done = subprocess.run(
        [sys.executable, "-m", *program, str(recipe)],
        env=environment, cwd=ROOT, capture_output=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode in (2, 5, 6), done.stderr
    found = list(files_below(tmp_path))
    assert local or any(name.endswith("prefect.db") for name, _ in found)
    assert_absent(secrets, [("output", done.stdout), ("errors", done.stderr), *found])


@pytest.fixture(scope="module")
def used(deployed):
    """The stack after a run that succeeds, one that is refused, and one whose source is missing."""
    from tests.e2e.deployments import demo_recipe

    recipes = [
        demo_recipe("security-secrets"),
        demo_recipe("security-refused", validate={"max_quarantined": 0}),
        demo_recipe("security-missing") | {"sources": [{"path": "s3://packhouse/raw/none.jsonl"}]},
    ]
    started = [deployed.api.start("prepare/form-prepare", recipe=recipe) for recipe in recipes]
    ended = [deployed.api.wait(run_id, 400)["state_type"] for run_id in started]
    assert ended == ["COMPLETED", "FAILED", "FAILED"]
    return deployed


@pytest.fixture(scope="module")
def canaries(stack):
    words = stack.secrets
    return {
        "auth string": words.auth,
        "password": words.auth.split(":")[1],
        "database password": words.database,
        "secret key": ceph.SECRET_KEY,
        "hub token": words.hub,
        "W&B key": words.wandb,
    }


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_no_table_of_the_database_holds_a_secret(used, canaries):
    dump = used.database.dump().encode()
    assert b"security-secrets" in dump
    assert b"Ledger" in dump  # includes artifacts
    assert_absent(canaries, [("PostgreSQL", dump)])


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_log_cache_or_home_holds_a_secret(used, canaries):
    folders = ("logs", "cache", "worker", "client", "server")
    found = list(files_below(*(used.folder / name for name in folders)))
    assert any("receipt.json" in name for name, _ in found)
    assert any("worker.log" in name for name, _ in found)
    assert_absent(canaries, found)


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_object_or_its_metadata_holds_a_secret(used, canaries):
    import pyarrow.parquet as pq

    from tests.e2e.stack import BUCKET, s3_client

    client, found = s3_client(used.environment), []
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for item in page.get("Contents", []):
                answer = client.get_object(Bucket=BUCKET, Key=item["Key"])
                with answer["Body"] as body:
                    content = body.read()
                found.append((item["Key"], content))
                found.append(
                    (f"metadata of {item['Key']}", json.dumps(answer["Metadata"]).encode())
                )
                if item["Key"].endswith(".parquet"):
                    from io import BytesIO

                    footer = pq.read_metadata(BytesIO(content)).metadata or {}
                    found.append((f"footer of {item['Key']}", b" ".join(footer.values())))
    finally:
        client.close()
    assert any(name.endswith("manifest.json") for name, _ in found)
    assert_absent(canaries, found)


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        "https://user:canary-in-form@host/a.jsonl",
        "s3://key:canary-in-form@bucket/a.jsonl",
        "https://host/a.jsonl?X-Amz-Signature=canary-in-form",
    ],
)
def test_a_secret_in_a_run_form_is_refused_and_not_kept(deployed, path):
    from tests.e2e.deployments import demo_recipe

    recipe = demo_recipe("security-form") | {"sources": [{"path": path}]}
    with pytest.raises(RuntimeError, match="409"):
        deployed.api.start("prepare/form-prepare", recipe=recipe)
    assert "canary-in-form" not in deployed.database.dump()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_process_shows_a_secret_in_its_arguments(stack, canaries):
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline()).encode()
        except psutil.Error:
            continue
        assert_absent(canaries, [(f"arguments of process {process.pid}", line)])
