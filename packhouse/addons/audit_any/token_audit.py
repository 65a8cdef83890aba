"""The audit of rows that another tool tokenized: what they teach, by their ids and masks alone.

Nothing is known of the texts that they came from, so turns are found by what the template writes
around contents (`turns`); without a template, prompts and headers are not looked at.

Cost: about 1 us a token, most of it `re` and hashing: 6 s for 52,000 Alpaca rows (5.4 M tokens).
Memory: 16 bytes for each record, to find duplicates.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from packhouse.addons.audit_any.answer_places import AnswerPlaces
from packhouse.addons.audit_any.token_rows import MASKS, Padding, TokenRows, read_token_rows
from packhouse.auditing.ends import bos_and_unknown
from packhouse.auditing.tokens import Intervals, Tokens
from packhouse.auditing.turns import TokenBytes, Turns
from packhouse.system.arrays import Bools, Int64s
from packhouse.tokenize.pipeline import Pipeline, TokenizerSnapshot

NUM_SAMPLES = 3
_BEFORE, _AFTER = 40, 24  # tokens of a sample, around the one that is wrong
_MOST = 0.9  # of all rows
_PREFIX = 8  # tokens that records begin with, where no template says how they do


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Tokens around what was found."""

    row: int
    token: int
    """Its place in the row's tokens."""
    ids: Int64s
    trained: Bools


@dataclass(slots=True)
class TokenAudit:
    """What was found in all rows."""

    counts: Counter[str] = field(default_factory=Counter)
    """`rows`, `records`, `tokens`, `trained_tokens`, `trained_bytes`, `trained_prompt_bytes`,
    `longest_row`; of trained spans, where the template is known, `spans`, `spans_stopped` (end with
    a stop token), `spans_of_one_stop` (no other token of theirs is one) and `spans_after_header`
    (follow the end of a generation prompt); a number of each finding."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    has_turns: bool = False
    """True if some row holds what the template writes before answers."""


def audit_token_rows(
    batches: Iterable[pa.RecordBatch], snapshot: TokenizerSnapshot, turns: Turns, pipeline: Pipeline
) -> TokenAudit:
    """Audit rows with `input_ids`.

    Args:
        batches: with some of `token_rows.COLUMNS`.
        snapshot: their tokenizer.
        turns: what their template writes.
        pipeline: of the tokenizer.
    """
    scan = _Scan(snapshot, turns, pipeline)
    for batch in batches:
        if batch.num_rows:
            scan.add(batch)
    return scan.finish()


class _Scan:
    def __init__(self, snapshot: TokenizerSnapshot, turns: Turns, pipeline: Pipeline) -> None:
        self.snapshot, self.turns, self.pipeline = snapshot, turns, pipeline
        self.table = TokenBytes.of(pipeline)
        named = {name: snapshot.added_tokens.get(t) for name, t in snapshot.special_tokens.items()}
        pad_id, bos_id = named.get("pad_token"), named.get("bos_token")
        unk_id = named.get("unk_token") if pad_id is None else None
        self.pad = Padding(pad_id, turns.end_ids, bos_id, unk_id)
        self.bos_id = -1 if bos_id is None or not turns.bos_opens else bos_id
        self.is_end = np.zeros(len(pipeline.is_control), np.bool_)
        self.is_end[[i for i in turns.end_ids if i < len(self.is_end)]] = True
        self.thought_tags = tuple(
            self.table.texts[snapshot.added_tokens[tag]]
            if tag in snapshot.added_tokens
            else tag.encode()
            for tag in ("<think>", "</think>")
        )
        self.found = TokenAudit()
        self.seen: set[bytes] = set()
        self.unended: dict[int, tuple[int, list[Sample]]] = {}
        self.several: dict[int, tuple[int, list[Sample]]] = {}
        self.lengths: Counter[int] = Counter()
        self.cut: tuple[int, list[Sample]] = (0, [])
        self.other: tuple[int, list[Sample]] = (0, [])
        self.num_alike = 0
        self.unmasked: tuple[int, list[Sample]] = (0, [])
        self.names_mask = False
        self.prefix: bytes | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        rows = read_token_rows(batch, self.found.counts["rows"], self.pad)
        counts = self.found.counts
        counts["rows"] += rows.num_rows
        counts["records"] += len(rows.rows)
        counts["tokens"] += len(rows.ids)
        counts["trained_tokens"] += int(rows.trained.sum())
        known = rows.ids[rows.trained & (rows.ids < len(self.table.widths))]
        counts["trained_bytes"] += int(self.table.widths[known].sum())
        longest = max([counts["longest_row"], *rows.row_lengths.tolist()])
        counts["longest_row"] = longest
        joined = rows.faults.get("joined", [])
        unmasked = np.array([token for _, token in rows.faults.get("unmasked", [])], np.int64)
        self.unmasked = self._more(self.unmasked, rows, unmasked)
        self.names_mask |= not MASKS.isdisjoint(batch.schema.names)
        for name, faults in rows.faults.items():
            if name not in ("joined", "unmasked"):
                self._note(rows, name, [token for _, token in faults], [r for r, _ in faults])
        size = len(self.table.texts)
        is_strange = rows.ids >= size
        if is_strange.any():  # of another tokenizer: the rest of these rows says nothing
            where = np.flatnonzero(is_strange)
            self._note(rows, "foreign_ids", *_first_of_each(self._record_of(rows, where), where))
            rows.ids[is_strange] = 0
        records = np.arange(len(rows.rows))
        if not len(records):
            return
        trained = np.add.reduceat(rows.trained.astype(np.int64), rows.starts[:-1])
        has_label = np.zeros(rows.num_rows, np.bool_)
        if "label" in batch.schema.names:  # a class for a model's head is what such a row teaches
            has_label = np.asarray(batch["label"].is_valid())
        idle = np.flatnonzero(trained == 0)
        idle = idle[~has_label[rows.rows[idle] - rows.rows[0]]] if has_label.any() else idle
        self._note(rows, "untrained", rows.starts[idle])
        self._ends(rows)
        self._several(rows)
        self._bos(rows)
        self._duplicates(rows)
        if self.pipeline.token_bytes is not None:
            self._turns(rows, joined)

    def _record_of(self, rows: TokenRows, places: Int64s) -> Int64s:
        return np.searchsorted(rows.starts, places, "right") - 1

    def _note(
        self,
        rows: TokenRows,
        name: str,
        places: Int64s | list[int],
        numbers: list[int] | None = None,
    ) -> None:
        """Count a finding once for each place, and keep the first as samples."""
        self.found.counts[name] += len(places)
        kept = self.found.samples.setdefault(name, [])
        for index, place in enumerate(places[: NUM_SAMPLES - len(kept)]):
            kept.append(self._sample(rows, int(place), numbers[index] if numbers else None))

    def _sample(self, rows: TokenRows, place: int, number: int | None = None) -> Sample:
        if place < 0 or not len(rows.ids):
            return Sample(number or 0, 0, rows.ids[:0], rows.trained[:0])
        record = int(self._record_of(rows, np.array([place]))[0])
        row = int(rows.rows[record])
        own = rows.starts[:-1][rows.rows == row]
        low, high = int(own[0]), int(own[0] + rows.row_lengths[record])
        window = slice(max(low, place - _BEFORE), min(high, place + _AFTER))
        return Sample(row, place - low, rows.ids[window].copy(), rows.trained[window].copy())

    def _ends(self, rows: TokenRows) -> None:
        """Runs of trained tokens that do not end with a stop token, and why."""
        if not self.turns.end_ids:
            return
        begins, stops = rows.runs()
        ends = np.flatnonzero(self.is_end[rows.ids])
        blanks = np.append(0, np.cumsum(~self.table.is_blank[rows.ids]))
        record_ends = rows.starts[self._record_of(rows, begins) + 1]
        # Run [5, 9), end tokens at [8 14]: the last one before 9 is 8, and no word is behind it, so
        # the run is ended. Run [5, 9) with [3 11]: 11 ends it, and is not trained.
        before = np.searchsorted(ends, stops) - 1
        last = np.where(before < 0, -1, np.append(ends, -1)[before])
        is_ended = (last >= begins) & (blanks[stops] == blanks[np.maximum(last, 0) + 1])
        is_whole = (begins == rows.starts[self._record_of(rows, begins)]) & (stops == record_ends)
        past = is_ended & (last < stops - 1) & ~is_whole  # rows that are trained whole have no ends
        self._note(rows, "past_stops", *_first_of_each(
            self._record_of(rows, begins[past]), last[past] + 1))  # fmt: skip
        if self.turns.stop_ids:
            is_stopped = np.isin(rows.ids[stops - 1], list(self.turns.stop_ids))
            other = is_ended & ~past & ~is_whole & ~is_stopped
            self._note(rows, "other_ends", *_first_of_each(
                self._record_of(rows, begins[other]), stops[other] - 1))  # fmt: skip
            is_ended |= is_stopped
        following = np.append(ends, len(rows.ids))[np.searchsorted(ends, stops)]
        next_run = np.append(begins[1:], len(rows.ids))
        has_end = ~is_ended & (following < record_ends) & (following < next_run)
        self._note(rows, "untrained_ends", *_first_of_each(
            self._record_of(rows, begins[has_end]), following[has_end]))  # fmt: skip
        goes_on = next_run < record_ends
        lacks = np.flatnonzero(~is_ended & ~has_end & ~goes_on)
        is_last = rows.is_last[self._record_of(rows, begins[lacks])] & (
            stops[lacks] == record_ends[lacks]
        )
        for run, at_end in zip(lacks.tolist(), is_last.tolist(), strict=True):
            place = int(stops[run]) - 1
            record = int(self._record_of(rows, np.array([place]))[0])
            length = int(rows.row_lengths[record]) if at_end else -1
            number, kept = self.unended.get(length, (0, []))
            if len(kept) < NUM_SAMPLES:
                kept.append(self._sample(rows, place))
            self.unended[length] = number + 1, kept

    def _several(self, rows: TokenRows) -> None:
        """Count rows, and those of one record with several end tokens and none last, by length."""
        self.lengths.update(rows.row_lengths[rows.is_last].tolist())
        ends = np.flatnonzero(self.is_end[rows.ids])
        record, first, number = np.unique(
            self._record_of(rows, ends), return_index=True, return_counts=True
        )
        # Rows that say they are one record, with over 2 end tokens and words behind the last one:
        # conversations that were joined, and cut at a length.
        is_one = rows.row_lengths[record] == np.diff(rows.starts)[record]
        words = np.append(0, np.cumsum(~self.table.is_blank[rows.ids]))
        is_cut = words[ends[first + number - 1] + 1] < words[rows.starts[record + 1]]
        for at in np.flatnonzero(is_one & is_cut & (number > 2)).tolist():
            length = int(rows.row_lengths[record[at]])
            count, kept = self.several.get(length, (0, []))
            if len(kept) < NUM_SAMPLES:
                kept.append(self._sample(rows, int(ends[first[at]]) + 1))
            self.several[length] = count + 1, kept

    def _bos(self, rows: TokenRows) -> None:
        counts = bos_and_unknown(_as_tokens(rows, self.pipeline), self.snapshot)
        for name in ("double_bos", "missing_bos"):
            self._note(rows, name, rows.starts[:-1][np.flatnonzero(counts[name])])
        self.found.counts["unknown_tokens"] += int(counts["unknown_tokens"].sum())

    def _duplicates(self, rows: TokenRows) -> None:
        again = []
        for start, end in zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True):
            digest = hashlib.blake2b(rows.ids[start:end].tobytes(), digest_size=16)
            digest.update(rows.trained[start:end].tobytes())
            if digest.digest() in self.seen:
                again.append(start)
            self.seen.add(digest.digest())
        self._note(rows, "duplicates", again)

    def _turns(self, rows: TokenRows, joined: list[tuple[int, int]]) -> None:
        ids = rows.ids.tolist()
        data = self.table.join(ids)
        edges = np.append(0, np.cumsum(self.table.widths[rows.ids]))
        self._leaks(rows, data, edges, joined)
        self._spans(rows, data, edges)
        if not self.turns.answer_opens:
            return
        answers = AnswerPlaces.of(rows, data, edges, self.turns, self.table)
        cut = answers.cut_prompts(rows.runs()[0], self.bos_id)
        self.cut = self._more(self.cut, rows, cut)
        if not len(answers.headers):
            return
        self.found.has_turns = True
        other, num_alike = answers.begin_otherwise(self.bos_id)
        self.other = self._more(self.other, rows, np.setdiff1d(other, cut))
        self.num_alike += num_alike
        late = answers.untrained_starts(self.thought_tags)
        self._note(rows, "untrained_starts", *_first_of_each(self._record_of(rows, late), late))
        is_header = _cover(answers.headers, answers.begins, len(ids))
        is_answer = _cover(answers.begins, answers.stops, len(ids))
        looked_at = np.zeros(len(rows.rows), np.bool_)
        looked_at[answers.records] = True
        wrong = rows.trained & ~self.table.is_blank[rows.ids] & ~is_answer
        wrong &= np.repeat(looked_at, np.diff(rows.starts))
        prompts = self.table.widths[rows.ids[wrong & ~is_header]]
        self.found.counts["trained_prompt_bytes"] += int(prompts.sum())
        for name, where in (
            ("trained_headers", np.flatnonzero(wrong & is_header)),
            ("trained_prompts", np.flatnonzero(wrong & ~is_header)),
        ):
            self._note(rows, name, *_first_of_each(self._record_of(rows, where), where))

    def _spans(self, rows: TokenRows, data: bytes, edges: Int64s) -> None:
        """Count trained spans that begin and end as inference does."""
        opens = self.turns.generation_opens
        if not opens:
            return
        begins, stops = rows.runs()
        is_stop = np.isin(rows.ids, list(self.turns.stop_ids))
        # Stop tokens at [2 5], spans [1, 3) and [4, 8): before their last tokens they have [0 1].
        before = np.append(0, np.cumsum(is_stop))
        places = zip(
            edges[rows.starts[self._record_of(rows, begins)]].tolist(),
            edges[begins].tolist(),
            strict=True,
        )
        counts = self.found.counts
        counts["spans"] += len(begins)
        counts["spans_stopped"] += int(is_stop[stops - 1].sum())
        counts["spans_of_one_stop"] += int((before[stops - 1] == before[begins]).sum())
        counts["spans_after_header"] += sum(data.endswith(opens, *place) for place in places)

    def _more(
        self, found: tuple[int, list[Sample]], rows: TokenRows, places: Int64s
    ) -> tuple[int, list[Sample]]:
        number, kept = found
        some = [self._sample(rows, at) for at in places[: NUM_SAMPLES - len(kept)].tolist()]
        return number + len(places), kept + some

    def _leaks(
        self, rows: TokenRows, data: bytes, edges: Int64s, joined: list[tuple[int, int]]
    ) -> None:
        """Rows in which a record begins where no boundary is, or whose attention mask joins all."""
        places = [np.array([token for _, token in joined], np.int64)]
        places.append(np.flatnonzero(rows.ids == self.bos_id))
        for text in (self.turns.system_opens, self._common_begin(rows)):
            if text:
                found = [match.start() for match in re.finditer(re.escape(text), data)]
                index = np.searchsorted(edges, np.array(found, np.int64))
                places.append(index[index < len(rows.ids)])
        places.append(self._after_ends(rows, data, edges))
        where = np.unique(np.concatenate(places))
        is_joined = np.isin(where, places[0])
        is_boundary = np.isin(where, rows.starts)
        # `<s>` and the `<|system|>` behind it begin one record: counted once.
        is_double = np.isin(where - 1, np.flatnonzero(rows.ids == self.bos_id))
        where = where[is_joined | ~(is_boundary | is_double)]
        numbers = rows.rows[self._record_of(rows, where)]
        self._note(rows, "leaks", *_first_of_each(numbers, where))

    def _after_ends(self, rows: TokenRows, data: bytes, edges: Int64s) -> Int64s:
        """Tokens behind an end token that the template does not write there."""
        if self.turns.after_end is None or not self.turns.end_ids:
            return np.zeros(0, np.int64)
        behind = np.flatnonzero(self.is_end[rows.ids]) + 1
        behind = behind[behind < len(rows.ids)]
        behind = behind[~np.isin(behind, rows.starts)]
        behind = behind[~(rows.trained[behind] & ~rows.trained[behind - 1])]  # a header was cut off
        own = rows.ids[behind]
        behind = behind[~self.table.is_control[own] & ~self.table.is_blank[own]]
        texts = (data[edges[place] : edges[place] + 16].lstrip() for place in behind.tolist())
        known = self.turns.after_end
        return behind[[not text.startswith(known) for text in texts]]

    def _common_begin(self, rows: TokenRows) -> bytes:
        """The tokens that at least half of the first batch's rows begin with, if some do."""
        if self.prefix is None:
            heads = Counter(
                tuple(rows.ids[start : start + _PREFIX].tolist())
                for start in rows.starts[:-1][np.append(True, rows.is_last[:-1])].tolist()
            )
            head, number = heads.most_common(1)[0]
            is_common = number > 4 and 2 * number >= heads.total() and len(head) == _PREFIX
            self.prefix = self.table.join(head) if is_common else b""
        return self.prefix

    def finish(self) -> TokenAudit:
        """Say which answers without an end are cut: those of rows as long as the longest."""
        counts, samples = self.found.counts, self.found.samples
        if self.names_mask:  # else all rows are meant to be trained whole
            counts["unmasked"], samples["unmasked"] = self.unmasked
        number, kept = self.unended.get(counts["longest_row"], (0, []))
        others = [each for length, each in self.unended.items() if length != counts["longest_row"]]
        if number == 1 and others:
            others, number, kept = [*others, (number, kept)], 0, []
        counts["truncated"], samples["truncated"] = number, kept
        # Conversations are not all of one length: where rows are, records were joined and cut.
        joined, shown = self.several.get(counts["longest_row"], (0, []))
        alike = self.lengths[counts["longest_row"]]
        if joined > counts["leaks"] and alike >= max(_MOST * counts["rows"], 5):
            counts["leaks"], samples["leaks"] = joined, shown
        if self.found.has_turns:  # else the template is another one
            number, kept = self.cut
            if self.other[0] < self.num_alike:  # most begin as the template does: it is theirs
                number, kept = number + self.other[0], (kept + self.other[1])[:NUM_SAMPLES]
            counts["missing_headers"], samples["missing_headers"] = number, kept
        counts["unended"] = sum(each for each, _ in others)
        samples["unended"] = [s for _, some in others for s in some][:NUM_SAMPLES]
        return self.found


def _first_of_each(owners: Int64s, places: Int64s) -> tuple[Int64s]:
    """The first place of each owner; both rise."""
    return (places[np.append(True, owners[1:] != owners[:-1])[: len(places)]],)


def _cover(starts: Int64s, ends: Int64s, size: int) -> Bools:
    """Return which of `size` places lie in ranges that do not overlap.

    Range [1, 3) of 4 places: steps [0 1 0 -1], added up [0 1 1 0].
    """
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return np.asarray(np.cumsum(steps[:-1]) > 0)


def _as_tokens(rows: TokenRows, pipeline: Pipeline) -> Tokens:
    """The rows as the audit of a shard sees them, with no content that is known."""
    nothing = np.zeros(0, np.int64)
    begins, stops = rows.runs()
    zeros = np.zeros(len(rows.ids), np.int64)
    num_records = len(rows.rows)
    return Tokens(
        ids=rows.ids.astype(np.int32),
        offsets=rows.starts,
        starts=zeros,
        ends=zeros,
        is_exact=np.ones(num_records, np.bool_),
        control=np.flatnonzero(pipeline.is_control[rows.ids]),
        range_starts=begins,
        range_ends=stops,
        range_rows=np.searchsorted(rows.starts, begins, "right") - 1,
        is_misplaced=np.zeros(num_records, np.bool_),
        content=Intervals.of(nothing, nothing),
        content_starts=nothing,
        content_ends=nothing,
        content_offsets=np.zeros(num_records + 1, np.int64),
        data=np.zeros(0, np.uint8),
        bases=np.zeros(num_records + 1, np.int64),
        pipeline=pipeline,
    )
