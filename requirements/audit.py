"""Check the pinned versions for known vulnerabilities with pip-audit (`make audit`).

    python requirements/audit.py [--service pypi|osv]

Exit codes: 0 if none are known; 1 if some are, listed with the versions that fix them; 2 if the
service did not answer for some packages, which pip-audit itself calls "skipped" and lets pass.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FILES = ("run.txt", "image.txt", "test.txt", "torch.txt", "docs.txt")


def audit(file: Path, service: str) -> list[Mapping[str, Any]]:
    """Return the report of pip-audit on every pinned package of a file."""
    command = [str(Path(sys.executable).parent / "pip-audit"), "--require-hashes", "--disable-pip"]
    command += ["--vulnerability-service", service, "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(
        [*command, "--requirement", str(file)], capture_output=True, text=True, check=False
    )
    try:
        found: list[Mapping[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        sys.exit(f"pip-audit failed on {file.name}: {done.stderr.strip()[-500:]}")
    return found


def report(dependencies: Iterable[Mapping[str, Any]]) -> int:
    """Print vulnerable and unaudited packages; return the exit code."""
    unknown, bad = [], []
    for package in dependencies:
        if "skip_reason" in package:
            unknown.append(package["name"])
        bad += [(package, finding) for finding in package.get("vulns", [])]
    for package, finding in bad:
        fixed = ", ".join(finding["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {finding['id']}, fixed by {fixed}")
    if bad:
        print("pin newer versions: raise them in pyproject.toml, `make lock`, `make check`")
        return 1
    if unknown:
        some = ", ".join(sorted(set(unknown))[:5])
        print(
            f"NOT AUDITED: {len(set(unknown))} packages ({some}, ...): the service did not answer"
            " for them; run it where PyPI can be reached, or try --service osv"
        )
        return 2
    print("no known vulnerabilities")
    return 0


def main() -> int:
    """Audit all files of pinned versions; return the exit code."""
    parser = argparse.ArgumentParser(description="known vulnerabilities of the pinned versions")
    parser.add_argument("--service", choices=["pypi", "osv"], default="pypi")
    parser.add_argument("files", nargs="*", type=Path, default=[FOLDER / name for name in FILES])
    arguments = parser.parse_args()
    packages = {
        (package["name"], package.get("version")): package
        for file in arguments.files
        for package in audit(file, arguments.service)
    }
    return report(packages.values())


if __name__ == "__main__":
    sys.exit(main())
