"""The conservation ledger: where every row and every token of a run went.

For each step: rows_in + added = rows_out + quarantined + dropped, and from tokenize on the same in
tokens. Three steps add to what they take in. Validate adds the paths of a message tree after its
first, and format the records after a conversation's first (reasons `turns` and `windows`): from
there on the numbers count records, see `units_of`. Pack adds copies, where a `weight` is over 1.
It is asserted, not hoped for: a run whose ledger does not add up publishes nothing.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from packhouse.errors import ContractError, EmptyDatasetError, PackhouseError, QuarantineLimitError
from packhouse.records.gates import GateResult
from packhouse.system.wording import counted

Cell = int | str
"""Of a table."""

ROW_STEPS = ("validate", "format", "tokenize")
"""Steps that may refuse a row; the limit of bad rows is checked after each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Rows and tokens into and out of one job, with a reason for each that did not pass."""

    rows_in: int
    rows_out: int
    added: Mapping[str, int] = field(default_factory=dict)
    """Rows by reason that one row in made beside the first."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Records by reason code (rows, before they are split); each is in the quarantine file."""
    quarantined_again: int = 0
    """Of these records, those of a row that has another bad one, in this step or before it."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows by policy; each one stands in the version's records file."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_dropped: Mapping[str, int] = field(default_factory=dict)
    tokens_added: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bad_rows(self) -> int:
        """Rows with a bad record, but for those that a step before counts."""
        return _sum(self.quarantined) - self.quarantined_again

    @property
    def num_added_records(self) -> int:
        """Records beyond one per row; copies of records are not counted."""
        return sum(number for reason, number in self.added.items() if reason != "repeated")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine(RowCounts):
    """The counts of all jobs of one step."""

    step: str

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
                f"step '{self.step}' lost {lost:,} of {counted(self.rows_in, 'row')} without a "
                "reason",
                step=self.step,
                lost=lost,
            )
        if self.tokens_in is None or self.tokens_out is None:
            return
        came = self.tokens_in + _sum(self.tokens_added)
        missing = came - self.tokens_out - _sum(self.tokens_dropped)
        if missing:
            raise ContractError(
                f"step '{self.step}' lost {missing:,} of {counted(self.tokens_in, 'token')} "
                "without a reason",
                step=self.step,
                lost=missing,
            )

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON, counters sorted by reason."""
        return {
            key: dict(sorted(value.items())) if isinstance(value, Mapping) else value
            for key, value in asdict(self).items()
            if key != "quarantined_again" or value
        }


class Counted(Protocol):
    """A receipt: its facts are `RowCounts` if rows went through its step."""

    @property
    def step(self) -> str:
        """Its name."""

    @property
    def facts(self) -> object:
        """What it says of its output."""


def ledger_of(receipts: Iterable[Counted]) -> list[LedgerLine]:
    """Add up the receipts of a run, step by step, and check the sum; see `check_ledger`.

    Raises:
        ContractError: it does not add up.
    """
    lines: dict[str, LedgerLine] = {}
    for receipt in receipts:
        if isinstance(receipt.facts, RowCounts):
            counts = {each.name: getattr(receipt.facts, each.name) for each in fields(RowCounts)}
            line = LedgerLine(step=receipt.step, **counts)
            lines[receipt.step] = _add(lines[receipt.step], line) if receipt.step in lines else line
    ledger = list(lines.values())
    check_ledger(ledger)
    return ledger


def check_ledger(ledger: Sequence[LedgerLine]) -> None:
    """Check each line, and that each step took in the rows and tokens that the one before put out.

    Raises:
        ContractError: a step lost rows or tokens, or got others than the step before put out.
    """
    for line in ledger:
        line.check()
    for before, after in itertools.pairwise(ledger):
        if before.rows_out != after.rows_in:
            raise ContractError(
                f"step '{before.step}' put out {counted(before.rows_out, 'row')} "
                f"but '{after.step}' took in {after.rows_in:,}",
                step=after.step,
            )
        if before.tokens_out != after.tokens_in:
            raise ContractError(
                f"step '{before.step}' put out {before.tokens_out} tokens "
                f"but '{after.step}' took in {after.tokens_in}",
                step=after.step,
            )


def check_quarantine(
    ledger: list[LedgerLine], limit: float, filters: Sequence["Filter"] = ()
) -> GateResult:
    """Refuse to go on when too many rows are bad, or none is left.

    A row is bad if any of its records is: both numbers of the share are rows.

    Args:
        ledger: lines so far; those of `ROW_STEPS` are looked at.
        limit: `validate.max_quarantined`.
        filters: what each expression of `where` left out.

    Raises:
        QuarantineLimitError: over the limit; names the reasons and their counts. Where the rows
            are at hand, `explain_bad_rows` of `packhouse.addons.quarantine` says more.
        EmptyDatasetError: no row is left.
    """
    checked = [line for line in ledger if line.step in ROW_STEPS]
    rows, left_out = (checked[0].rows_in, _sum(checked[0].dropped)) if checked else (0, 0)
    bad = sum(line.num_bad_rows for line in checked)
    reasons: Counter[str] = Counter()
    for line in checked:
        reasons.update(line.quarantined)
    is_by_record = reasons.total() > bad
    counts = ", ".join(
        f"{reason} {counted(n, 'record') if is_by_record else f'{n:,}'}"
        for reason, n in reasons.most_common()
    )
    allowed = share_allowed(limit, rows)
    is_empty = not checked or checked[-1].rows_out == 0
    result = GateResult(
        name="quarantine",
        outcome="failed" if is_empty or bad / rows > allowed else "passed",
        value=bad / rows if rows else 0.0,
        limit=allowed,
        total=rows,
        detail=f"{bad:,} of {counted(rows, 'row is', 'rows are')} bad"
        + (f": {counts}" if counts else ""),
    )
    if result.outcome == "passed":
        return result
    if rows == 0:
        error: PackhouseError = EmptyDatasetError(
            "the sources hold no rows at all: nothing to publish"
        )
    elif is_empty and left_out:
        policies = "`where` or `media`" if "media" in checked[0].dropped else "`where`"
        error = EmptyDatasetError(
            f"no row is left of {rows:,}: {policies} leaves out {left_out:,}"
            + "".join(
                f"; `{each.where}` of {each.source} {each.filtered:,}"
                for each in filters
                if each.filtered
            )
            + f"; {bad:,} are bad{f' ({counts})' if counts else ''}: nothing to publish",
            reasons=dict(reasons),
            rows=rows,
        )
    elif is_empty:
        error = EmptyDatasetError(
            f"all {counted(rows, 'row is', 'rows are')} bad ({counts}): nothing to publish",
            reasons=dict(reasons),
            rows=rows,
        )
    else:
        error = QuarantineLimitError(
            f"{bad:,} of {counted(rows, 'row')} ({bad / rows:.2%}) are bad, over the limit of "
            f"{limit:.2%}: "
            f"{counts}. Mend the rows, or raise validate.max_quarantined",
            reasons=dict(reasons),
            rows=rows,
        )
    error.facts["gates"] = (result,)
    raise error


def share_allowed(limit: float, rows: int) -> float:
    """Return the share of rows that may be bad: the recipe's, or one row if that is more.

    Example:
        >>> share_allowed(0.01, 1_000), share_allowed(0.01, 20), share_allowed(0, 20)
        (0.01, 0.05, 0)
    """
    return max(limit, 1 / rows) if limit and rows else limit


@dataclass(frozen=True, slots=True)
class Filter:
    """What an expression of a source's `where` did."""

    source: str
    where: str
    filtered: int
    """Rows that it left out, and no expression before it."""
    rows: int
    """Rows read."""


def filters_of(sources: Iterable[Mapping[str, Any]]) -> list[Filter]:
    """Return what each expression of each source left out.

    Args:
        sources: shards, as the lineage of a manifest has them.

    Example:
        >>> shard = {"file": "a/a.jsonl", "rows": 9, "settings": {"where": "n > 1"}}
        >>> filters_of([shard, shard | {"dropped": {"filtered": 4}}])
        [Filter(source='a', where='n > 1', filtered=4, rows=18)]
        >>> both = {"file": "b/b.jsonl", "rows": 9, "settings": {"where": ["n > 1", "m = 2"]}}
        >>> [each.filtered for each in filters_of([both | {"filtered": {"m = 2": 4}}])]
        [0, 4]
    """
    found: dict[tuple[str, str], Filter] = {}
    for each in sources:
        settings = each.get("settings")
        where = settings.get("where") if isinstance(settings, Mapping) else None
        left_out = each.get("filtered", {})
        if isinstance(where, str):
            left_out = {where: each.get("dropped", {}).get("filtered", 0), **left_out}
            where = [where]
        name = str(each.get("file", "")).partition("/")[0]
        for text in where if isinstance(where, list) else ():
            if isinstance(text, str):  # a store's manifest may say anything
                before = found.get((name, text), Filter(name, text, 0, 0))
                filtered = before.filtered + left_out.get(text, 0)
                found[name, text] = Filter(name, text, filtered, before.rows + each.get("rows", 0))
    return list(found.values())


def sum_by_reason(ledger: Iterable[LedgerLine], kind: str) -> Counter[str]:
    """Return rows of a kind (`quarantined`, `dropped`) by reason, over all steps."""
    sums: Counter[str] = Counter()
    for line in ledger:
        sums.update(getattr(line, kind))
    return sums


def units_of(ledger: Iterable[LedgerLine]) -> dict[str, tuple[str, str]]:
    """Return what each step takes in and puts out: rows, or records once a row has made several.

    Example:
        >>> read = LedgerLine(step="validate", rows_in=2, rows_out=2)
        >>> cut = LedgerLine(step="format", rows_in=2, rows_out=4, added={"turns": 2})
        >>> units_of([read, cut, LedgerLine(step="pack", rows_in=4, rows_out=4)])
        {'validate': ('row', 'row'), 'format': ('row', 'record'), 'pack': ('record', 'record')}
    """
    units: dict[str, tuple[str, str]] = {}
    unit = "row"
    for line in ledger:
        before, unit = unit, "record" if line.num_added_records else unit
        units[line.step] = before, unit
    return units


def in_and_out(
    ledger: Sequence[LedgerLine],
) -> tuple[tuple[str, str], list[tuple[Cell, Cell]]]:
    """Return headings and cells of what went into each step and came out of it.

    Example:
        >>> in_and_out([LedgerLine(step="format", rows_in=60, rows_out=60)])
        (('rows in', 'rows out'), [(60, 60)])
        >>> cut = LedgerLine(step="format", rows_in=60, rows_out=1_200, added={"turns": 1_140})
        >>> in_and_out([cut])
        (('in', 'out'), [('60 rows', '1,200 records')])
    """
    if not any(line.num_added_records for line in ledger):
        return ("rows in", "rows out"), [(line.rows_in, line.rows_out) for line in ledger]
    units = units_of(ledger)
    cells: list[tuple[Cell, Cell]] = []
    for line in ledger:
        before, after = units[line.step]
        cells.append((counted(line.rows_in, before), counted(line.rows_out, after)))
    return ("in", "out"), cells


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def _add(a: LedgerLine, b: LedgerLine) -> LedgerLine:
    """Add up two lines of one step: numbers, and counts by reason; None is no number."""
    sums: dict[str, Any] = {}
    for name in (each.name for each in fields(RowCounts)):
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, Mapping):
            sums[name] = dict(Counter(one) + Counter(other))
        else:
            sums[name] = None if one is None and other is None else (one or 0) + (other or 0)
    return LedgerLine(step=a.step, **sums)
