"""Account for every row and every token of a run in a ledger.

For each step, rows_in + added = rows_out + quarantined + dropped; from tokenize on, the same holds
for tokens. Three steps add rows. Validate adds every path of a message tree after the first. Format
adds every record of a conversation after the first (reasons `turns` and `windows`); from there on
the numbers count records, see `units_of`. Pack adds copies if a `weight` is over 1.
A run whose ledger does not add up publishes nothing.

`RenderCounts` counts how rows became records and how much text the records hold. `plan`, the report
and the end of a run print the same lines from it. If a template drops earlier reasoning from the
history, or moves tools to the last question, each answer needs its own record that repeats the
turns before it. Long agent runs then take several times their text. `plan`, `init` and `prepare`
print the factor if it is over 1.1, together with settings that cost less.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from packhouse.errors import ContractError, EmptyDatasetError, QuarantineLimitError
from packhouse.records.gate_results import GateResult
from packhouse.records.reasons import ROW_STEPS
from packhouse.system.wording import counted

if TYPE_CHECKING:  # loaders use the ledger without the recipe's models
    from packhouse.recipe import FormatConfig

Cell = int | str
"""Cell of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Rows and tokens into and out of one job, with a reason for each one that did not pass."""

    rows_in: int
    rows_out: int
    added: Mapping[str, int] = field(default_factory=dict)
    """Reason -> additional rows, beyond one for each row that came in."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Reason code -> bad records (rows, until they are split); all are in the quarantine file."""
    quarantined_again: int = 0
    """Bad records of rows that already have another bad record in this step or an earlier one."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Policy -> dropped rows; all are in the version's records or dropped file, except answers of
    long rows, whose records format only counts."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_dropped: Mapping[str, int] = field(default_factory=dict)
    tokens_added: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bad_rows(self) -> int:
        """Rows with a bad record that no earlier step has counted."""
        return _sum(self.quarantined) - self.quarantined_again

    @property
    def num_added_records(self) -> int:
        """Records beyond one per row; copies of records are not counted."""
        return sum(number for reason, number in self.added.items() if reason != "repeated")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine(RowCounts):
    """Counts of all jobs of one step."""

    step: str

    def check(self) -> None:
        """Check that no row or token was lost.

        Raises:
            ContractError: rows or tokens do not add up.

        Example:
            >>> LedgerLine(step="pack", rows_in=3, rows_out=2, dropped={"over_length": 1}).check()
            >>> LedgerLine(step="pack", rows_in=3, rows_out=2).check()
            Traceback (most recent call last):
            packhouse.errors.ContractError: step 'pack' lost 1 of 3 rows without a reason
        """
        lost = self.rows_in + _sum(self.added) - self.rows_out
        lost -= _sum(self.quarantined) + _sum(self.dropped)
        losses = [(lost, self.rows_in, "row")]
        if self.tokens_in is not None and self.tokens_out is not None:
            lost = self.tokens_in + _sum(self.tokens_added) - self.tokens_out
            losses.append((lost - _sum(self.tokens_dropped), self.tokens_in, "token"))
        for lost, came, unit in losses:
            if lost:
                what = f"{lost:,} of {counted(came, unit)} without a reason"
                raise ContractError(f"step '{self.step}' lost {what}", step=self.step, lost=lost)

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON, counters sorted by reason."""
        return {
            key: dict(sorted(value.items())) if isinstance(value, Mapping) else value
            for key, value in asdict(self).items()
            if key != "quarantined_again" or value
        }


class Counted(Protocol):
    """A receipt; its facts are `RowCounts` if rows pass through its step."""

    @property
    def step(self) -> str:
        """Name of the step."""

    @property
    def facts(self) -> object:
        """Facts about its output."""


def ledger_of(receipts: Iterable[Counted]) -> list[LedgerLine]:
    """Add up the receipts of a run by step, and check that nothing was lost.

    Raises:
        ContractError: rows or tokens were lost in a step or between two steps.
    """
    lines: dict[str, LedgerLine] = {}
    for receipt in receipts:
        if isinstance(receipt.facts, RowCounts):
            counts = {each.name: getattr(receipt.facts, each.name) for each in fields(RowCounts)}
            line = LedgerLine(step=receipt.step, **counts)
            lines[receipt.step] = _add(lines[receipt.step], line) if receipt.step in lines else line
    ledger = list(lines.values())
    for line in ledger:
        line.check()
    # Each step counts what it read itself. Compared with what the step before counted as written, a
    # file that was cut between two steps is found.
    for before, after in itertools.pairwise(ledger):
        for gave, got, unit in (
            (before.rows_out, after.rows_in, "row"),
            (before.tokens_out, after.tokens_in, "token"),
        ):
            if gave != got:
                gave_what, got_what = (counted(number or 0, unit) for number in (gave, got))
                raise ContractError(
                    f"step '{before.step}' returned {gave_what}, but '{after.step}' received "
                    f"{got_what}",
                    step=after.step,
                )
    return ledger


def check_quarantine(
    ledger: list[LedgerLine], limit: float, filters: Sequence["Filter"] = ()
) -> GateResult:
    """Check that not too many rows are bad and that some are left.

    A row is bad if any of its records is bad, so the share is one of rows, not records.

    Args:
        ledger: ledger so far; only lines of `ROW_STEPS` count.
        limit: `validate.max_quarantined`.
        filters: rows left out by each `where` expression.

    Raises:
        QuarantineLimitError: too many rows are bad; names the reasons and their counts. If the rows
            are available, `explain_bad_rows` of `packhouse.addons.quarantine` adds details.
        EmptyDatasetError: no rows are left.
    """
    checked = [line for line in ledger if line.step in ROW_STEPS]
    rows, left_out = (checked[0].rows_in, _sum(checked[0].dropped)) if checked else (0, 0)
    bad = sum(line.num_bad_rows for line in checked)
    reasons = sum_by_reason(checked, "quarantined")
    # A row has several reasons if several of its records are bad.
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
    facts: dict[str, Any] = {"reasons": dict(reasons), "rows": rows, "gates": (result,)}
    if not is_empty:
        raise QuarantineLimitError(
            f"{bad:,} of {counted(rows, 'row')} ({bad / rows:.2%}) are bad ({counts}); the limit "
            f"is {limit:.2%}. Fix the rows, or raise validate.max_quarantined",
            **facts,
        )
    which = "the only row is" if rows == 1 else f"all {rows:,} rows are"
    why, advice = f"{which} bad ({counts})", ""
    if rows == 0:
        why, advice = "the sources have no rows", ". Check their paths"
    elif left_out:
        policies = "`where` or `media`" if "media" in checked[0].dropped else "`where`"
        parts = [f"no row is left of {rows:,}: {policies} leaves out {left_out:,}"]
        parts += [f"`{f.where}` of {f.source} {f.filtered:,}" for f in filters if f.filtered]
        why = "; ".join([*parts, f"{bad:,} are bad{f' ({counts})' if counts else ''}"])
    raise EmptyDatasetError(f"{why}, so there is nothing to publish{advice}", **facts)


def share_allowed(limit: float, rows: int) -> float:
    """Return the allowed share of bad rows: the recipe's limit, but at least one row.

    Example:
        >>> share_allowed(0.01, 1_000), share_allowed(0.01, 20), share_allowed(0, 20)
        (0.01, 0.05, 0)
    """
    # With the default of 1%, one bad row of 20 would fail a small file. A limit of 0 stays 0.
    return max(limit, 1 / rows) if limit and rows else limit


@dataclass(frozen=True, slots=True)
class Filter:
    """Effect of one `where` expression of a source."""

    source: str
    where: str
    filtered: int
    """Rows that it left out; a row counts for the first expression that leaves it out."""
    rows: int
    """Rows read."""


def filters_of(sources: Iterable[Mapping[str, Any]]) -> list[Filter]:
    """Return the rows left out by each `where` expression of each source.

    Args:
        sources: shards, in the form of a manifest's lineage.

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
            # The manifest has one count for a single expression, and one for each of a list.
            where = [where]
        name = str(each.get("file", "")).partition("/")[0]
        for text in where if isinstance(where, list) else ():
            if isinstance(text, str):  # a manifest from a store is not trusted
                before = found.get((name, text), Filter(name, text, 0, 0))
                filtered = before.filtered + left_out.get(text, 0)
                found[name, text] = Filter(name, text, filtered, before.rows + each.get("rows", 0))
    return list(found.values())


def sum_by_reason(ledger: Iterable[LedgerLine], kind: str) -> Counter[str]:
    """Return the rows of a kind (`quarantined`, `dropped`) by reason, added up over all steps."""
    sums: Counter[str] = Counter()
    for line in ledger:
        sums.update(getattr(line, kind))
    return sums


def units_of(ledger: Iterable[LedgerLine]) -> dict[str, tuple[str, str]]:
    """Return the units each step receives and returns: rows, or records once rows are split.

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


def in_and_out(ledger: Sequence[LedgerLine]) -> tuple[tuple[str, str], list[tuple[Cell, Cell]]]:
    """Return headings and cells for the rows or records into and out of each step.

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
    """Add up two lines of one step; None plus None stays None."""
    sums: dict[str, Any] = {}
    for name in (each.name for each in fields(RowCounts)):
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, Mapping):
            sums[name] = dict(Counter(one) + Counter(other))
        else:
            sums[name] = None if one is None and other is None else (one or 0) + (other or 0)
    return LedgerLine(step=a.step, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderCounts:
    """Counts of the format step; the end of a run adds the notes of the other steps."""

    rows: int = 0
    """Rows that gave at least one record."""
    records: int = 0
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Token at which generation stops -> its origin: a file of the model, a setting or
    `template`."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts of observations that users should know about; see `NOTES`."""

    @classmethod
    def total(cls, parts: Iterable["RenderCounts"]) -> "RenderCounts":
        """Add up the counts of several shards.

        Example:
            >>> a = RenderCounts(rows=2, records=3, notes={"bom": 1})
            >>> RenderCounts.total([a, a]).notes
            {'bom': 2}
        """
        rows = records = 0
        stops, notes = dict[str, str](), Counter[str]()
        for part in parts:
            rows, records = rows + part.rows, records + part.records
            stops.update(part.stop_tokens)
            notes.update(part.notes)
        return cls(rows=rows, records=records, stop_tokens=stops, notes=dict(sorted(notes.items())))

    def scaled(self, share: float) -> "RenderCounts":
        """Return estimated counts for `share` times as many rows."""
        return RenderCounts(
            rows=round(self.rows * share),
            records=round(self.records * share),
            stop_tokens=self.stop_tokens,
            notes={name: round(number * share) for name, number in self.notes.items()},
        )

    def record_lines(self) -> list[str]:
        """Return a line with the number of records, unless each row gave one.

        Example:
            >>> RenderCounts(rows=10, records=14).record_lines()
            ['10 rows became 14 records']
            >>> RenderCounts(rows=10, records=10).record_lines()
            []
        """
        if self.rows == self.records:
            return []
        return [f"{counted(self.rows, 'row')} became {counted(self.records, 'record')}"]

    def lines(self) -> list[str]:
        """Return a line for the stop tokens and one for each note.

        Example:
            >>> RenderCounts(stop_tokens={"</s>": "tokenizer"}, notes={"bom": 1}).lines()
            ['generation stops at </s> (tokenizer)', '1 file starts with a byte order mark']
        """
        by_source: dict[str, list[str]] = {}
        for token, source in sorted(self.stop_tokens.items()):
            by_source.setdefault(source, []).append(token)
        ends = [
            f"generation stops at {' or '.join(tokens)} ({source})"
            + (_NOT_NAMED if source == "template" else "")
            for source, tokens in by_source.items()
        ]
        numbers = {name: self.notes.get(name, 0) for name in NOTES}
        texts = {n: _ONE_OR_MANY.sub(r"\1" if numbers[n] == 1 else r"\2", NOTES[n]) for n in NOTES}
        return ends + [f"{number:,} {texts[name]}" for name, number in numbers.items() if number]


_ONE_OR_MANY = re.compile(r"\[(.*?)\|(.*?)\]")
_NOT_NAMED = (
    "; none of the model's files lists this token, so add it to stop_token_ids in the "
    "inference engine"
)

NOTES: Mapping[str, str] = {
    "straddles_start": (
        "[answer starts|answers start] inside a token of the prompt, and that token is not "
        "trained; to avoid this, end the template's prompt with a line break"
    ),
    "straddles_end": (
        "trained [turn ends|turns end] inside a token, and all of that token is trained"
    ),
    "split_prompts": (
        "[prompt ends|prompts end] inside a token, so [it is|they are] tokenized separately, as "
        "at inference"
    ),
    "control_text_rows": "[record contains|records contain] the text of a control token",
    "inexact_round_trip": (
        "[record does|records do] not decode to [its|their] exact text, because the tokenizer "
        "normalizes text"
    ),
    "unk_tokens": "unknown [token|tokens]",
    "reasoning_not_rendered": (
        "[answer loses its|answers lose their] reasoning, because the template does not write it"
    ),
    "history_not_rendered": (
        "[text|texts] of [an |]untrained [answer is|answers are] not in the [record,|records,] "
        "because the template does not write [it|them]"
    ),
    "thinking_turns": "[answer follows|answers follow] the thinking prompt",
    "plain_turns": "[answer follows|answers follow] the non-thinking prompt",
    "turns_without_thought": (
        "[answer has|answers have] no reasoning and [follows|follow] the non-thinking prompt, "
        "although other answers to the same question have reasoning"
    ),
    "rewritten_prompts": (
        "[prompt differs|prompts differ] from the previous record, but only in text that the "
        "template adds"
    ),
    "answers_too_long": (
        "[answer is|answers are] left out, because [its prompt is|their prompts are] longer than "
        "any pack"
    ),
    "borrowed_thoughts": (
        "[answer is|answers are] rendered as if a tool call followed, because the template would "
        "otherwise leave out [its|their] reasoning"
    ),
    "arguments_not_read": "[row has|rows have] template arguments that the template does not read",
    "bom": "[file starts|files start] with a byte order mark",
    "media_parts": "[row was|rows were] read without [its|their] images, sound, video or files",
    "unanswered": "[question has|questions have] no answer and [is|are] left out",
    "blank_lines": "blank [line was|lines were] skipped",
    "joined_rows": "[row follows|rows follow] another without a comma or a line break between them",
    "trailing_commas": "JSON [array has|arrays have] a comma after [its|their] last row",
    "truncated_files": "[file ends|files end] in the middle of a row",
}
"""Note -> its text; `[singular|plural]` depends on the count. No row is lost by any of these."""

_WORTH_SAYING = 1.1
_CAUSE = {
    "joined": "the template writes a turn differently when later turns follow",
    "exact": "prompts at inference do not continue the previous record",
    "alone": "each answer is a separate record that repeats the turns before it",
}


def factor_note(counts: RenderCounts, config: "FormatConfig") -> str | None:
    """Return a line with the factor and cheaper settings; None if the factor is at most 1.1.

    Args:
        counts: has the notes `text_bytes` (all records) and `repeated_bytes` (what they hold in
            addition to one rendering per row).
        config: format section of the recipe.

    Example:
        >>> from packhouse.recipe import FormatConfig
        >>> counts = RenderCounts(notes={"text_bytes": 147, "repeated_bytes": 47})
        >>> factor_note(counts, FormatConfig(turns="alone"))
        ... # doctest: +NORMALIZE_WHITESPACE
        'records contain 1.47 times as much text as one rendering per row, because each answer is a
        separate record that repeats the turns before it; to reduce this, set format.turns: joined
        or format.turns: whole or format.train_on: last_assistant, if the template allows it'
        >>> factor_note(RenderCounts(notes={"text_bytes": 110, "repeated_bytes": 10}),
        ...     FormatConfig())
    """
    size = counts.notes.get("text_bytes", 0)
    factor = size / max(size - counts.notes.get("repeated_bytes", 0), 1)
    if factor <= _WORTH_SAYING or config.turns == "whole":
        return None
    ways = [f"format.turns: {name}" for name in ("joined", "whole") if name != config.turns]
    if config.turns != "alone" and config.reasoning != "strip":
        ways.append("format.reasoning: strip")
    if config.train_on != "last_assistant":
        ways.append("format.train_on: last_assistant")
    return (
        f"records contain {factor:.2f} times as much text as one rendering per row, because "
        f"{_CAUSE[config.turns]}; to reduce this, set {' or '.join(ways)}, if the template allows "
        "it"
    )
