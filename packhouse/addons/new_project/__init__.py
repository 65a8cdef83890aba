"""`packhouse new FOLDER`: create a project, from a recipe to schedules and clusters.

Flows, tasks, contracts, deployments and the image are copied from `files/` in the wheel, or from a
checkout. A few templates in `files/` are filled in.
"""

import json
import re
import shutil
from pathlib import Path

import click

import packhouse
from packhouse.cli import json_option
from packhouse.errors import ConfigError, PackhouseError
from packhouse.system.disks import disk_errors
from packhouse.system.plugins import pip_install
from packhouse.system.terminal import echo

_OWN = Path(__file__).parent / "files"
_CHECKOUT = Path(packhouse.__file__).parents[1]

# Folders and files to copy, without the checkout's recipes, whose data a project does not have.
_CARRIED = ("flows", "tasks", "schemas", "deployments", "docker", "requirements/image.txt")
_LEFT_OUT = ("__pycache__", "recipes", "templates", "secrets", "sources.yaml", "Dockerfile*")

# Target path of each template in `files/`; @NAME@, @VERSION@ and @INSTALL@ are filled in.
_FILLED = {
    "README.md": "README.md",
    "Makefile": "Makefile",
    "pyproject.in": "pyproject.toml",
    "gitignore": ".gitignore",
    "sources.yaml": "deployments/sources.yaml",
    "dockerignore": "docker/Dockerfile.dockerignore",
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@json_option()
def new(folder: Path, as_json: bool) -> None:
    """Create a project in FOLDER: flows, schedules, a container image and a sample recipe.

    FOLDER must be empty, or must not exist yet.

    \b
    Example:
      $ packhouse new my-data
      created a project in my-data. Next:
        cd my-data
        make setup     # once: .venv with packhouse and Prefect
        make demo      # run the whole pipeline on the sample data
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}' is not an empty folder. Pass a new one.")
    with disk_errors(folder, "the project", "pass another folder"):
        _write(folder)
    if as_json:
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
        echo(json.dumps({"folder": str(folder), "files": files}))
        return
    echo(f"created a project in {folder}. Next:")
    echo(f"  cd {folder}")
    echo("  make setup     # once: .venv with packhouse and Prefect")
    echo("  make demo      # run the whole pipeline on the sample data")


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in _CARRIED:
        source, target = carried(name), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        else:
            shutil.copyfile(source, target)
    for own, place in _FILLED.items():
        text = (_OWN / own).read_text(encoding="utf-8")
        (folder / place).write_text(_filled(text, folder), encoding="utf-8")
    # The Dockerfile of the image, which installs packhouse instead of copying a checkout.
    text = carried("docker/Dockerfile").read_text(encoding="utf-8")
    before, _, rest = text.partition("COPY pyproject.toml")
    _, last_stage, after = rest.partition("FROM ${BASE} AS run")
    text = before + (_OWN / "Dockerfile.build").read_text("utf-8") + last_stage + after
    (folder / "docker" / "Dockerfile").write_text(_filled(text, folder), encoding="utf-8")


def carried(name: str) -> Path:
    """Return the path of a folder or file to copy, in the wheel or in a checkout.

    Raises:
        PackhouseError: neither has it, because packhouse was installed in another way.
    """
    for root in (_OWN, _CHECKOUT):
        # In site-packages, a folder `tasks` next to packhouse may belong to another package.
        is_ours = root == _OWN or (root / "hatch_build.py").is_file()
        if is_ours and (root / name).exists():
            return root / name
    raise PackhouseError(
        f"this installation of packhouse lacks '{name}'. Install the packhouse wheel."
    )


def _filled(text: str, folder: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "my-data"
    filled = {"NAME": name, "VERSION": packhouse.__version__, "INSTALL": pip_install("flows")}
    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], text)
