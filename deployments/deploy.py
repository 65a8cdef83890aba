"""Bring a server up to date: work pools, deployments, run forms, automations. Safe to run again.

python deployments/deploy.py      # in the root of the repository; the server at PREFECT_API_URL
"""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore

from packhouse.recipe.reading import expand_variables
from schemas.places import Places

HERE = Path(__file__).parent
POOLS = {  # name: type, template of its jobs
    "packhouse": ("process", "pools/process.json"),
    "packhouse-docker": ("docker", "pools/docker.json"),
    "packhouse-k8s": ("kubernetes", "k8s/base-job-template.json"),
}


def main() -> int:
    """Do the four steps; the first that fails ends it."""
    make_pools()
    deployed = subprocess.run(
        [
            *(sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"),
            *("--prefect-file", str(HERE / "prefect.yaml")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if deployed.returncode:
        print(deployed.stdout)
        return deployed.returncode
    make_forms()
    make_automations()
    print("deployed: pools, deployments, forms and automations are up to date")
    return 0


def make_pools() -> None:
    """Create the work pools, or renew what their runs may set; ${PACKHOUSE_X} is filled in."""
    with get_client(sync_client=True) as client:
        for name, (kind, file) in POOLS.items():
            template = expand_variables(json.loads((HERE / file).read_text()))
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool, overwrite=True)


def make_forms() -> None:
    """Let the forms offer what a deployed run accepts, and the names that its worker knows."""
    file = Path(os.environ.get("PACKHOUSE_SOURCES", HERE / "sources.yaml"))
    places = Places.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    deployments = yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
    with get_client(sync_client=True) as client:
        for each in deployments:
            flow = each["entrypoint"].rpartition(".")[2]  # flows.prepare.prepare
            found = client.read_deployment_by_name(f"{flow}/{each['name']}")
            schema = form(found.parameter_openapi_schema or {}, places)
            client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=schema))


def form(schema: dict[str, Any], places: Places) -> dict[str, Any]:
    """Return the schema of a flow's parameters as the form of its deployments.

    Args:
        schema: of the parameters, as Prefect reads it from the flow.
        places: names that the workers know; none is required, for they may allow prefixes as well.
    """
    schema = deepcopy(schema)
    schema["properties"].pop("cache", None)  # the worker's own: a deployed run may not choose it
    schema["additionalProperties"] = False
    sections = {name: each["properties"] for name, each in schema.get("definitions", {}).items()}
    sections["parameters"] = schema["properties"]
    for section, field, names in (
        ("Recipe", "tokenizer", places.tokenizers),
        ("Recipe", "golden", places.files),
        ("SourceConfig", "path", places.sources),
        ("PublishConfig", "store", places.stores),
        ("parameters", "store", places.stores),
        ("parameters", "recipe", places.recipes),
        ("parameters", "recipes", places.recipes),
    ):
        found = sections.get(section, {}).get(field)
        if found is None or not names or "$ref" in found:
            continue
        found = found.get("items", found)  # of a list, each one
        choice = {"title": "Name", "type": "string", "enum": sorted(names)}
        if "anyOf" not in found:
            keys = found.keys() & {"type", "pattern", "minLength"}
            found["anyOf"] = [{key: found.pop(key) for key in keys}]
        if field in ("recipe", "recipes"):  # what is no name is a whole recipe, never a place
            found["anyOf"][0] = choice
        else:
            found["anyOf"][0]["title"] = "Path or URI"
            found["anyOf"].insert(0, choice)
    return schema


def make_automations() -> None:
    """Create the automations, or bring those of the same name up to date."""
    with get_client(sync_client=True) as client:
        for raw in yaml.safe_load((HERE / "automations.yaml").read_text()):
            wanted = AutomationCore.model_validate(raw)
            found = client.read_automations_by_name(wanted.name)
            if found:
                client.update_automation(found[0].id, wanted)
            else:
                client.create_automation(wanted)


if __name__ == "__main__":
    sys.exit(main())
