"""Expressions that make messages of what rows hold elsewhere: `select` of a source.

{"talk": {"messages": [...]}}              -> messages: talk.messages
{"prompt": [...], "completion": [...]}     -> messages: list_concat(..., ...), no loss on the prompt
{"messages": [..., user], "answer": "4"}   -> messages: list_append(messages, {...})
"""

from collections.abc import Mapping, Sequence
from typing import Any

from packhouse.read.base_format import MESSAGE_FIELDS
from packhouse.read.extra_fields import PARTS

_ANSWERS = (*sorted(PARTS["answer"]), "target", "reply")
_PROMPTS = (*sorted(PARTS["question"]), "messages", "input")
_BESIDE = (*sorted(PARTS["system"]), "tools")
"""Fields that formats of messages read, too."""

_KEYS = {"chat": ("role", "content"), "sharegpt": ("from", "value")}
"""Format -> the fields of a message that it reads."""


def select_messages(rows: Sequence[Any]) -> dict[str, Any]:
    """Return `format` and `select` of rows whose messages are no field of their own; else nothing.

    Example:
        >>> asked, said = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
        >>> print(select_messages([{"messages": [asked], "answer": "2"}])["select"]["messages"])
        list_append("messages", {'role': 'assistant', 'content': "answer"})
        >>> select_messages([{"messages": [asked, said], "id": 7}])
        {}
    """
    if not rows or not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        return {}
    if isinstance(rows[0].get("label"), bool):  # of KTO: some answers are bad ones
        return {}
    for row_format in _KEYS:
        for look in (_nested, _in_two_lists, _without_answer):
            if select := look(rows, row_format):
                beside = {name: f'"{name}"' for name in _BESIDE if name in rows[0]}
                return {"format": row_format, "select": beside | select}
    return {}


def _nested(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """Messages in an object."""
    if any(_are_messages([row[name] for row in rows], row_format) for name in rows[0]):
        return {}
    for outer in rows[0]:
        objects = [row[outer] for row in rows]
        if '"' in outer or not all(isinstance(each, dict) for each in objects):
            continue
        for inner in MESSAGE_FIELDS:
            talks = [each.get(inner) for each in objects]
            if _are_messages(talks, row_format) and not _are_questions(talks, row_format):
                names = [n for n in _BESIDE if any(each.get(n) for each in objects)]
                return {n: f'"{outer}"."{n}"' for n in names} | {"messages": f'"{outer}"."{inner}"'}
    return {}


def _in_two_lists(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """A prompt and its answer that are both lists of messages; the prompt has no loss."""
    if "chosen" in rows[0] or "rejected" in rows[0]:
        return {}
    lists = [name for name in rows[0] if _are_messages([row[name] for row in rows], row_format)]
    prompt = next((name for name in _PROMPTS if name in lists), None)
    answer = next((name for name in _ANSWERS if name in lists), None)
    if prompt is None or answer is None:
        return {}
    said = [message for row in rows for name in (prompt, answer) for message in row[name]]
    speaker, content = _KEYS[row_format]
    if any(set(each) != {speaker, content} for each in said):
        return {}
    parts = [
        f"list_transform(\"{name}\", lambda m: {{'{speaker}': m.\"{speaker}\", '{content}': "
        f"m.\"{content}\", 'loss': {loss}}})"
        for name, loss in ((prompt, "false"), (answer, "true"))
    ]
    return {"messages": f"list_concat({', '.join(parts)})"}


def _without_answer(rows: Sequence[Mapping[str, Any]], row_format: str) -> dict[str, str]:
    """Messages that end on a question, and a text that answers it."""
    prompt = next(
        (n for n in _PROMPTS if _are_messages([row.get(n) for row in rows], row_format)), None
    )
    answers = [n for n in _ANSWERS if all(isinstance(row.get(n), str) for row in rows)]
    if prompt is None or len(answers) != 1:
        return {}
    said = [message for row in rows for message in row[prompt]]
    speaker, content = _KEYS[row_format]
    is_plain = all(set(each) == {speaker, content} for each in said)
    if not is_plain or not _are_questions([row[prompt] for row in rows], row_format):
        return {}
    name = "assistant" if speaker == "role" else "gpt"
    answer = f"{{'{speaker}': '{name}', '{content}': \"{answers[0]}\"}}"
    return {"messages": f'list_append("{prompt}", {answer})'}


def _are_questions(talks: Sequence[Any], row_format: str) -> bool:
    """Return True if all end on a question."""
    return {talk[-1].get(_KEYS[row_format][0]) for talk in talks} <= {"user", "human"}


def _are_messages(values: Sequence[Any], row_format: str) -> bool:
    """Return True for lists of objects that have the fields of a format's messages."""
    return all(
        isinstance(value, list)
        and value
        and all(isinstance(each, dict) and each.keys() >= set(_KEYS[row_format]) for each in value)
        for value in values
    )
