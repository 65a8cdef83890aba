"""Audit a shard by comparing conversations, texts and tokens; audit packs and duplicates.

Nothing is done per row. Token positions in the text follow from the bytes of each token. (A row
whose tokens do not decode to its text counts as `unlocated` and is judged by its ids alone.) The
rest is a few binary searches per turn, of range ends in span ends.

Findings:

- answers: bytes of the assistant's contents, and how many of them are in trained tokens;
- unterminated turns: trained ranges without a control token after the last content, or that stop
  before the token that ends turns; and answers without a trained range;
- misplaced rows: trained ranges that differ from the tokens that begin in trained spans;
- leaked headers: trained ranges that begin with a token that opens turns (`<|im_start|>`, BOS);
- trained prompts: trained content beyond what the assistant wrote;
- rows without a trained token; rows with BOS or an end token twice in a row, or without the BOS
  that the tokenizer adds; unknown tokens.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.plain_template import writes_prompts
from packhouse.auditing.token_checks import (
    NUM_WORST,
    Ids,
    Intervals,
    PlacedTokens,
    Side,
    bos_and_unknown,
    double_ends,
    worst_first,
)
from packhouse.errors import PluginError
from packhouse.recipe import FormatConfig
from packhouse.records.arrays import Bools, Int64s, TokenColumns, Uint64s, flat_list, one_chunk
from packhouse.records.conversation_shapes import has_thinking, without_thinking
from packhouse.records.message_rules import ASSISTANT, SYSTEM, USER, FlatMessages, num_bytes
from packhouse.records.record_ids import is_among, leading_bits, sort_leading_bits
from packhouse.system.plugins import Plugin
from packhouse.tokenize.encoders import TokenizerSnapshot, read_pipeline

SLICE_TOKENS = 2**20
"""Tokens processed at a time, which limits memory to about 100 MB."""

# One slice in so many is compared again if the tokenize step found no difference. To compare all
# would take 3.2 s of CPU instead of 2.1 s for 520,020 rows.
_COMPARED = 8
_WITHOUT_TURNS = ("text", "classification", "sequence_classification")
_TAGS = re.compile(r"\s*</?think>\s*")
_MAX_TAIL = 8  # tokens


def answer_bytes(
    flat: FlatMessages,
    validated: pa.Table,
    formatted: pa.Table,
    config: FormatConfig,
    label_names: Sequence[str] | None,
) -> tuple[Int64s, Int64s]:
    """Return, per row, how many bytes must be trained, and how many may be (assistant's text).

    White space at the ends of a content is not required, because templates strip it. Neither is
    reasoning that the recipe or the template removes, as Qwen3's does in earlier turns.
    """
    is_answer = flat.roles == ASSISTANT
    is_trained = flat.decide_weights(config) > 0
    is_own = is_trained | is_answer
    if config.train_on == "all" and not config.never_train:
        is_trained &= is_answer
    content = flat.content
    due = num_bytes(pc.utf8_trim_whitespace(content))
    # Messages u a u a: users before each message, and in total, are [0 1 1 2 2]. The answer at 1
    # has 1 of 2 users before it, so it is an earlier turn; the answer at 3 has both.
    at = np.flatnonzero(has_thinking(flat))
    users, rows = np.append(0, np.cumsum(flat.roles == USER)), flat.rows[at]
    is_earlier = users[at] < users[flat.offsets[rows + 1]]
    texts, contents = one_chunk(formatted["text"]), content.take(at).to_pylist()
    of_messages = at.tolist(), rows.tolist(), is_earlier, contents
    for message, row, earlier, text in zip(*of_messages, strict=True):
        whole = text.strip()
        # A record that ends with this answer does not show whether its row continues.
        is_cut = config.reasoning == "train_last" and (earlier or config.turns != "whole")
        if is_cut or whole not in texts[row].as_py():
            due[message] -= len(whole.encode()) - len(without_thinking(text).strip().encode())
        else:  # a template may parse the content and write the tags itself, as Qwen3's does
            due[message] -= sum(len(tag.encode()) for tag in _TAGS.findall(whole))
    for message in np.flatnonzero(flat.has("part_weights")).tolist():
        text = content[message].as_py()
        parts = json.loads(flat.part_weights[message].as_py())
        place = len(text) - sum(size for size, _ in parts)  # negative for parts of the reasoning
        for size, factor in parts:
            if factor == 0:
                due[message] -= len(text[max(place, 0) : max(place + size, 0)].encode())
            place += size
    due[~is_trained] = 0
    own = num_bytes(content) + num_bytes(flat.reasoning)
    own += 2 * num_bytes(flat.tool_calls)  # templates may write the same JSON at greater length
    own += 2 * num_bytes(flat.context)
    labels = np.zeros(len(flat.counts), np.int64)
    if label_names:
        # Names of 3 and 5 bytes, labels [1 null 0] -> bytes [5 0 3].
        sizes = np.array([*(len(name.strip().encode()) for name in label_names), 0], np.int64)
        numbers = pc.fill_null(one_chunk(validated["label"]), len(label_names))
        labels = sizes[numbers.to_numpy()]
    own = flat.sums(np.where(is_own, own, 0)) + labels
    # Tool definitions are part of the system turn.
    tools = 2 * num_bytes(one_chunk(validated["tools"]))
    tools += 2 * num_bytes(one_chunk(validated["arguments"]))
    own += np.where(flat.sums(is_trained & (flat.roles == SYSTEM)) > 0, tools, 0)
    return flat.sums(due) + labels, own


def audit_shard(
    sides: Sequence[Side],
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    label_names: Sequence[str] | None = None,
    *,
    are_exact: bool = False,
) -> dict[str, object]:
    """Audit one shard.

    Args:
        sides: conversations, texts and tokens in the same order; conversations and texts may
            include rows that later steps quarantined. For pairs, there is one for the chosen and
            one for the rejected answers, and a row has the findings of both.
        snapshot: tokenizer.
        config: which turns are trained; `train_on: all` trains prompts and headers on purpose.
        label_names: texts of labels 0, 1, ..., if the source has labels.
        are_exact: the tokenize step found that the tokens of all rows decode to their text. Then
            only those of one slice in `_COMPARED` are compared again.

    Returns:
        `counts`, name -> number; and `worst`, finding -> the worst rows, each with `source`,
        `row`, `record_id` and `value`.
    """
    counts: Counter[str] = Counter()
    values: dict[str, Int64s] = {}
    for side in sides:
        audited = _audit_side(side, snapshot, config, label_names, counts, are_exact)
        for name, own in audited.items():
            # The sides of a pair count once for a flag, and add up for all other findings.
            known = values.get(name, np.zeros(len(own), np.int64))
            values[name] = np.maximum(known, own) if name in _FLAGS else known + own
    tokenized = sides[0][2]
    worst = {name: worst_rows(tokenized, each) for name, each in values.items()}
    worst.pop("unlocated_rows", None)
    sums = {name: int(each.sum()) for name, each in values.items()}
    return {
        "counts": {**counts, "rows": tokenized.num_rows, **sums},
        "worst": {name: rows for name, rows in worst.items() if rows},
    }


_FLAGS = {
    *("double_bos", "missing_bos", "double_ends"),
    *("untrained_rows", "misplaced_rows", "unlocated_rows"),
}
"""Findings that are 0 or 1 per row."""


def _audit_side(
    side: Side,
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    label_names: Sequence[str] | None,
    counts: Counter[str],
    are_exact: bool,
) -> dict[str, Int64s]:
    """Return a number per row for each finding, and add the totals for shares to `counts`."""
    validated, formatted, tokenized = side
    found: dict[str, list[Int64s]] = {}
    pipeline = read_pipeline(snapshot.backend)
    are_headers_trained = config.turns != "whole" and not writes_prompts(config, snapshot)
    ids = one_chunk(tokenized["record_id"])
    known = [one_chunk(table["record_id"]) for table in (validated, formatted)]
    # Row of each record in the earlier tables; None if no row was quarantined in between.
    places = [None if each.equals(ids) else pc.index_in(ids, value_set=each) for each in known]
    # Slices of about SLICE_TOKENS tokens. Four rows of 6 tokens, at 10 per slice: the running
    # sums 6, 12, 18, 24 are in slices 0, 1, 1, 2, so the slices are rows [0, 1), [1, 3) and [3, 4).
    reached = np.cumsum(tokenized["num_tokens"].to_numpy(), dtype=np.int64) // SLICE_TOKENS
    cuts = np.flatnonzero(np.diff(reached)) + 1
    slices = pairwise([0, *cuts.tolist(), tokenized.num_rows])
    for number, (start, stop) in enumerate(slices):
        part = tokenized.slice(start, stop - start)
        rows, texts = (
            table.slice(start, stop - start) if place is None else table.take(place[start:stop])
            for table, place in zip((validated, formatted), places, strict=True)
        )
        # Comparing bytes takes 20 ns per token, as long as encoding.
        compares = not are_exact or number % _COMPARED == 0
        tokens = PlacedTokens.of(texts, part, pipeline, compares=compares)
        # After one difference, all later slices are compared.
        are_exact &= bool(tokens.is_exact.all())
        messages = FlatMessages.of_table(rows)
        due, own = answer_bytes(messages, rows, texts, config, label_names)
        num_ranges = tokens.per_row(tokens.range_rows)
        is_trained, is_answer = messages.decide_weights(config) > 0, messages.roles == ASSISTANT
        # Answers of each row that should be trained but have no range.
        num_absent = np.maximum(messages.sums(is_trained & is_answer) - num_ranges, 0)
        # A row without any range counts as an untrained row instead.
        num_absent[num_ranges == 0] = 0
        if config.train_on == "all" or config.template in _WITHOUT_TURNS:
            num_absent[:] = 0
        # Totals for the shares. Turns that should be trained but are not count as well.
        counts.update(
            tokens=len(tokens.ids),
            trained_tokens=int((tokens.range_ends - tokens.range_starts).sum()),
            turns=len(tokens.range_starts) + int(num_absent.sum()),
            answer_bytes=int(due[tokens.is_exact].sum()),
        )
        # With a class label for a classification head, no text of the row needs to be trained.
        has_label = part["label"].is_valid().to_numpy()
        due[has_label & (num_ranges == 0)] = 0
        trains_others = messages.sums(is_trained & ~is_answer) > 0
        ends = _find_ends(tokens, messages, config, trains_others)
        is_leak = _are_leaked(tokens, ends)
        # If spans include headers on purpose, only ranges outside of the spans count as leaks.
        if are_headers_trained:
            is_leak &= tokens.is_misplaced[tokens.range_rows]
        if config.train_on == "all" or config.template == "text":
            is_leak[:] = False
        findings = {
            **_coverage(tokens, due, own, config),
            "unterminated_turns": tokens.per_row(tokens.range_rows[~ends.is_ended]) + num_absent,
            "leaked_headers": tokens.per_row(tokens.range_rows[is_leak]),
            "double_ends": double_ends(tokens, ends.ids),
            **bos_and_unknown(tokens, snapshot),
            "untrained_rows": ((num_ranges == 0) & ~has_label).astype(np.int64),
            "misplaced_rows": tokens.is_misplaced.astype(np.int64),
            "unlocated_rows": (~tokens.is_exact).astype(np.int64),
        }
        for name, numbers in findings.items():
            found.setdefault(name, []).append(numbers)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def worst_rows(table: pa.Table, values: Int64s) -> list[dict[str, object]]:
    """Return the rows with the highest values above 0; among equal values, the first rows."""
    bad = np.flatnonzero(values > 0)
    chosen = bad[np.argsort(-values[bad], kind="stable")[:NUM_WORST]]
    rows = table.select(["source", "row", "record_id"]).take(pa.array(chosen))
    found: list[dict[str, object]] = rows.append_column("value", [values[chosen]]).to_pylist()
    return found


def _coverage(
    tokens: PlacedTokens, due: Int64s, own: Int64s, config: FormatConfig
) -> dict[str, Int64s]:
    """Return, per row, the bytes of answers that are not trained, and of prompts that are."""
    first, last = tokens.range_starts, tokens.range_ends - 1
    known = tokens.is_exact[tokens.range_rows]
    trained = Intervals.of(tokens.texts.starts[first[known]], tokens.texts.ends[last[known]])
    of_spans = trained.within(tokens.contents.starts, tokens.contents.ends)
    # Three contents, two in row 0 and one in row 1, with trained bytes [0 12 7] -> rows [12 7].
    covered = np.diff(np.append(0, np.cumsum(of_spans))[tokens.contents.offsets])
    missing = np.where(tokens.is_exact, np.maximum(due - covered, 0), 0)
    surplus = np.where(tokens.is_exact, np.maximum(covered - own, 0), 0)
    if config.train_on == "all" and "system" not in config.never_train:
        surplus[:] = 0  # everything is trained on purpose, including tool definitions
    return {"untrained_answer_bytes": missing, "trained_prompt_bytes": surplus}


class _Ends(NamedTuple):
    """Control tokens at the end of trained ranges and at the start of turns."""

    is_ended: Bools
    """Mask of ranges that end with an end token, or need none."""
    ids: Ids
    """Ids of tokens that end ranges."""
    headers: Ids
    """Ids of control tokens before a row's first content, which open its first turn."""


def _find_ends(
    tokens: PlacedTokens, messages: FlatMessages, config: FormatConfig, trains_others: Bools
) -> _Ends:
    """Find the tokens that end trained turns, those that open turns, and the ranges that end.

    Args:
        tokens: tokens of all rows.
        messages: messages of the rows.
        config: which turns are trained.
        trains_others: mask of rows that train turns of roles other than the assistant.
    """
    rows, control = tokens.range_rows, tokens.control
    is_exact = tokens.is_exact[rows]
    # Control tokens at [2 7], ranges that end at [2 5 8] -> last control tokens [-1 2 7].
    index = np.searchsorted(control, tokens.range_ends, "left") - 1
    last = np.where(index < 0, -1, np.append(control, -1)[index])
    is_ended = last >= tokens.range_starts
    at = np.maximum(last, tokens.range_starts)
    content_after = tokens.holds_content(at, tokens.range_ends - 1)
    is_ended &= np.where(is_exact, ~content_after, last == tokens.range_ends - 1)
    # Prefer exact rows: only there is it known that a token is not content.
    ends = np.unique(tokens.ids[last[is_ended & (is_exact if is_exact.any() else True)]])
    # Use rows whose first message has text; otherwise the first content belongs to a later turn,
    # and tokens before it may end the first.
    counts = np.diff(tokens.contents.offsets)
    first = messages.content.take(pa.array(messages.offsets[:-1]))
    filled = np.flatnonzero((counts > 0) & (num_bytes(pc.utf8_trim_whitespace(first)) > 0))
    first_content = np.full(len(counts), -1, np.int64)
    if len(filled):
        begins = tokens.contents.offsets[:-1][filled]
        first_content[filled] = np.minimum.reduceat(tokens.contents.starts, begins)
    row = tokens.row_of(control)
    before = (tokens.texts.starts[control] < first_content[row]) & tokens.is_exact[row]
    headers = np.unique(tokens.ids[control[before]])
    # A range is too short if it stops at a control token (`</tool_call>`) and the end token of the
    # turn follows. This does not apply if EOS follows the end token: with EOS `<|end|>`, Phi-3
    # writes "<|end|>\n<|end|>".
    control = control[~tokens.are_content(control, control)]
    following = np.append(control, len(tokens.ids))[np.searchsorted(control, tokens.range_ends)]
    is_short = following < tokens.offsets[rows + 1]
    following = np.minimum(following, len(tokens.ids) - 1)
    is_short &= np.isin(tokens.ids[following], ends) & is_exact
    is_short &= ~tokens.holds_content(np.minimum(tokens.range_ends, following), following)
    is_short &= tokens.ids[tokens.range_ends - 1] != tokens.ids[following]
    is_ended &= ~(is_short & ~trains_others[rows])
    # If a row has ranges [5, 9) and [12, 20) with no end token or header between 9 and 12, the turn
    # continues, and untrained reasoning is in between.
    edges = control[np.isin(tokens.ids[control], np.union1d(headers, ends))]
    seen = np.searchsorted(edges, np.stack([tokens.range_ends[:-1], tokens.range_starts[1:]]))
    goes_on = np.append((seen[0] == seen[1]) & (rows[:-1] == rows[1:]), False)[: len(rows)]
    if config.reasoning != "train_last":  # otherwise only weights of parts leave gaps in a turn
        goes_on &= (messages.sums(messages.has("part_weights")) > 0)[rows]
    is_ended |= goes_on
    # In valid data, the only ranges left are of turns for which the template writes no end token,
    # so a loop is fast enough.
    for number in np.flatnonzero(~is_ended).tolist():
        is_blank = _ends_blank(tokens, number, int(last[number]))
        is_ended[number] = is_blank or _has_no_end(tokens, number, messages)
    return _Ends(is_ended, ends, headers)


def _ends_blank(tokens: PlacedTokens, at: int, control: int) -> bool:
    r"""Return True if only white space follows the last control token of a range.

    For rows whose tokens do not decode to their text, because the tokenizer normalizes it. There
    the position of content is unknown, but a line break after `<|im_end|>` is from the template.
    """
    start, end = int(tokens.range_starts[at]), int(tokens.range_ends[at])
    known = tokens.pipeline.token_bytes
    is_exact = tokens.is_exact[tokens.range_rows[at]]
    if is_exact or known is None or control < start or end - control > _MAX_TAIL:
        return False
    tail = known.take(pa.array(tokens.ids[control + 1 : end]))
    return not b"".join(tail.to_pylist()).strip()


def _has_no_end(tokens: PlacedTokens, at: int, messages: FlatMessages) -> bool:
    """Return True if a range ends with a message of another role that has no end token.

    An example is Mistral's system turn, which is inside the user turn: the template writes no
    control token between it and the next content.
    """
    row = int(tokens.range_rows[at])
    own = slice(*tokens.contents.offsets[row : row + 2])
    starts, ends = tokens.contents.starts[own], tokens.contents.ends[own]
    start, end = (
        tokens.texts.starts[tokens.range_starts[at]],
        tokens.texts.ends[tokens.range_ends[at] - 1],
    )
    inside = np.flatnonzero((starts >= start) & (starts < end))
    if not tokens.is_exact[row] or not len(inside) or inside[-1] + 1 == len(starts):
        return False
    span = int(inside[-1])
    control = tokens.texts.starts[tokens.control]
    has_end = ((control >= ends[span]) & (control < starts[span + 1])).any()
    own = slice(*messages.offsets[row : row + 2])
    columns = messages.role, messages.content, messages.context
    roles, contents, contexts = (column[own].to_pylist() for column in columns)
    pairs = zip(contents, contexts, strict=True)
    said = [f"{content}\n{context}" if context else content for content, context in pairs]
    role, message = "assistant", 0
    for begin, stop in zip(starts[: span + 1], ends[: span + 1], strict=True):
        # Find the message that the content comes from.
        text = tokens.texts.text[begin:stop].tobytes().decode()
        places = range(message, len(said))
        found = next((n for n in places if said[n].strip() == text.strip()), None)
        role = "assistant" if found is None else roles[found]
        message = message if found is None else found + 1
    return role != "assistant" and not has_end


def _are_leaked(tokens: PlacedTokens, ends: _Ends) -> Bools:
    r"""Return a mask of ranges that begin with a token that opens turns.

    Ranges directly after a header do not count, because there the model itself writes the token.
    `<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>` is a header, `<|im_end|>\n` is not.
    """
    first, rows = tokens.range_starts, tokens.range_rows
    # Control tokens at [2 7], ranges that begin at [1 3 8]: those before them are [none 2 7].
    index = np.searchsorted(tokens.control, first) - 1
    before = np.append(tokens.control, 0)[index]
    is_opened = (index >= 0) & (before >= tokens.offsets[rows])
    is_opened &= ~tokens.holds_content(np.minimum(before, first), first)
    is_opened &= ~np.isin(tokens.ids[before], ends.ids)
    is_leak = np.isin(tokens.ids[first], np.setdiff1d(ends.headers, ends.ids))
    is_leak &= tokens.is_exact[rows] & ~tokens.holds_content(first, first)
    return np.asarray(is_leak & ~is_opened)


_MAX_DETAIL = 200

# Counts of the tokenize step that cannot be derived from its tables.
_NOTES = ("control_text", "control_text_rows", "straddles_start", "straddles_end", "split_prompts")


def combine(shards: Sequence[tuple[str, Mapping[str, Any], Mapping[str, int]]]) -> dict[str, Any]:
    """Add up the audits of shards, by source and overall.

    Args:
        shards: name of the source, result of `audit_shard`, and notes of the tokenize step, in
            order.

    Returns:
        `dataset`: overall counts; `sources`: counts by source; `worst`: rows by finding.
    """
    total, sources = Counter[str](), defaultdict[str, Counter[str]](Counter)
    worst = defaultdict[str, list[dict[str, Any]]](list)
    for name, audited, notes in shards:
        for counts in (sources[name], total):
            counts.update(audited["counts"])
            counts.update({note: notes.get(note, 0) for note in _NOTES})
        for finding, rows in audited["worst"].items():
            worst[finding] += rows
    return {
        "dataset": dict(sorted(total.items())),
        "sources": {name: dict(sorted(counts.items())) for name, counts in sorted(sources.items())},
        "worst": {n: sorted(worst[n], key=worst_first)[:NUM_WORST] for n in sorted(worst)},
    }


def audit_packs(packs: pa.RecordBatch, is_control: Bools, is_blank: Bools) -> dict[str, int]:
    r"""Count packs and sequences without a trained token, and sequences with a cut answer.

    A sequence that ends with a trained token other than a control token teaches the model not to
    stop. White space may follow the control token, as in `<|im_end|>\n`.

    Args:
        packs: schema `table_schemas.PACKED`.
        is_control: mask of control tokens, shape [vocab_size].
        is_blank: mask of ids that are only white space, shape [vocab_size].

    Returns:
        `packs`, `sequences`, `untrained_packs`, `untrained_sequences`, `cut_sequences`.
    """
    ids, offsets, ranges = TokenColumns.of(packs)
    lengths, _ = flat_list(packs["seq_lengths"])
    rows = ranges.rows
    ends = ranges.ends + offsets[rows].astype(np.int64)
    # Sequences of [3 2] tokens end at [3 5], trained ranges end at [2 5]: both sequences have a
    # trained token, and the second one ends with it.
    sequence_ends = np.cumsum(lengths, dtype=np.int64)
    is_trained = np.zeros(len(lengths), np.bool_)
    is_trained[np.searchsorted(sequence_ends, ends - 1, "right")] = True
    last_range = np.searchsorted(ends, sequence_ends)
    is_open = np.isin(sequence_ends, ends)  # the sequence ends with a trained token
    starts = (ranges.starts + offsets[rows].astype(np.int64))[last_range[is_open]]
    # Last token of each sequence that is not white space; it is trained if inside the range.
    last = sequence_ends[is_open] - 1
    while (goes_back := (last >= starts) & is_blank[ids[last]]).any():
        last = last - goes_back
    is_cut = (last < starts) | ~is_control[ids[last]]
    # Rows with a label train a classification head, not their tokens.
    has_label = packs["label"].is_valid().to_numpy(zero_copy_only=False)
    return {
        "packs": packs.num_rows,
        "sequences": len(lengths),
        "untrained_packs": int(((ranges.counts == 0) & ~has_label).sum()),
        "untrained_sequences": int((~is_trained).sum()),
        "cut_sequences": int(is_cut.sum()),
    }


Read: TypeAlias = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def audit_records(read: Read, num_records: int) -> dict[str, Any]:
    """Count duplicates, in each source and overall, and contents that are in train and eval.

    Ids and groups are compared by their leading 64 bits.

    Args:
        read: returns the named columns of all records in batches, schema `table_schemas.LINEAGE`,
            each time in the same order; dropped records are ignored.
        num_records: maximum number of records.

    Returns:
        `duplicates`: records with the content of an earlier one; `prompt_groups`: prompts shared by
        several different records, and `prompt_group_records`, the number of these records;
        `both_sides`: contents in train and eval; `sources`: duplicates within each source;
        `worst`: the most frequent contents.
    """
    files: set[str] = set()

    def packed(*names: str) -> Iterator[pa.RecordBatch]:
        for batch in read([*names, "times"]):
            yield batch.filter(pc.greater(batch["times"], 0)).select(names)

    def ids() -> Iterator[pa.Array]:
        for batch in packed("record_id", "source"):
            record_ids, sources = batch.columns
            files.update(sources.unique().to_pylist())
            yield record_ids

    # Read the records three times rather than keep them: 9 bytes per record, 70 per duplicate.
    ordered = sort_leading_bits(ids(), num_records)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    sharing = []  # records whose content occurs more than once
    for batch in packed(*_NO_RECORDS.names):
        sharing.append(batch.filter(pa.array(is_among(leading_bits(batch[0]), repeated))))
    records = pa.Table.from_batches(sharing, None if sharing else _NO_RECORDS)
    record_ids, group_keys, sources, splits, _ = records.columns
    names = [file.split("/")[0] for file in sources.to_pylist()]
    facts = {"bits": leading_bits(record_ids), "name": pa.array(names, pa.string())}
    facts |= {"is_eval": pc.equal(splits, "eval"), "at": np.arange(records.num_rows)}
    flat = pa.table(facts)
    # Records a b a: content a is first at 0 and occurs twice.
    counted = [("at", "min"), ("at", "count"), ("is_eval", "sum")]
    contents = flat.group_by("bits").aggregate(counted).sort_by("at_min")
    first, times, in_eval = (contents[f"{n}_{how}"].to_numpy() for n, how in counted)
    chosen = np.argsort(-times, kind="stable")[:NUM_WORST]
    worst = records.select(["source", "row", "record_id"]).take(pa.array(first[chosen]))
    again = Counter(names)
    again.subtract(flat.group_by(["bits", "name"]).aggregate([])["name"].to_pylist())

    def groups() -> Iterator[pa.Array | pa.ChunkedArray]:
        """Yield the group of each distinct content."""
        yield group_keys.take(pa.array(first))
        for batch in packed("record_id", "group_key"):
            record_ids, keys = batch.columns
            is_repeated = pa.array(is_among(leading_bits(record_ids), repeated))
            yield keys.filter(pc.invert(is_repeated))

    return {
        "duplicates": int((times - 1).sum()),
        "both_sides": int(np.count_nonzero((in_eval > 0) & (in_eval < times))),
        "sources": {name: again[name] for name in sorted({f.split("/")[0] for f in files})},
        "worst": worst.append_column("value", [times[chosen]]).to_pylist(),
        **_shared_prompts(sort_leading_bits(groups(), num_records)),
    }


_TEXTS = ("record_id", "group_key", "source", "split")  # `record_id` first, see `audit_records`
_NO_RECORDS = pa.schema([*((name, pa.string()) for name in _TEXTS), ("row", pa.int64())])


def _shared_prompts(groups: Uint64s) -> dict[str, int]:
    """Count the groups that occur more than once, and their records.

    Example:
        >>> _shared_prompts(np.array([1, 2, 2, 3, 4, 4, 4], np.uint64))
        {'prompt_groups': 2, 'prompt_group_records': 5}
    """
    is_again = groups[1:] == groups[:-1]
    num_again = int(np.count_nonzero(is_again))
    num_groups = num_again - int(np.count_nonzero(is_again[1:] & is_again[:-1]))
    return {"prompt_groups": num_groups, "prompt_group_records": num_again + num_groups}


def run_check(plugin: Plugin, conversations: pa.Table) -> dict[str, object]:
    """Run a plug-in's check on a shard.

    Args:
        plugin: check, called with the table; returns a dict of row number -> problem.
        conversations: conversations, schema `table_schemas.VALIDATED`.

    Returns:
        Plain JSON: name of the check, number of rows, failed rows, and the first of these.

    Raises:
        PluginError: the check failed or returned something else.
    """
    with plugin.named_in_errors(f" on {conversations.num_rows:,} conversations"):
        found = plugin.load()(conversations)
    number = conversations.num_rows
    if not isinstance(found, dict) or not all(
        type(row) is int and isinstance(detail, str) for row, detail in found.items()
    ):
        raise PluginError(f"{plugin} did not return a dict of row number -> text")
    if found and not 0 <= min(found) <= max(found) < number:
        returned = f"{plugin} returned row {max(found, key=abs)}"
        raise PluginError(f"{returned}, but the table has {number:,} conversations")
    first = sorted(found)[:NUM_WORST]
    worst = conversations.select(["source", "row"]).take(pa.array(first, pa.int64()))
    details = [[found[row][:_MAX_DETAIL] for row in first]]
    return {
        "check": plugin.name,
        "plugin": str(plugin),
        "rows": number,
        "failed": len(found),
        "worst": worst.append_column("detail", details).to_pylist(),
    }


def combine_checks(shards: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Add up the results of checks by name."""
    combined: dict[str, dict[str, Any]] = {}
    for found in shards:
        empty = {"plugin": found["plugin"], "rows": 0, "failed": 0, "worst": []}
        total = combined.setdefault(found["check"], empty)
        total["rows"] += found["rows"]
        total["failed"] += found["failed"]
        total["worst"] = [*total["worst"], *found["worst"]][:NUM_WORST]
    return combined
