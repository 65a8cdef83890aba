"""Compose and the container pools as shipped, with their own commands started as processes.

Command, environment, mounts and user come from the files that an operator uses, and Prefect's own
workers create the jobs of pools. Only addresses belong to this machine. tests/e2e/containers.py
replaces the container engine.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.e2e import containers, services
from tests.e2e.deployments import demo_recipe
from tests.e2e.stack import BUCKET, Api, missing, s3_client
from tests.prepared import DEMO
from tests.store import ceph

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = services.ROOT
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
K8S = list(yaml.safe_load_all((ROOT / "deployments" / "k8s" / "packhouse.yaml").read_text()))
SOURCE = {"path": "/data/rows.jsonl", "format": "alpaca"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Starts containers of this test; volumes and secrets are in `folder`."""

    folder: Path
    addresses: dict[str, str]
    """Address in the files -> address in this test."""

    @property
    def origin(self) -> str:
        return self.addresses["http://server:4200"]

    def secret(self, name: str) -> Path:
        return self.folder / "docker" / "secrets" / name

    def volume(self, name: str) -> Path:
        place = self.folder / "volumes" / name
        if not place.exists():
            place.mkdir(parents=True)
            os.chown(place, 10001, 10001)
        return place

    def service(self, name: str) -> containers.Container:
        """Return a service of compose.yaml, for an operator with their own data."""

        def filled(text: str) -> str:
            own = {"PACKHOUSE_DATA": str(self.folder / "data")}
            return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: own.get(m[1], m[2]), text)

        service = COMPOSE["services"][name]
        volumes = {}
        for volume in service.get("volumes", []):
            source, place, mode = f"{filled(volume)}:rw".split(":")[:3]
            volumes[place] = (self.volume(source) if source in COMPOSE["volumes"] else source, mode)
        for secret in service["secrets"]:
            file = Path(COMPOSE["secrets"][secret]["file"]).name
            volumes[f"/run/secrets/{secret}"] = (self.secret(file), "ro")
        return containers.Container(
            command=[filled(word) for word in service["command"]],
            environment={k: filled(v) for k, v in service["environment"].items()},
            user=int(service["user"].split(":")[0]),
            volumes=volumes,
        )

    @contextlib.contextmanager
    def running(
        self, name: str, container: containers.Container, **own: str
    ) -> Iterator["subprocess.Popen[bytes]"]:
        command, environment = container.start(self.folder / "roots" / name)
        for theirs, ours in self.addresses.items():
            environment = {k: v.replace(theirs, ours) for k, v in environment.items()}
        log = self.folder / "logs" / f"{name}.log"
        with services.process(command, log, environment | own) as started:
            yield started

    def finish(self, name: str, container: containers.Container) -> None:
        with self.running(name, container) as started:
            code = started.wait(900)
        assert code == 0, (self.folder / "logs" / f"{name}.log").read_text()[-4000:]


@pytest.fixture(scope="module")
def engine(tmp_path_factory, ceph_endpoint):
    """Server and first start of compose, with an operator's secrets and rows."""
    if lacking := missing() or containers.missing():
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("compose")
    (folder / "data").mkdir()
    shutil.copy(DEMO / "instructions.jsonl", folder / "data" / "rows.jsonl")
    (folder / "docker").mkdir()
    script = shutil.copy(ROOT / "docker" / "make_secrets.sh", folder / "docker")
    subprocess.run([script], check=True)
    port = services.free_port()
    addresses = {
        "http://127.0.0.1:4200": f"http://127.0.0.1:{port}",
        "http://server:4200": f"http://127.0.0.1:{port}",
        "http://prefect-server.prefect.svc:4200": f"http://127.0.0.1:{port}",
        "http://s3:8333": ceph_endpoint,
        "http://s3.storage.svc:8333": ceph_endpoint,
    }
    engine = Engine(folder=folder, addresses=addresses)
    engine.secret("aws_credentials").unlink()
    engine.secret("aws_credentials").write_text(
        f"[default]\naws_access_key_id = {ceph.ACCESS_KEY}\n"
        f"aws_secret_access_key = {ceph.SECRET_KEY}\n"
    )
    with services.postgres(engine.secret("database_password").read_text()) as database:
        server = engine.service("server")
        ours = {"0.0.0.0": "127.0.0.1", "4200": str(port)}
        server.command[:] = [ours.get(word, word) for word in server.command]
        at = {
            "PREFECT_SERVER_DATABASE_HOST": "127.0.0.1",
            "PREFECT_SERVER_DATABASE_PORT": str(database.port),
        }
        with engine.running("server", server, **at) as started:
            ready = f"{engine.origin}/api/ready"
            services.wait_until(lambda: services._is_ready(ready, port), "server", started, 600)
            engine.finish("first-start", engine.service("first-start"))
            yield engine


@pytest.fixture(scope="module")
def api(engine):
    api = Api(engine.origin, engine.secret("prefect_auth_string").read_text())
    yield api
    api.close()


@pytest.fixture(scope="module")
def worker(engine):
    """The worker of compose; it listens on this machine only."""
    port = services.free_port()
    own = {"PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1"}
    own |= {"PREFECT_WORKER_WEBSERVER_PORT": str(port), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    with engine.running("worker", engine.service("worker"), **own) as started:
        health = f"http://127.0.0.1:{port}/health"
        services.wait_until(lambda: services._is_ready(health, port), "worker", started, 600)
        yield started


@pytest.fixture(scope="module")
def bucket(engine):
    client = s3_client(
        {
            "AWS_ENDPOINT_URL": engine.addresses["http://s3:8333"],
            "AWS_ACCESS_KEY_ID": ceph.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": ceph.SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    )
    yield client
    client.close()


def recipe(dataset, **source):
    changes = {"validate": {"max_quarantined": 0.2}}
    return demo_recipe(dataset, **changes) | {"sources": [{**SOURCE, **source}]}


def is_published(bucket, dataset):
    found = bucket.list_objects_v2(Bucket=BUCKET, Prefix=f"{dataset}/v/").get("Contents", [])
    return any(item["Key"].endswith("manifest.json") for item in found)


def test_composes_worker_publishes_a_file_that_was_put_into_the_data_folder(
    engine, api, worker, bucket
):
    run = api.wait(api.start("prepare/form-prepare", recipe=recipe("compose")), 900)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert is_published(bucket, "compose")
    assert list((engine.volume("worker") / "cache").iterdir())


def test_composes_worker_reads_only_the_data_folder(engine, api, worker, bucket):
    (engine.folder / "data" / "link.jsonl").symlink_to("/run/secrets/aws_credentials")
    runs = {
        path: api.start("prepare/form-prepare", recipe=recipe("beside", path=path))
        for path in ("/run/secrets/aws_credentials", "/data/link.jsonl")
    }
    for path, run_id in runs.items():
        run = api.wait(run_id, 900)
        assert run["state_type"] == "FAILED"
        assert f"'{path}' is not listed in the worker's sources.yaml" in run["state"]["message"]
    assert not is_published(bucket, "beside")


@contextlib.contextmanager
def as_worker_of(engine: Engine) -> Iterator[None]:
    """This process as a pool's worker, with the password in its settings."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    auth = engine.secret("prefect_auth_string").read_text()
    with temporary_settings(
        {PREFECT_API_URL: f"{engine.origin}/api", PREFECT_API_AUTH_STRING: auth}
    ):
        yield


def configured(worker, run_id):
    """Return the job of a run as this type of worker configures it from the server's pool."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        run = client.read_flow_run(run_id)
        deployment = client.read_deployment(run.deployment_id)
        pool = client.read_work_pool(deployment.work_pool_name)
    job = asyncio.run(
        worker.job_configuration.from_template_and_values(
            pool.base_job_template, {**deployment.job_variables, **run.job_variables}
        )
    )
    job.prepare_for_flow_run(run, deployment=deployment, work_pool=pool, worker_name="w")
    return job


def test_a_run_of_the_docker_pool_publishes_from_its_container(engine, api, bucket, monkeypatch):
    from prefect_docker.worker import DockerWorker

    monkeypatch.chdir(engine.folder)  # relative paths start where the worker is started
    run_id = api.start("refresh/docker-refresh", recipe=recipe("docker"), store="main")
    with as_worker_of(engine):
        worker = DockerWorker("packhouse-docker")
        settings = worker._build_container_settings(None, configured(worker, run_id))

    shown = json.dumps(settings)
    for secret in ("prefect_auth_string", "aws_credentials"):
        assert engine.secret(secret).read_text().split()[-1] not in shown
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert list(settings["tmpfs"]) == ["/tmp"]
    volumes = {}
    for volume in settings["volumes"]:
        source, place, mode = f"{volume}:rw".split(":")[:3]
        named = source.removeprefix("packhouse_")  # compose adds its name to those of volumes
        volumes[place] = (engine.volume(named) if named in COMPOSE["volumes"] else source, mode)
    assert volumes["/data"] == (str(engine.folder / "data"), "ro")
    container = containers.Container(
        command=shlex.split(settings["command"]),
        environment=settings["environment"],
        user=int(settings["user"].split(":")[0]),
        volumes=volumes,
    )
    engine.finish("docker-run", container)
    run = api.wait(run_id, 60)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert is_published(bucket, "docker")


def test_a_run_of_the_kubernetes_pool_publishes_from_its_job(engine, api, bucket, monkeypatch):
    from prefect_kubernetes import worker as kubernetes

    by_kind = {manifest["kind"]: manifest for manifest in K8S}
    (its_worker,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    for setting in its_worker["env"]:
        if "value" in setting:
            monkeypatch.setenv(setting["name"], setting["value"])
    created = []

    class Cluster:
        def __init__(self, client):
            pass

        async def create_namespaced_job(self, namespace, manifest):
            created.append((namespace, manifest))

    monkeypatch.setattr(kubernetes, "BatchV1Api", Cluster)
    bucket.upload_file(str(DEMO / "instructions.jsonl"), BUCKET, "raw/rows.jsonl")
    raw = recipe("kubernetes", path=f"s3://{BUCKET}/raw/rows.jsonl")
    run_id = api.start("refresh/k8s-refresh", recipe=raw, store="main")
    with as_worker_of(engine):
        worker = kubernetes.KubernetesWorker("packhouse-k8s")
        asyncio.run(worker._create_job(configured(worker, run_id), None))

    ((namespace, job),) = created
    assert namespace == by_kind["Namespace"]["metadata"]["name"]
    kubernetes_validate.validate(job, "1.34", strict=True)
    secret = {
        "PREFECT_API_AUTH_STRING": engine.secret("prefect_auth_string").read_text(),
        "AWS_ACCESS_KEY_ID": ceph.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": ceph.SECRET_KEY,
    }
    assert not [value for value in secret.values() if value in json.dumps(job)]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {"configMapRef": by_kind["ConfigMap"]["data"], "secretRef": secret}
    environment = {}
    for source in container["envFrom"]:
        ((kind, name),) = source.items()
        assert name == {"name": "packhouse"}
        environment |= given[kind]
    for setting in container["env"]:
        reference = setting.get("valueFrom")
        value = secret[reference["secretKeyRef"]["key"]] if reference else setting["value"]
        environment[setting["name"]] = value
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert set(claims.values()) == {by_kind["PersistentVolumeClaim"]["metadata"]["name"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.pop("tmp") == "/tmp"
    engine.finish(
        "kubernetes-run",
        containers.Container(
            command=container["args"],
            environment=environment,
            user=pod["securityContext"]["runAsUser"],
            volumes={place: (engine.volume(claims[n]), "rw") for n, place in mounts.items()},
        ),
    )
    run = api.wait(run_id, 60)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert is_published(bucket, "kubernetes")
    assert list((engine.volume("packhouse-cache") / "cache").iterdir())
