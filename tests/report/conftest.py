"""Versions for tests of reports."""

from pathlib import Path
from typing import NamedTuple

import pytest

import packhouse
from packhouse.addons.report.version_report import version_report
from packhouse.store.version_reader import open_address
from tests.prepared import prepare_in
from tests.report.hostile import write_rows


class Made(NamedTuple):
    """A version, its report, and the folder of tokenizers used to make it."""

    version: packhouse.Version
    html: str
    tokenizers: Path


@pytest.fixture(scope="session")
def hostile(tmp_path_factory, empty_reports):
    folder = tmp_path_factory.mktemp("hostile")
    write_rows(folder / "rows.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packhouse.addons.report.version_report.unpublished_report", empty_reports)
        version = prepare_in(
            folder,
            folder / "rows.jsonl",
            seq_len=512,
            format={"template": "alpaca"},
            validate={"max_quarantined": 0.5},
            split={"eval_fraction": 0.2},
        )
    tokenizers = folder / "cache" / "tokenizers"
    return Made(version, version_report(open_address(version.uri), tokenizers), tokenizers)
