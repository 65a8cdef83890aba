r"""How a template opens and closes an assistant turn, learned from probe conversations.

    <|im_start|>user\nPerhaps<|im_end|>\n<|im_start|>assistant\nCertainly<|im_end|>\n
                                         ^^^^^^^^^^^^^^^^^^^^^^         ^^^^^^^^^^
                                         opening                       end token

The end token is the first one behind the answer, or EOS where control tokens lead to it:
`<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`. It must be the same for every turn. A template with
`{% generation %}` blocks says by itself what is trained; `check_generation` proves that they hold
what a model has to write.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from packhouse.errors import TemplateError
from packhouse.templates.rendering import Occurrence, Rendering


class TurnRules(NamedTuple):
    """How a template opens and closes an assistant turn."""

    has_prompt: bool
    """True if `add_generation_prompt` changes anything."""
    header: bytes
    """Without a generation prompt: what stands between the turns before and the answer."""
    opening: bytes
    """What opens an answer, whatever stands before it: the header, or the generation prompt."""
    end_token: bytes
    ends_inner_turns: bool
    """True if turns before the last one end with `end_token`, too."""
    before_end: bytes = b""
    """Control tokens that lead to `end_token`: an answer that has them has it right behind them."""
    is_tagged: bool = False
    """True if generation blocks say what is trained; the rules say where each may begin."""


Probe = Callable[[int, bool], Rendering | None]
"""(number of alternating messages, whether as a prompt) -> rendering of plain words; None where the
template refuses the conversation."""


def learn_rules(render: Probe, control: re.Pattern[bytes], eos: bytes, where: str) -> TurnRules:
    """Learn a template's rules from probe conversations.

    Args:
        render: renders them.
        control: matches control tokens.
        eos: the tokenizer's EOS; empty if it has none.
        where: what errors call the template.

    Raises:
        TemplateError: no end token, or no way to tell where an answer starts.
    """
    question, prompt_of, answered = render(1, False), render(1, True), render(2, False)
    if answered is None:
        raise TemplateError(
            f"{where} refuses a conversation of one user and one assistant turn, or rewrites it"
        )
    asked, answer = _two(answered, where)
    end_tokens = _end_tokens(_behind(answered, 1), control, eos, where)
    gap = answered.text[asked.end : answer.start]
    # Behind the question: "<|im_end|>\n", and in a prompt "<|im_end|>\n<|im_start|>assistant\n".
    without, prompt = _tail(question), _tail(prompt_of)
    has_prompt = prompt is not None and prompt != without
    header = b""
    if not has_prompt and without is not None and gap.startswith(without):
        header = gap[len(without) :]
        header = header if header.strip() else b""  # Mistral's space is the answer's
    if prompt is None or not (
        gap.startswith(prompt + header) or (has_prompt and prompt.startswith(gap))
    ):
        raise TemplateError(
            f"{where} does not show where an answer starts: the prompt of inference ends in"
            f" {(prompt or b'')[-40:]!r}, the conversation goes on with {gap[-40:]!r}"
        )
    opening = header
    if has_prompt and without is not None and prompt.startswith(without):
        opening = prompt[len(without) :]
    ends_inner = True  # nothing longer is ever rendered, or each row has to show it
    if longer := _four(render):
        inner = _run_to(eos, control, _behind(longer, 1))
        if inner != end_tokens and inner[:1] == end_tokens[:1]:
            end_tokens = end_tokens[:1]  # EOS stands behind the conversation, not behind each turn
        ends_inner = end_tokens[-1] in inner
    *lead, end_token = end_tokens
    return TurnRules(has_prompt, header, opening, end_token, ends_inner, b"".join(lead))


def check_generation(
    render: Probe,
    control: re.Pattern[bytes],
    eos: bytes,
    where: str,
    *,
    trains_all: bool = True,
) -> TurnRules | None:
    """Refuse a template whose `{% generation %}` blocks do not hold what a model has to write.

    Args:
        render: renders probes.
        control: matches control tokens.
        eos: the tokenizer's EOS; empty if it has none.
        where: what errors call the template.
        trains_all: whether answers before the last one are trained, too.

    Returns:
        Rules that say where an answer begins, where blocks begin before it; else None.

    Raises:
        TemplateError: the answer or its end token is in no block, a question is, or a block begins
            with what no rules show to be no part of the answer.
    """
    answered = render(2, False)
    if answered is None:
        return None  # refused row by row, in the template's own words
    _two(answered, where)
    longer = _four(render)
    inner = _run_to(eos, control, _behind(longer, 1)) if longer else []
    own_eos = eos if eos in inner else b""  # else it stands behind the conversation at most
    is_early = _begins_early(answered, 1, render, control, own_eos, where)
    if longer:
        for number in (1, 3) if trains_all else (3,):
            is_early |= _begins_early(longer, number, render, control, own_eos, where)
    return learn_rules(render, control, eos, where)._replace(is_tagged=True) if is_early else None


def _begins_early(
    talk: Rendering,
    number: int,
    render: Probe,
    control: re.Pattern[bytes],
    eos: bytes,
    where: str,
) -> bool:
    """Check the block of one answer of a probe; True if it begins before the answer does."""
    text, (asked, answer) = talk.text, talk.occurrences[number - 1 : number + 1]
    around = [(a, b) for a, b in talk.generation if a <= answer.start and answer.end <= b]
    if not around:
        _misplaced(where, "holds no assistant turn")
    (start, end) = around[0]
    if any(a < asked.end and asked.start < b for a, b in talk.generation):
        _misplaced(where, "holds text of the user")
    ends = _end_tokens(_behind(talk, number), control, eos, where)
    if ends[-1] not in text[answer.end : end]:
        behind = text[end : end + 24]
        _misplaced(where, f"ends before the token that ends the turn ({behind!r} follows it)")
    prompt = _tail(render(number, True)) or b""
    header = text[asked.end : answer.start]
    openers = {match.group() for match in control.finditer(text[: asked.start])}
    own = control.search(text[start : answer.start])
    is_early = header.startswith(prompt) and start < asked.end + len(prompt)
    return is_early or (own is not None and own.group() in openers)


def _behind(talk: Rendering, number: int) -> bytes:
    """What a probe's template writes between a message's text and the next one's."""
    found = talk.occurrences
    stop = found[number + 1].start if number + 1 < len(found) else len(talk.text)
    return talk.text[found[number].end : stop]


def _misplaced(where: str, what: str) -> NoReturn:
    raise TemplateError(
        f"{where} has misplaced generation tags: its {{% generation %}} block {what}. Put"
        " {% generation %} right behind the assistant's header and {% endgeneration %} right behind"
        " the end token, or take the tags out: spans are then found without them"
    )


def _two(rendering: Rendering, where: str) -> list[Occurrence]:
    if [o.field.message for o in rendering.occurrences] != [0, 1]:
        raise TemplateError(
            f"{where} does not write each content once and in order: trained turns cannot be found"
        )
    return rendering.occurrences


def _four(render: Probe) -> Rendering | None:
    """Two questions and two answers, if the template writes each of them once and in order."""
    longer = render(4, False)
    is_plain = longer and [o.field.message for o in longer.occurrences] == [0, 1, 2, 3]
    return longer if is_plain else None


def _tail(rendering: Rendering | None) -> bytes | None:
    """Text behind the last content."""
    if rendering is None or not rendering.occurrences:
        return None
    return rendering.text[rendering.occurrences[-1].end :]


def _end_tokens(after: bytes, control: re.Pattern[bytes], eos: bytes, where: str) -> list[bytes]:
    tokens = _run_to(eos, control, after)
    if not tokens:
        raise TemplateError(
            f"{where} writes no control token of the tokenizer after an assistant turn (but"
            f" {after[:40]!r}): a model trained on it never learns to stop. Use a template that"
            " ends turns with EOS, or train_on: all."
        )
    return tokens


def _run_to(eos: bytes, control: re.Pattern[bytes], text: bytes) -> list[bytes]:
    """The first control token, and those behind it if they lead to EOS with nothing between.

    Example:
        >>> control = re.compile(rb"<[a-z]+>")
        >>> [_run_to(b"<eos>", control, text) for text in (b" <end><eos><user>", b"<end> <eos>")]
        [[b'<end>', b'<eos>'], [b'<end>']]
    """
    found: list[bytes] = []
    match = control.search(text)
    while match is not None:
        found.append(match.group())
        if match.group() == eos:
            return found
        match = control.match(text, match.end())
    return found[:1]
