"""The job template and the manifests, filled in as a worker does, match Kubernetes' own schemas."""

import asyncio
import json
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml

from deployments.deploy import HERE, POOLS
from packhouse.recipe.recipe_file import expand_variables

K8S = HERE / "k8s"
TEMPLATE = expand_variables(json.loads((K8S / "base-job-template.json").read_text()))
MANIFESTS = list(yaml.safe_load_all((K8S / "packhouse.yaml").read_text()))
VERSIONS = ("1.31", "1.34")  # the oldest in wide use, and a recent one
BY_KIND = {manifest["kind"]: manifest for manifest in MANIFESTS}


def configured(**values):
    """Return the job that Prefect's Kubernetes worker makes for a run with these job variables."""
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    job = asyncio.run(
        KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, values, client=object())
    )
    job.prepare_for_flow_run(FlowRun(flow_id=uuid4(), name="calm-otter"))
    return job


def filled_in(**values):
    return configured(**values).job_manifest


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_valid(version):
    kubernetes_validate.validate(filled_in(), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}")
def test_every_manifest_is_valid(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


def test_every_placeholder_is_a_variable_and_every_variable_is_used():
    from prefect.utilities.templating import find_placeholders

    names = {p.name for p in find_placeholders(TEMPLATE["job_configuration"])}
    assert names == set(TEMPLATE["variables"]["properties"])


def test_a_job_executes_its_flow_run():
    (container,) = filled_in()["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert "PREFECT__FLOW_RUN_ID" in {setting["name"] for setting in container["env"]}


@pytest.mark.parametrize("kind", ["docker", "kubernetes", "process"])
def test_whoever_starts_a_run_chooses_neither_command_nor_image_nor_secrets(kind):
    (file,) = (file for each, file in POOLS.values() if each == kind)
    variables = json.loads((HERE / file).read_text())["variables"]
    assert variables["additionalProperties"] is False
    chosen = {"command", "env", "image", "volumes", "networks", "secret", "service_account_name"}
    assert not chosen & set(variables["properties"])


def test_a_registrys_image_is_named_when_the_pools_are_made(monkeypatch):
    monkeypatch.setenv("PACKHOUSE_IMAGE", "registry.example/packhouse@sha256:1")
    template = expand_variables(json.loads((K8S / "base-job-template.json").read_text()))
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/packhouse@sha256:1"


PODS = [
    pytest.param(filled_in()["spec"]["template"]["spec"], id="run"),
    pytest.param(BY_KIND["Deployment"]["spec"]["template"]["spec"], id="worker"),
]


@pytest.mark.parametrize("pod", PODS)
def test_pods_meet_the_restricted_standard(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"]


def test_a_run_has_no_rights_in_the_cluster():
    run = filled_in()["spec"]["template"]["spec"]
    assert run["automountServiceAccountToken"] is False
    assert run["serviceAccountName"] == "packhouse-run"
    assert BY_KIND["RoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": "packhouse-worker", "namespace": "packhouse"}
    ]
    rules = BY_KIND["Role"]["rules"]
    assert not any("secrets" in rule["resources"] or "*" in str(rule) for rule in rules)


def test_secrets_are_references_only():
    (container,) = filled_in()["spec"]["template"]["spec"]["containers"]
    assert {"secretRef": {"name": "packhouse"}} in container["envFrom"]
    (worker,) = BY_KIND["Deployment"]["spec"]["template"]["spec"]["containers"]
    named = {env["name"]: env for env in worker["env"]}
    assert "valueFrom" in named["PREFECT_API_AUTH_STRING"]
    assert "Secret" not in BY_KIND
    # Without these two, Prefect writes the auth string into the manifest of every job.
    prefix = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET"
    assert named[f"{prefix}_NAME"]["value"] == "packhouse"
    assert named[f"{prefix}_KEY"]["value"] == "PREFECT_API_AUTH_STRING"


def test_the_worker_watches_the_namespace_that_its_account_may_look_at(monkeypatch):
    """By default Prefect watches the whole cluster, which a Role cannot allow."""
    from prefect_kubernetes.settings import KubernetesSettings

    (worker,) = BY_KIND["Deployment"]["spec"]["template"]["spec"]["containers"]
    for setting in worker["env"]:
        if "value" in setting:
            monkeypatch.setenv(setting["name"], setting["value"])
    settings = KubernetesSettings()
    assert settings.observer.namespaces == {BY_KIND["Role"]["metadata"]["namespace"]}
    assert settings.worker.api_auth_string_secret_name == "packhouse"
    assert configured().namespace == "packhouse"


def test_every_pool_of_containers_has_a_deployment_whose_schedule_is_off():
    deployments = yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
    assert {each["work_pool"]["name"] for each in deployments} == set(POOLS)
    for each in deployments:
        if each["work_pool"]["name"] != "packhouse":
            assert not any(schedule["active"] for schedule in each.get("schedules", []))
