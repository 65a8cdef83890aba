r"""A shard's conversations by shape, so that templates work on columns, not rows; and thinking.

Rows whose messages have the same roles in the same order are one *shape*: a template puts the same
constants between the contents of all of them, so a shape is rendered with a handful of Arrow
kernels. Costs about 10 ms per 50,000 rows; `messages_of` (dicts for Jinja) costs 5 us a message and
is only for rows that no shape covers.

Thinking of reasoning models is in a field of its own, or in `<think>...</think>` in the content:

    "<think>\nThey greet.\n</think>\n\nHello!"  ->  "Hello!"

Tags are taken as templates take them: what stands before a lone `</think>` was thought (the prompt
opened it), what follows a lone `<think>` was never answered.
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
from packhouse.records.identity import rename
from packhouse.records.lists import one_chunk
from packhouse.records.messages import ROLES, FlatMessages
from packhouse.records.tables import MESSAGE
from packhouse.system.arrays import Bools, Float32s, Int64s

_TRAINED, _SCALED, _CONTEXT = 8, 16, 32


class Turn(NamedTuple):
    """What a template may know of a message without reading its text."""

    role: str
    has_context: bool = False
    is_trained: bool = True
    is_scaled: bool = False
    """Trained with a weight other than 1."""


Shape = tuple[Turn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Conversations of a part as templates see them."""

    messages: FlatMessages
    """With system turns that the recipe adds; `weight` as decided, times that of the row."""
    context: pa.Array
    """Of each message; null where it has none. Empty context counts as none."""
    is_plain: Bools
    """Of each row: nothing but roles, contents and contexts (no tools, arguments, reasoning,
    names)."""
    source: pa.Array
    row: pa.Array
    tools: pa.Array
    arguments: pa.Array
    label: pa.Array
    row_weights: Float32s
    """Factor of each row, which is in the weights of its messages."""

    @classmethod
    def from_table(cls, table: pa.Table, config: FormatConfig) -> "Conversations":
        """Take the columns apart, put in system turns that the recipe adds, and decide weights."""
        flat = FlatMessages.of(table["messages"])
        if config.system is not None:
            flat = _put_system(flat, config.system)
        row_weights = pc.fill_null(one_chunk(table["weight"]), 1).to_numpy()
        weights = flat.decide_weights(config) * np.repeat(row_weights, flat.counts)
        given = one_chunk(table["tools"]), one_chunk(table["arguments"])
        tools, arguments = _with_defaults(*given, config)
        rich = np.zeros(len(flat), np.bool_)
        for name in ("reasoning", "tool_calls", "tool_call_id", "name", "part_weights"):
            if flat[name].null_count != len(flat):
                rich |= flat.has(name)
        is_plain = ~flat.any(rich)
        for aside in (tools, arguments):
            is_plain &= np.asarray(aside.is_null(), np.bool_)
        blank = pc.equal(pc.fill_null(flat["context"], ""), "")
        return cls(
            messages=flat.replace(weight=pa.array(weights, pa.float32())),
            context=pc.if_else(blank, pa.scalar(None, pa.string()), flat["context"]),
            is_plain=is_plain,
            source=one_chunk(table["source"]),
            row=one_chunk(table["row"]),
            tools=tools,
            arguments=arguments,
            label=one_chunk(table["label"]),
            row_weights=row_weights,
        )

    @property
    def num_rows(self) -> int:
        """Number of conversations."""
        return len(self.row)

    @property
    def starts(self) -> Int64s:
        """Where the messages of each conversation begin; shape [num_rows + 1]."""
        return self.messages.offsets

    def name_of(self, number: int) -> str:
        """Return the source and row of a conversation, as lineage names them."""
        return f"{self.source[number]} row {self.row[number]}"

    def codes(self, *, with_context: bool = False) -> np.ndarray:
        """int64 [number of messages]: role, whether it is trained, and by what kind of weight.

        Without `with_context`, contexts are not told apart (they are part of the content).
        """
        codes, weight = self.messages.role_codes().astype(np.int64), self.weights
        codes |= np.where(weight > 0, np.where(weight != 1, _TRAINED | _SCALED, _TRAINED), 0)
        if with_context:
            codes |= np.where(self.context.is_valid().to_numpy(False), _CONTEXT, 0)
        return np.asarray(codes)

    def group(
        self, codes: np.ndarray, row_codes: np.ndarray, wanted: np.ndarray
    ) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield the rows (ascending) whose messages, and they themselves, have equal codes.

        Args:
            codes: int64 [number of messages].
            row_codes: int64 [num_rows].
            wanted: bool [num_rows]; others are left out.

        Returns:
            The codes of the messages and the row as bytes, and the numbers of the rows.
        """
        # A row's code goes behind those of its messages: messages [1 9 | 1 9 9] and rows [5 6]
        # become [1 9 5 1 9 9 6], cut at [0 3 7]. Each row is a binary of 8 bytes a code, and Arrow
        # groups equal ones.
        codes = np.insert(codes, self.starts[1:], row_codes)
        bounds = (self.starts + np.arange(len(self.starts))) * 8
        keys = pa.Array.from_buffers(
            pa.large_binary(), self.num_rows, [None, pa.py_buffer(bounds), pa.py_buffer(codes)]
        )
        rows = np.flatnonzero(wanted)
        encoded = pc.dictionary_encode(keys.take(pa.array(rows)))
        of_row = encoded.indices.to_numpy()
        order = rows[np.argsort(of_row, kind="stable")]
        ends = np.cumsum(np.bincount(of_row, minlength=len(encoded.dictionary)))
        for number, key in enumerate(encoded.dictionary.to_pylist()):
            yield key, order[ends[number - 1] if number else 0 : ends[number]]

    @property
    def weights(self) -> np.ndarray:
        """float32 [number of messages]; 0: not trained."""
        return np.asarray(self.messages["weight"].to_numpy())

    def weights_of(self, message: int, rows: np.ndarray) -> np.ndarray:
        """Weight of a message in each of the rows; of -1, which is a label's text, the row's."""
        own = self.row_weights[rows] if message < 0 else self.weights[self.starts[rows] + message]
        return np.asarray(own)

    def messages_of(
        self, rows: np.ndarray
    ) -> Iterator[tuple[list[dict[str, object]], tuple[str | None, str | None]]]:
        """Yield each row's messages (dicts of MESSAGE, nulls left out); its tools and arguments."""
        lists = self.messages.to_lists()
        for first in range(0, len(rows), 512):
            block = pa.array(rows[first : first + 512])
            talks = lists.take(block)
            items = _dicts(talks.flatten())
            columns = talks.value_lengths(), self.tools.take(block), self.arguments.take(block)
            for length, *given in zip(*(each.to_pylist() for each in columns), strict=True):
                yield [next(items) for _ in range(length)], tuple(given)


DEFAULTS = ("tools", "documents")
"""Arguments of a recipe that stand in for those of rows that have none."""


def _with_defaults(
    tools: pa.Array, arguments: pa.Array, config: FormatConfig
) -> tuple[pa.Array, pa.Array]:
    given = config.chat_template_kwargs
    if given.get("tools"):
        tools = pc.fill_null(tools, json.dumps(given["tools"]))
    if given.get("documents"):
        own = {"documents": given["documents"]}
        texts = [json.dumps(own | json.loads(text or "{}")) for text in arguments.to_pylist()]
        arguments = pa.array(texts, pa.string())
    return tools, arguments


def _put_system(flat: FlatMessages, system: str) -> FlatMessages:
    lacking = np.flatnonzero(~flat.any(flat.is_role("system")))
    message = pa.array([{"role": "system", "content": system}], MESSAGE)
    # Offsets [0 2 4], row 1 lacks it: messages [0 1 4 2 3], of which 4 is the new one; [0 2 5].
    order = np.insert(np.arange(len(flat)), flat.offsets[lacking], len(flat))
    added = np.zeros(len(flat.offsets), np.int64)
    added[lacking + 1] = 1
    values = pa.concat_arrays([flat.values, message]).take(pa.array(order))
    return FlatMessages(values, flat.offsets + np.cumsum(added))


def _dicts(values: pa.StructArray) -> Iterator[dict[str, object]]:
    names = [f.name for f in values.type if values.field(f.name).null_count != len(values)]
    for items in zip(*(values.field(name).to_pylist() for name in names), strict=True):
        yield {n: item for n, item in zip(names, items, strict=True) if item is not None}


def make_shape(codes: np.ndarray) -> Shape:
    """The shape that codes of messages stand for."""
    return tuple(
        Turn(
            ROLES[code & 7] if code & 7 < len(ROLES) else "other",
            bool(code & _CONTEXT),
            bool(code & _TRAINED),
            bool(code & _SCALED),
        )
        for code in codes.tolist()
    )


REASONS = {
    "only_thinking": "nothing of an answer is left without its thinking; see format.reasoning",
    "unclosed_thinking": "an answer has a `<think>` that nothing closes, so what was thought and "
    "what was said cannot be told apart; mend it, or give it the weight 0",
}
"""Reason code -> sentence; the last that applies wins."""

THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)|\A(?:(?!<think>).)*</think>\s*", re.DOTALL)
BEGINS_THOUGHT = r"\A[ \t\r\n]*<think>"
"""For Python and RE2 alike."""
_THOUGHT_BYTES = re.compile(THOUGHT.pattern.encode(), re.DOTALL)


def has_thinking(messages: FlatMessages) -> Bools:
    """Which messages are answers with thinking, in a field or between tags."""
    # As a regular expression: RE2 leaps from "<" to "<", 0.2 ns a byte; match_substring takes 2.
    is_tagged = np.asarray(pc.match_substring_regex(messages["content"], "</?think>"), np.bool_)
    return messages.is_role("assistant") & ((messages.num_bytes("reasoning") > 0) | is_tagged)


def is_unclosed(content: str) -> bool:
    """Return True if a thought has no end, so that nobody knows what was said.

    Example:
        >>> [is_unclosed(said) for said in ("<think>a</think>b", "<think>a", "Write <think> here")]
        [False, True, True]
    """
    return content.rfind("<think>") > content.rfind("</think>")


def without_thinking(content: str) -> str:
    r"""A content without what was thought.

    Example:
        >>> without_thinking("<think>\nThey greet.\n</think>\n\nHello!")
        'Hello!'
        >>> without_thinking("They greet.</think>Hello!"), without_thinking("<think>They gr")
        ('Hello!', '')
    """
    return THOUGHT.sub("", content)


def thought_spans(text: bytes) -> list[tuple[int, int]]:
    """Byte spans of the thoughts in an answer, tags and white space behind them included.

    A space before `<think>` belongs to it, and a last space behind it to what is said: tokens begin
    with the space before them.

    A tag that nothing closes is none; contents with one are refused.

    Example:
        >>> thought_spans(b"<think>a</think> Hello"), thought_spans(b'{"q": "<think>"}<|im_end|>')
        ([(0, 16)], [])
    """
    found = [match for match in _THOUGHT_BYTES.finditer(text) if b"</think>" in match.group()]
    edges = [match.span() for match in found]
    return [(a - text.endswith(b" ", 0, a), b - text.endswith(b" ", a, b)) for a, b in edges]


def tag_spans(content: str, *, is_opened: bool = False) -> list[tuple[int, int]]:
    """Characters of the tags of the thought that an answer begins with; empty if there is none.

    Args:
        content: of the answer.
        is_opened: whether the prompt before it ends with `<think>`.

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
    """Apply `reasoning` to conversations; with `strip` they are called by what is left of them.

    Args:
        table: schema VALIDATED.
        config: `reasoning` is read.

    Returns:
        The conversations, and reason code and sentence of each row to refuse: it has an answer,
        not weighed 0, whose thinking has no end, or of which nothing else is left.
    """
    if config.reasoning == "keep":
        return table, {}
    messages = FlatMessages.of(table["messages"])
    at = np.flatnonzero(has_thinking(messages))
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
        is_thinking = np.isin(np.arange(len(messages)), at)
        content = pc.replace_with_mask(messages["content"], is_thinking, pa.array(said))
        stripped = messages.replace(content=content, reasoning=pa.nulls(len(messages), pa.string()))
        table = stripped.put_into(table)
        table = rename(table, np.isin(np.arange(table.num_rows), row_of))
    return table, {row: (code, REASONS[code]) for row, code in refused.items()}
