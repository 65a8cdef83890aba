"""Count how rows became records and how much text the records hold, and describe it in words.

`plan`, the report and the end of a run print the same lines from the same counts.

If a template drops earlier reasoning from the history, or moves tools to the last question, each
answer needs its own record that repeats the turns before it. Long agent runs then take several
times their text. `plan`, `init` and `prepare` print the factor if it is over 1.1, together with
settings that cost less.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packhouse.recipe import FormatConfig
from packhouse.system.wording import counted


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


def factor_note(counts: RenderCounts, config: FormatConfig) -> str | None:
    """Return a line with the factor and cheaper settings; None if the factor is at most 1.1.

    Args:
        counts: has the notes `text_bytes` (all records) and `repeated_bytes` (what they hold in
            addition to one rendering per row).
        config: format section of the recipe.

    Example:
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
