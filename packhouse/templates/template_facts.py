"""What probe conversations show of a chat template: stop tokens, thinking switch, lost reasoning.

Probes are plain words, rendered once for each template. No model family is known by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from packhouse.errors import TemplateError
from packhouse.templates.chat_messages import Messages
from packhouse.templates.rendering import Rendering
from packhouse.templates.results import RefusedError

PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")
PROBE_THOUGHT = "Presumably"


class Switch(NamedTuple):
    """An argument that changes the generation header: whether the model thinks first."""

    name: str
    thinking: object
    plain: object


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What a template does, whatever the row."""

    stops: frozenset[bytes]
    """Tokens at which generation stops."""
    stop_sources: Mapping[str, str]
    """Where each is from: `format.stop_tokens`, a file of the model, or `template`."""
    switch: Switch | None
    """None: there is none, or `chat_template_kwargs` sets it."""
    opening: bytes
    """What opens an answer after a question: the generation prompt."""
    opens_thought: bool
    """True if the prompt always ends within a thought."""
    opened: bytes
    """What the prompt ends with and a plain answer is not written after: `<think>\\n`."""
    writes_thoughts: bool
    """True if reasoning is written in the last answer."""


Probe = Callable[..., Rendering]
"""(messages, arguments, is_prompt) -> rendering.

Raises:
    RefusedError: the template refuses the conversation.
"""

_QUESTION: Messages = [{"role": "user", "content": PROBE[0]}]
_ANSWER: Messages = [{"role": "assistant", "content": PROBE[1]}]
_THOUGHT: Messages = [
    {
        "role": "assistant",
        "content": PROBE[1],
        "reasoning_content": PROBE_THOUGHT,
        "thinking": PROBE_THOUGHT,
    }
]
_CALL: Messages = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00000",
                "function": {"name": PROBE[3], "arguments": {"a": PROBE[3]}},
            }
        ],
    },
    {"role": "tool", "content": PROBE[2], "tool_call_id": "call00000", "name": PROBE[3]},
]


def learn_facts(
    render: Probe,
    *,
    where: str,
    arguments: Iterable[str],
    is_set: Callable[[str], bool],
    stop_tokens: Mapping[str, str],
    control: re.Pattern[bytes],
) -> TemplateFacts:
    """Learn what a template does from probe conversations.

    Args:
        render: renders them.
        where: what errors call the template.
        arguments: names that the template looks up, beside what every template gets.
        is_set: says of an argument whether the recipe sets it.
        stop_tokens: tokens at which generation stops, and where each is from.
        control: matches control tokens.

    Raises:
        TemplateError: it refuses a question and an answer, or writes no control token after it.
    """
    try:
        answered = render([*_QUESTION, *_ANSWER])
    except RefusedError as error:
        said = error.refusal.detail.removeprefix(where).lstrip(": ")
        raise TemplateError(
            f"{where} refuses a conversation of one user and one assistant turn, or rewrites it "
            f"(it says: {said})"
        ) from None
    if [o.field.message for o in answered.occurrences] != [0, 1]:
        raise TemplateError(f"{where} does not write each content once and in order")
    sources = _stops(render, answered, stop_tokens, control, where)
    switch = _find_switch(render, sorted(arguments))
    is_free = switch is not None and not is_set(switch.name)
    on: dict[str, object] = {switch.name: switch.thinking} if switch and is_free else {}
    return TemplateFacts(
        stops=frozenset(token.encode() for token in sources),
        stop_sources=sources,
        switch=switch if is_free else None,
        opening=_opening(render),
        opens_thought=switch is None and _opens_thought(render),
        opened=_opened(render, answered),
        writes_thoughts=_writes_thoughts(render, on),
    )


def _stops(
    render: Probe,
    answered: Rendering,
    given: Mapping[str, str],
    control: re.Pattern[bytes],
    where: str,
) -> dict[str, str]:
    """Stop tokens with their sources."""
    after = [_after(answered, 1, control)]
    with suppress(RefusedError):
        after.append(_after(render([*_QUESTION, *_ANSWER, *_QUESTION]), 1, control))
    if any(token in given for tokens in after for token in tokens):
        return dict(given)
    # A chat format on a base checkpoint: `<|im_end|>` ends each answer, and EOS is another token.
    own = after[0][:1]
    with suppress(RefusedError):
        longer = render([*_QUESTION, *_ANSWER, *_QUESTION, *_ANSWER])
        inner = _after(longer, 1, control)[:1]
        if own and inner != own:
            raise TemplateError(
                f"{where} ends the last answer with {own[0]!r}, but"
                f" {inner[0] if inner else 'no control token'!r} follows the one before it, and no"
                " stop token of the model's files does. Name the tokens that stop the model in"
                " format.stop_tokens"
            )
    if not own:
        rest = answered.text[max((o.end for o in answered.own(1)), default=0) :]
        raise TemplateError(
            f"{where} writes no control token of the tokenizer after an assistant turn (but"
            f" {rest[:40]!r}): a model trained on it never learns to stop. Use a template that"
            " ends each turn, name the token that it writes in format.stop_tokens, or set"
            " train_on: all"
        )
    return {own[0]: "template"}


def _after(rendering: Rendering, message: int, control: re.Pattern[bytes]) -> list[str]:
    """Control tokens between the text of a message and the next one."""
    own = rendering.own(message)
    if not own:
        return []
    following = [o.start for o in rendering.occurrences if o.start >= own[-1].end]
    stop = min(following, default=len(rendering.text))
    return [m.group().decode() for m in rendering.controls(control, own[-1].end, stop)]


def _tail(rendering: Rendering) -> bytes:
    """Text after the last content."""
    found = rendering.occurrences
    return rendering.text[found[-1].end :] if found else rendering.text


def _opening(render: Probe) -> bytes:
    try:
        prompt, question = _tail(render(_QUESTION, is_prompt=True)), _tail(render(_QUESTION))
    except RefusedError:
        return b""
    return prompt.removeprefix(question)


def _find_switch(render: Probe, names: Iterable[str]) -> Switch | None:
    """The first argument, in the order of names, that changes the header of an answer."""

    def headers(messages: Messages, name: str) -> list[bytes | None]:
        found = list[bytes | None]()
        for value in (True, False):
            try:
                found.append(_tail(render(messages, {name: value}, is_prompt=True)))
            except RefusedError:
                found.append(None)
        return found

    for name in names:
        for messages in (_QUESTION, [*_QUESTION, *_CALL]):
            on, off = headers(messages, name)
            if on is not None and off is not None and on != off:
                fits = [_thinks_with(render, {name: value}) for value in (True, False)]
                is_reversed = fits == [False, True]
                return Switch(name, not is_reversed, is_reversed)
    return None


def _thinks_with(render: Probe, arguments: dict[str, object]) -> bool:
    """Return True if an answer with reasoning follows the prompt that these arguments give."""
    try:
        prompt = render(_QUESTION, arguments, is_prompt=True)
        finished = render([*_QUESTION, *_THOUGHT], arguments)
    except RefusedError:
        return False
    rest = finished.text[len(prompt.text) :]
    return finished.text.startswith(prompt.text) and PROBE_THOUGHT.encode() in rest


def _opens_thought(render: Probe) -> bool:
    """Return True if a thought begins right where the prompt ends, and a plain answer does not."""
    try:
        prompt = render(_QUESTION, is_prompt=True).text
        thinking = render([*_QUESTION, *_THOUGHT]).text
        plain = render([*_QUESTION, *_ANSWER]).text
    except RefusedError:
        return False
    begins = [
        text.startswith(prompt) and text[len(prompt) :].lstrip().startswith(own.encode())
        for text, own in ((thinking, PROBE_THOUGHT), (plain, PROBE[1]))
    ]
    return begins == [True, False]


def _opened(render: Probe, answered: Rendering) -> bytes:
    try:
        tail = _tail(render(_QUESTION, is_prompt=True))
    except RefusedError:
        return b""
    own = answered.own(1)
    before = [o.end for o in answered.occurrences if own and o.end <= own[0].start]
    gap = answered.text[before[-1] : own[0].start] if before else tail
    return tail.removeprefix(gap) if tail.startswith(gap) else b""


def _writes_thoughts(render: Probe, arguments: dict[str, object]) -> bool:
    call: dict[str, Any] = _CALL[0]
    for answer in (_THOUGHT[0], {**_THOUGHT[0], "tool_calls": call["tool_calls"]}):
        with suppress(RefusedError):
            if PROBE_THOUGHT.encode() in render([*_QUESTION, answer], arguments).text:
                return True
    return False
