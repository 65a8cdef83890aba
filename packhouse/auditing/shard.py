"""The audit of one shard: its conversations, their text and their tokens, held against each other.

Nothing is done per row. Tokens are placed in the text by the widths of their own bytes (a row
whose tokens do not spell its text is counted as `unlocated`, and judged by its ids alone); the
rest is binary searches of range ends in span ends, a few per turn.

What is looked for:

- answers: bytes of the assistant's contents, and how many of them lie in trained tokens;
- unterminated turns: trained ranges in which no control token follows the last content, or which
  stop before the one that ends turns; and answers to be trained that have no range;
- misplaced rows: trained ranges other than the tokens that begin in the text's trained spans;
- leaked headers: trained ranges that begin with a token that opens turns (`<|im_start|>`, BOS);
- trained prompts: content trained beyond all that the assistant wrote;
- rows without any trained token; rows with BOS or an end token twice in a row, or without the
  BOS that the tokenizer puts; unknown tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.ends import bos_and_unknown, double_ends
from packhouse.auditing.second_look import ends_blank, has_no_end
from packhouse.auditing.tokens import Intervals, Tokens
from packhouse.recipe import FormatConfig
from packhouse.records.lists import one_chunk
from packhouse.records.messages import FlatMessages, num_bytes
from packhouse.records.thinking import has_thinking, without_thinking
from packhouse.render import writes_prompts
from packhouse.system.arrays import Bools, Int32s, Int64s
from packhouse.tokenize.pipeline import TokenizerSnapshot, read_pipeline

_TAGS = re.compile(r"\s*</?think>\s*")


def answer_bytes(
    validated: pa.Table,
    formatted: pa.Table,
    config: FormatConfig,
    label_names: Sequence[str] | None,
) -> tuple[Int64s, Int64s]:
    """Bytes of each row that must be trained, and bytes that may be: all the assistant's writing.

    White space at a content's ends is not due, since templates strip it; neither is thinking that
    the recipe leaves out, or the template, as Qwen3's does with earlier turns.
    """
    flat = FlatMessages.of(validated["messages"])
    is_answer = flat.is_role("assistant")
    is_trained = flat.decide_weights(config) > 0
    is_own = is_trained | is_answer
    if config.train_on == "all" and not config.never_train:
        is_trained &= is_answer
    due = num_bytes(pc.utf8_trim_whitespace(flat["content"]))
    due -= _unsaid_bytes(flat, one_chunk(formatted["text"]), config)
    due = np.where(is_trained, due - _untrained_parts(flat), 0)
    own = flat.num_bytes("content") + flat.num_bytes("reasoning")
    own += 2 * flat.num_bytes("tool_calls")  # room for another way to write the same JSON
    own += 2 * flat.num_bytes("context")
    labels = _label_bytes(one_chunk(validated["label"]), label_names)
    own = flat.sums(np.where(is_own, own, 0)) + labels
    # Definitions of tools stand in the system turn.
    tools = 2 * num_bytes(one_chunk(validated["tools"]))
    tools += 2 * num_bytes(one_chunk(validated["arguments"]))
    own += np.where(flat.any(is_trained & flat.is_role("system")), tools, 0)
    return flat.sums(due) + labels, own


def num_trained(flat: FlatMessages, config: FormatConfig, *, of_assistant: bool) -> Int64s:
    """Messages of each row that are to be trained: the assistant's, or all of the other roles."""
    is_trained = flat.decide_weights(config) > 0
    return flat.sums(is_trained & (flat.is_role("assistant") == of_assistant))


def _unsaid_bytes(flat: FlatMessages, texts: pa.StringArray, config: FormatConfig) -> Int64s:
    """Bytes of each content that need not be trained: thoughts left out, and the tags of others.

    Templates may take a content apart and write the tags themselves (Qwen3's does).
    """
    unsaid = np.zeros(len(flat), np.int64)
    at = np.flatnonzero(has_thinking(flat))
    # Messages u a u a: users [0 1 1 2 2] before each and in all. The answer at 1 has seen 1 of 2,
    # so it is an earlier one; that at 3 has seen both.
    users = np.append(0, np.cumsum(flat.is_role("user")))
    rows = flat.rows[at]
    is_earlier = users[at] < users[flat.offsets[rows + 1]]
    contents = flat["content"].take(at).to_pylist()
    for message, row, earlier, content in zip(at, rows, is_earlier, contents, strict=True):
        whole = content.strip()
        # A record that ends with this answer does not show whether its row goes on.
        is_cut = config.reasoning == "train_last" and (earlier or config.turns != "whole")
        if is_cut or whole not in texts[int(row)].as_py():
            unsaid[message] = len(whole.encode()) - len(without_thinking(content).strip().encode())
        else:
            unsaid[message] = sum(len(tag.encode()) for tag in _TAGS.findall(whole))
    return unsaid


def _untrained_parts(flat: FlatMessages) -> Int64s:
    """Bytes of each content that stand in parts of weight 0."""
    untrained = np.zeros(len(flat), np.int64)
    for message in np.flatnonzero(flat.has("part_weights")).tolist():
        content = flat["content"][message].as_py()
        parts = json.loads(flat["part_weights"][message].as_py())
        at = len(content) - sum(size for size, _ in parts)  # below 0: those of the reasoning
        for size, factor in parts:
            part = content[max(at, 0) : max(at + size, 0)]
            untrained[message] += len(part.encode()) if factor == 0 else 0
            at += size
    return untrained


def _label_bytes(labels: pa.Array, names: Sequence[str] | None) -> Int64s:
    if not names or labels.null_count == len(labels):
        return np.zeros(len(labels), np.int64)
    sizes = np.array([*(len(name.strip().encode()) for name in names), 0], np.int64)
    return np.asarray(sizes[pc.fill_null(labels, len(names)).to_numpy()])


NUM_WORST = 5
"""Rows that are named for each finding."""

SLICE_TOKENS = 2**20
"""Tokens looked at together; it bounds memory to about 100 MB."""

_WITHOUT_TURNS = ("text", "classification", "sequence_classification")


Side = tuple[pa.Table, pa.Table, pa.Table]
"""Conversations, texts and tokens of the same rows."""


def audit_shard(
    sides: Sequence[Side],
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    label_names: Sequence[str] | None = None,
) -> dict[str, object]:
    """Measure one shard.

    Args:
        sides: conversations, their texts, and the tokens to audit, in the order of the two others;
            those that later steps quarantined may be among the first two. Of pairs, one for the
            chosen and one for the rejected answers, row by row: a row has what either side has.
        snapshot: the tokenizer.
        config: which turns are trained; `train_on: all` trains prompts and headers on purpose.
        label_names: text of label 0, 1, ... where the source has labels.

    Returns:
        `counts`, name -> number; and `worst`, finding -> the rows with most of it, each with
        `source`, `row`, `record_id`, `value`.
    """
    counts: Counter[str] = Counter()
    values: dict[str, Int64s] = {}
    for side in sides:
        for name, own in _audit_side(side, snapshot, config, label_names, counts).items():
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


_FLAGS = frozenset(
    ("double_bos", "missing_bos", "double_ends", "untrained_rows", "misplaced_rows")
) | {"unlocated_rows"}
"""Findings that a row has or has not."""


def _audit_side(
    side: Side,
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    label_names: Sequence[str] | None,
    counts: Counter[str],
) -> dict[str, Int64s]:
    """Each finding as a number per row; what they are shares of is added to `counts`."""
    validated, formatted, tokenized = side
    found: dict[str, list[Int64s]] = {}
    pipeline = read_pipeline(snapshot.backend)
    places = [_places(table, tokenized) for table in (validated, formatted)]
    for start, stop in _slices(tokenized):
        part = tokenized.slice(start, stop - start)
        earlier = [
            _rows(table, place, start, stop)
            for table, place in zip((validated, formatted), places, strict=True)
        ]
        tokens = Tokens.of(earlier[1], part, pipeline)
        due, own = answer_bytes(earlier[0], earlier[1], config, label_names)
        messages = FlatMessages.of(earlier[0]["messages"])
        # What the findings are shares of; turns that should be trained and are not count, too.
        num_absent = int(_num_absent(tokens, config, messages).sum())
        counts["tokens"] += len(tokens.ids)
        counts["trained_tokens"] += int((tokens.range_ends - tokens.range_starts).sum())
        counts["turns"] += len(tokens.range_starts) + num_absent
        counts["answer_bytes"] += int(due[tokens.is_exact].sum())
        findings = _findings(tokens, due, own, snapshot, config, messages, part)
        for name, numbers in findings.items():
            found.setdefault(name, []).append(numbers)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _findings(
    tokens: Tokens,
    due: Int64s,
    own: Int64s,
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    messages: FlatMessages,
    tokenized: pa.Table,
) -> dict[str, Int64s]:
    """Each finding, as a number per row."""
    are_headers_trained = config.turns != "whole" and not writes_prompts(config, snapshot)
    is_idle = (tokens.ranges_per_row == 0) & _is_null(tokenized["label"])
    return {
        **_coverage(tokens, due, own, config, tokenized),
        **_turns(tokens, config, messages, are_headers_trained=are_headers_trained),
        **bos_and_unknown(tokens, snapshot),
        "untrained_rows": is_idle.astype(np.int64),
        "misplaced_rows": tokens.is_misplaced.astype(np.int64),
        "unlocated_rows": (~tokens.is_exact).astype(np.int64),
    }


def worst_rows(table: pa.Table, values: Int64s) -> list[dict[str, object]]:
    """Rows of the highest values over 0, the first of equal ones first."""
    bad = np.flatnonzero(values > 0)
    chosen = bad[np.argsort(-values[bad], kind="stable")[:NUM_WORST]]
    rows = table.select(["source", "row", "record_id"]).take(pa.array(chosen)).to_pylist()
    return [
        row | {"value": value} for row, value in zip(rows, values[chosen].tolist(), strict=True)
    ]


def _places(table: pa.Table, tokenized: pa.Table) -> pa.Array | None:
    """Rows of an earlier table that are still there; None: all. Equal ids, equal conversations."""
    ids = one_chunk(tokenized["record_id"])
    if table.num_rows == tokenized.num_rows and one_chunk(table["record_id"]).equals(ids):
        return None
    return pc.index_in(ids, value_set=one_chunk(table["record_id"]))


def _rows(table: pa.Table, places: pa.Array | None, start: int, stop: int) -> pa.Table:
    return table.slice(start, stop - start) if places is None else table.take(places[start:stop])


def _slices(tokenized: pa.Table) -> list[tuple[int, int]]:
    """Row ranges of about SLICE_TOKENS tokens each.

    Of rows of 6 tokens, at 10 to a slice: 6, 12, 18, 24 reach slices 0, 1, 1, 2, so the ranges are
    [0, 1), [1, 3) and [3, 4).
    """
    reached = np.cumsum(tokenized["num_tokens"].to_numpy(), dtype=np.int64) // SLICE_TOKENS
    cuts = np.flatnonzero(np.diff(reached)) + 1
    edges = [0, *cuts.tolist(), tokenized.num_rows]
    return list(pairwise(edges))


def _coverage(
    tokens: Tokens, due: Int64s, own: Int64s, config: FormatConfig, tokenized: pa.Table
) -> dict[str, Int64s]:
    """Bytes of each row's answers that are not trained, and of its prompts that are."""
    first, last = tokens.range_starts, tokens.range_ends - 1
    known = tokens.is_exact[tokens.range_rows]
    trained = Intervals.of(tokens.starts[first[known]], tokens.ends[last[known]])
    of_spans = trained.within(tokens.content_starts, tokens.content_ends)
    # Trained bytes [0 12 7] of three contents, two of row 0 and one of row 1: [12 7].
    covered = np.diff(np.append(0, np.cumsum(of_spans))[tokens.content_offsets])
    # A class label for a model's head is no text, so nothing of such a row is due.
    is_due = tokens.is_exact & ((tokens.ranges_per_row > 0) | _is_null(tokenized["label"]))
    missing = np.where(is_due, np.maximum(due - covered, 0), 0)
    surplus = np.where(tokens.is_exact, np.maximum(covered - own, 0), 0)
    if config.train_on == "all" and "system" not in config.never_train:
        surplus[:] = 0  # all is trained, tool definitions, too
    return {"untrained_answer_bytes": missing, "trained_prompt_bytes": surplus}


def _turns(
    tokens: Tokens, config: FormatConfig, messages: FlatMessages, *, are_headers_trained: bool
) -> dict[str, Int64s]:
    """Per row: trained turns without a trained end token, and turns whose header is trained."""
    num_rows = len(tokens.offsets) - 1
    is_exact = tokens.is_exact[tokens.range_rows]
    # The last control token before the end of each range. Control tokens at [2 7], ranges that end
    # at [2 5 8]: [-1 2 7]; -1: there is none before it at all.
    index = np.searchsorted(tokens.control, tokens.range_ends, "left") - 1
    last = np.where(index < 0, -1, np.append(tokens.control, -1)[index])
    is_ended = last >= tokens.range_starts
    at = np.maximum(last, tokens.range_starts)
    content_after = tokens.holds_content(at, tokens.range_ends - 1)
    is_ended &= np.where(is_exact, ~content_after, last == tokens.range_ends - 1)
    # What is content, and so no end, is known of exact rows alone.
    end_ids = np.unique(tokens.ids[last[is_ended & (is_exact if is_exact.any() else True)]])
    headers = _header_ids(tokens, messages)
    is_ended &= ~_are_short(tokens, end_ids, config, messages)
    goes_on = _goes_on(tokens, np.union1d(headers, end_ids))
    if config.reasoning != "train_last":  # in rows with weights of parts, too
        goes_on &= messages.any(messages.has("part_weights"))[tokens.range_rows]
    is_ended |= goes_on
    for number in np.flatnonzero(~is_ended).tolist():
        is_ended[number] = ends_blank(tokens, number, int(last[number])) or has_no_end(
            tokens, number, messages
        )
    openers = np.setdiff1d(headers, end_ids)
    first = tokens.range_starts
    leaks = np.isin(tokens.ids[first], openers) & is_exact & ~tokens.holds_content(first, first)
    leaks &= ~_are_opened(tokens, end_ids)
    if are_headers_trained:  # where the text says so
        leaks &= tokens.is_misplaced[tokens.range_rows]
    if config.train_on == "all" or config.template == "text":
        leaks[:] = False
    rows = tokens.range_rows
    return {
        "unterminated_turns": np.bincount(rows[~is_ended], minlength=num_rows)
        + _num_absent(tokens, config, messages),
        "leaked_headers": np.bincount(rows[leaks], minlength=num_rows),
        "double_ends": double_ends(tokens, end_ids),
    }


def _are_opened(tokens: Tokens, end_ids: Int32s) -> Bools:
    r"""Ranges that begin behind a header: the model itself writes what their first token opens.

    `<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>` is a header, `<|im_end|>\n` is none.
    """
    index = np.searchsorted(tokens.control, tokens.range_starts) - 1
    before = np.append(tokens.control, 0)[index]
    is_own = (index >= 0) & (before >= tokens.offsets[tokens.range_rows])
    has_text = tokens.holds_content(np.minimum(before, tokens.range_starts), tokens.range_starts)
    return np.asarray(is_own & ~has_text & ~np.isin(tokens.ids[before], end_ids))


def _are_short(
    tokens: Tokens,
    end_ids: Int32s,
    config: FormatConfig,
    messages: FlatMessages,
) -> Bools:
    """Ranges that stop at a control token and before the one that ends turns: `</tool_call>`."""
    control = tokens.control[~tokens.are_content(tokens.control, tokens.control)]
    index = np.searchsorted(control, tokens.range_ends)
    following = np.append(control, len(tokens.ids))[index]
    is_short = following < tokens.offsets[tokens.range_rows + 1]
    behind = np.minimum(following, len(tokens.ids) - 1)
    is_short &= np.isin(tokens.ids[behind], end_ids) & tokens.is_exact[tokens.range_rows]
    between = np.minimum(tokens.range_ends, behind)
    is_short &= ~tokens.holds_content(between, behind)
    # Not where EOS ends the text, too: Phi-3 with the EOS `<|end|>` writes "<|end|>\n<|end|>".
    is_short &= tokens.ids[tokens.range_ends - 1] != tokens.ids[behind]
    others = num_trained(messages, config, of_assistant=False)
    is_short &= (others == 0)[tokens.range_rows]
    return np.asarray(is_short)


def _num_absent(tokens: Tokens, config: FormatConfig, messages: FlatMessages) -> Int64s:
    """Answers of each row that are to be trained and have no range."""
    if config.train_on == "all" or config.template in _WITHOUT_TURNS:
        return np.zeros(len(messages.counts), np.int64)
    absent = num_trained(messages, config, of_assistant=True) - tokens.ranges_per_row
    return np.where(tokens.ranges_per_row > 0, np.maximum(absent, 0), 0)


def _goes_on(tokens: Tokens, turn_boundaries: np.ndarray) -> Bools:
    """Ranges that are followed by another one of the same turn: a thought within is left out."""
    goes_on = np.zeros(len(tokens.range_rows), np.bool_)
    places = tokens.control[np.isin(tokens.ids[tokens.control], turn_boundaries)]
    places = places[~tokens.are_content(places, places)]
    # Ranges [5, 9) and [12, 20): no boundary between 9 and 12, so the first one's turn goes on.
    seen = np.searchsorted(places, np.stack([tokens.range_ends[:-1], tokens.range_starts[1:]]))
    goes_on[:-1] = (seen[0] == seen[1]) & (tokens.range_rows[:-1] == tokens.range_rows[1:])
    return goes_on


def _header_ids(tokens: Tokens, messages: FlatMessages) -> Int32s:
    """Ids of control tokens before a row's first content: what opens its first turn.

    Of rows whose first message has a text: before another one's, tokens of that turn may stand.
    """
    counts = np.diff(tokens.content_offsets)
    first = messages["content"].take(pa.array(messages.offsets[:-1]))
    has_text = num_bytes(pc.utf8_trim_whitespace(first)) > 0
    filled = np.flatnonzero((counts > 0) & has_text)
    if not len(filled):
        return np.zeros(0, np.int32)
    first_content = np.full(len(counts), -1, np.int64)
    first_content[filled] = np.minimum.reduceat(
        tokens.content_starts, tokens.content_offsets[:-1][filled]
    )
    control = tokens.control
    row = tokens.row_of(control)
    before = (tokens.starts[control] < first_content[row]) & tokens.is_exact[row]
    return np.unique(tokens.ids[control[before]])


def _is_null(column: pa.ChunkedArray) -> Bools:
    return np.asarray(one_chunk(column).is_null().to_numpy(zero_copy_only=False), np.bool_)
