r"""Which bytes of a rendering an assistant has to learn, proven from the template's own behaviour.

A turn is trained from where the prompt of inference ends to the token that ends the turn:

    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n
                                                          ^^^^^^^^^^^^^^^^
- Its start comes from rendering the turns before it with `add_generation_prompt=True`: that is the
  prompt a model continues. Templates without a generation prompt (Mistral) start a turn where the
  turns before it end; a header they write there (`ASSISTANT:`) is no part of the turn.
- Its end is the first end-of-turn token that the template writes behind the turn's own text. Which
  token that is comes from a probe conversation, and must be the same for every turn.
- A template with `{% generation %}` blocks says so itself, and is taken at its word.

Nothing is guessed: where this cannot be shown, the template (`TemplateError`) or the row
(`RefusedError`) is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from packhouse.errors import TemplateError
from packhouse.templates.marks import Marked, Marker, Occurrence
from packhouse.templates.renderer import RefusedError

__all__ = ["Starts", "TurnRules", "check_generation", "learn_rules", "locate_turns"]


class TurnRules(NamedTuple):
    """How a template opens and closes an assistant turn."""

    has_prompt: bool
    """Whether `add_generation_prompt` changes anything."""
    header: bytes
    """Without a generation prompt: what stands between the turns before and the answer."""
    end_token: bytes
    ends_inner_turns: bool
    """Whether turns before the last one end with `end_token`, too."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Template text around a turn, in bytes: from `start` to the turn's first leaf at `stop`."""

    start: int
    stop: int
    anchor: int
    """Leaf that ends at `start`, or -1 at the very beginning."""


Starts = dict[tuple[tuple[str, ...], bool, bytes], int]
PromptTail = Callable[[int], tuple[int, bytes]]
"""Message number -> (last leaf, text after it) of the prompt that ends before that message."""


def learn_rules(
    render: Callable[[int, bool], tuple[Marked, Marker] | None],
    control: re.Pattern[bytes],
    where: str,
) -> TurnRules:
    """Learn a template's rules from probe conversations of plain words.

    Args:
        render: number of alternating messages and `add_generation_prompt` -> marked rendering;
            None where the template refuses the conversation.
        control: matches control tokens.
        where: what errors call the template.

    Raises:
        TemplateError: no end token, or no way to tell where an answer starts.
    """
    prompt, opened, answered = render(1, False), render(1, True), render(2, False)
    if answered is None:
        raise TemplateError(
            f"{where} refuses a conversation of one user and one assistant turn, or rewrites it"
        )
    first, second = _two(answered[0].occurrences, where)
    end_token = _end_token(answered[0].text[second.end :], control, where)
    without = _tail(prompt[0] if prompt else None)
    with_prompt = _tail(opened[0] if opened else None)
    gap = answered[0].text[first.end : second.start]
    header = b""
    has_prompt = with_prompt is not None and with_prompt != without
    if not has_prompt and without is not None and gap.startswith(without):
        header = gap[len(without) :]
        header = header if header.strip() else b""  # Mistral's space is the answer's
    if with_prompt is None or not _opens(gap, with_prompt, header, has_prompt):
        raise TemplateError(
            f"{where} does not show where an answer starts: the prompt of inference ends in"
            f" {(with_prompt or b'')[-40:]!r}, the conversation goes on with {gap[-40:]!r}"
        )
    longer = render(4, False)
    return TurnRules(has_prompt, header, end_token, _ends_inner(longer, end_token, control))


def check_generation(
    answered: tuple[Marked, Marker] | None,
    opened: tuple[Marked, Marker] | None,
    control: re.Pattern[bytes],
    where: str,
) -> None:
    """Refuse a template whose `{% generation %}` blocks do not hold what a model has to write.

    Args:
        answered: a user and an assistant turn, rendered with marks around the blocks; None where
            the template refuses them.
        opened: the user turn with the prompt of inference.
        control: matches control tokens.
        where: what errors call the template.

    Raises:
        TemplateError: the answer or its end token is in no block, or a prompt or a header is.
    """
    if answered is None:
        return  # refused row by row, in the template's own words
    marked, _ = answered
    asked, answer = _two(marked.occurrences, where)
    around = [(a, b) for a, b in marked.generation if a <= answer.start and answer.end <= b]
    if not around:
        _misplaced(where, "holds no assistant turn")
    (start, end) = around[0]
    if any(a < asked.end for a, _ in marked.generation):
        _misplaced(where, "holds text of the user")
    _end_token(marked.text[answer.end :], control, where)
    if control.search(marked.text[answer.end : end]) is None:
        behind = marked.text[end : end + 24]
        _misplaced(where, f"ends before the token that ends the turn ({behind!r} follows it)")
    prompt = _tail(opened[0] if opened else None) or b""
    header = marked.text[asked.end : answer.start]
    if header.startswith(prompt) and start < asked.end + len(prompt):
        given = marked.text[start : asked.end + len(prompt)]
        _misplaced(where, f"begins with {given[-24:]!r}, which the prompt of inference holds")
    openers = {match.group() for match in control.finditer(marked.text[: asked.start])}
    own = control.search(marked.text[start : answer.start])
    if own is not None and own.group() in openers:
        _misplaced(where, f"begins with the header, {own.group()!r}")


def _misplaced(where: str, what: str) -> NoReturn:
    raise TemplateError(
        f"{where} has misplaced generation tags: its {{% generation %}} block {what}. Put"
        " {% generation %} right behind the assistant's header and {% endgeneration %} right behind"
        " the end token, or take the tags out: spans are then found without them"
    )


def _opens(gap: bytes, tail: bytes, header: bytes, has_prompt: bool) -> bool:
    """Whether an answer follows the prompt: `tail` and `header` stand in the gap before it."""
    return gap.startswith(tail + header) or (has_prompt and tail.startswith(gap))


def _two(occurrences: list[Occurrence], where: str) -> tuple[Occurrence, Occurrence]:
    if [o.leaf for o in occurrences] != [0, 1]:
        raise TemplateError(
            f"{where} does not write each content once and in order: trained turns cannot be found"
        )
    return occurrences[0], occurrences[1]


def _tail(marked: Marked | None) -> bytes | None:
    if marked is None or not marked.occurrences:
        return None
    return marked.text[marked.occurrences[-1].end :]


def _end_token(after: bytes, control: re.Pattern[bytes], where: str) -> bytes:
    match = control.search(after)
    if match is None:
        raise TemplateError(
            f"{where} writes no control token of the tokenizer after an assistant turn (but"
            f" {after[:40]!r}): a model trained on it never learns to stop. Use a template that"
            " ends turns with EOS, or train_on: all."
        )
    return match.group()


def _ends_inner(
    longer: tuple[Marked, Marker] | None, end_token: bytes, control: re.Pattern[bytes]
) -> bool:
    if longer is None or [o.leaf for o in longer[0].occurrences] != [0, 1, 2, 3]:
        return True  # nothing longer is ever rendered, or each row has to show it
    occurrences = longer[0].occurrences
    match = control.search(longer[0].text[occurrences[1].end : occurrences[2].start])
    return match is not None and match.group() == end_token


def locate_turns(
    marked: Marked,
    shape: bytes,
    owners: list[int],
    roles: list[str],
    wanted: set[int],
    rules: TurnRules,
    prompt_tail: PromptTail,
    starts: Starts,
) -> dict[int, tuple[int, int]]:
    """Byte span of the wanted assistant turns of a rendering.

    Args:
        marked: the rendering.
        shape: its text, without what differs from row to row and is no leaf (ids).
        owners: message number of each leaf.
        roles: role of each message.
        wanted: numbers of the assistant turns to find.
        rules: of the template.
        prompt_tail: asked once for every kind of gap.
        starts: answers of `prompt_tail` so far, by roles before, whether first, and gap.

    Raises:
        RefusedError: a turn's start or end cannot be shown.
    """
    turns = {}
    for number in sorted(wanted):
        gap, stop, after = _surroundings(marked, owners, roles, number)
        text = marked.text[gap.start : gap.stop]
        key = (tuple(roles[:number]), gap.anchor < 0, shape[gap.start : gap.stop])
        length = starts.get(key)
        if length is None:
            if len(starts) > 4096:
                starts.clear()
            length = starts[key] = _header_length(text, number, gap.anchor, rules, prompt_tail)
        start = gap.start + length
        begin = max(stop, start)
        end = marked.text.find(rules.end_token, begin, after)
        if end < 0:
            raise RefusedError(
                "template", f"no end token {rules.end_token!r} after message {number} (assistant)"
            )
        turns[number] = (start, end + len(rules.end_token))
    return turns


def _surroundings(
    marked: Marked, owners: list[int], roles: list[str], number: int
) -> tuple[Gap, int, int]:
    """The gap before a turn, the end of the turn's last leaf, and where the next leaf starts."""
    found = marked.occurrences
    own = [at for at, o in enumerate(found) if owners[o.leaf] == number]
    if own:
        first, last = own[0], own[-1]
        if last - first + 1 != len(own):
            raise RefusedError("template", f"message {number} (assistant) is torn by other text")
        stop, end = found[first].start, found[last].end
    else:
        first = next((at for at, o in enumerate(found) if owners[o.leaf] > number), len(found))
        last = first - 1
        stop = end = -1
    before = found[first - 1] if first else None
    after = found[last + 1].start if last + 1 < len(found) else len(marked.text)
    start = before.end if before else 0
    if not own:
        _only_one_inside(owners[before.leaf] if before else -1, number, roles)
        stop, end = after, start
    return Gap(start, stop, before.leaf if before else -1), end, after


def _only_one_inside(before: int, number: int, roles: list[str]) -> None:
    if "assistant" in roles[max(before, -1) + 1 : number]:
        raise RefusedError("template", f"message {number} (assistant) has no text to be found by")


def _header_length(
    gap: bytes, number: int, anchor: int, rules: TurnRules, prompt_tail: PromptTail
) -> int:
    last_leaf, tail = prompt_tail(number)
    if last_leaf == anchor:
        if gap.startswith(tail + rules.header):
            return len(tail + rules.header)
        if rules.has_prompt and tail.startswith(gap):
            return len(gap)  # the prompt already opens something, as `<think>`: not in this turn
    raise RefusedError(
        "template",
        f"the prompt before message {number} (assistant) is no beginning of the rendering:"
        f" {tail[-40:]!r} against {gap[-40:]!r}",
    )
