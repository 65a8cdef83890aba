"""The job template and the manifests: by Kubernetes' own schemas, filled in as a worker does."""

import asyncio
import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

K8S = Path(__file__).resolve().parents[2] / "deployments" / "k8s"
TEMPLATE = json.loads((K8S / "base-job-template.json").read_text())
MANIFESTS = list(yaml.safe_load_all((K8S / "packhouse.yaml").read_text()))
VERSIONS = ("1.31", "1.34")  # the oldest in wide use, and a recent one
BY_KIND = {manifest["kind"]: manifest for manifest in MANIFESTS}


def filled_in(**values):
    """The job that Prefect makes of the template: its own code for defaults and placeholders."""
    from prefect.utilities.templating import apply_values

    defaults = {
        name: field["default"]
        for name, field in TEMPLATE["variables"]["properties"].items()
        if "default" in field
    }
    given = {"name": "calm-otter", "command": ["prefect", "flow-run", "execute"], "labels": {}}
    manifest = apply_values(
        TEMPLATE["job_configuration"], {**defaults, **given, "env": [], **values}
    )
    return json.loads(json.dumps(manifest))["job_manifest"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_valid(version):
    kubernetes_validate.validate(filled_in(), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}")
def test_every_manifest_is_valid(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_job_with_a_field_that_does_not_exist_is_found():
    job = filled_in()
    job["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicies"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_prefect_reads_the_template_and_every_placeholder_is_a_variable():
    from prefect.utilities.templating import find_placeholders
    from prefect.workers.base import BaseJobConfiguration

    names = {p.name for p in find_placeholders(TEMPLATE["job_configuration"])}
    assert names == set(TEMPLATE["variables"]["properties"])

    async def configure():
        return await BaseJobConfiguration.from_template_and_values(
            TEMPLATE, {"namespace": "elsewhere"}, client=object()
        )

    assert asyncio.run(configure()).name is None


def test_deployments_may_choose_image_resources_and_cache():
    job = filled_in(image="registry/p@sha256:1", memory_limit="32Gi", cache_claim="big")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/p@sha256:1"
    assert container["resources"]["limits"] == {"memory": "32Gi"}
    (work, _) = job["spec"]["template"]["spec"]["volumes"]
    assert work["persistentVolumeClaim"]["claimName"] == "big"


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


def test_the_worker_says_whether_it_is_well():
    (worker,) = BY_KIND["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert worker["args"][:2] == ["python", "deployments/worker.py"]
    assert "--with-healthcheck" in worker["args"]
    assert worker["readinessProbe"]["httpGet"] == {"path": "/health", "port": "health"}
    assert worker["livenessProbe"]
