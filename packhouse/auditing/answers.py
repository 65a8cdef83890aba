"""How much of each row's text must be trained, and how much may be: counted in its messages."""

import json
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.records.lists import one_chunk
from packhouse.records.messages import FlatMessages, num_bytes
from packhouse.records.thinking import has_thinking, without_thinking
from packhouse.system.arrays import Int64s

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
