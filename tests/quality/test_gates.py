"""Counters of a whole run: shown and published, and a gate if the recipe sets a limit."""

import json

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.errors import AuditError, ConfigError
from packhouse.recipe import QualityConfig
from packhouse.store import open_version
from tests.audit.conftest import SUMS, Sums


@pytest.fixture
def project(tmp_path):
    rows = [*SUMS]
    rows[3] = {**rows[3], "output": "Ask jo@mail.org."}
    rows[7] = {**rows[7], "output": "Ask al@mail.org."}
    return Sums(tmp_path, rows, audit={"quality": {}})


def test_counts_are_published_and_stop_nothing(project):
    published = project.prepare()
    opened = open_version(published.store, "sums")
    quality = opened.manifest.audit["quality"]
    assert quality["dataset"]["emails"] == quality["sources"]["sums"]["emails"] == 2
    assert [row["row"] for row in quality["worst"]["emails"]] == [3, 7]
    assert "jo@mail.org" not in json.dumps(quality)  # its place is reported, never its value
    (card,) = (project.root / "store").rglob("README-*.md")
    assert "| emails | 2 |" in card.read_text()


def test_the_run_reports_each_finding_and_its_place(project):
    arguments = [str(project.path), "--cache", str(project.cache)]
    result = CliRunner().invoke(cli, ["prepare", *arguments])
    assert result.exit_code == 0
    said = "  emails: 2 (5.00%) contain an email address: sums/sums.jsonl rows 3, 7\n"
    assert f"quality (of 40 rows)\n{said}" in result.stdout
    assert "phones" not in result.stdout
    shown = CliRunner().invoke(cli, ["show", str(project.root / "store" / "sums")])
    assert f"quality (of 40 rows)\n{said}" in shown.stdout


def test_a_limit_stops_publication_and_names_count_share_limit_rows_and_remedy(project):
    with pytest.raises(AuditError) as caught:
        project.prepare("audit.quality.max_emails=0.01")
    assert str(caught.value) == (
        "the audit stopped publication: source 'sums': 2 of 40 rows (5.00%, limit 1.00%) contain "
        "an email address: sums/sums.jsonl row 3, sums/sums.jsonl row 7; rows are numbered "
        "from 0. Fix the rows or the template, or change audit.quality.max_emails"
    )
    assert caught.value.exit_code == 4
    assert not (project.root / "store").exists()
    gates = {gate.name: gate for gate in caught.value.gates}
    assert gates["audit.quality.max_emails"].shown_value == "5.00%"


def test_languages_are_part_of_the_version(project):
    pytest.importorskip("py3langid")
    published = project.prepare()
    named = project.prepare("audit.quality.languages=[en]")
    assert named.version != published.version
    assert named.published.content_id == published.published.content_id
    with pytest.raises(
        ConfigError,
        match=r"audit.quality.languages: 'english' is not available. Use one of af, ar,",
    ):
        project.prepare("audit.quality.languages=[english]")


def test_another_language_is_one_that_is_not_named():
    with pytest.raises(ValueError, match="is set without `languages`"):
        QualityConfig(max_other_languages=0.1)
