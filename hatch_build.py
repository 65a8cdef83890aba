"""Add to the wheel what is not Python: the files of a new project, and the reports' JavaScript.

The files that `packhouse new` copies (flows, tasks, deployments and what they need) are in
`packhouse/addons/new_project/files/`, because a top-level `tasks` in site-packages would shadow
other people's. An editable install needs none of this: the checkout has the files.

Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) come from `vl-convert-python`, which bundles them
without a network in two seconds. They become `packhouse/addons/report/vega.js`, which git ignores.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = ("flows", "tasks", "schemas", "deployments", "docker")
FILES = "packhouse/addons/new_project/files"
VEGA = Path("packhouse", "addons", "report", "vega.js")


class ProjectFiles(BuildHookInterface[Any]):
    """Adds the files to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name each file and its place in the wheel; `version` is `editable` or `standard`."""
        root = Path(self.root)
        write_vega(root / VEGA, is_needed=version != "editable")
        if version == "editable":
            return
        build_data["artifacts"].append(str(VEGA))  # though git ignores it
        files = [file for folder in CARRIED for file in (root / folder).rglob("*")]
        for file in [*files, root / "requirements" / "image.txt"]:
            if file.is_file() and not {"__pycache__", "secrets"} & set(file.parts):
                place = file.relative_to(root)
                build_data["force_include"][str(file)] = f"{FILES}/{place}"


def write_vega(path: Path, *, is_needed: bool) -> None:
    """Write the JavaScript that draws charts; a checkout may go without it.

    Raises:
        ImportError: a wheel is built, and `vl-convert-python` is not installed.
    """
    try:
        from vl_convert import javascript_bundle
    except ImportError:
        if is_needed and not path.exists():
            raise
        return
    licence = path.with_name("vega-licence.txt").read_text("utf-8")
    code = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    path.write_text(f"/*!\n{licence}*/\n{code}", encoding="utf-8")


if __name__ == "__main__":
    write_vega(Path(__file__).parent / VEGA, is_needed=True)
