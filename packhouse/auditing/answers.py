"""How much of each row's text must be trained, and how much may be: counted in its messages."""

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Int64s
from packhouse.recipe import FormatConfig
from packhouse.records.conversations import decide_weights
from packhouse.records.lists import list_items, one_chunk
from packhouse.records.thinking import has_thinking, without_thinking

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
    flat, offsets = list_items(validated["messages"])
    fields: Mapping[str, pa.Array] = dict(zip(flat.type.names, flat.flatten(), strict=True))
    is_trained = decide_weights(flat, offsets, config) > 0
    is_own = is_trained | np.asarray(pc.equal(fields["role"], "assistant"), np.bool_)
    if config.train_on == "all" and not config.never_train:
        is_trained &= np.asarray(pc.equal(fields["role"], "assistant"), np.bool_)
    due = _num_bytes(pc.utf8_trim_whitespace(fields["content"]))
    due -= _unsaid_bytes(flat, offsets, one_chunk(formatted["text"]), config)
    due = np.where(is_trained, due - _untrained_parts(fields), 0)
    own = _num_bytes(fields["content"]) + _num_bytes(fields["reasoning"])
    own += 2 * _num_bytes(fields["tool_calls"])  # room for another way to write the same JSON
    own += 2 * _num_bytes(fields["context"])
    labels = _label_bytes(one_chunk(validated["label"]), label_names)
    own = _sums(np.where(is_own, own, 0), offsets) + labels
    # Definitions of tools stand in the system turn.
    is_system = is_trained & np.asarray(pc.equal(fields["role"], "system"), np.bool_)
    tools = 2 * _num_bytes(one_chunk(validated["tools"]))
    tools += 2 * _num_bytes(one_chunk(validated["arguments"]))
    own += np.where(_sums(is_system.astype(np.int64), offsets) > 0, tools, 0)
    return _sums(due, offsets) + labels, own


def num_trained(messages: pa.ListArray, config: FormatConfig, *, of_assistant: bool) -> Int64s:
    """Messages of each row that are to be trained: the assistant's, or all of the other roles."""
    flat, offsets = list_items(messages)
    is_answer = np.asarray(pc.equal(flat.field("role"), "assistant"), np.bool_)
    is_trained = decide_weights(flat, offsets, config) > 0
    return _sums((is_trained & (is_answer == of_assistant)).astype(np.int64), offsets)


def _unsaid_bytes(
    messages: pa.StructArray, offsets: Int64s, texts: pa.StringArray, config: FormatConfig
) -> Int64s:
    """Bytes of each content that need not be trained: thoughts left out, and the tags of others.

    Templates may take a content apart and write the tags themselves (Qwen3's does).
    """
    unsaid = np.zeros(len(messages), np.int64)
    at = np.flatnonzero(has_thinking(messages))
    is_user = np.asarray(pc.equal(messages.field("role"), "user"), np.bool_)
    # Messages u a u a: users [0 1 1 2 2] before each and in all. The answer at 1 has seen 1 of 2,
    # so it is an earlier one; that at 3 has seen both.
    users = np.append(0, np.cumsum(is_user))
    rows = np.searchsorted(offsets, at, "right") - 1
    is_earlier = users[at] < users[offsets[rows + 1]]
    contents = messages.field("content").take(at).to_pylist()
    for message, row, earlier, content in zip(at, rows, is_earlier, contents, strict=True):
        whole = content.strip()
        # A record that ends with this answer does not show whether its row goes on.
        is_cut = config.reasoning == "train_last" and (earlier or config.turns != "whole")
        if is_cut or whole not in texts[int(row)].as_py():
            unsaid[message] = len(whole.encode()) - len(without_thinking(content).strip().encode())
        else:
            unsaid[message] = sum(len(tag.encode()) for tag in _TAGS.findall(whole))
    return unsaid


def _untrained_parts(fields: Mapping[str, pa.Array]) -> Int64s:
    """Bytes of each content that stand in parts of weight 0."""
    untrained = np.zeros(len(fields["content"]), np.int64)
    for message in np.flatnonzero(fields["part_weights"].is_valid()).tolist():
        content = fields["content"][message].as_py()
        parts = json.loads(fields["part_weights"][message].as_py())
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


def _num_bytes(texts: pa.Array) -> Int64s:
    return np.asarray(pc.fill_null(pc.binary_length(texts), 0)).astype(np.int64)


def _sums(values: Int64s, offsets: Int64s) -> Int64s:
    # Values [5 1 2], offsets [0 2 3]: sums [0 5 6 8] at the offsets [0 6 8], so rows of 6 and 2.
    return np.diff(np.append(0, np.cumsum(values))[offsets])
