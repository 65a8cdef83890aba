"""Count the rows of a shard that a counter finds, and add shards up.

A row is counted once by each counter, however often it is found in it. Personal data and dirt are
looked for in all that a row's turns say, the rest in its answers. What is found is named by file
and row, never repeated: a manifest is no place for what a row should not hold.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.quality.answers import echoes, is_empty, is_refusal
from packhouse.addons.quality.dirt import has_html, has_invisible, has_mojibake
from packhouse.addons.quality.language import UNDETERMINED, language
from packhouse.addons.quality.personal import has_card, has_email, has_phone, has_secret
from packhouse.addons.quality.repetition import REPETITIVE, repetition
from packhouse.recipe.audit import QUALITY_COUNTERS
from packhouse.records.messages import FlatMessages
from packhouse.system.arrays import Bools, Int64s

_NUM_WORST = 5
_BLOCK = 2**13  # rows looked at together
_OUTLIER = 16  # buckets above the median's
_EDGES = np.array([round(2 ** (step / 4)) for step in range(4 * 40)])
"""Lengths in characters at which buckets begin; four buckets double."""


def count_quality(validated: pa.Table, *, languages: bool = False) -> dict[str, object]:
    """Count what the counters find in the conversations of a shard.

    Args:
        validated: schema `tables.VALIDATED`.
        languages: count the languages of answers as well.

    Returns:
        Plain JSON: `rows`; `counts`, counter -> rows; `worst`, counter -> the first of them;
        `lengths`, bucket -> rows, and `languages` (language -> rows) with `of_languages`
        (language -> first rows): which of these count is known when all shards are.
    """
    flags: dict[str, list[Bools]] = {name: [] for name in _CHECKS}
    lengths, found_languages = [], []
    for start in range(0, validated.num_rows, _BLOCK):
        rows = _Rows(FlatMessages.of(validated["messages"].slice(start, _BLOCK)))
        for name, check in _CHECKS.items():
            flags[name].append(check(rows))
        lengths.append(np.asarray(pc.utf8_length(rows.texts), np.int64))
        if languages:
            found_languages.append(language(rows.joined_answers))
    found = {name: np.flatnonzero(np.concatenate([_NONE, *each])) for name, each in flags.items()}
    sizes = np.concatenate([np.zeros(0, np.int64), *lengths])
    longest = np.argsort(-sizes, kind="stable")[:_NUM_WORST]
    result: dict[str, Any] = {
        "rows": validated.num_rows,
        "counts": {name: len(rows) for name, rows in found.items()},
        "worst": {name: _places(validated, rows) for name, rows in found.items() if len(rows)},
        "lengths": _histogram(np.searchsorted(_EDGES, np.maximum(sizes, 1), "right")),
        "longest": _places(validated, longest, sizes[longest]),
    }
    if languages:
        names = np.concatenate(
            [np.zeros(0, object), *(each.to_pylist() for each in found_languages)]
        )
        result["languages"] = _histogram(names)
        result["of_languages"] = {
            name: _places(validated, np.flatnonzero(names == name)) for name in result["languages"]
        }
    return result


def combine_quality(
    shards: Sequence[tuple[str, Mapping[str, Any]]], languages: Sequence[str] = ()
) -> dict[str, object]:
    """Add up what was counted in shards.

    Args:
        shards: name of the source, and result of `count_quality`; in order.
        languages: those that answers may be in.

    Returns:
        `dataset` and each of `sources`: rows and counts; `worst`: the first rows of each source by
        counter; `languages`: rows by language, where they were counted.
    """
    sources: dict[str, Counter[str]] = {}
    worst: dict[str, list[dict[str, object]]] = {name: [] for name in QUALITY_COUNTERS}
    spoken: Counter[str] = Counter()
    medians = _medians(shards)
    for name, found in shards:
        counts = sources.setdefault(name, Counter(rows=0))
        counts.update(rows=found["rows"], **found["counts"])
        for counter, rows in found["worst"].items():
            worst[counter] += rows
        limit = medians[name] + _OUTLIER
        counts["length_outliers"] += sum(
            rows for bucket, rows in found["lengths"].items() if int(bucket) >= limit
        )
        edge = _EDGES[min(limit, len(_EDGES)) - 1]
        worst["length_outliers"] += [row for row in found["longest"] if row["value"] >= edge]
        for spoken_in, rows in found.get("languages", {}).items():
            spoken[spoken_in] += rows
            is_other = spoken_in not in (*languages, UNDETERMINED)
            counts["other_languages"] += rows * is_other
            worst["other_languages"] += found["of_languages"][spoken_in] * is_other
    total: Counter[str] = Counter(rows=0)
    for counts in sources.values():
        total.update(counts)
    combined = {
        "dataset": dict(total),
        "sources": {name: dict(counts) for name, counts in sorted(sources.items())},
        "worst": {name: _first_of_sources(rows) for name, rows in worst.items() if rows},
    }
    return combined | ({"languages": dict(sorted(spoken.items()))} if spoken else {})


def _first_of_sources(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    rows.sort(key=lambda row: (-row["value"], row["source"], row["row"], row["record_id"]))
    num_kept: Counter[str] = Counter()
    kept = []
    for row in rows:
        source = row["source"].split("/")[0]
        num_kept[source] += 1
        kept += [row] if num_kept[source] <= _NUM_WORST else []
    return kept


def _medians(shards: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, int]:
    """The bucket of the median length of each source."""
    buckets: dict[str, Counter[int]] = {}
    for name, found in shards:
        own = buckets.setdefault(name, Counter())
        own.update({int(bucket): rows for bucket, rows in found["lengths"].items()})
    medians = {}
    for name, own in buckets.items():
        # Two rows in bucket 3 and five in bucket 9: [2 7] rows up to each, and the middle one, at
        # 3.5, is in bucket 9.
        ordered = sorted(own)
        up_to = np.cumsum([own[bucket] for bucket in ordered])
        medians[name] = ordered[int(np.searchsorted(up_to, up_to[-1] / 2))] if ordered else 0
    return medians


_NONE = np.zeros(0, np.bool_)


@dataclass(frozen=True, eq=False)
class _Rows:
    """What some conversations say."""

    flat: FlatMessages

    @cached_property
    def texts(self) -> pa.StringArray:
        """All that the turns of each row say, behind one another."""
        said = pc.binary_join_element_wise(
            *(self.flat[name] for name in ("content", "context", "reasoning", "tool_calls")),
            "\n",
            null_handling="skip",
        )
        return self.flat.join(said, "\n")

    @cached_property
    def _is_answer(self) -> Bools:
        return self.flat.is_role("assistant")

    @cached_property
    def answers(self) -> pa.StringArray:
        """What the assistant says, a text for each of its turns."""
        return self.flat["content"].filter(pa.array(self._is_answer))

    @cached_property
    def joined_answers(self) -> pa.StringArray:
        """The same, a text for each row."""
        counts = self.flat.sums(self._is_answer)
        lists = pa.ListArray.from_arrays(
            pa.array(np.append(0, np.cumsum(counts)), pa.int32()), self.answers
        )
        return pc.binary_join(lists, "\n")

    @cached_property
    def prompts(self) -> pa.StringArray:
        """What the user said right before each answer; null where nobody did."""
        user = self.flat.is_role("user")
        # Messages u a a: answers at [1 2]; before the first one is a user's, before the second not.
        at = np.flatnonzero(self._is_answer)
        is_first = np.isin(at, self.flat.offsets)
        mask = is_first | ~user[np.maximum(at - 1, 0)]
        return self.flat["content"].take(pa.array(np.maximum(at - 1, 0), mask=mask))

    @cached_property
    def calls_nothing(self) -> Bools:
        """Marks answers without tool calls and reasoning."""
        return ~(self.flat.has("tool_calls") | self.flat.has("reasoning"))[self._is_answer]

    def of_answers(self, is_found: pa.BooleanArray | Bools) -> Bools:
        """Marks rows of which an answer is marked."""
        marks = np.asarray(pc.fill_null(pa.array(is_found), False), np.bool_)
        rows = np.zeros(len(self.flat.counts), np.bool_)
        rows[self.flat.rows[self._is_answer][marks]] = True
        return rows


def _in_texts(check: Callable[[pa.StringArray], pa.BooleanArray]) -> Callable[[_Rows], Bools]:
    return lambda rows: np.asarray(check(rows.texts), np.bool_)


_CHECKS: dict[str, Callable[[_Rows], Bools]] = {
    "empty_answers": lambda rows: rows.of_answers(
        np.asarray(is_empty(rows.answers), np.bool_) & rows.calls_nothing
    ),
    "echoes": lambda rows: rows.of_answers(echoes(rows.answers, rows.prompts)),
    "refusals": lambda rows: rows.of_answers(is_refusal(rows.answers)),
    "repetition": lambda rows: rows.of_answers(pc.greater(repetition(rows.answers), REPETITIVE)),
    "html": _in_texts(has_html),
    "mojibake": _in_texts(has_mojibake),
    "invisible": _in_texts(has_invisible),
    "emails": _in_texts(has_email),
    "phones": _in_texts(has_phone),
    "cards": _in_texts(has_card),
    "secrets": _in_texts(has_secret),
}


def _places(table: pa.Table, rows: Int64s, values: Int64s | None = None) -> list[dict[str, object]]:
    """Where the first of some rows stand, each with a value: 1 by default."""
    first = rows[:_NUM_WORST]
    found = table.select(["source", "row", "record_id"]).take(pa.array(first)).to_pylist()
    numbers = [1] * len(first) if values is None else values.tolist()
    return [{**row, "value": value} for row, value in zip(found, numbers, strict=True)]


def _histogram(values: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(values, return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}
