"""Audit a whole run: packs, repetition and limits. A breach publishes nothing."""

import hashlib
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from packhouse.auditing.audit_limits import check_audit
from packhouse.auditing.shard_audit import audit_packs, audit_records
from packhouse.auditing.token_checks import NUM_WORST
from packhouse.cli import cli
from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig, PublishConfig
from packhouse.records.table_schemas import LINEAGE, PACKED
from packhouse.store.manifest import read_audit
from packhouse.store.schema_drift import Drift
from tests.audit.conftest import SUMS, Sums

IS_CONTROL = np.array([True, True, True, *[False] * 97])
IS_BLANK = np.arange(100) == 50


def pack(ids, ranges, lengths):
    spans = [{"start": a, "end": b} for a, b in ranges]
    return {
        "input_ids": ids,
        "trained_ranges": spans,
        "seq_lengths": lengths,
        "record_ids": ["r"] * len(lengths),
        "label": None,
    }


def packs(*rows):
    return pa.RecordBatch.from_pylist(list(rows), PACKED)


def test_trl_packs_whose_labels_are_all_ignored():
    """TRL's bfd packing kept a pack with labels [-100] * 8, whose loss is NaN."""
    counts = audit_packs(
        packs(pack([9] * 8, [], [8]), pack([9, 9, 2, 8, 8], [(1, 3)], [3, 2])),
        IS_CONTROL,
        IS_BLANK,
    )
    assert counts["packs"] == 2
    assert counts["untrained_packs"] == 1
    assert (counts["sequences"], counts["untrained_sequences"]) == (3, 2)


@pytest.mark.parametrize(
    ("ids", "ranges", "num_cut"),
    [
        ([9, 8, 2, 50], [(1, 4)], 0),  # <|im_end|>\n
        ([9, 8, 2, 50, 50], [(1, 5)], 0),
        ([9, 8, 2, 50], [(1, 3)], 0),
        ([9, 8, 7, 50], [(1, 4)], 1),
        ([9, 8, 2, 50], [(3, 4)], 1),  # the end token is not trained
        ([9, 8, 2, 50], [(1, 2), (3, 4)], 1),
        ([50, 50], [(0, 2)], 1),
    ],
)
def test_white_space_may_follow_an_end_token(ids, ranges, num_cut):
    """https://github.com/allenai/open-instruct/issues/1876: answers cut before their EOS."""
    whole = pack([9, 8, 2], [(1, 3)], [3])
    own = pack([9, 8, 2, *ids], [(1, 3), *((a + 3, b + 3) for a, b in ranges)], [3, len(ids)])
    found = audit_packs(packs(whole, own, whole), IS_CONTROL, IS_BLANK)
    assert found["cut_sequences"] == num_cut


def key(name):
    return hashlib.sha256(name.encode()).hexdigest()[:20]


def record(name, row, group, split="train", source="a/a.jsonl", times=1):
    return {
        "record_id": key(name),
        "source": source,
        "row": row,
        "group_key": key(group),
        "split": split,
        "outcome": "kept",
        "times": times,
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from("uvwxyz"),
            st.sampled_from("gh"),
            st.sampled_from(["train", "eval"]),
            st.sampled_from(["a/1", "a/2", "b/1"]),
            st.sampled_from([0, 5]),
        ),
        max_size=12,
    )
)
def test_repetition_equals_a_plain_count(made):
    rows = [
        record(name, row, group, split, source, times)
        for row, (name, group, split, source, times) in enumerate(made)
    ]
    kept = [row for row in rows if row["times"]]
    copies = {}
    for row in kept:
        copies.setdefault(row["record_id"], []).append(row)
    groups = Counter(same[0]["group_key"] for same in copies.values())
    within = Counter({row["source"][0]: 0 for row in kept})
    for same in copies.values():
        within.update({s: n - 1 for s, n in Counter(row["source"][0] for row in same).items()})
    often = sorted((s for s in copies.values() if len(s) > 1), key=lambda s: (-len(s), s[0]["row"]))
    assert repetition(rows) == {
        "duplicates": len(kept) - len(copies),
        "prompt_groups": sum(n > 1 for n in groups.values()),
        "prompt_group_records": sum(n for n in groups.values() if n > 1),
        "both_sides": sum(len({row["split"] for row in same}) > 1 for same in copies.values()),
        "sources": dict(within),
        "worst": [
            {**{key: same[0][key] for key in ("source", "row", "record_id")}, "value": len(same)}
            for same in often[:NUM_WORST]
        ],
    }


def repetition(rows):
    """Read in batches of two, because repeated rows can be far apart."""
    table = pa.Table.from_pylist(rows, LINEAGE)
    return audit_records(lambda columns: table.select(columns).to_batches(2), len(rows))


@pytest.fixture
def project(tmp_path):
    return Sums(tmp_path)


@pytest.fixture
def repeating(project):
    project.write([*SUMS, *SUMS[:8]], "repeats.jsonl")
    source = {"path": "repeats.jsonl", "format": "alpaca"}
    project.edit(sources=[source], audit={"max_duplicates": 0.1})
    return project


def test_a_breach_names_the_rows_and_publishes_nothing(repeating):
    with pytest.raises(AuditError) as caught:
        repeating.prepare()
    assert str(caught.value) == (
        "the audit stopped publication: source 'repeats': 8 of 48 rows (16.67%, limit 10.00%) "
        "repeat an earlier row, worst: repeats/repeats.jsonl row 0 (2), repeats/repeats.jsonl row "
        "1 (2), "
        "repeats/repeats.jsonl row 2 (2); rows are numbered from 0. Fix the rows or the template, "
        "or change audit.max_duplicates or dedup.exact (drop keeps one copy of each row)"
    )
    assert caught.value.exit_code == 4
    (breach,) = caught.value.breaches
    assert len(breach["rows"]) == 5
    assert not (repeating.root / "store").exists()


def test_prepare_exits_with_four_and_the_facts_as_json(repeating, monkeypatch):
    arguments = ["prepare", str(repeating.path), "--json", "--cache", str(repeating.cache)]
    monkeypatch.setattr("sys.argv", ["packhouse", *arguments])
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"] == "AuditError"
    assert json.loads(result.stdout)["breaches"][0]["limit"] == "max_duplicates"


def test_limits_decide_no_byte_and_hold_at_every_run(repeating):
    published = repeating.prepare("audit.max_duplicates=0.2")
    assert published.created
    with pytest.raises(AuditError):  # everything is cached, publish too
        repeating.prepare()
    again = repeating.prepare("audit.max_duplicates=0.2", "audit.max_unknown_tokens=0.5")
    assert (again.version, again.created) == (published.version, False)
    assert all(receipt.cached for receipt in again.receipts)


def test_a_misplaced_mask_stops_the_run_whatever_the_limits():
    counts = {"answer_bytes": 9, "untrained_answer_bytes": 0, "trained_prompt_bytes": 0}
    rows = [{"source": "a/a.jsonl", "row": 7, "record_id": "r", "value": 1}]
    audit = {
        "dataset": {**counts, "misplaced_rows": 1, "both_sides": 0},
        "sources": {"a": {**counts, "misplaced_rows": 1}},
        "packs": {},
        "worst": {"misplaced_rows": rows},
    }
    with pytest.raises(AuditError, match="tokens other than those of the text to train") as caught:
        check_audit(read_audit(audit), AuditConfig())
    assert str(caught.value).endswith(
        "a/a.jsonl row 7 (1); rows are numbered from 0. Fix the rows or the template"
    )


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


def test_drift_without_a_limit_passes_and_one_that_nobody_measured_is_not_reached():
    drift = Drift(lengths=0.3, sources=0.2, quarantined=None, trained=0.0)
    limits = PublishConfig(max_length_drift=0.1, max_trained_drift=0.0)
    outcomes = {r.name: r.outcome for r in drift.results(limits)}
    assert outcomes == {
        "drift.lengths": "failed",
        "drift.sources": "passed",
        "drift.quarantined": "not reached",
        "drift.trained": "passed",
    }
