"""Results of a version's gates: what was found, what the recipe allows, and the outcome.

    quarantine   validate.max_quarantined        share of rows that are bad
    golden       golden                          pinned conversations that came out otherwise
    audit.*      audit.*                         what the tokens would teach, a result per limit
    schema       publish.allow_breaking_schema   changes that readers of the ref would notice
    drift.*      publish.max_*_drift             distance from the version that the ref points to

`check_golden`, `check_quarantine` and `check_audit` return these results. If one failed they raise
instead, and the error carries the same results as its fact `gates`. So the refusal that a person
reads, the page of a run and the summary of a CI job come from one object. Limits are in no key:
every run checks them again, also for a version that is published already.
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
    """What was found: a count (int) or a share in [0, 1] (float)."""
    limit: float | None = None
    """What is allowed, in the unit of `value`. None: any value passes."""
    total: int = 0
    """How many things were looked at: rows, turns, conversations; 0 if that says nothing."""
    is_minimum: bool = False
    """True if values below the limit fail; otherwise values above it do."""
    detail: str = ""
    """For people: the reason, or what the value counts."""
    seconds: float = 0.0
    """Time of the run that was spent on it, with the steps that it waits for."""

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
        """The value for people, empty if there is none.

        Example:
            >>> GateResult(name="quarantine", outcome="passed", value=0.0296).shown_value
            '2.96%'
        """
        return "" if self.value is None else _shown(self.value)

    @property
    def shown_limit(self) -> str:
        """The limit for people, empty if there is none.

        Example:
            >>> GateResult(name="quarantine", outcome="passed", limit=0.05).shown_limit
            'at most 5.00%'
        """
        if self.limit is None:
            return ""
        return f"{'at least' if self.is_minimum else 'at most'} {_shown(self.limit)}"


class GateLog:
    """Results of a run in the order in which they came, with the time that each took.

    The run adds to it as it goes, so that whoever holds it knows what was reached when a run ends
    early. The seconds of all results add up to the time from the start to the last result.
    """

    def __init__(self) -> None:
        self.results: list[GateResult] = []
        self._started = time.monotonic()

    def add(self, results: Iterable[GateResult], seconds: float | None = None) -> None:
        """Add results; they replace earlier results of the same gates.

        Args:
            results: of one gate or several; the first one gets their time.
            seconds: that they took; by default all time that no result has yet.
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
    rows = (
        (
            gate.name,
            Markdown(marks[gate.outcome]),
            Markdown(gate.shown_value),
            Markdown(gate.shown_limit),
            gate.detail,
        )
        for gate in gates
    )
    return markdown_table(("gate", "outcome", "value", "limit", ""), rows)


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.2%}"
