"""Nothing of a row is lost: every text of it is in the rendering, or the row is refused.

Contents, calls and tool definitions have to be written; reasoning that the template leaves out is
counted. Control-token text in what has no span of its own (ids, names, numbers) is refused, too.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from packhouse.templates.leaves import Leaf, ids_of, replace_ids, replace_leaves, skeleton
from packhouse.templates.marks import Marked
from packhouse.templates.renderer import RefusedError

__all__ = [
    "EXCERPT",
    "HAS_TAGS",
    "Loss",
    "LostError",
    "check_leaves",
    "check_unmarked",
    "is_plain",
    "writes_whole",
]

Messages = list[dict[str, Any]]

_PLAIN = {"role", "content", "thinking", "reasoning_content"}
_OTHER_TEMPLATE = (
    "Give format.template a Jinja file that writes it (docs/masks.md), or mend the rows"
)
HAS_TAGS = "<think>"
EXCERPT = 60  # characters of a lost text that are shown


class LostError(RefusedError):
    """Text of a row is not in its rendering."""

    def __init__(self, what: str, remedy: str, loss: "Loss | None" = None) -> None:
        super().__init__("content_lost", f"{what}{remedy}")
        self.what = what
        self.loss = loss
        """None: of a call or a tool."""

    def with_remedy(self, remedy: str) -> "LostError":
        """The same loss with another advice."""
        return LostError(self.what, remedy, self.loss and self.loss._replace(remedy=remedy))


class Loss(NamedTuple):
    """A content that a template leaves out, whatever it says."""

    message: int
    role: str
    remedy: str
    """Depends on the content by `HAS_TAGS` alone."""

    def of(self, content: str) -> LostError:
        """The error of a row with this content."""
        what = f"text of message {self.message} ({self.role}) is not in the rendering"
        return LostError(f"{what}: {_excerpt(content)}", self.remedy, self)


def is_plain(messages: Messages, tools: list[Any] | None) -> bool:
    """Whether all of a conversation's texts are leaves."""
    return tools is None and all(message.keys() <= _PLAIN for message in messages)


def check_leaves(
    messages: Messages,
    marked: Marked,
    leaves: list[Leaf],
    notes: Counter[str],
    *,
    is_stripped: bool,
) -> None:
    """Refuse a rendering that leaves out a leaf; left out reasoning is counted.

    `is_stripped` says that thinking was taken out of contents before.
    """
    found = {occurrence.leaf for occurrence in marked.occurrences}
    is_covered = False
    for number, leaf in reversed(list(enumerate(leaves))):
        if leaf.kind == "function":
            is_covered = number in found
        elif leaf.kind == "thought":
            notes["reasoning_not_rendered"] += number not in found
        elif leaf.kind == "call" and is_covered:
            continue
        elif leaf.kind != "tools" and number not in found:
            raise _lost(leaf, messages[leaf.message], is_stripped)


def _lost(leaf: Leaf, message: dict[str, Any], is_stripped: bool) -> LostError:
    role, remedy = message["role"], _remedy(message, is_stripped)
    if leaf.kind == "content":
        return Loss(leaf.message, role, remedy).of(leaf.value)
    what = f"a tool call of message {leaf.message} ({role}) is not in the rendering"
    return LostError(f"{what}: {_excerpt(leaf.value)}", remedy)


def _remedy(message: dict[str, Any], is_stripped: bool) -> str:
    has_tags = message["role"] == "assistant" and HAS_TAGS in str(message.get("content"))
    if has_tags and not is_stripped:
        return f". Set format.reasoning: strip. Or: {_OTHER_TEMPLATE}"
    return f". {_OTHER_TEMPLATE}"


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...")


def writes_whole(marked: Marked, leaves: list[Leaf], is_quiet: Callable[[], bool]) -> bool:
    """Whether the template wrote calls (and tools, if they are not quiet) as objects."""
    found = {occurrence.leaf for occurrence in marked.occurrences}
    is_covered = False
    for number, leaf in reversed(list(enumerate(leaves))):
        if leaf.kind == "function":
            is_covered = number in found
        elif leaf.kind == "call" and not is_covered and number not in found:
            return False
        elif leaf.kind == "tools" and number not in found and not is_quiet():
            return False
    return True


def check_unmarked(
    messages: Messages,
    tools: list[Any] | None,
    text: bytes,
    control: re.Pattern[str],
    render: Callable[[Messages, list[Any] | None], str],
) -> None:
    """Refuse rows whose tools are left out, or that have control-token text without marks."""
    for name in _names_defined(tools):
        if not _is_in(name, text):
            raise LostError(f"tool '{name}' is not in the rendering", f". {_OTHER_TEMPLATE}")
    for number, message in enumerate(messages):
        for name in _names_called(message):
            if not _is_in(name, text):
                what = f"a tool call of message {number} is not in the rendering: {name!r}"
                raise LostError(what, f". {_OTHER_TEMPLATE}")
    bare, _ = skeleton(messages, None)
    noise = control.search(bare) or _noise_in_ids(messages, tools, text, control, render)
    if noise:
        raise RefusedError(
            "template", f"control-token text {noise.group()!r} in an id, name or number"
        )


def _noise_in_ids(
    messages: Messages,
    tools: list[Any] | None,
    text: bytes,
    control: re.Pattern[str],
    render: Callable[[Messages, list[Any] | None], str],
) -> re.Match[str] | None:
    """Control-token text in ids, if the template writes ids at all."""
    noise = control.search("\0".join(ids_of(messages)))
    if noise is None:
        return None
    other, _ = replace_leaves(messages, None, lambda _, copy: copy)
    replace_ids(other, lambda value: "x" * len(value) if isinstance(value, str) else value)
    return None if render(other, tools).encode() == text else noise


def _names_called(message: dict[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _names_defined(tools: list[Any] | None) -> Iterator[str]:
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _is_in(name: str, text: bytes) -> bool:
    """Whether a name is in a text, as it is or within JSON."""
    if name.encode() in text:
        return True
    forms = (json.dumps(name, ensure_ascii=way)[1:-1] for way in (False, True))
    return any(form.encode() in text for form in forms)
