r"""Group conversations by shape, so that templates work on columns, and find their reasoning.

Rows whose messages have the same roles in the same order share a *shape*. A template writes the
same constants between their contents, so a shape is rendered with a few Arrow kernels, at about
10 ms per 50,000 rows. `messages_of` (dicts for Jinja) takes 5 us per message and is only for rows
that no shape covers.

Reasoning is in its own field, or in `<think>...</think>` in the content:

    "<think>\nThey greet.\n</think>\n\nHello!"  ->  "Hello!"

Tags are interpreted as templates do: text before a lone `</think>` is reasoning (the prompt opened
it), and after a lone `<think>` there is no answer.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.records.arrays import Bools, Float32s, Int64s, one_chunk
from packhouse.records.message_rules import ASSISTANT, SYSTEM, FlatMessages, num_bytes
from packhouse.records.reasons import QUARANTINE_REASONS
from packhouse.records.record_ids import rename
from packhouse.records.table_schemas import MESSAGE, ROLES

_TRAINED, _SCALED, _CONTEXT = 8, 16, 32  # bits of a message's code, above those of its role


class Turn(NamedTuple):
    """The properties of a message that a template may use without reading its text."""

    role: str
    has_context: bool = False
    is_trained: bool = True
    is_scaled: bool = False
    """True if it is trained with a weight other than 1."""


Shape = tuple[Turn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Conversations in the form that templates see."""

    messages: FlatMessages
    """Messages, including system turns that the recipe adds."""
    weights: Float32s
    """Final weight of each message: its own, times that of the row; 0: not trained."""
    context: pa.Array
    """Context of each message; null if it has none or an empty one."""
    is_plain: Bools
    """Mask of rows with only roles, contents and contexts (no tools, arguments, reasoning,
    names)."""
    source: pa.Array
    row: pa.Array
    tools: pa.Array
    arguments: pa.Array
    label: pa.Array
    row_weights: Float32s
    """Weight of each row, already included in the weights of its messages."""

    @classmethod
    def from_table(cls, table: pa.Table, config: FormatConfig) -> "Conversations":
        """Read the columns, add the recipe's system turn where missing, and decide weights."""
        flat = FlatMessages.of_table(table)
        if config.system is not None:
            # Offsets [0 2 4] and row 1 has no system turn: messages become [0 1 4 2 3], where 4 is
            # the new message, and offsets [0 2 5].
            lacking = np.flatnonzero(flat.sums(flat.roles == SYSTEM) == 0)
            message = pa.array([{"role": "system", "content": config.system}], MESSAGE)
            num_messages = len(flat.values)
            order = np.insert(np.arange(num_messages), flat.offsets[lacking], num_messages)
            values = pa.concat_arrays([flat.values, message]).take(pa.array(order))
            added = np.zeros(len(flat.offsets), np.int64)
            added[lacking + 1] = 1
            flat = FlatMessages(flat.offsets + np.cumsum(added), values)
        read = ("source", "row", "weight", "tools", "arguments", "label")
        source, row, weight, tools, arguments, label = (one_chunk(table[name]) for name in read)
        row_weights = pc.fill_null(weight, 1).to_numpy()
        weights = flat.decide_weights(config) * np.repeat(row_weights, flat.counts)
        default_tools, documents = map(config.chat_template_kwargs.get, DEFAULTS)
        if default_tools:
            tools = pc.fill_null(tools, json.dumps(default_tools))
        if documents:
            own = {"documents": documents}
            texts = [json.dumps(own | json.loads(text or "{}")) for text in arguments.to_pylist()]
            arguments = pa.array(texts, pa.string())
        names = ("reasoning", "tool_calls", "tool_call_id", "name", "part_weights")
        is_rich = np.logical_or.reduce([flat.has(name) for name in names])
        is_bare = pc.and_(tools.is_null(), arguments.is_null())
        blank = pc.equal(pc.fill_null(flat.context, ""), "")
        return cls(
            messages=flat,
            context=pc.if_else(blank, pa.scalar(None, pa.string()), flat.context),
            weights=weights,
            is_plain=(flat.sums(is_rich) == 0) & np.asarray(is_bare),
            source=source,
            row=row,
            tools=tools,
            arguments=arguments,
            label=label,
            row_weights=row_weights,
        )

    def group(
        self,
        wanted: Bools,
        *,
        of_messages: Int64s | None = None,
        of_rows: Int64s | None = None,
        with_context: bool = False,
    ) -> Iterator[tuple[bytes, Int64s]]:
        """Yield groups of rows whose messages have the same roles and are trained alike.

        Args:
            wanted: mask of rows to group, bool [num_rows].
            of_messages: further properties of each message, in bits 6 and up, int64 [num_messages].
            of_rows: further properties of each row, int64 [num_rows].
            with_context: group messages with and without context separately.

        Returns:
            The codes of the messages (see `make_shape`) and of the row, int64, as bytes; and the
            row numbers in ascending order.
        """
        codes, weight = self.messages.roles.astype(np.int64), self.weights
        codes |= np.where(weight > 0, np.where(weight != 1, _TRAINED | _SCALED, _TRAINED), 0)
        if with_context:
            codes |= np.where(self.context.is_valid().to_numpy(False), _CONTEXT, 0)
        if of_messages is not None:
            codes |= of_messages
        # Append each row's code to those of its messages: messages [1 9 | 1 9 9] and rows [5 6]
        # become [1 9 5 1 9 9 6], cut at [0 3 7]. Viewed as binary values of 8 bytes per code, Arrow
        # finds the equal ones.
        starts = self.messages.offsets
        codes = np.insert(codes, starts[1:], 0 if of_rows is None else of_rows)
        bounds = (starts + np.arange(len(starts))) * 8
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(codes)]
        keys = pa.Array.from_buffers(pa.large_binary(), len(self.row), buffers)
        rows = np.flatnonzero(wanted)
        encoded = pc.dictionary_encode(keys.take(pa.array(rows)))
        of_row = encoded.indices.to_numpy()
        order = rows[np.argsort(of_row, kind="stable")]
        ends = np.cumsum(np.bincount(of_row, minlength=len(encoded.dictionary)))
        for number, key in enumerate(encoded.dictionary.to_pylist()):
            yield key, order[ends[number - 1] if number else 0 : ends[number]]

    def messages_of(
        self, rows: np.ndarray
    ) -> Iterator[tuple[str, list[dict[str, object]], tuple[str | None, str | None]]]:
        """Yield the name, the messages (dicts without nulls) and (tools, arguments) of each row."""
        lists = self.messages.to_lists(weight=pa.array(self.weights))
        # In blocks, so that not all rows are Python objects at the same time.
        for first in range(0, len(rows), 512):
            block = pa.array(rows[first : first + 512])
            flat = FlatMessages.of(lists.take(block))
            columns = dict(zip(MESSAGE.names, flat.values.flatten(), strict=True))
            names = [name for name in columns if columns[name].null_count < len(flat.values)]
            values = zip(*(columns[name].to_pylist() for name in names), strict=True)
            own = (each.take(block) for each in (self.source, self.row, self.tools, self.arguments))
            of_rows = (each.to_pylist() for each in (pa.array(flat.counts), *own))
            for length, source, row, tools, arguments in zip(*of_rows, strict=True):
                each = (zip(names, next(values), strict=True) for _ in range(length))
                messages = [{n: v for n, v in fields if v is not None} for fields in each]
                yield f"{source} row {row}", messages, (tools, arguments)


DEFAULTS = ("tools", "documents")
"""Template arguments of the recipe that apply to rows without their own."""


def make_shape(codes: np.ndarray) -> Shape:
    """Decode the codes of messages to a shape."""
    roles, bits = (*ROLES, "other"), (_CONTEXT, _TRAINED, _SCALED)
    return tuple(Turn(roles[c & 7], *(bool(c & bit) for bit in bits)) for c in codes.tolist())


THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)|\A(?:(?!<think>).)*</think>\s*", re.DOTALL)
BEGINS_THOUGHT = r"\A[ \t\r\n]*<think>"
"""A pattern that works in Python and in RE2."""
_THOUGHT_BYTES = re.compile(THOUGHT.pattern.encode(), re.DOTALL)


def has_thinking(messages: FlatMessages) -> Bools:
    """Return a mask of answers that have reasoning, in its field or between tags."""
    # A regular expression, because RE2 jumps from "<" to "<" at 0.2 ns per byte; match_substring
    # takes 2 ns.
    is_tagged = np.asarray(pc.match_substring_regex(messages.content, "</?think>"), np.bool_)
    has_reasoning = (num_bytes(messages.reasoning) > 0) | is_tagged
    return np.asarray((messages.roles == ASSISTANT) & has_reasoning)


def is_unclosed(content: str) -> bool:
    """Return True if reasoning has no end, so that the answer cannot be separated from it.

    Example:
        >>> [is_unclosed(said) for said in ("<think>a</think>b", "<think>a", "Write <think> here")]
        [False, True, True]
    """
    return content.rfind("<think>") > content.rfind("</think>")


def without_thinking(content: str) -> str:
    r"""Return a content without its reasoning.

    Example:
        >>> without_thinking("<think>\nThey greet.\n</think>\n\nHello!")
        'Hello!'
        >>> without_thinking("They greet.</think>Hello!"), without_thinking("<think>They gr")
        ('Hello!', '')
    """
    return THOUGHT.sub("", content)


def thought_spans(text: bytes) -> list[tuple[int, int]]:
    """Return byte spans of the reasoning in an answer, with its tags and the white space after it.

    A space before `<think>` is part of the span, but the last space after `</think>` belongs to the
    answer, because tokens begin with the space before them. A tag without `</think>` does not
    count; contents with one are rejected elsewhere.

    Example:
        >>> thought_spans(b"<think>a</think> Hello"), thought_spans(b'{"q": "<think>"}<|im_end|>')
        ([(0, 16)], [])
    """
    found = [match for match in _THOUGHT_BYTES.finditer(text) if b"</think>" in match.group()]
    edges = [match.span() for match in found]
    return [(a - text.endswith(b" ", 0, a), b - text.endswith(b" ", a, b)) for a, b in edges]


def tag_spans(content: str, *, is_opened: bool = False) -> list[tuple[int, int]]:
    """Return character spans of the tags around reasoning at the start of an answer, if any.

    Args:
        content: content of the answer.
        is_opened: True if the prompt before it ends with `<think>`.

    Example:
        >>> tag_spans("<think>a</think> Hello"), tag_spans("Write <think> and </think> here")
        ([(0, 7), (8, 16)], [])
        >>> tag_spans("a</think> Hello", is_opened=True)
        [(1, 9)]
    """
    close, begun = content.find("</think>"), re.match(BEGINS_THOUGHT, content)
    if close < 0:
        return []
    if begun:
        return [(begun.end() - 7, begun.end()), (close, close + 8)]
    is_thought = is_opened and "<think>" not in content[:close]
    return [(close, close + 8)] if is_thought else []


def strip_thinking(
    table: pa.Table, config: FormatConfig
) -> tuple[pa.Table, dict[int, tuple[str, str]]]:
    """Apply the `reasoning` setting to conversations; `strip` computes new ids for changed ones.

    Args:
        table: conversations, schema VALIDATED.
        config: format settings; reads `reasoning`.

    Returns:
        The conversations, and the reason code and sentence of each row to reject, because an answer
        with a weight other than 0 has reasoning without an end, or nothing but reasoning.
    """
    if config.reasoning == "keep":
        return table, {}
    messages = FlatMessages.of_table(table)
    is_thinking = has_thinking(messages)
    at = np.flatnonzero(is_thinking)
    if not len(at):
        return table, {}
    answers = messages.values.take(pa.array(at))
    contents = answers.field("content").to_pylist()
    row_of = messages.rows[at]
    is_weighed = np.asarray(pc.fill_null(answers.field("weight"), 1)) != 0
    is_open = is_weighed & [is_unclosed(content) for content in contents]
    refused = dict.fromkeys(row_of[is_open].tolist(), "unclosed_thinking")
    if config.reasoning == "strip":
        said = [without_thinking(content) for content in contents]
        is_silent = is_weighed & np.asarray(answers.field("tool_calls").is_null())
        is_silent &= [not content.strip() for content in said]
        refused = dict.fromkeys(row_of[is_silent].tolist(), "only_thinking") | refused
        content = pc.replace_with_mask(messages.content, is_thinking, pa.array(said))
        none = pa.nulls(len(is_thinking), pa.string())
        table = messages.put_into(table, content=content, reasoning=none)
        table = rename(table, np.isin(np.arange(table.num_rows), row_of))
    reasons = QUARANTINE_REASONS["format"]
    return table, {row: (code, reasons[code].sentence) for row, code in refused.items()}
