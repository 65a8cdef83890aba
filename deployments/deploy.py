"""Create or update work pools, deployments, run forms and automations on a server. Safe to repeat.

python deployments/deploy.py [POOL ...]    # in the root of the repository

Uses the server at PREFECT_API_URL, and all pools by default. PACKHOUSE_NOTIFY is the address for
notifications (docs/how-to/notify.md).
"""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.types import SecretDict
from pydantic import SecretStr

from packhouse.recipe.recipe_file import expand_variables
from schemas.places import AllowedPaths

HERE = Path(__file__).parent
POOLS = {  # name: type, template of its jobs
    "packhouse": ("process", "pools/process.json"),
    "packhouse-docker": ("docker", "pools/docker.json"),
    "packhouse-k8s": ("kubernetes", "k8s/base-job-template.json"),
}


BLOCK = "packhouse-notify"
"""Notification block of the automations: made from PACKHOUSE_NOTIFY, or in the UI."""

SHOWN = {
    "parameters": "recipe recipes approval store",
    "Recipe": "dataset sources tokenizer validate pack split publish",
    "SourceConfig": "path format",
    "ValidateConfig": "max_quarantined",
    "PackConfig": "seq_len",
    "SplitConfig": "eval_fraction",
    "PublishConfig": "store",
}
"""Fields of the run forms. Other settings of a recipe can be given as JSON."""


def main(pools: list[str]) -> int:
    """Deploy to these pools; return the exit code."""
    deployments = [
        each
        for each in yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
        if each["work_pool"]["name"] in pools
    ]
    sources = Path(os.environ.get("PACKHOUSE_SOURCES", HERE / "sources.yaml"))
    raw = yaml.safe_load(sources.read_text(encoding="utf-8")) or {}
    places = AllowedPaths.model_validate(raw)
    known = ", ".join(sorted(places.recipes)) or "none"
    unknown = unknown_recipes(deployments, places)
    for deployment, recipe in unknown:
        print(
            f"{HERE / 'prefect.yaml'}: the recipe '{recipe}' of {deployment} is not listed under "
            f"`recipes` in {sources} (known: {known}). Choose a known one, or add it there"
        )
    if unknown:
        return 2
    make_pools(pools)
    deployed = subprocess.run(
        [
            *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
            *(part for each in deployments for part in ("--name", each["name"])),
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
    make_forms(deployments, places)
    make_automations(make_block())
    print("deployed: pools, deployments, forms and automations are up to date")
    return 0


def make_pools(names: list[str]) -> None:
    """Create or update the work pools; ${PACKHOUSE_X} in their templates is replaced."""
    with get_client(sync_client=True) as client:
        for name in names:
            kind, file = POOLS[name]
            template = expand_variables(json.loads((HERE / file).read_text()))
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool, overwrite=True)


def unknown_recipes(
    deployments: list[dict[str, Any]], places: AllowedPaths
) -> list[tuple[str, str]]:
    """Return deployments with recipes that the file of names lacks: Prefect ends in a traceback."""
    found = []
    for each in deployments:
        parameters = each.get("parameters", {})
        named = [parameters.get("recipe"), *parameters.get("recipes", ())]
        found += [
            (each["name"], recipe)
            for recipe in named
            if isinstance(recipe, str) and recipe not in places.recipes
        ]
    return found


def make_forms(deployments: list[dict[str, Any]], places: AllowedPaths) -> None:
    """Let the forms offer what a deployed run accepts, and the names from sources.yaml."""
    with get_client(sync_client=True) as client:
        for each in deployments:
            flow = each["entrypoint"].rpartition(".")[2]  # flows.prepare.prepare
            found = client.read_deployment_by_name(f"{flow}/{each['name']}")
            schema = form(found.parameter_openapi_schema or {}, places)
            client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=schema))


def form(schema: dict[str, Any], places: AllowedPaths) -> dict[str, Any]:
    """Return the schema of a flow's parameters for the form of its deployments.

    Args:
        schema: of the parameters, as Prefect reads it from the flow.
        places: names to choose from. Paths are accepted too, as workers may allow prefixes.
    """
    schema = deepcopy(schema)
    schema["properties"].pop("cache", None)  # a deployed run uses the worker's cache
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
        if field in ("recipe", "recipes"):  # a name or a whole recipe, never a path
            found["anyOf"][0] = choice
        else:
            found["anyOf"][0]["title"] = "Path or URI"
            found["anyOf"].insert(0, choice)
    if "Recipe" in sections:
        hide(schema, SHOWN["parameters"])
        for section in SHOWN.keys() - {"parameters"}:
            hide(schema["definitions"][section], SHOWN[section])
    return schema


def hide(section: dict[str, Any], shown: str) -> None:
    """Let a form show only these properties; the server still checks the others.

    The UI shows only `properties`, but a JSON schema checks `patternProperties` too.
    """
    hidden = section["properties"].keys() - set(shown.split())
    section["patternProperties"] = {
        f"^{name}$": section["properties"].pop(name) for name in sorted(hidden)
    }


def make_block() -> UUID | None:
    """Return the id of the notification block, made from PACKHOUSE_NOTIFY if that is set."""
    if url := os.environ.get("PACKHOUSE_NOTIFY"):
        is_plain = url.startswith(("http://", "https://")) and "://hooks.slack" not in url
        block = (
            CustomWebhookNotificationBlock(
                name=BLOCK,
                url="{{url}}",
                json_data={"subject": "{{subject}}", "body": "{{body}}"},
                secrets=SecretDict({"url": url}),  # it may contain a token, and the UI shows `url`
            )
            if is_plain
            else SlackWebhook(
                url=SecretStr(url)
            )  # takes any address of Apprise, such as mailtos://
        )
        saved = block.save(BLOCK, overwrite=True)
    with get_client(sync_client=True) as client:
        found = [each for each in client.read_block_documents() if each.name == BLOCK]
        if url:  # blocks of other types may have the name too, with an address from before
            for each in found:
                if each.id != saved:
                    client.delete_block_document(each.id)
            return saved
        return found[0].id if found else None


def make_automations(block: UUID | None) -> None:
    """Create or update the automations, by name.

    One that has not changed is left alone, because an update restarts the time that a trigger has
    waited: a dead run would not be marked Crashed, and no dataset would be reported as stale.

    Args:
        block: for notifications; without one, automations that notify are left out.
    """
    with get_client(sync_client=True) as client:
        for raw in yaml.safe_load((HERE / "automations.yaml").read_text()):
            for action in raw["actions"]:
                if action["type"] == "send-notification":
                    action["block_document_id"] = block
            if block is None and any("block_document_id" in each for each in raw["actions"]):
                continue
            wanted = AutomationCore.model_validate(raw)
            found = client.read_automations_by_name(wanted.name)
            if not found:
                client.create_automation(wanted)
            elif AutomationCore.model_validate(found[0].model_dump()) != wanted:
                client.update_automation(found[0].id, wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*POOLS]))
