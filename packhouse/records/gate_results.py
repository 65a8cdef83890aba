"""Results of a version's gates: the value found, the recipe's limit, and the outcome.

    quarantine   validate.max_quarantined        share of bad rows
    golden       golden                          conversations that differ from their pinned output
    audit.*      audit.*                         what the tokens would teach, one result per limit
    schema       publish.allow_breaking_schema   changes that would break readers of the ref
    drift.*      publish.max_*_drift             distance from the version that the ref points to

`check_golden`, `check_quarantine` and `check_audit` return these results. If a gate fails, they
raise an error that carries the same results as its fact `gates`, so the error message, the run
page and the CI summary all show the same results. Limits are not part of any key: every run checks
them again, even for a version that is already published.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from packhouse.system.escaping import Markdown, markdown_table

GateOutcome = Literal["passed", "failed", "not reached"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Result of one gate, or of one of its limits."""

    name: str
    """Name of the gate; `gate.limit` if it has several, as in `audit.max_duplicates`."""
    outcome: GateOutcome
    value: float | None = None
    """Value found: a count (int) or a share in [0, 1] (float)."""
    limit: float | None = None
    """Limit in the unit of `value`. None: any value passes."""
    total: int = 0
    """Number of rows, turns or conversations checked; 0 if not applicable."""
    is_minimum: bool = False
    """True if values below the limit fail; otherwise values above it do."""
    detail: str = ""
    """A short text for users: the reason, or what the value counts."""
    seconds: float = 0.0
    """Run time spent on it, including the steps that it needs."""

    @property
    def gate(self) -> str:
        """Name of the gate without its limit.

        Example:
            >>> GateResult(name="audit.max_duplicates", outcome="passed").gate
            'audit'
        """
        return self.name.partition(".")[0]

    @property
    def shown_value(self) -> str:
        """The value as text; empty if there is none.

        Example:
            >>> GateResult(name="quarantine", outcome="passed", value=0.0296).shown_value
            '2.96%'
        """
        return "" if self.value is None else _shown(self.value)

    @property
    def shown_limit(self) -> str:
        """The limit as text; empty if there is none.

        Example:
            >>> GateResult(name="quarantine", outcome="passed", limit=0.05).shown_limit
            'at most 5.00%'
        """
        if self.limit is None:
            return ""
        return f"{'at least' if self.is_minimum else 'at most'} {_shown(self.limit)}"


class GateLog:
    """Gate results of a run in order, with the time that each took.

    The run adds results as it goes, so the log shows how far a failed run got. The seconds of all
    results add up to the time from the start to the last result.
    """

    def __init__(self) -> None:
        self.results: list[GateResult] = []
        # Not `time.time`, which jumps when the clock of the machine is set.
        self._started = time.monotonic()

    def add(self, results: Iterable[GateResult], seconds: float | None = None) -> None:
        """Add results, replacing earlier results of the same gates.

        Args:
            results: results of one or more gates; the first one is given the time.
            seconds: their time; by default, the time since the last result.
        """
        results = list(results)
        gates = {result.gate for result in results}
        self.results = [result for result in self.results if result.gate not in gates]
        counted_s = sum(result.seconds for result in self.results)
        if seconds is None:
            seconds = max(0.0, time.monotonic() - self._started - counted_s)
        for number, result in enumerate(results):
            self.results.append(replace(result, seconds=0.0 if number else seconds))


def gates_table(gates: Iterable[GateResult]) -> list[str]:
    """Return the lines of a markdown table, one for each result.

    Example:
        >>> gate = GateResult(name="quarantine", outcome="failed", value=0.0296, limit=0.01)
        >>> gates_table([gate])[2]
        '| quarantine | **FAILED** | 2.96% | at most 1.00% |  |'
    """
    marks = {"passed": "passed", "failed": "**FAILED**", "not reached": "not reached"}
    rows = []
    for gate in gates:
        shown = map(Markdown, (marks[gate.outcome], gate.shown_value, gate.shown_limit))
        rows.append((gate.name, *shown, gate.detail))
    return markdown_table(("gate", "outcome", "value", "limit", ""), rows)


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.2%}"
