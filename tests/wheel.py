"""The wheel, and environments that contain it and nothing else of this checkout."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_over_ours(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel and this environment's packages, but not the checkout.

    Packages are visible through a line in a `.pth` file. Those of editable installs have their own
    `.pth` files, which Python reads only in its own site-packages.

    Returns:
        The path of its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (ours,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{ours}\n")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([str(python), *install], check=True)
    return python
