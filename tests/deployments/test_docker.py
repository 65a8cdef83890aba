"""The image and the compose file pass linters and keep the promises made to operators."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from packhouse.errors import ConfigError
from schemas.places import load_places
from tests.e2e.services import documented_server

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


def test_hadolint_finds_nothing_in_the_dockerfile():
    done = run(Path(sys.executable).parent / "hadolint", DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_file_follows_the_compose_specification():
    tool = Path(sys.executable).parent / "check-jsonschema"
    done = run(tool, "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")
    assert done.returncode == 0, done.stdout


def test_docker_compose_reads_the_file(tmp_path):
    """Debian's version is old and does not know `name`; without that line it reads the rest."""
    folder = tmp_path / "docker"
    shutil.copytree(DOCKER, folder, ignore=shutil.ignore_patterns("secrets"))
    assert run(folder / "make_secrets.sh").returncode == 0
    if shutil.which("docker") and run("docker", "compose", "version").returncode == 0:
        command, text = ["docker", "compose"], (folder / "compose.yaml").read_text()
    elif shutil.which("docker-compose"):
        command = ["docker-compose"]
        text = (folder / "compose.yaml").read_text().replace("name: packhouse\n", "", 1)
    else:
        pytest.skip("no docker compose here; the schema above is checked all the same")
    (folder / "compose.yaml").write_text(text)
    done = run(*command, "-f", folder / "compose.yaml", "config")
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


def test_the_image_is_pinned_locked_and_not_root():
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert stages == ["${BASE}", "${BASE}"]
    assert DIGEST.search(re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)[1])
    assert "pip install --no-deps --require-hashes -r requirements/image.txt" in DOCKERFILE
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"
    assert re.search(r"^HEALTHCHECK ", DOCKERFILE, re.MULTILINE)
    assert not re.search(r"\b(curl|wget|ADD)\b", DOCKERFILE)


def test_everything_the_dockerfile_copies_is_let_through_to_the_builder():
    let_through = set(
        re.findall(r"^!(\S+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.M)
    )
    copied = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    for sources in ([p for p in line.split()[:-1] if not p.startswith("--")] for line in copied):
        assert set(sources) <= let_through
        assert all((ROOT / source).exists() for source in sources)


def test_the_image_holds_the_versions_that_were_tested():
    def pins(name):
        text = (ROOT / "requirements" / name).read_text()
        return dict(re.findall(r"^([a-z0-9._-]+(?:\[\w+\])?)==(\S+)", text, re.MULTILINE))

    image = pins("image.txt")
    assert pins("run.txt").items() <= image.items()
    tested = pins("test.txt")
    assert {n: v for n, v in image.items() if tested.get(n, v) != v} == {}
    assert {"prefect-kubernetes", "prefect-docker", "prefect-dask", "prefect-ray"} <= set(image)
    assert {"duckdb", "py3langid"} <= set(image)  # allowed requests of a recipe to a worker


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_hardened(name):
    service = SERVICES[name]
    user = service["user"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not {"privileged", "network_mode", "pid", "cap_add", "devices"} & set(service)
    assert DIGEST.search(service["image"]) or service["image"].startswith("packhouse:")
    assert "docker.sock" not in str(service.get("volumes", ""))


def test_only_the_loopback_is_published_and_only_the_server():
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert list(ports) == ["server"]
    assert all(port.startswith("127.0.0.1:") for port in ports["server"])


def test_the_parts_of_the_store_that_ask_for_no_key_are_out_of_reach():
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert {name for name, joined in networks.items() if "storage" in joined} == {"store", "s3"}
    assert {name for name, joined in networks.items() if "database" in joined} == {
        "database",
        "server",
    }
    assert [n for n, network in COMPOSE["networks"].items() if not network.get("internal")] == [
        "api"
    ]
    assert "-config=/run/secrets/s3_identities" in SERVICES["s3"]["command"]


def test_secrets_come_by_file_and_only_to_who_needs_them():
    for secret in COMPOSE["secrets"].values():
        assert set(secret) == {"file"}
        assert secret["file"].startswith("./secrets/")
    given = {name: set(service.get("secrets", [])) for name, service in SERVICES.items()}
    assert {n for n, s in given.items() if "database_password" in s} == {"database", "server"}
    assert {n for n, s in given.items() if "aws_credentials" in s} == {"first-start", "worker"}
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|AUTH_STRING|SECRET|TOKEN|CREDENTIALS", key) and value:
                assert key.endswith("_FILE"), f"{name}: {key} holds a secret in the open"
                assert value.removeprefix("/run/secrets/") in given[name]


def test_the_server_asks_for_a_password_and_tokens_and_names_its_origin():
    server = SERVICES["server"]["environment"]
    assert "PREFECT_SERVER_API_AUTH_STRING_FILE" in server
    assert server["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
    assert "*" not in server["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]


def test_every_setting_of_prefect_exists_and_has_a_value_that_it_takes(tmp_path, monkeypatch):
    """Prefect ignores names that it does not know, so a misspelled one would protect nothing."""
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_valid_setting_names

    named = {
        key.removesuffix("_FILE"): "user:value" if key.endswith("_FILE") else value
        for service in SERVICES.values()
        for key, value in service.get("environment", {}).items()
        if key.startswith("PREFECT_")
    }
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for name, value in named.items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    Settings()  # refuses a bad value
    known = set(_get_valid_setting_names(Settings))
    assert set(named) <= known
    assert "PREFECT_SERVER_CSRF_PROTECTED" not in known  # a wrong name would be found


def test_the_documented_server_has_every_setting_of_the_compose_file():
    compose = {k.removesuffix("_FILE"): v for k, v in SERVICES["server"]["environment"].items()}
    documented = dict(re.findall(r"\b(PREFECT_[A-Z_]+|DO_NOT_TRACK)=(\S+)", documented_server()))
    image = set(re.findall(r"\b(PREFECT_SERVER_\w+|PREFECT_HOME|DO_NOT_TRACK)=", DOCKERFILE))
    assert set(documented) == set(compose) | image
    places = re.compile("DATABASE_HOST|PASSWORD|AUTH_STRING|ORIGINS|UI_API_URL")
    for name in (name for name in compose if not places.search(name)):
        assert documented[name] == compose[name]


def entrypoint(tmp_path, **settings):
    return run(
        DOCKER / "entrypoint.sh",
        "sh",
        "-c",
        "env",
        env={"PATH": os.environ["PATH"], **settings},
        cwd=tmp_path,
    )


def test_the_entrypoint_reads_secrets_from_their_files(tmp_path):
    (tmp_path / "auth").write_text("admin:s3cr3t $x `y`\n")
    (tmp_path / "none").touch()
    done = entrypoint(
        tmp_path, PREFECT_API_AUTH_STRING_FILE="auth", HF_TOKEN_FILE="none", OTHER_FILE="auth"
    )
    lines = done.stdout.splitlines()
    assert "PREFECT_API_AUTH_STRING=admin:s3cr3t $x `y`" in lines
    assert "OTHER_FILE=auth" in lines
    assert not any(line.startswith(("HF_TOKEN", "PREFECT_API_AUTH_STRING_FILE")) for line in lines)


@pytest.mark.parametrize("content", [None, ""])
def test_a_server_never_starts_without_the_password_it_was_promised(tmp_path, content):
    if content is not None:
        (tmp_path / "auth").write_text(content)
    done = entrypoint(tmp_path, PREFECT_SERVER_API_AUTH_STRING_FILE="auth")
    assert done.returncode == 2
    assert "auth" in done.stderr
    assert done.stdout == ""


def test_a_server_does_not_wait_for_the_lock_of_the_one_before_it(tmp_path):
    leases = tmp_path / "home" / "concurrency_leases"
    leases.mkdir(parents=True)
    (leases / "expirations.lock").write_text("1")
    (leases / "expirations.json").write_text("{}")
    (tmp_path / "prefect").symlink_to("/usr/bin/true")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PREFECT_HOME": str(leases.parent)}
    done = run(DOCKER / "entrypoint.sh", "prefect", "server", "start", env=environment)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in leases.iterdir()] == ["expirations.json"]


def test_a_health_check_fails_where_nothing_answers(tmp_path):
    done = run(
        DOCKER / "entrypoint.sh",
        "healthy",
        "http://127.0.0.1:9/",
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 1
    assert "Connection refused" in done.stdout


def test_secrets_are_random_agree_and_are_kept(tmp_path):
    shutil.copy(DOCKER / "make_secrets.sh", tmp_path)
    script, folder = tmp_path / "make_secrets.sh", tmp_path / "secrets"
    assert run(script).returncode == 0
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert run(script).stdout == ""
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (key,) = json.loads(first["s3_identities.json"])["identities"][0]["credentials"]
    assert f"aws_access_key_id = {key['accessKey']}\n" in first["aws_credentials"]
    assert f"aws_secret_access_key = {key['secretKey']}\n" in first["aws_credentials"]
    assert len(first["database_password"]) == 40
    files = {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert set(first) == files


def test_the_docker_pool_shares_networks_cache_and_settings_with_composes_worker():
    job = json.loads((ROOT / "deployments" / "pools" / "docker.json").read_text())
    job = job["job_configuration"]
    worker = SERVICES["worker"]
    assert job["networks"] == [f"packhouse_{name}" for name in worker["networks"]]
    assert job["env"].items() >= worker["environment"].items()
    home = re.search(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)[1]
    assert f"packhouse_worker:{home}" in job["volumes"]
    assert f"worker:{home}" in worker["volumes"]
    assert f"PACKHOUSE_CACHE={home}/" in DOCKERFILE
    secrets = {volume.split(":")[1] for volume in job["volumes"] if "/secrets/" in volume}
    assert secrets == {f"/run/secrets/{name}" for name in worker["secrets"]}
    assert job["container_create_kwargs"]["user"] == worker["user"]


@pytest.mark.parametrize(("folder", "read"), [("/data", True), ("s3://raw/a/", False)])
def test_runs_may_read_the_data_folder_and_the_demo_and_nothing_else(monkeypatch, folder, read):
    assert SERVICES["worker"]["environment"]["PACKHOUSE_DATA"] == "/data"
    monkeypatch.setenv("PACKHOUSE_DATA", folder)
    places = load_places(ROOT / "deployments" / "sources.yaml")
    demo = str(ROOT / "deployments" / "demo" / "chats.jsonl")
    for place, allowed in {
        "/data/x.jsonl": read,
        "s3://raw/a/x.jsonl": not read,
        demo: True,
        "/data/../run/secrets/hf_token": False,
        "/run/secrets/aws_credentials": False,
        "/database/x.jsonl": False,
        "s3://raw/b.jsonl": False,
    }.items():
        if allowed:
            assert places.source(place) == place
        else:
            with pytest.raises(ConfigError, match="is not listed in the worker's sources\\.yaml"):
                places.source(place)


def test_without_a_data_folder_runs_may_read_the_demo_only(monkeypatch):
    monkeypatch.delenv("PACKHOUSE_DATA", raising=False)
    places = load_places(ROOT / "deployments" / "sources.yaml")
    assert set(places.allow.read) == {str(ROOT / "deployments" / "demo")}
    monkeypatch.setenv("PACKHOUSE_DATA", "")
    with pytest.raises(ConfigError, match="allow"):  # it would be the folder of the file itself
        load_places(ROOT / "deployments" / "sources.yaml")
