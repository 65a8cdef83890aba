"""Run the tests of peers on packhouse's code, and compare the results with expected ones.

`python -m bench.peers_tests --trl CHECKOUT --megatron-bridge CHECKOUT --dart-math CHECKOUT`

A checkout is a clone, bare or not, or a folder of its files; fetch it yourself. `expected.json` has
the last tested commits, the number of tests, and the tests that fail, with message and reason:
packhouse refuses these cases by design. Any other result is reported, with exit code 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.inputs import ROOT, find_shared
from bench.reporting import markdown_table

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tests that run together."""

    peer: str
    needs: tuple[str, ...]
    """Parts of the checkout."""
    tests: tuple[str, ...]
    """Files, from the checkout or from this folder."""
    only: str = ""
    """Expression for pytest's `-k`."""


_PACKING = "tests/unit_tests/data/packing"
_FUNCTIONAL = "tests/functional_tests/test_groups/data/packing"
_BRIDGE = ("src/megatron/bridge", _PACKING, _FUNCTIONAL)
SUITES = {
    "TRL: TestPackDataset*": Suite(
        peer="trl",
        needs=("trl", "tests", "VERSION"),
        tests=("tests/test_data_utils.py",),
        only="TestPackDataset",
    ),
    "Megatron-Bridge: test_algorithms.py": Suite(
        peer="megatron-bridge",
        needs=_BRIDGE,
        tests=(f"{_PACKING}/test_algorithms.py", f"{_FUNCTIONAL}/test_algorithms.py"),
    ),
    "Megatron-Bridge: test_parquet.py, its own reader": Suite(
        peer="megatron-bridge", needs=_BRIDGE, tests=(f"{_PACKING}/test_parquet.py",)
    ),
    "Megatron-Bridge: its reader on exports": Suite(
        peer="megatron-bridge", needs=_BRIDGE, tests=("megatron_reader.py",)
    ),
    "dart-math: templates, packs": Suite(
        peer="dart-math", needs=("dart_math",), tests=("dart_math_rows.py",)
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a result differs from the expected one."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers_tests", description=__doc__)
    for peer in sorted({suite.peer for suite in SUITES.values()}):
        parser.add_argument(f"--{peer}", type=Path, metavar="CHECKOUT")
    options = vars(parser.parse_args(arguments))
    expected = json.loads((HERE / "expected.json").read_text())
    lines: list[list[str]] = []
    refused: list[list[str]] = []
    surprises: list[str] = []
    for name, suite in SUITES.items():
        checkout = options[suite.peer.replace("-", "_")]
        if checkout is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            commit = _copy(checkout.resolve(), suite.needs, Path(folder))
            said = _run(suite, Path(folder))
        counts = Counter(outcome for outcome, _ in said.values())
        told = f"{counts['passed']} of {len(said)}"
        told += f", {counts['skipped']} skipped" if counts["skipped"] else ""
        lines.append([name, commit, told])
        refused += [[name, str(len(r["tests"])), r["why"]] for r in expected[name]["refused"]]
        surprises += [f"{name}: {each}" for each in find_surprises(said, expected[name])]
    print(markdown_table(["tests", "commit", "pass"], lines))
    if refused:
        print("\n" + markdown_table(["tests", "number", "refused by design"], refused))
    for surprise in surprises:
        print(f"UNEXPECTED {surprise}", file=sys.stderr)
    return bool(surprises)


def find_surprises(said: dict[str, tuple[str, str]], expected: dict[str, Any]) -> list[str]:
    """Return the differences from a suite's part of `expected.json`.

    Args:
        said: outcome (`passed`, `failed`, `skipped`) and message of each test.
        expected: `tests`, their number; `refused`, whose `tests` fail with a message that contains
            `says`.
    """
    found = []
    if len(said) != expected["tests"]:
        found.append(f"{len(said)} tests, expected {expected['tests']}")
    due = {test: each["says"] for each in expected["refused"] for test in each["tests"]}
    for test, (outcome, message) in said.items():
        if outcome == "failed" and (test not in due or due[test] not in message):
            found.append(f"{test} fails: {message:.300}")
        elif outcome == "passed" and test in due:
            found.append(f"{test} passes, expected '{due[test]}'")
    return found + [f"{test} is gone" for test in due if test not in said]


def _copy(checkout: Path, needs: tuple[str, ...], folder: Path) -> str:
    """Copy parts of a checkout's commit, or of a folder without git; return the commit."""
    git = ("git", "-C", str(checkout))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    pack = [*git, "archive", "HEAD"] if head.returncode == 0 else ["tar", "-cC", str(checkout)]
    parts = subprocess.run([*pack, *needs], capture_output=True)
    if parts.returncode:
        sys.exit(f"'{checkout}' has no {', '.join(needs)}; is it the right checkout?")
    subprocess.run(["tar", "-xC", str(folder)], input=parts.stdout, check=True)
    return head.stdout[:9] or "no git"


def _run(suite: Suite, folder: Path) -> dict[str, tuple[str, str]]:
    """Run the tests in a separate process without a configuration; return each result."""
    report = folder / "report.xml"
    tests = [test if "/" in test else str(HERE / test) for test in suite.tests]
    command = [sys.executable, "-m", "pytest", "-p", "bench.peers_tests.names", "-q", *tests]
    command += [
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    command += ["--noconftest", "--import-mode=importlib", f"--junitxml={report}", "-k", suite.only]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    shared = {"PACKHOUSE_SHARED": str(find_shared() or "")}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | paths | shared, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    said = {}
    for case in ET.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for each in case:
            if each.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if each.tag == "skipped" else "failed"
                message = each.get("message", "")
        said[f"{case.get('classname')}.{case.get('name')}"] = (outcome, message)
    return said


if __name__ == "__main__":
    sys.exit(main())
