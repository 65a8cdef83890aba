"""`make audit` passes only if every pinned package was really audited."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "audit.py"
spec = importlib.util.spec_from_file_location("audit_of_versions", SCRIPT)
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

SOUND = {"name": "orjson", "version": "3.11.4", "vulns": []}
SKIPPED = {"name": "six", "skip_reason": "Dependency not found on PyPI and could not be audited"}
VULNERABLE = {
    "name": "jinja2",
    "version": "3.1.5",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.6"], "aliases": []}],
}


def test_nothing_known_passes(capsys):
    assert audit.report([SOUND]) == 0
    assert capsys.readouterr().out == "no known vulnerabilities\n"


def test_a_package_that_nobody_answered_for_does_not_pass(capsys):
    assert audit.report([SOUND, SKIPPED]) == 2
    assert "NOT AUDITED: 1 packages (six" in capsys.readouterr().out


def test_a_vulnerable_version_is_named_with_the_fixed_one(capsys):
    assert audit.report([SOUND, SKIPPED, VULNERABLE]) == 1
    assert "jinja2 3.1.5: PYSEC-1, fixed by 3.1.6" in capsys.readouterr().out


def test_every_file_of_versions_is_audited():
    folder = SCRIPT.parent
    assert {folder / name for name in audit.FILES} == set(folder.glob("*.txt")) - {
        folder / "trainers.txt",  # used only by tests, without its dependencies
        folder / "torch-cpu.txt",  # another build of a package in torch.txt
    }
