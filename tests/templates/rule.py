"""The rule of docs/masks.md, implemented a second time with `apply_chat_template`.

Uses no code of packhouse. Slow and simple: every turn is rendered separately, and texts are found
by searching. The texts in the shapes of `tests.templates.families` occur nowhere else.
"""

import json
import re
from itertools import takewhile

from tests.templates.families import (
    CONTROL,
    Answer,
    Family,
    Messages,
    Records,
    arguments_of,
    own_texts,
    render,
    texts_of,
)

PROBE = "Perhaps"


class RefusedError(Exception):
    """A row that the rule refuses, by reason code."""


def records(of: Family, messages: Messages, tools: object, turns: str) -> Records:
    """Return the records of a conversation.

    Raises:
        RefusedError: with the reason code.
    """
    made = []
    written = ""
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, completion = turn(of, messages, k, tools)
        joined = None
        if made and prompt.startswith(written) and turns != "alone":
            joined = prompt
        elif made and turns == "joined":
            joined = _joined(prompt, written, messages[:k])
        if joined is None:
            made.append([])
            joined = prompt
        made[-1].append(Answer(k, joined, completion))
        written = joined + completion
    return made


def turn(of: Family, messages: Messages, k: int, tools: object) -> tuple[str, str]:
    """Return prompt and completion of answer k.

    Raises:
        RefusedError: with the reason code.
    """
    refusal = RefusedError("template")
    for arguments in arguments_of(of, messages, k):
        try:
            prompt = render(of, messages[:k], tools, is_prompt=True, **arguments)
            end = render(of, messages[: k + 1], tools, **arguments)
        except Exception as error:
            raise RefusedError("template") from error
        try:
            body = _body(prompt, end, messages, k)
            return prompt, _stopped(of, body, messages, k, tools, arguments)
        except RefusedError as error:
            refusal = error
    raise refusal


def _body(prompt: str, end: str, messages: Messages, k: int) -> str:
    """Return the finished conversation after the prompt, however it writes older turns."""
    reasoning = messages[k].get("reasoning")
    body = None
    if end.startswith(prompt):
        body = end[len(prompt) :]
    else:
        last = texts_of(messages[k - 1])[-1]
        header = prompt[prompt.rfind(last) :]
        if header in end:
            body = end[end.rfind(header) + len(header) :]
    if body is None:
        raise RefusedError("thought_lost" if reasoning else "no_reasoning")
    for text in texts_of(messages[k]):
        if text not in body:
            raise RefusedError("thought_lost" if text == reasoning else "content_lost")
    return body


def _stopped(
    of: Family, body: str, messages: Messages, k: int, tools: object, arguments: dict[str, bool]
) -> str:
    """Return the body up to its stop token, which may be the first of the next turn."""
    stops = re.compile("|".join(map(re.escape, of.stops)))
    own = re.compile("|".join(map(re.escape, texts_of(messages[k]))))
    last = max(found.end() for found in own.finditer(body))
    stop = stops.search(body, last)
    if stop is None:
        calls = json.loads(messages[k].get("tool_calls") or "[]")
        probe = {"role": "user", "content": PROBE}
        if calls:
            probe = {"role": "tool", "content": PROBE, "tool_call_id": calls[0]["id"]}
        more = render(of, [*messages[: k + 1], probe], tools, **arguments)
        more = more[: more.index(PROBE)]
        more = more[max(found.end() for found in own.finditer(more)) :]
        stop = stops.search(more)
        if stop is None:
            raise RefusedError("no_stop")
        body = body[:last] + more
        stop = stops.search(body, last)
        assert stop is not None
    if stops.search(own.sub("", body[: stop.start()])):
        raise RefusedError("stop_inside")
    return body[: stop.end()]


def _joined(prompt: str, written: str, messages: Messages) -> str | None:
    """Return the record plus the new part of the prompt, if it contains the same own texts."""
    own = own_texts(messages)
    ours, theirs = list(own.finditer(written)), list(own.finditer(prompt))
    num_equal = len(
        list(takewhile(lambda ab: ab[0][0] == ab[1][0], zip(ours, theirs, strict=False)))
    )
    if num_equal < len(ours):
        return None
    tail, rest = written[ours[-1].end() :], prompt[theirs[num_equal - 1].end() :]
    if rest.startswith(tail):
        return written + rest[len(tail) :]
    other = CONTROL.search(rest)  # `<|end|>` instead of `<|return|>`
    return None if other is None else written + rest[other.end() :]
