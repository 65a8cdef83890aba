import pickle

import pytest
from hypothesis import given, strategies as st

from packhouse.errors import ContractError, EmptyDatasetError, QuarantineLimitError
from packhouse.records.ledger import LedgerLine, RowCounts, check_quarantine, ledger_of
from packhouse.run.step_cache import Receipt


def receipt(step: str, rows_in: int, rows_out: int, **facts) -> Receipt:
    counts = RowCounts(rows_in=rows_in, rows_out=rows_out, **facts)
    return Receipt(step=step, key="k", folder="f", files={}, facts=counts)


def test_shards_add_up_and_steps_join():
    ledger = ledger_of(
        [
            receipt("validate", 5, 4, quarantined={"json": 1}),
            receipt("validate", 3, 2, quarantined={"type": 1}),
            receipt("format", 6, 6),
        ]
    )

    assert [(line.step, line.rows_in, line.rows_out) for line in ledger] == [
        ("validate", 8, 6),
        ("format", 6, 6),
    ]
    assert ledger[0].quarantined == {"json": 1, "type": 1}


def test_rows_lost_between_two_steps_are_noticed():
    with pytest.raises(ContractError, match="'validate' returned 5 rows, but 'format' received 4"):
        ledger_of([receipt("validate", 5, 5), receipt("format", 4, 4)])


def test_tokens_are_conserved_too():
    kept = {"tokens_in": 10, "tokens_out": 7}
    with pytest.raises(ContractError, match="lost 3 of 10 tokens"):
        ledger_of([receipt("pack", 2, 2, **kept)])
    ledger_of([receipt("pack", 2, 2, **kept, tokens_dropped={"truncated": 3})])


@given(
    out=st.integers(0, 50),
    reasons=st.dictionaries(st.sampled_from(["json", "type", "roles"]), st.integers(1, 9)),
    error=st.integers(-3, 3),
)
def test_a_line_passes_exactly_when_it_adds_up(out, reasons, error):
    rows_in = out + sum(reasons.values()) + error
    line = LedgerLine(step="s", rows_in=rows_in, rows_out=out, quarantined=reasons)
    if error:
        with pytest.raises(ContractError):
            line.check()
    else:
        line.check()


def test_over_the_quarantine_limit_names_reasons_counts_and_remedy():
    ledger = [LedgerLine(step="validate", rows_in=100, rows_out=97, quarantined={"json": 3})]
    check_quarantine(ledger, 0.03)
    with pytest.raises(QuarantineLimitError, match=r"3 of 100 rows \(3.00%\).*json 3") as caught:
        check_quarantine(ledger, 0.02)
    assert "max_quarantined" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).reasons == {"json": 3}  # noqa: S301


def test_one_bad_row_does_not_fail_a_small_file():
    ledger = [LedgerLine(step="validate", rows_in=20, rows_out=19, quarantined={"json": 1})]
    assert check_quarantine(ledger, 0.01).shown_limit == "at most 5.00%"
    with pytest.raises(QuarantineLimitError, match="1 of 20 rows"):
        check_quarantine(ledger, 0)


def test_nothing_left_is_an_error_of_its_own():
    with pytest.raises(EmptyDatasetError, match="have no rows"):
        check_quarantine([], 1.0)
    bad = LedgerLine(step="validate", rows_in=2, rows_out=0, quarantined={"json": 2})
    with pytest.raises(EmptyDatasetError, match="all 2 rows are bad"):
        check_quarantine([bad], 1.0)
    bad = LedgerLine(step="validate", rows_in=1, rows_out=0, quarantined={"json": 1})
    with pytest.raises(EmptyDatasetError, match="the only row is bad"):
        check_quarantine([bad], 1.0)


def test_a_row_with_several_bad_records_is_one_bad_row():
    ledger = [
        LedgerLine(step="validate", rows_in=10, rows_out=9, quarantined={"json": 1}),
        LedgerLine(
            step="tokenize",
            rows_in=9,
            rows_out=27,
            added={"turns": 21},
            quarantined={"empty": 3},
            quarantined_again=2,
        ),
    ]

    result = check_quarantine(ledger, 0.2)
    assert (result.value, result.total) == (0.2, 10)
    assert result.detail == "2 of 10 rows are bad: empty 3 records, json 1 record"
    with pytest.raises(QuarantineLimitError, match=r"2 of 10 rows \(20.00%\)"):
        check_quarantine(ledger, 0.19)


def test_records_that_pack_drops_are_not_bad_rows():
    ledger = [
        LedgerLine(step="validate", rows_in=2, rows_out=2),
        LedgerLine(step="pack", rows_in=2, rows_out=0, dropped={"over_seq_len": 2}),
    ]

    assert check_quarantine(ledger, 0.0).value == 0.0
