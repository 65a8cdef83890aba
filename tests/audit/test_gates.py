"""Gate results: the text a person reads and the summary come from the same object."""

import pytest

from packhouse.auditing.gate import check_audit
from packhouse.errors import AuditError, EmptyDatasetError, QuarantineLimitError
from packhouse.recipe import AuditConfig
from packhouse.records.ledger import LedgerLine, check_quarantine
from packhouse.store import Drift, Gate
from packhouse.store.manifest import read_audit

COUNTS = {
    "rows": 100,
    "turns": 100,
    "tokens": 900,
    "answer_bytes": 1000,
    "untrained_answer_bytes": 0,
    "trained_prompt_bytes": 0,
}


def audit_of(**sources):
    """An audit in which each source has the given number of duplicates in its 100 rows."""
    document = {
        "dataset": {**COUNTS, "duplicates": sum(sources.values()), "both_sides": 0},
        "sources": {name: {**COUNTS, "duplicates": n} for name, n in sources.items()},
        "packs": {},
        "worst": {},
    }
    return read_audit(document)


def test_each_limit_of_the_audit_has_a_result_with_the_source_nearest_to_it():
    results = {r.name: r for r in check_audit(audit_of(a=2, b=7), AuditConfig())}
    duplicates = results["audit.max_duplicates"]
    assert (duplicates.outcome, duplicates.value, duplicates.limit) == ("passed", 0.09, 0.3)
    assert results["audit.min_answer_coverage"].shown_limit == "at least 99.00%"
    assert results["audit.both_sides"].limit == 0
    assert {r.outcome for r in results.values()} == {"passed"}


def test_an_error_of_the_audit_carries_all_results_the_good_ones_too():
    with pytest.raises(AuditError) as caught:
        check_audit(audit_of(a=2, b=40), AuditConfig())
    failed = [result for result in caught.value.gates if result.outcome == "failed"]
    assert [(r.name, r.value) for r in failed] == [("audit.max_duplicates", 0.42)]
    assert failed[0].detail in str(caught.value)
    assert len(caught.value.gates) > 10


@pytest.mark.parametrize(
    ("bad", "limit", "error"),
    [(3, 0.05, None), (6, 0.05, QuarantineLimitError), (100, 1.0, EmptyDatasetError)],
)
def test_the_share_of_bad_rows_is_the_value_of_a_result_or_of_an_error(bad, limit, error):
    line = LedgerLine(step="validate", rows_in=100, rows_out=100 - bad, quarantined={"json": bad})
    if error is None:
        result = check_quarantine([line], limit)
    else:
        with pytest.raises(error) as caught:
            check_quarantine([line], limit)
        (result,) = caught.value.gates
    assert result.outcome == ("failed" if error else "passed")
    assert (result.value, result.limit, result.total) == (bad / 100, limit, 100)


def test_drift_without_a_limit_passes_and_one_that_nobody_measured_is_not_reached():
    drift = Drift(lengths=0.3, sources=0.2, quarantined=None, trained=0.0)
    outcomes = {r.name: r.outcome for r in drift.results(Gate(max_lengths=0.1, max_trained=0.0))}
    assert outcomes == {
        "drift.lengths": "failed",
        "drift.sources": "passed",
        "drift.quarantined": "not reached",
        "drift.trained": "passed",
    }
