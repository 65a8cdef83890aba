"""Probe a chat template for its stop tokens, its thinking switch and lost reasoning.

Probes are plain words, rendered once per template. Model families are never recognised by name.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from packhouse.errors import TemplateError
from packhouse.render.rendered_texts import RefusedError, shown
from packhouse.render.template_arguments import Messages
from packhouse.render.text_positions import Rendering

PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")
PROBE_THOUGHT = "Presumably"
IN_TAGS = (
    "put it in the message's text, between the tags that the model writes, such as <think> and "
    "</think>"
)
"""Advice if a template writes no reasoning and its prompt does not open a thought."""


class Switch(NamedTuple):
    """An argument that changes the generation header, to switch reasoning on or off."""

    name: str
    thinking: object
    plain: object


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Properties of a template that do not depend on the row."""

    stops: frozenset[bytes]
    """Tokens that stop generation."""
    plain_stops: frozenset[bytes]
    """Stop tokens that the template writes after a plain answer."""
    stop_sources: Mapping[str, str]
    """Source of each: `format.stop_tokens`, a file of the model, or `template`."""
    switch: Switch | None
    """None if there is none or `chat_template_kwargs` sets it."""
    opening: bytes
    """Generation prompt, which opens an answer after a question."""
    opens_thought: bool
    """True if the prompt always ends within a thought."""
    opened: bytes
    """End of the prompt that is missing before a plain answer, such as `<think>\\n`."""
    writes_thoughts: bool
    """True if reasoning is written in the last answer."""
    needs_thought: bool
    """True if every prompt opens a thought that a plain answer does not close."""
    can_open_thought: bool
    """True if the prompt for thinking opens a thought, which `format.thought_end` can close."""


Probe = Callable[..., Rendering]
"""(messages, arguments, is_prompt) -> rendering.

Raises:
    RefusedError: the template refuses the conversation.
"""

Arguments = Mapping[str, object]
_Tried = Callable[..., Rendering | None]
"""Like `Probe`, but returns None if the template refuses the conversation."""

QUESTION: Messages = [{"role": "user", "content": PROBE[0]}]
ANSWER: Messages = [{"role": "assistant", "content": PROBE[1]}]
_THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), PROBE_THOUGHT)
_THOUGHT: Messages = [{**ANSWER[0], **_THOUGHTS}]
_FUNCTION = {"name": PROBE[3], "arguments": {"a": PROBE[3]}}
# Mistral's template needs ids of nine letters or digits.
_CALLS = [{"type": "function", "id": "call00000", "function": _FUNCTION}]
_CALL: Messages = [
    {"role": "assistant", "content": "", "tool_calls": _CALLS},
    {"role": "tool", "content": PROBE[2], "tool_call_id": "call00000", "name": PROBE[3]},
]


def learn_facts(
    render: Probe,
    *,
    where: str,
    arguments: Mapping[str, Sequence[object]],
    set_arguments: Container[str],
    stop_tokens: Mapping[str, str],
    control: re.Pattern[bytes],
) -> TemplateFacts:
    """Learn what a template does from probe conversations.

    Args:
        render: renders the probes.
        where: name of the template in errors.
        arguments: arguments that only this template looks up, with values to try.
        set_arguments: arguments that the recipe sets.
        stop_tokens: tokens at which generation stops, with their sources.
        control: matches control tokens.

    Raises:
        TemplateError: the template refuses a question with an answer, or writes no control token
            after the answer.
    """
    try:
        answered = render([*QUESTION, *ANSWER])
    except RefusedError as error:
        said = error.refusal.detail.removeprefix(where).lstrip(": ")
        what = "rejects or rewrites a conversation of one user turn and one assistant turn"
        raise TemplateError(f"{where} {what} ({said}). Fix the template") from None
    if [o.field.message for o in answered.occurrences] != [0, 1]:
        what = "does not write the content of each message exactly once and in order"
        raise TemplateError(f"{where} {what}. Fix the template")

    def tried(messages: Messages, *how: object) -> Rendering | None:
        with suppress(RefusedError):
            return render(messages, *how)
        return None

    sources, plain_stops = _stops(tried, answered, stop_tokens, control, where)
    switch = _find_switch(tried, arguments)
    free = None if switch is None or switch.name in set_arguments else switch
    thinking = {free.name: free.thinking} if free else {}
    prompt, question = tried(QUESTION, {}, True), tried(QUESTION)
    tail = prompt.tail if prompt else b""
    header = answered.text[answered.occurrences[0].end : answered.occurrences[1].start]
    opened = tail.removeprefix(header) if tail.startswith(header) else b""
    # A thought begins right where the prompt ends, and a plain answer does not.
    thought, bare = (_completion(tried, answer, {}).lstrip() for answer in (_THOUGHT, ANSWER))
    opens_thought = switch is None and thought.startswith(PROBE_THOUGHT.encode())
    opens_thought = opens_thought and not bare.startswith(PROBE[1].encode())
    ends_in_thought = ends_in_tag(tail) and b"</think>" not in header
    asking = tried(QUESTION, thinking, True)
    plain = tried(QUESTION, {free.name: free.plain}, True) if free else None
    is_other = asking and plain and not plain.tail.startswith(asking.tail)
    asks = bool(asking and ends_in_tag(asking.tail)) or bool(is_other)
    return TemplateFacts(
        stops=frozenset(token.encode() for token in sources),
        plain_stops=frozenset(token.encode() for token in plain_stops),
        stop_sources=sources,
        switch=free,
        opening=tail.removeprefix(question.tail) if question else b"",
        opens_thought=opens_thought,
        opened=opened,
        # Kimi K2-Thinking writes reasoning only in turns that call a tool.
        writes_thoughts=any(
            (done := tried([*QUESTION, answer], thinking)) and PROBE_THOUGHT.encode() in done.text
            for answer in (_THOUGHT[0], {**_THOUGHT[0], "tool_calls": _CALLS})
        ),
        needs_thought=switch is None and (opens_thought or bool(opened) or ends_in_thought),
        can_open_thought=opens_thought or bool(opened) or asks,
    )


def ends_in_tag(text: bytes) -> bool:
    """Return True if a text ends within `<think>`."""
    return text.rfind(b"<think>") > text.rfind(b"</think>")


def _stops(
    tried: _Tried,
    answered: Rendering,
    given: Mapping[str, str],
    control: re.Pattern[bytes],
    where: str,
) -> tuple[dict[str, str], set[str]]:
    """Return the stop tokens with their sources, and those that follow a plain answer."""

    def after(messages: Messages) -> list[str]:
        """Return the control tokens between the first answer and the next text."""
        rendering = tried(messages)
        own = rendering.own(1) if rendering else []
        if not rendering or not own:
            return []
        following = [o.start for o in rendering.occurrences if o.start >= own[-1].end]
        stop = min(following, default=len(rendering.text))
        return [m.group().decode() for m in rendering.controls(control, own[-1].end, stop)]

    # With a question after it too, because GLM writes the stop token as the header of the next
    # turn.
    last, asked = after([*QUESTION, *ANSWER]), after([*QUESTION, *ANSWER, *QUESTION])
    if found := {*last, *asked} & {*given}:
        return dict(given), found
    # Only the recipe's own tokens are an error here: a base checkpoint has an EOS that a chat
    # template does not use.
    if "format.stop_tokens" in given.values():
        raise TemplateError(
            f"{where} ends answers with {' and '.join(map(repr, last)) or 'no control token'}, but "
            f"format.stop_tokens lists {', '.join(map(repr, given))}. Use the token that the "
            "template writes, or remove format.stop_tokens"
        )
    # A chat format on a base checkpoint: `<|im_end|>` ends each answer, and EOS is another token.
    longer = [*QUESTION, *ANSWER, *QUESTION, *ANSWER]
    inner = after(longer)
    if last and inner[:1] != last[:1] and tried(longer):
        raise TemplateError(
            f"{where} ends the last answer with {last[0]!r}, but "
            f"{inner[0] if inner else 'no control token'!r} follows the previous answer, and the "
            "model's files list neither as a stop token. List the tokens that stop the model in "
            "format.stop_tokens"
        )
    if not last:
        header = f", set format.stop_tokens: [{asked[0]!r}]" if asked else ""
        raise TemplateError(
            f"{where} writes none of the tokenizer's control tokens after an assistant turn (only "
            f"{shown(answered.tail[:40])}), so the model would never learn to stop. Use a "
            f"template that ends each turn{header}, or set format.train_on: all and "
            "audit.max_unterminated_turns: 1 to train without an end"
        )
    return {**given, last[0]: "template"}, {last[0]}


def _find_switch(tried: _Tried, arguments: Mapping[str, Sequence[object]]) -> Switch | None:
    """Return the first argument, ordered by name, that changes the header of an answer.

    Values with prompts that do not lead to answers are not modes of thinking: Granite 3.3 writes
    its argument `controls` only into the header of prompts.
    """
    for name, messages in product(sorted(arguments), (QUESTION, [*QUESTION, *_CALL])):
        fitting = (value for value in arguments[name] if _leads_to_answer(tried, {name: value}))
        done = {value: tried(messages, {name: value}, True) for value in fitting}
        prompts = {value: prompt for value, prompt in done.items() if prompt}
        if len({prompt.tail for prompt in prompts.values()}) < 2:
            continue
        answered = {value: _completion(tried, _THOUGHT, {name: value}) for value in prompts}
        thinks = (value for value in prompts if PROBE_THOUGHT.encode() in answered[value])
        header = prompts[next(thinks, next(iter(prompts)))].tail
        # If several words give the same header, take the template's default.
        default = tried(messages, {}, True)
        usual = sorted(prompts, key=lambda v: not default or prompts[v].text != default.text)
        thinking = next(value for value in usual if prompts[value].tail == header)
        return Switch(name, thinking, next(v for v in usual if prompts[v].tail != header))
    return None


def _leads_to_answer(tried: _Tried, arguments: Arguments) -> bool:
    """Return True if a prompt ends, up to an empty thought, as answers begin."""
    prompt = tried(QUESTION, arguments, True)
    if prompt is None or b"think>" in prompt.tail:
        return prompt is not None
    wholes = (tried([*QUESTION, *answer], arguments) for answer in (ANSWER, _THOUGHT))
    headers = [w.text[prompt.end : w.own(1)[0].start] for w in wholes if w and w.own(1)]
    return any(h.startswith(prompt.tail) or prompt.tail.startswith(h) for h in headers)


def _completion(tried: _Tried, answer: Messages, arguments: Arguments) -> bytes:
    """Return the text of an answer after its prompt; empty if the prompt does not lead to it."""
    prompt, finished = tried(QUESTION, arguments, True), tried([*QUESTION, *answer], arguments)
    if not prompt or not finished or not finished.text.startswith(prompt.text):
        return b""
    return finished.text[len(prompt.text) :]
