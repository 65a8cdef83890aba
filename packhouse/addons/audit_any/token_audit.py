"""Audit rows that another tool tokenized, from their ids and masks alone.

The original texts are unknown, so turns are found by what the template writes around contents
(`template_turns`). Without a template, prompts and headers are not checked.

Cost: about 1 us per token, mostly regular expressions and hashing: 6 s for 52,000 Alpaca rows
(5.4 million tokens). Memory: 16 bytes per record, for duplicate detection.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.audit_any.template_turns import REASONING_TAGS, TokenBytes, Turns, learn_turns
from packhouse.addons.audit_any.tokenized_rows import MASKS, Padding, TokenRows, read_token_rows
from packhouse.auditing.shard_audit import worst_rows
from packhouse.auditing.token_checks import Ids, bos_and_unknown
from packhouse.pack.pack_columns import expand_labels
from packhouse.recipe import Recipe
from packhouse.records.arrays import Bools, Int64s, list_array
from packhouse.tokenize.encoders import Pipeline, TokenizerSnapshot, read_pipeline

NUM_SAMPLES = 3
_BEFORE, _AFTER = 40, 24  # number of tokens shown around the wrong one
_MOST = 0.9  # share of all rows
_PREFIX = 8  # tokens compared to find a common beginning, if no template gives one
_LEAST_PROMPT = 8  # tokens before an answer without header that show that a prompt was cut
_BATCH_ROWS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Tokens around one occurrence of a finding."""

    row: int
    token: int
    """Position within the tokens of the row."""
    ids: Ids
    trained: Bools


@dataclass(slots=True)
class Totals:
    """Counts over all rows, other than findings."""

    rows: int = 0
    records: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    trained_bytes: int = 0
    trained_prompt_bytes: int = 0
    longest_row: int = 0
    spans: int = 0
    """Trained spans; like the next three, 0 if the template is unknown."""
    spans_stopped: int = 0
    """Spans that end with a stop token."""
    spans_of_one_stop: int = 0
    """Spans that contain no other stop token."""
    spans_after_header: int = 0
    """Spans that follow the end of a generation prompt."""


@dataclass(slots=True)
class Occurrences:
    """Number of occurrences of a finding, and samples of the first ones."""

    number: int = 0
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def total(cls, parts: Iterable["Occurrences"]) -> "Occurrences":
        """Add up several findings."""
        known = [*parts]
        samples = [sample for each in known for sample in each.samples]
        return cls(sum(each.number for each in known), samples[:NUM_SAMPLES])


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """Findings in all rows."""

    totals: Totals
    findings: defaultdict[str, Occurrences]
    has_turns: bool
    """True if any row contains what the template writes before answers."""


def audit_token_rows(
    batches: Iterable[pa.RecordBatch], snapshot: TokenizerSnapshot, turns: Turns, pipeline: Pipeline
) -> TokenAudit:
    """Audit rows with `input_ids`.

    Args:
        batches: rows with some of `tokenized_rows.COLUMNS`.
        snapshot: tokenizer of the rows.
        turns: what the template writes around contents.
        pipeline: tokenization pipeline of the rows.
    """
    scan = _Scan(snapshot, turns, pipeline)
    for batch in batches:
        if batch.num_rows:
            scan.add(batch)
    return scan.finish()


class _Scan:
    """Audits batches of rows, and keeps counts, samples and digests of records."""

    def __init__(self, snapshot: TokenizerSnapshot, turns: Turns, pipeline: Pipeline) -> None:
        self.snapshot, self.turns, self.pipeline = snapshot, turns, pipeline
        self.table = TokenBytes.of(pipeline)
        # A tokenizer may name a special token that is not in its vocabulary; its id is then None.
        named = {name: snapshot.added_tokens.get(t) for name, t in snapshot.special_tokens.items()}
        pad_id, bos_id = named.get("pad_token"), named.get("bos_token")
        unk_id = named.get("unk_token") if pad_id is None else None
        self.pad = Padding(pad_id, turns.end_ids, bos_id, unk_id)
        self.bos_id = -1 if bos_id is None or not turns.bos_opens else bos_id
        self.is_end = np.zeros(len(pipeline.is_control), np.bool_)
        self.is_end[[i for i in turns.end_ids if i < len(self.is_end)]] = True
        tags = (self.table.of_text(tag, snapshot.added_tokens) for tag in REASONING_TAGS)
        self.prompt_ends = (*tags, *(text.rstrip() for text in turns.generation_opens))
        self.totals = Totals()
        self.found: defaultdict[Hashable, Occurrences] = defaultdict(Occurrences)
        """Occurrences by finding. Some become findings only in `finish`: `unended` and `several` by
        row length, `cut` and `other` starts of records, and `unmasked` rows."""
        self.seen: set[bytes] = set()
        self.lengths: Counter[int] = Counter()
        self.has_turns = self.names_mask = False
        self.num_alike = 0
        self.prefix: bytes | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        totals = self.totals
        rows = read_token_rows(batch, totals.rows, self.pad, self.pipeline)
        totals.rows += rows.num_rows
        totals.records += len(rows.rows)
        totals.tokens += len(rows.ids)
        totals.trained_tokens += int(rows.trained.sum())
        known = rows.ids[rows.trained & (rows.ids < len(self.table.widths))]
        totals.trained_bytes += int(self.table.widths[known].sum())
        totals.longest_row = max([totals.longest_row, *rows.row_lengths.tolist()])
        self.names_mask |= not MASKS.isdisjoint(batch.schema.names)
        for name, faults in rows.faults.items():
            self._count(rows, name, faults)
        is_strange = rows.ids >= len(self.table.texts)
        # These ids belong to another tokenizer. They are reported, and id 0 keeps the arrays valid.
        self._note(rows, "foreign_ids", np.flatnonzero(is_strange))
        rows.ids[is_strange] = 0
        if not len(rows.rows):
            return
        trained = np.add.reduceat(rows.trained.astype(np.int64), rows.offsets[:-1])
        is_idle = trained == 0
        if "label" in batch.schema.names:  # such a row teaches a class
            is_idle &= ~np.asarray(batch["label"].is_valid())[rows.rows - rows.rows[0]]
        self._note(rows, "untrained", rows.offsets[:-1][is_idle])
        if self.turns.end_ids:
            self._ends(rows)
        self._several(rows)
        of_bos = bos_and_unknown(rows, self.snapshot)
        for name in ("double_bos", "missing_bos"):
            self._note(rows, name, rows.offsets[:-1][of_bos[name] > 0])
        self.found["unknown_tokens"].number += int(of_bos["unknown_tokens"].sum())
        self._duplicates(rows)
        if self.pipeline.token_bytes is not None:
            self._turns(rows)

    def _note(self, rows: TokenRows, name: Hashable, places: Int64s) -> None:
        """Count a finding at most once per record, and keep samples of the first ones."""
        places = _first_of_each(rows.row_of(places), places)
        self._count(rows, name, [(0, place) for place in places.tolist()])

    def _count(self, rows: TokenRows, name: Hashable, places: Sequence[tuple[int, int]]) -> None:
        """Count a finding at these (row number, index in `ids`); see `TokenRows.faults`."""
        found = self.found[name]
        found.number += len(places)
        for number, place in places[: max(NUM_SAMPLES - len(found.samples), 0)]:
            found.samples.append(self._sample(rows, place, number))

    def _sample(self, rows: TokenRows, place: int, number: int) -> Sample:
        if place < 0 or not len(rows.ids):
            return Sample(number, 0, rows.ids[:0], rows.trained[:0])
        record = int(rows.row_of(np.array([place]))[0])
        row = int(rows.rows[record])
        low = int(rows.offsets[:-1][rows.rows == row][0])
        high = low + int(rows.row_lengths[record])
        window = slice(max(low, place - _BEFORE), min(high, place + _AFTER))
        return Sample(row, place - low, rows.ids[window].copy(), rows.trained[window].copy())

    def _ends(self, rows: TokenRows) -> None:
        """Find trained spans that do not end with a stop token, and classify them."""
        begins, stops = rows.range_starts, rows.range_ends
        ends = np.flatnonzero(self.is_end[rows.ids])
        blanks = np.append(0, np.cumsum(~self.table.is_blank[rows.ids]))
        record_ends = rows.offsets[rows.range_rows + 1]
        # Span [5, 9) with end tokens at [8 14]: the last one before 9 is 8 and no text follows it,
        # so the span is ended. With end tokens at [3 11], it ends with 11, which is not trained.
        before = np.searchsorted(ends, stops) - 1
        last = np.where(before < 0, -1, np.append(ends, -1)[before])
        # White space may follow the end token, as in TRL's templates, and is not a sign of a cut.
        is_ended = (last >= begins) & (blanks[stops] == blanks[np.maximum(last, 0) + 1])
        is_whole = (begins == rows.offsets[rows.range_rows]) & (stops == record_ends)
        past = is_ended & (last < stops - 1) & ~is_whole  # fully trained rows have no spans to end
        self._note(rows, "past_stops", last[past] + 1)
        if self.turns.stop_ids:
            is_stopped = np.isin(rows.ids[stops - 1], list(self.turns.stop_ids))
            self._note(rows, "other_ends", stops[is_ended & ~past & ~is_whole & ~is_stopped] - 1)
            is_ended |= is_stopped
        following = np.append(ends, len(rows.ids))[np.searchsorted(ends, stops)]
        next_run = np.append(begins[1:], len(rows.ids))
        has_end = ~is_ended & (following < record_ends) & (following < next_run)
        self._note(rows, "untrained_ends", following[has_end])
        lacks = ~is_ended & ~has_end & (next_run >= record_ends)
        at_end = rows.is_last[rows.range_rows] & (stops == record_ends)
        lengths = np.where(at_end, rows.row_lengths[rows.range_rows], -1)
        for length in dict.fromkeys(lengths[lacks].tolist()):
            self._note(rows, ("unended", length), stops[lacks & (lengths == length)] - 1)

    def _several(self, rows: TokenRows) -> None:
        """Count rows by length, and those that look like several conversations in one record."""
        self.lengths.update(rows.row_lengths[rows.is_last].tolist())
        ends = np.flatnonzero(self.is_end[rows.ids])
        record, first, number = np.unique(rows.row_of(ends), return_index=True, return_counts=True)
        # A row that claims to be one record, with more than 2 end tokens and text after the last
        # one, is probably several conversations concatenated and cut at a fixed length.
        lengths = rows.row_lengths[record]
        words = np.append(0, np.cumsum(~self.table.is_blank[rows.ids]))
        is_cut = words[ends[first + number - 1] + 1] < words[rows.offsets[record + 1]]
        is_cut &= (lengths == np.diff(rows.offsets)[record]) & (number > 2)
        for length in dict.fromkeys(lengths[is_cut].tolist()):
            self._note(rows, ("several", length), ends[first[is_cut & (lengths == length)]] + 1)

    def _duplicates(self, rows: TokenRows) -> None:
        """Find records with the tokens and mask of an earlier one."""
        again = []
        for start, end in zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True):
            digest = hashlib.blake2b(rows.ids[start:end].tobytes(), digest_size=16)
            digest.update(rows.trained[start:end].tobytes())
            # A digest of 16 bytes per record instead of the record bounds memory.
            if digest.digest() in self.seen:
                again.append(start)
            self.seen.add(digest.digest())
        self._note(rows, "duplicates", np.array(again, np.int64))

    def _turns(self, rows: TokenRows) -> None:
        """Check prompts, headers and answers, located by what the template writes."""
        data = self.table.join(rows.ids.tolist())
        edges = np.append(0, np.cumsum(self.table.widths[rows.ids]))
        self._leaks(rows, data, edges)
        if self.turns.generation_opens:
            self._spans(rows, data, edges)
        if not self.turns.answer_opens:
            return
        answers = AnswerPlaces.of(rows, data, edges, self.turns, self.table)
        cut = answers.cut_prompts(self.bos_id)
        self._note(rows, "cut", cut)
        if not len(answers.headers):
            return
        self.has_turns = True
        other, num_alike = answers.unusual_starts(self.bos_id)
        self._note(rows, "other", np.setdiff1d(other, cut))
        self.num_alike += num_alike
        self._note(rows, "untrained_starts", answers.untrained_starts(self.prompt_ends))
        is_header = _cover(answers.headers, answers.begins, len(rows.ids))
        is_answer = _cover(answers.begins, answers.stops, len(rows.ids))
        is_checked = np.zeros(len(rows.rows), np.bool_)
        is_checked[answers.records] = True
        wrong = rows.trained & ~self.table.is_blank[rows.ids] & ~is_answer
        wrong &= np.repeat(is_checked, np.diff(rows.offsets))
        prompts = np.flatnonzero(wrong & ~is_header)
        self.totals.trained_prompt_bytes += int(self.table.widths[rows.ids[prompts]].sum())
        self._note(rows, "trained_headers", np.flatnonzero(wrong & is_header))
        self._note(rows, "trained_prompts", prompts)

    def _spans(self, rows: TokenRows, data: bytes, edges: Int64s) -> None:
        """Count the trained spans that start and end as in inference."""
        begins, stops, totals = rows.range_starts, rows.range_ends, self.totals
        is_stop = np.isin(rows.ids, list(self.turns.stop_ids))
        # Stop tokens at [2 5], spans [1, 3) and [4, 8): [0 1] stop tokens before their last tokens.
        before = np.append(0, np.cumsum(is_stop))
        records = edges[rows.offsets[rows.range_rows]].tolist()
        places = [*zip(records, edges[begins].tolist(), strict=True)]
        totals.spans += len(begins)
        totals.spans_stopped += int(is_stop[stops - 1].sum())
        totals.spans_of_one_stop += int((before[stops - 1] == before[begins]).sum())
        opens, header = self.turns.generation_opens, self.turns.answer_opens[:1]
        opened = [data.endswith(opens, *place) for place in places]
        totals.spans_after_header += sum(opened)
        # Right after a header, but all prompts at inference have more, such as `<think>`.
        if header and header[0] not in {text.rstrip() for text in opens}:
            others = [
                not is_opened and data[max(at - 200, start) : at].rstrip().endswith(header)
                for is_opened, (start, at) in zip(opened, places, strict=True)
            ]
            self._note(rows, "other_prompts", begins[np.array(others, np.bool_)])

    def _leaks(self, rows: TokenRows, data: bytes, edges: Int64s) -> None:
        """Find rows whose records start without a boundary, or are joined by attention."""
        is_bos = np.flatnonzero(rows.ids == self.bos_id)
        joined = np.array([token for _, token in rows.joined], np.int64)
        places = [joined, is_bos, self._after_ends(rows, data, edges)]
        for text in filter(None, (self.turns.system_opens, self._common_begin(rows))):
            found = [match.start() for match in re.finditer(re.escape(text), data)]
            index = np.searchsorted(edges, np.array(found, np.int64))
            places.append(index[index < len(rows.ids)])
        where = np.unique(np.concatenate(places))
        # `<s>` followed by `<|system|>` starts one record, so it is counted once.
        is_known = np.isin(where, rows.offsets) | np.isin(where - 1, is_bos)
        where = where[np.isin(where, joined) | ~is_known]
        self._note(rows, "leaks", _first_of_each(rows.rows[rows.row_of(where)], where))

    def _after_ends(self, rows: TokenRows, data: bytes, edges: Int64s) -> Int64s:
        """Return tokens after an end token that the template does not write there."""
        known = self.turns.after_end
        if known is None or not self.turns.end_ids:
            return np.zeros(0, np.int64)
        places = np.flatnonzero(self.is_end[rows.ids]) + 1
        places = places[(places < len(rows.ids)) & ~np.isin(places, rows.offsets)]
        # A trained token right after an untrained end token: the header between them was cut off.
        places = places[~(rows.trained[places] & ~rows.trained[places - 1])]
        own = rows.ids[places]
        places = places[~self.table.is_control[own] & ~self.table.is_blank[own]]
        texts = (data[edges[place] : edges[place] + 16].lstrip() for place in places.tolist())
        is_other = np.array([not text.startswith(known) for text in texts], np.bool_)
        return np.asarray(places[is_other])

    def _common_begin(self, rows: TokenRows) -> bytes:
        """Return the bytes that at least half of the first batch's rows start with, or b""."""
        if self.prefix is None:
            starts = rows.offsets[:-1][np.append(True, rows.is_last[:-1])]
            heads = Counter(tuple(rows.ids[at : at + _PREFIX].tolist()) for at in starts.tolist())
            head, number = heads.most_common(1)[0]
            is_common = number > 4 and 2 * number >= heads.total() and len(head) == _PREFIX
            self.prefix = self.table.join(head) if is_common else b""
        return self.prefix

    def finish(self) -> TokenAudit:
        """Resolve findings that depend on all rows, such as which unended answers are truncated."""
        totals, found = self.totals, self.found
        longest = totals.longest_row
        if not self.names_mask:  # all rows are meant to be trained whole
            found["unmasked"] = Occurrences()
        unended = {
            key[1]: found[key] for key in found if isinstance(key, tuple) and key[0] == "unended"
        }
        truncated = unended.pop(longest, Occurrences())
        # A single longest row does not prove a limit, so it counts as unended like shorter ones.
        if truncated.number == 1 and unended:
            unended[longest], truncated = truncated, Occurrences()
        found["truncated"] = truncated
        found["unended"] = Occurrences.total(unended.values())
        # Conversations rarely have equal lengths: if most rows do, they were concatenated and cut.
        several, alike = found["several", longest], self.lengths[longest]
        if several.number > found["leaks"].number and alike >= max(_MOST * totals.rows, 5):
            found["leaks"] = several
        cut, other = found["cut"], found["other"]
        if self.has_turns:  # otherwise the template is not the right one
            if other.number < self.num_alike:  # most match the template, so the others were cut
                cut = Occurrences.total([cut, other])
            found["missing_headers"] = cut
        named = {name: each for name, each in found.items() if isinstance(name, str)}
        return TokenAudit(totals, defaultdict(Occurrences, named), self.has_turns)


def _first_of_each(owners: Int64s, places: Int64s) -> Int64s:
    """Return the first place of each owner; both arrays are sorted."""
    return np.asarray(places[np.append(True, owners[1:] != owners[:-1])[: len(places)]])


def _cover(starts: Int64s, ends: Int64s, size: int) -> Bools:
    """Return a mask over `size` positions that non-overlapping ranges cover.

    Range [1, 3) of 4 positions: steps [0 1 0 -1], cumulative sum [0 1 1 0].
    """
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return np.asarray(np.cumsum(steps[:-1]) > 0)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerPlaces:
    """Answers after headers, in row order; arrays of shape [num_answers].

    Positions come from what the template writes (`template_turns`): the header of an
    answer, the header of a user turn, and the control token at the start of conversations.
    """

    rows: TokenRows
    data: bytes
    """Bytes of all tokens, in the format of `TokenBytes.join`."""
    edges: Int64s
    """Offset of each token in `data`, and the end of the last one."""
    turns: Turns
    table: TokenBytes
    headers: Int64s
    """Token in which each header starts."""
    begins: Int64s
    """First token after the header."""
    stops: Int64s
    """Position after the answer's end token, or of the next header or record."""
    records: Int64s

    @staticmethod
    def of(
        rows: TokenRows, data: bytes, edges: Int64s, turns: Turns, table: TokenBytes
    ) -> "AnswerPlaces":
        """Find the answers, given what the template writes before them."""
        opens = re.compile(b"|".join(map(re.escape, turns.answer_opens)))
        num_tokens = len(rows.ids)
        spans = np.array([m.span() for m in opens.finditer(data)], np.int64).reshape(-1, 2)
        # Tokens at bytes [0 5 15 20] and a header at bytes [5, 15): the header starts in token 1,
        # and the answer with token 2.
        first, begins = np.searchsorted(edges, spans[:, 0]), np.searchsorted(edges, spans[:, 1])
        is_end = np.isin(rows.ids, list(turns.end_ids))
        if turns.stop_ids and len(first):
            # The model writes some headers itself: gpt-oss has <|end|><|start|>assistant between
            # reasoning and answer. Such a header follows a trained control token at which
            # generation does not stop, in a span that begins right after an answer's header.
            before = np.maximum(first - 1, 0)
            spans_before = np.searchsorted(rows.range_starts, before, "right") - 1
            goes_on = rows.trained[before] & table.is_control[rows.ids[before]]
            goes_on &= ~np.isin(rows.ids[before], list(turns.stop_ids))
            goes_on &= np.isin(np.append(rows.range_starts, -1)[spans_before], begins)
            is_end[before[goes_on]] = False
            first, begins = first[~goes_on], begins[~goes_on]
        records = rows.row_of(np.minimum(first, num_tokens - 1))
        limits = np.minimum(rows.offsets[records + 1], np.append(first[1:], num_tokens))
        at = _next(is_end, begins)
        stops = np.minimum(np.where(at < limits, at + 1, limits), num_tokens)
        stops = np.maximum(stops, begins)
        return AnswerPlaces(rows, data, edges, turns, table, first, begins, stops, records)

    def untrained_starts(self, prompt_ends: tuple[bytes, ...]) -> Int64s:
        r"""Return the first token of each answer that is trained, but not from its first token on.

        Reasoning may be untrained, as may tags that the inference prompt ends with:

            <|im_start|>assistant\n<think>\n\n</think>\n\nFour.<|im_end|>
                                   ------ untrained -----  --- trained ---

        An answer with only its end token trained counts if nothing else in its record is trained,
        because some tools train the end of every turn.

        Args:
            prompt_ends: ends of prompts after the header, as bytes of the table: `</think>`.
        """
        rows, num_tokens = self.rows, len(self.rows.ids)
        is_text = ~self.table.is_blank[rows.ids]
        is_content = is_text & ~np.isin(rows.ids, list(self.turns.end_ids))
        first = _next(is_text, self.begins)
        first_trained = _next(is_text & rows.trained, self.begins)
        # Running counts of trained text tokens: a difference gives the count of [begin, stop).
        num_content = np.append(0, np.cumsum(is_content & rows.trained))
        has_trained = num_content[self.stops] > num_content[self.begins]
        of_record = np.diff(num_content[rows.offsets])[self.records]
        is_late = (first < first_trained) & (first_trained < self.stops)
        is_late &= (has_trained | (of_record == 0)) & is_content[np.minimum(first, num_tokens - 1)]
        found = [
            begin
            for begin, end in np.stack([first, first_trained], 1)[is_late].tolist()
            if not self.data[self.edges[begin] : self.edges[end]].rstrip().endswith(prompt_ends)
        ]
        return np.array(found, np.int64)

    def cut_prompts(self, bos_id: int) -> Int64s:
        r"""Return one position in each record whose prompt was cut.

        - Cut at its end: an answer follows a prompt without a header between them.
        - Cut at its start: the record does not start with a control token, although the template
          always writes one (`no?<|im_end|>\n<|im_start|>assistant\nYes.`). For templates that start
          with text: no user turn starts before the first answer.

        A cut between two turns leaves a valid conversation; see `unusual_starts`.

        Args:
            bos_id: the BOS id before conversations; -1 if there is none.
        """
        rows = self.rows
        record, first = np.unique(rows.range_rows, return_index=True)
        is_bare = ~np.isin(record, self.records)
        is_bare &= rows.range_starts[first] - rows.offsets[record] >= _LEAST_PROMPT
        bare = rows.range_starts[first][is_bare]
        record, first = np.unique(self.records, return_index=True)
        starts, until = rows.offsets[record], self.headers[first]
        starts = starts + (rows.ids[starts] == bos_id)
        is_cut = _next(~self.table.is_blank[rows.ids], starts) < until
        if self.turns.begins_with_control:
            own = rows.ids[np.minimum(starts, len(rows.ids) - 1)]
            is_cut &= ~self.table.is_control[own] | np.isin(own, list(self.turns.end_ids))
        elif self.turns.user_opens:
            opens = re.finditer(re.escape(self.turns.user_opens), self.data)
            users = np.array([match.start() for match in opens], np.int64)
            before, after = (np.searchsorted(users, self.edges[at]) for at in (starts, until))
            is_cut &= before == after
        else:
            is_cut[:] = False
        return np.sort(np.append(bare, starts[is_cut]))

    def unusual_starts(self, bos_id: int) -> tuple[Int64s, int]:
        r"""Return the starts of records that differ from the template's, and how many match it.

        Qwen2.5's template starts every conversation with a system turn. A record that starts with
        `<|im_start|>user` lost its first turns or was made with another template; the count tells
        which.

        Args:
            bos_id: the BOS id before conversations; -1 if there is none.
        """
        rows, begins = self.rows, self.turns.begins
        starts = rows.offsets[np.unique(self.records)]
        starts = starts + (rows.ids[starts] == bos_id)
        edges = self.edges[starts].tolist()
        is_other = np.array([not self.data.startswith(begins, edge) for edge in edges], np.bool_)
        return starts[is_other], int((~is_other).sum())


def _next(is_match: Bools, places: Int64s) -> Int64s:
    """Return the first true position at or after each place; len(is_one) if there is none."""
    # For [0 1 0 0 1] and places [0 2 5]: [1 4 5].
    ones = np.append(np.flatnonzero(is_match), len(is_match))
    return np.asarray(ones[np.searchsorted(ones, places)])


# Count of `audit_shard` -> findings that add up to it. `trained_prompt_bytes` counts bytes.
_FINDINGS = {
    "unterminated_turns": ("untrained_ends", "unended", "truncated"),
    "leaked_headers": ("trained_headers",),
    "trained_prompt_bytes": ("trained_prompts", "padding"),
    "missing_headers": ("missing_headers",),
    "untrained_starts": ("untrained_starts",),
    "leaks": ("leaks",),
    "untrained_rows": ("untrained", "empty"),
    "double_bos": ("double_bos",),
    "missing_bos": ("missing_bos",),
}


def audit_given(
    tokenized: pa.Table, recipe: Recipe, snapshot: TokenizerSnapshot, tokenizers: Path
) -> dict[str, object]:
    """Audit a shard of pretokenized rows with the checks that apply to packhouse's own rows.

    Args:
        tokenized: one record per row, schema `table_schemas.TOKENIZED`.
        recipe: recipe of the run.
        snapshot: tokenizer snapshot.
        tokenizers: folder of tokenizer snapshots.

    Returns:
        The same structure as `audit_shard`.
    """
    pipeline = read_pipeline(snapshot.backend)
    turns, _ = learn_turns(recipe, snapshot, pipeline, tokenizers)
    found = audit_token_rows(batches_of(tokenized), snapshot, turns, pipeline)
    totals = found.totals
    counts = {
        "rows": tokenized.num_rows,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained_tokens,
        "turns": len(pc.list_flatten(tokenized["trained_ranges"])),
        "unlocated_rows": 0,
        "answer_bytes": totals.trained_bytes - totals.trained_prompt_bytes,
        "untrained_answer_bytes": 0,
        "double_ends": 0,
        "unknown_tokens": found.findings["unknown_tokens"].number,
        **{n: sum(found.findings[own].number for own in names) for n, names in _FINDINGS.items()},
        # Trained padding counts as at least one byte per record.
        "trained_prompt_bytes": totals.trained_prompt_bytes + found.findings["padding"].number,
    }
    worst = {}
    for name, names in _FINDINGS.items():
        values: Int64s = np.zeros(tokenized.num_rows, np.int64)
        for own in names:
            values[[sample.row for sample in found.findings[own].samples]] += 1
        if rows := worst_rows(tokenized, values):
            worst[name] = rows
    return {"counts": counts, "worst": worst}


def batches_of(tokenized: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows with `input_ids` and `labels`, from schema `table_schemas.TOKENIZED`."""
    for batch in tokenized.to_batches(_BATCH_ROWS):
        ids = batch["input_ids"]
        offsets = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        labels = list_array(pa.array(expand_labels(batch)), offsets, pa.int32())
        yield pa.RecordBatch.from_arrays([ids, labels], names=["input_ids", "labels"])
