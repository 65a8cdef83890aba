"""The conservation ledger: where every row and every token of a run went.

For each step: rows_in + added = rows_out + quarantined + dropped, and from tokenize on the same in
tokens. Three steps add rows: validate, the paths of a message tree beyond its first; format, the
examples of single turns and the windows beyond a conversation's first; and pack, the copies of
records whose source has a `weight` over 1.
It is asserted, not hoped for: a run whose ledger does not add up publishes nothing.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from packhouse.errors import ContractError, EmptyDatasetError, PackhouseError, QuarantineLimitError
from packhouse.gates import GateResult
from packhouse.step_store import Receipt

__all__ = ["ROW_STEPS", "LedgerLine", "check_quarantine", "ledger_of"]


ROW_STEPS = ("validate", "format", "tokenize")
"""Steps that may refuse a row; the limit of bad rows is checked after each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """Rows and tokens into and out of one step, with a reason for each that did not pass."""

    step: str
    rows_in: int
    rows_out: int
    added: Mapping[str, int] = field(default_factory=dict)
    """Rows by reason that one row in made beside the first."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Rows by reason code; each one stands in the quarantine file."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows by policy; each one stands in the version's records file."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_dropped: Mapping[str, int] = field(default_factory=dict)
    tokens_added: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Assert that nothing was lost.

        Raises:
            ContractError: rows or tokens do not add up.

        Example:
            >>> LedgerLine(step="pack", rows_in=3, rows_out=2, dropped={"over_length": 1}).check()
            >>> LedgerLine(step="pack", rows_in=3, rows_out=2).check()
            Traceback (most recent call last):
            packhouse.errors.ContractError: step 'pack' lost 1 of 3 rows without a reason
        """
        came = self.rows_in + _sum(self.added)
        lost = came - self.rows_out - _sum(self.quarantined) - _sum(self.dropped)
        if lost:
            raise ContractError(
                f"step '{self.step}' lost {lost:,} of {self.rows_in:,} rows without a reason",
                step=self.step,
                lost=lost,
            )
        if self.tokens_in is None or self.tokens_out is None:
            return
        came = self.tokens_in + _sum(self.tokens_added)
        missing = came - self.tokens_out - _sum(self.tokens_dropped)
        if missing:
            raise ContractError(
                f"step '{self.step}' lost {missing:,} of {self.tokens_in:,} tokens "
                "without a reason",
                step=self.step,
                lost=missing,
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON, counters sorted by reason."""
        return {
            key: dict(sorted(value.items())) if isinstance(value, Mapping) else value
            for key, value in asdict(self).items()
        }


def ledger_of(receipts: Iterable[Receipt]) -> list[LedgerLine]:
    """Add up the receipts of a run, step by step, check each line, and that the lines join.

    Raises:
        ContractError: a step lost rows or tokens, or got other rows than the step before put out.
    """
    lines: dict[str, LedgerLine] = {}
    for receipt in receipts:
        if "rows_in" in receipt.facts:
            line = _line(receipt)
            lines[receipt.step] = _add(lines[receipt.step], line) if receipt.step in lines else line
    ledger = list(lines.values())
    for line in ledger:
        line.check()
    for before, after in itertools.pairwise(ledger):
        if before.rows_out != after.rows_in:
            raise ContractError(
                f"step '{before.step}' put out {before.rows_out:,} rows "
                f"but '{after.step}' took in {after.rows_in:,}",
                step=after.step,
            )
    return ledger


def check_quarantine(
    ledger: list[LedgerLine], limit: float, places: Iterable[str] = ()
) -> GateResult:
    """Refuse to go on when too many rows are bad, or none is left.

    Args:
        ledger: lines so far.
        limit: share of the rows read that may be quarantined.
        places: files in which the quarantined rows lie, for the message.

    Raises:
        QuarantineLimitError: over the limit; names the reasons and their counts.
        EmptyDatasetError: no row is left.
    """
    rows = ledger[0].rows_in + sum(_sum(line.added) for line in ledger) if ledger else 0
    reasons: Counter[str] = Counter()
    for line in ledger:
        reasons.update(line.quarantined)
    bad = reasons.total()
    counts = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common())
    places = list(places)
    where = f"; see {', '.join(places)}" if places else ""
    result = GateResult(
        name="quarantine",
        outcome="failed" if bad == rows or bad / rows > limit else "passed",
        value=bad / rows if rows else 0.0,
        limit=limit,
        total=rows,
        detail=f"{bad:,} of {rows:,} rows are bad" + (f": {counts}" if counts else ""),
    )
    if result.outcome == "passed":
        return result
    if rows == 0:
        error: PackhouseError = EmptyDatasetError(
            "the sources hold no rows at all: nothing to publish"
        )
    elif bad == rows:
        error = EmptyDatasetError(
            f"all {rows:,} rows are bad ({counts}): nothing to publish{where}",
            reasons=dict(reasons),
            rows=rows,
            places=places,
        )
    else:
        error = QuarantineLimitError(
            f"{bad:,} of {rows:,} rows ({bad / rows:.2%}) are bad, over the limit of {limit:.2%}: "
            f"{counts}{where}. Mend the rows, or raise validate.max_quarantined",
            reasons=dict(reasons),
            rows=rows,
            places=places,
        )
    error.facts["gates"] = (result,)
    raise error


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def _line(receipt: Receipt) -> LedgerLine:
    facts = receipt.facts
    return LedgerLine(
        step=receipt.step,
        rows_in=facts["rows_in"],
        rows_out=facts["rows_out"],
        added=facts.get("added", {}),
        quarantined=facts.get("quarantined", {}),
        dropped=facts.get("dropped", {}),
        tokens_in=facts.get("tokens_in"),
        tokens_out=facts.get("tokens_out"),
        tokens_dropped=facts.get("tokens_dropped", {}),
        tokens_added=facts.get("tokens_added", {}),
    )


def _add(a: LedgerLine, b: LedgerLine) -> LedgerLine:
    return LedgerLine(
        step=a.step,
        rows_in=a.rows_in + b.rows_in,
        rows_out=a.rows_out + b.rows_out,
        added=_both(a.added, b.added),
        quarantined=_both(a.quarantined, b.quarantined),
        dropped=_both(a.dropped, b.dropped),
        tokens_in=_plus(a.tokens_in, b.tokens_in),
        tokens_out=_plus(a.tokens_out, b.tokens_out),
        tokens_dropped=_both(a.tokens_dropped, b.tokens_dropped),
        tokens_added=_both(a.tokens_added, b.tokens_added),
    )


def _both(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(a) + Counter(b))


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None and b is None else (a or 0) + (b or 0)
