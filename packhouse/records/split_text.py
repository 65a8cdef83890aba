"""How much text the records of split rows hold, compared with one rendering per row.

A template that drops earlier reasoning from history, or moves tools to the last question, makes a
record per answer, and each repeats the turns before it: long agent runs cost several times their
text. `plan`, `init` and `prepare` print this once it is more than a tenth, and name the settings
that cost less.

The format step notes bytes only for rows that were split, so other runs read nothing here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig

_WORTH_SAYING = 1.1
_CAUSE = {
    "joined": "the template writes earlier turns differently once others follow",
    "exact": "prompts at inference do not continue the record before them",
    "alone": "each answer is a separate record that repeats the turns before it",
}


@dataclass(frozen=True, slots=True)
class SplitText:
    """Bytes of text that was rendered."""

    all: float = 0
    """Of all records."""
    split: float = 0
    """Of the records of rows that were split."""
    whole: float = 0
    """Of one rendering for each of these rows."""

    @classmethod
    def of(cls, formatted: Iterable[pa.Table], notes: Mapping[str, int]) -> "SplitText":
        """Measure the texts of a shard, or of a sample, with the notes of their format step.

        Args:
            formatted: tables with a column `text`: one, or of pairs one per side.
            notes: `split_bytes` and `whole_bytes` are read.

        Example:
            >>> table = pa.table({"text": ["four", "seven b"]})
            >>> SplitText.of([table], {"split_bytes": 7, "whole_bytes": 2})
            SplitText(all=11, split=7, whole=2)
        """
        sizes = [pc.sum(pc.binary_length(table["text"])).as_py() or 0 for table in formatted]
        return cls(sum(sizes), notes.get("split_bytes", 0), notes.get("whole_bytes", 0))

    @property
    def factor(self) -> float:
        """Text of all records by that of one rendering per row.

        Example:
            >>> round(SplitText(all=1000, split=600, whole=200).factor, 2)
            1.67
        """
        return self.all / max(self.all - self.split + self.whole, 1)

    def scaled(self, share: float) -> "SplitText":
        """Return as many times the text."""
        return SplitText(self.all * share, self.split * share, self.whole * share)


def total(parts: Iterable[SplitText]) -> SplitText:
    """Add up the bytes of several shards."""
    every = np.array([(0, 0, 0), *((each.all, each.split, each.whole) for each in parts)])
    return SplitText(*every.sum(axis=0).tolist())


def factor_note(text: SplitText, config: FormatConfig) -> str | None:
    """Return a line that names the factor and the alternatives; None if it is at most 1.1.

    Example:
        >>> factor_note(SplitText(all=147, split=97, whole=50), FormatConfig(turns="alone"))
        ... # doctest: +NORMALIZE_WHITESPACE
        'records hold 1.47 times the text of one rendering per row, because each answer is a
        separate record that repeats the turns before it; alternatives: format.turns: joined, or
        whole if the template allows it; format.train_on: last_assistant'
        >>> factor_note(SplitText(all=110, split=60, whole=50), FormatConfig())
    """
    if text.factor <= _WORTH_SAYING or config.turns == "whole":
        return None
    turns = "" if config.turns == "joined" else "joined, or "
    alternatives = [f"format.turns: {turns}whole if the template allows it"]
    if config.turns != "alone" and config.reasoning != "strip":
        alternatives.append("format.reasoning: strip if rows have reasoning")
    if config.train_on != "last_assistant":
        alternatives.append("format.train_on: last_assistant")
    return (
        f"records hold {text.factor:.2f} times the text of one rendering per row, because "
        f"{_CAUSE[config.turns]}; alternatives: {'; '.join(alternatives)}"
    )
