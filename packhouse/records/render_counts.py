"""Count how rows became records and how much text the records hold, and describe it in words.

`plan`, the report and the end of a run print the same lines from the same counts.

If a template drops earlier reasoning from the history, or moves tools to the last question, each
answer needs its own record that repeats the turns before it. Long agent runs then take several
times their text. `plan`, `init` and `prepare` print the factor if it is over 1.1, together with
settings that cost less. The format step counts bytes only for rows that were split.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
        return ends + [counted(n, *NOTES[name]) for name, n in numbers.items() if n]


_NOT_NAMED = (
    "; none of the model's files lists this token, so add it to stop_token_ids in the "
    "inference engine"
)

NOTES: Mapping[str, tuple[str, str]] = {
    "straddles_start": (
        "answer starts inside a token of the prompt, and that token is not trained; to avoid it, "
        "end the template's prompt with a line break",
        "answers start inside a token of the prompt, and that token is not trained; to avoid it, "
        "end the template's prompt with a line break",
    ),
    "straddles_end": (
        "trained turn ends inside a token, and all of that token is trained",
        "trained turns end inside a token, and all of that token is trained",
    ),
    "split_prompts": (
        "prompt ends inside a token, so it is tokenized separately, as at inference",
        "prompts end inside a token, so they are tokenized separately, as at inference",
    ),
    "control_text_rows": (
        "record contains the text of a control token",
        "records contain the text of a control token",
    ),
    "inexact_round_trip": (
        "record does not decode to its exact text, because the tokenizer normalizes text",
        "records do not decode to their exact text, because the tokenizer normalizes text",
    ),
    "unk_tokens": ("unknown token", "unknown tokens"),
    "reasoning_not_rendered": (
        "answer loses its reasoning, because the template does not write it",
        "answers lose their reasoning, because the template does not write it",
    ),
    "history_not_rendered": (
        "text of an untrained answer is not in the record, because the template does not write it",
        "texts of untrained answers are not in the records, because the template does not write "
        "them",
    ),
    "thinking_turns": (
        "answer follows the thinking prompt",
        "answers follow the thinking prompt",
    ),
    "plain_turns": (
        "answer follows the non-thinking prompt",
        "answers follow the non-thinking prompt",
    ),
    "turns_without_thought": (
        "answer has no reasoning and follows the non-thinking prompt, although other answers to "
        "the same question have reasoning",
        "answers have no reasoning and follow the non-thinking prompt, although other answers to "
        "the same question have reasoning",
    ),
    "rewritten_prompts": (
        "prompt differs from the record before it, only in text that the template adds",
        "prompts differ from the record before them, only in text that the template adds",
    ),
    "answers_too_long": (
        "answer is left out, because its prompt is longer than any pack",
        "answers are left out, because their prompts are longer than any pack",
    ),
    "borrowed_thoughts": (
        "answer is written as if a tool call followed, because the template leaves out its "
        "reasoning otherwise",
        "answers are written as if a tool call followed, because the template leaves out their "
        "reasoning otherwise",
    ),
    "arguments_not_read": (
        "row has template arguments that the template does not read",
        "rows have template arguments that the template does not read",
    ),
    "bom": ("file starts with a byte order mark", "files start with a byte order mark"),
    "media_parts": (
        "row was read without its images, sound, video or files",
        "rows were read without their images, sound, video or files",
    ),
    "unanswered": (
        "question has no answer and is left out",
        "questions have no answer and are left out",
    ),
    "blank_lines": ("blank line was skipped", "blank lines were skipped"),
    "joined_rows": (
        "row follows another without a comma or a line break between them",
        "rows follow another without a comma or a line break between them",
    ),
    "trailing_commas": (
        "JSON array has a comma after its last row",
        "JSON arrays have a comma after their last row",
    ),
    "truncated_files": (
        "file ends in the middle of a row",
        "files end in the middle of a row",
    ),
}
"""Note -> its text in the singular and in the plural. No row is lost by any of these."""


_WORTH_SAYING = 1.1
REFUSALS: dict[str, dict[str, object]] = {
    "whole_refused": {"turns": "whole"},
    "strip_refused": {"reasoning": "strip"},
}
"""Notes of the format step, and the settings that its first split row is tried with."""
_CAUSE = {
    "joined": "the template writes a turn differently once later turns follow",
    "exact": "prompts at inference do not continue the record before them",
    "alone": "each answer is a separate record that repeats the turns before it",
}


@dataclass(frozen=True, slots=True)
class SplitText:
    """Bytes of rendered text."""

    all: float = 0
    """Bytes of all records."""
    split: float = 0
    """Bytes of the records of split rows, and extra bytes of joined records."""
    whole: float = 0
    """Bytes of one rendering for each split row."""
    whole_refused: float = 0
    """Shards whose first split row the template refuses with `turns: whole`."""
    strip_refused: float = 0
    """The same, with `reasoning: strip`."""

    @classmethod
    def of(cls, formatted: Iterable[pa.Table], notes: Mapping[str, int]) -> "SplitText":
        """Measure the texts of a shard, or of a sample, with the notes of their format step.

        Args:
            formatted: tables with a column `text`: one, or of pairs one per side.
            notes: `split_bytes`, `whole_bytes`, `joined_bytes` and `REFUSALS` are read.

        Example:
            >>> table = pa.table({"text": ["four", "seven b"]})
            >>> SplitText.of([table], {"split_bytes": 7, "whole_bytes": 2})
            SplitText(all=11, split=7, whole=2, whole_refused=0, strip_refused=0)
        """
        sizes = [pc.sum(pc.binary_length(table["text"])).as_py() or 0 for table in formatted]
        more = notes.get("split_bytes", 0) + notes.get("joined_bytes", 0)
        refused = (notes.get(name, 0) for name in REFUSALS)
        return cls(sum(sizes), more, notes.get("whole_bytes", 0), *refused)

    @property
    def factor(self) -> float:
        """Text of all records relative to one rendering per row.

        Example:
            >>> round(SplitText(all=1000, split=600, whole=200).factor, 2)
            1.67
        """
        return self.all / max(self.all - self.split + self.whole, 1)

    def scaled(self, share: float) -> "SplitText":
        """Return the sizes multiplied by `share`."""
        return SplitText(*(share * size for size in astuple(self)))


def split_bytes(part: pa.Table, formatted: pa.Table) -> dict[str, int]:
    """Return the bytes of the records of split rows, and of one rendering for each of these rows.

    The longest record of a row, that of its last answer, counts as that rendering.
    """
    rows, counts = np.unique(part["row"].to_numpy(), return_counts=True)
    texts = pa.table({"row": formatted["row"], "size": pc.binary_length(formatted["text"])})
    sums = texts.group_by("row").aggregate([("size", name) for name in ("count", "sum", "max")])
    is_split = pc.greater(sums["size_count"], 1)
    # Paths of a message tree share a row; those rows are not counted.
    is_alone = pc.is_in(sums["row"], value_set=pa.array(rows[counts == 1]))
    split = sums.filter(pc.and_(is_split, is_alone))
    return {
        "split_bytes": pc.sum(split["size_sum"]).as_py() or 0,
        "whole_bytes": pc.sum(split["size_max"]).as_py() or 0,
    }


def total(parts: Iterable[SplitText]) -> SplitText:
    """Add up the bytes of several shards."""
    every = np.array([astuple(each) for each in (SplitText(), *parts)])
    return SplitText(*every.sum(axis=0).tolist())


def factor_note(text: SplitText, config: FormatConfig) -> str | None:
    """Return a line with the factor and cheaper settings; None if the factor is at most 1.1.

    Example:
        >>> factor_note(SplitText(all=147, split=97, whole=50), FormatConfig(turns="alone"))
        ... # doctest: +NORMALIZE_WHITESPACE
        'records hold 1.47 times the text of one rendering per row, because each answer is a
        separate record that repeats the turns before it; alternatives: format.turns: joined or
        whole; format.train_on: last_assistant'
        >>> factor_note(SplitText(all=110, split=60, whole=50), FormatConfig())
    """
    if text.factor <= _WORTH_SAYING or config.turns == "whole":
        return None
    turns = ["joined"] * (config.turns != "joined") + ["whole"] * (not text.whole_refused)
    alternatives = [f"format.turns: {' or '.join(turns)}"] if turns else []
    if config.turns != "alone" and config.reasoning != "strip" and not text.strip_refused:
        alternatives.append("format.reasoning: strip if rows have reasoning")
    if config.train_on != "last_assistant":
        alternatives.append("format.train_on: last_assistant")
    return (
        f"records hold {text.factor:.2f} times the text of one rendering per row, because "
        f"{_CAUSE[config.turns]}; "
        + (f"alternatives: {'; '.join(alternatives)}" if alternatives else "no setting avoids this")
    )
