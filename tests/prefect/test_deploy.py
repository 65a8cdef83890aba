"""Deploying again changes only what differs."""

import yaml
from prefect.client.orchestration import get_client

from deployments import deploy


def automation(client):
    """Return the only automation of the server; the client's own type has no IDs of triggers."""
    (found,) = client.request("POST", "/automations/filter", json={}).json()
    return found


def test_a_trigger_keeps_the_time_it_has_waited_unless_it_changes(tmp_path, monkeypatch):
    (shipped,) = (
        each
        for each in yaml.safe_load((deploy.HERE / "automations.yaml").read_text())
        if each["name"] == "packhouse-crashed"
    )
    monkeypatch.setattr(deploy, "HERE", tmp_path)
    file = tmp_path / "automations.yaml"
    file.write_text(yaml.safe_dump([shipped]))
    with get_client(sync_client=True) as client:
        deploy.make_automations(None)
        first = automation(client)
        deploy.make_automations(None)
        assert automation(client)["trigger"]["id"] == first["trigger"]["id"]  # the server's key
        file.write_text(yaml.safe_dump([shipped | {"description": "another"}]))
        deploy.make_automations(None)
        assert automation(client)["description"] == "another"
        assert automation(client)["id"] == first["id"]
        client.delete_automation(first["id"])
