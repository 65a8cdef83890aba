"""What an audit of anyone's data found: numbers, findings, rows that show them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packhouse.cli.tokens import Run, html_runs, plain
from packhouse.recipe import AuditConfig
from packhouse.system.escaping import PAGE_STYLE, html_text
from packhouse.system.wording import counted

# Finding -> what is wrong, what to do.
MEANINGS = {
    "untrained": ("no trained token", "drop them, or mend their mask: their loss is 0 or NaN"),
    "empty": ("no token, or padding alone", "drop them"),
    "hidden": (
        "attention_mask is 0 at tokens that are no padding",
        "write 1 there, or cut these tokens off: the model would not see them",
    ),
    "unmasked": (
        "nothing says which tokens are trained, as in other rows",
        "write labels of -100 where a token is not; or drop them",
    ),
    "untrained_ends": (
        "the end token of an answer is not trained",
        "train it: the model would not learn to stop",
    ),
    "past_stops": (
        "trained spans go past the stop token",
        "write labels of -100 after it: the model stops there and generates nothing more",
    ),
    "other_ends": (
        "trained spans end with a token at which generation does not stop",
        "train the stop token in its place, or configure inference to stop there",
    ),
    "unended": (
        "an answer has no end token",
        "end answers as the template does: the model would not learn to stop",
    ),
    "truncated": (
        "cut in the middle of an answer; the row is as long as the longest",
        "drop them or raise the limit of tokens: the model would not learn to stop",
    ),
    "padding": (
        "pad tokens, or end tokens behind the end, are trained, or in front and not masked",
        "write labels of -100 and an attention_mask of 0 there",
    ),
    "untrained_starts": (
        "the first tokens of an answer are not trained",
        "begin the mask right behind the header",
    ),
    "untrained_answers": ("bytes of answers are not trained", "look at the template"),
    "trained_prompts": ("tokens of prompts are trained", "mask what the assistant does not say"),
    "trained_headers": ("the header of an answer is trained", "begin the mask behind the header"),
    "missing_headers": (
        "the record does not begin as the template does, or no header stands before the answer",
        "the prompt was cut: drop them or raise the limit; or a boundary lies beside its place",
    ),
    "double_bos": ("two BOS", "tokenize rendered text with add_special_tokens=False"),
    "missing_bos": ("no BOS, and the tokenizer puts one", "add it: the model expects it"),
    "double_ends": (
        "an end token stands twice in a row",
        "let the tokenizer or the template write it",
    ),
    "positions": (
        "position_ids do not restart where a record begins",
        "count from 0 in each record",
    ),
    "boundaries": (
        "seq_lengths or cu_seqlens do not add up to the tokens",
        "write the boundaries again",
    ),
    "leaks": (
        "several records that attention does not keep apart",
        "write seq_lengths, or position_ids that restart and no attention_mask of ones",
    ),
    "crossing": (
        "the first token of a later record is trained: it is predicted from the record before",
        "give it the label -100",
    ),
    "mislabeled": (
        "a label is neither its token nor -100",
        "do not shift labels, trainers do; or the ids are of another row",
    ),
    "uneven": ("columns differ in length, ids are below 0, or a value is null", "write them again"),
    "foreign_ids": ("ids that the tokenizer does not have", "is it the right tokenizer?"),
    "unknown_tokens": ("tokens are unknown to the tokenizer", "is it the right tokenizer?"),
    "duplicates": ("repeat an earlier record", "drop them"),
    "quarantined": ("`prepare` would refuse them", "mend them; below is why"),
}
_OF_ROWS = {
    "positions",
    "boundaries",
    "leaks",
    "mislabeled",
    "uneven",
    "crossing",
    "unmasked",
    "padding",
    "empty",
    "hidden",
}
OF_SPANS = ("spans", "spans_stopped", "spans_of_one_stop", "spans_after_header")
"""Counts of trained spans, where the chat template is known."""
_OF_TOKENS = {"untrained_answers", "unknown_tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A row in which something was found."""

    place: str
    """Which row, and which token of it."""
    runs: tuple[Run, ...] = ()
    """Tokens around the place; empty where there are none."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found, how often, and where."""

    name: str
    number: int
    total: int
    of: str
    """What is counted: `records`, `rows`, or nothing where `says` names it."""
    says: str
    remedy: str
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What data would teach. Prints as text, and shows itself in a notebook.

    Example:
        >>> from packhouse import audit
        >>> rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, -100, 8]}]
        >>> report = audit(rows, "deployments/demo/tokenizer", progress=False,
        ...     cache=getfixture("tmp_path"))
        >>> report.summary()[0]
        '1 tokenized row, 1 record, 4 tokens, 25.0% of them trained'
    """

    data: str
    """What was audited: `tokenized` or `raw` rows."""
    tokenizer: str
    counts: Mapping[str, int]
    """`rows_in`, `rows` (packed ones, of raw data), `records`, `tokens`, `trained_tokens`,
    `longest_row`, the number of each finding, and those of `OF_SPANS`."""
    findings: tuple[Finding, ...]
    """Those that occur."""
    notes: tuple[str, ...]
    """What could not be looked at, and why."""

    @property
    def is_clean(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @property
    def fill(self) -> float:
        """Share of tokens in rows as long as the longest one."""
        return self.counts["tokens"] / max(self.counts["rows"] * self.counts["longest_row"], 1)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "data": self.data,
            "tokenizer": self.tokenizer,
            "is_clean": self.is_clean,
            "fill": round(self.fill, 4),
            "counts": dict(self.counts),
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        """Lines for people: numbers, then notes."""
        counts = self.counts
        share = counts["trained_tokens"] / max(counts["tokens"], 1)
        return [
            f"{counted(counts['rows_in'], f'{self.data} row')}, "
            f"{counted(counts['records'], 'record')}, {counted(counts['tokens'], 'token')}, "
            f"{share:.1%} of them trained",
            f"longest row {counted(counts['longest_row'], 'token')}, fill {self.fill:.1%}",
            *(
                [
                    f"of {counted(counts['spans'], 'trained span')}, "
                    f"{counts['spans_after_header']:,} follow a generation header, "
                    f"{counts['spans_stopped']:,} end with a stop token, "
                    f"{counts['spans_of_one_stop']:,} contain no other"
                ]
                if "spans" in counts
                else []
            ),
            *(f"note: {note}" for note in self.notes),
        ]

    def __repr__(self) -> str:
        lines = self.summary()
        for finding in self.findings:
            lines += ["", *headline(finding)]
            for example in finding.examples:
                lines.append(f"    {example.place}{': ' * bool(example.detail)}{example.detail}")
                if example.runs:
                    lines.append(indented(plain(example.runs), 6))
        return "\n".join([*lines, "" if self.findings else "nothing found"])

    def _repr_html_(self) -> str:
        lines = "<br>".join(html_text(line) for line in self.summary())
        parts = [PAGE_STYLE, '<div class="packhouse">', f"<p>{lines}</p>"]
        for finding in self.findings:
            title, remedy = headline(finding)
            parts.append(f"<p><b>{html_text(title)}</b><br>{html_text(remedy)}</p>")
            for example in finding.examples:
                said = f"{example.place}{': ' * bool(example.detail)}{example.detail}"
                parts.append(f'<div class="quiet">{html_text(said)}</div>')
                parts.append(html_runs(example.runs) if example.runs else "")
        if self.is_clean:
            parts.append("<b>nothing found</b>")
        return "".join([*parts, "</div>"])


def indented(text: str, width: int) -> str:
    """Return lines with a margin, without those at the end that are empty."""
    return "\n".join(" " * width + line for line in text.rstrip().split("\n"))


def headline(finding: Finding) -> tuple[str, str]:
    """Return a finding as one line, and what to do as another."""
    of = f"of {finding.total:,} {finding.of}: " if finding.of else ""
    return f"{finding.name}: {finding.number:,} {of}{finding.says}", f"  {finding.remedy}"


def make_report(
    data: str,
    tokenizer: str,
    counts: Mapping[str, int],
    examples: Mapping[str, tuple[Example, ...]],
    notes: tuple[str, ...],
) -> AuditReport:
    """Make a report of the number of each finding; a few are allowed as `prepare` allows them."""
    limits = AuditConfig()
    allowed = {
        "unknown_tokens": limits.max_unknown_tokens * counts["tokens"],
        "untrained_answers": (1 - limits.min_answer_coverage) * counts.get("answer_bytes", 0),
    }
    findings = tuple(
        Finding(
            name=name,
            number=counts[name],
            total=counts[_total_of(name)],
            of="" if name in _OF_TOKENS else _total_of(name).removesuffix("_in"),
            says=says,
            remedy=remedy,
            examples=examples.get(name, ()),
        )
        for name, (says, remedy) in MEANINGS.items()
        if counts.get(name, 0) > allowed.get(name, 0)
    )
    return AuditReport(
        data=data, tokenizer=tokenizer, counts=counts, findings=findings, notes=notes
    )


def _total_of(name: str) -> str:
    """The count that a finding is a part of."""
    if name == "quarantined":
        return "rows_in"
    return "tokens" if name in _OF_TOKENS else "rows" if name in _OF_ROWS else "records"
