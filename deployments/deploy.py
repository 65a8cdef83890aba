"""Bring a server up to date: work pools, deployments, automations. Safe to run again.

python deployments/deploy.py      # in the root of the repository; the server at PREFECT_API_URL
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore

HERE = Path(__file__).parent
POOLS = {"packhouse": "process", "packhouse-docker": "docker"}


def main() -> int:
    """Do the three steps; the first that fails ends it."""
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
    make_automations()
    print("deployed: pools, deployments and automations are up to date")
    return 0


def make_pools() -> None:
    """Create the work pools, or renew what their runs may set."""
    with get_client(sync_client=True) as client:
        for name, kind in POOLS.items():
            template = json.loads((HERE / "pools" / f"{kind}.json").read_text())
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool, overwrite=True)


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
