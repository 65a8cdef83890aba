r"""Thinking of reasoning models: in a field of its own, or in `<think>...</think>` in the content.

    "<think>\nThey greet.\n</think>\n\nHello!"  ->  "Hello!"

Tags are taken as templates take them: what stands before a lone `</think>` was thought (the prompt
opened it), what follows a lone `<think>` was never answered.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.records.identity import rename
from packhouse.records.messages import FlatMessages
from packhouse.system.arrays import Bools

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
