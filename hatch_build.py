"""Put into the wheel what `packhouse new` copies: flows, tasks, deployments and what they need.

They lie in `packhouse/project/`, for a top-level `tasks` in site-packages would shadow those of
other people. An editable install needs none of it: there they are in the checkout.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = ("flows", "tasks", "schemas", "deployments", "docker")


class ProjectFiles(BuildHookInterface[Any]):
    """Adds the files to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name each file and its place in the wheel; `version` is `editable` or `standard`."""
        if version == "editable":
            return
        root = Path(self.root)
        files = [file for folder in CARRIED for file in (root / folder).rglob("*")]
        for file in [*files, root / "requirements" / "image.txt"]:
            if file.is_file() and not {"__pycache__", "secrets"} & set(file.parts):
                place = file.relative_to(root)
                build_data["force_include"][str(file)] = f"packhouse/project/{place}"
