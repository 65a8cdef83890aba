r"""Formats whose rows say which answers are better: pairs of answers, and answers with a verdict.

`preference` reads the chosen answer alone, to be trained like any other. `pairs` reads both, and
`kto` an answer with its verdict; each is a conversation that ends on one assistant turn. All before
it is the prompt, which has the weight 0, so that nothing of it is trained:

    {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    -> [user "1+1?" weight 0, assistant "2"], [user "1+1?" weight 0, assistant "3"]

Of a pair the prompt is all that both sides begin with. Turns that they share teach nothing about
which one is better: their probabilities cancel out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from packhouse.read.base_format import (
    RowFormat,
    aliases,
    check_present,
    optional,
    optional_text,
)
from packhouse.read.chat_messages import (
    Conversation,
    Turn,
    kind_of,
    read_messages,
    speaker_key,
    text_turn,
)
from packhouse.read.strict import parse_text
from packhouse.read.transcripts import is_transcript, read_transcript
from packhouse.recipe import SourceConfig
from packhouse.system.plugins import BadRowError


@dataclass(frozen=True, kw_only=True)
class Preference(RowFormat):
    """A prompt with a chosen and a rejected answer: the chosen one is read."""

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the chosen conversation, after the prompt unless it begins with it."""
        check_present(row, self.required, names, config)
        return [_whole(row, names, "chosen", _prompt(row, names))]


def _prompt(row: dict[str, Any], names: dict[str, str]) -> Conversation:
    """The row's prompt: messages, a transcript, or a question; without turns if it has none."""
    value = optional(row, names, "prompt")
    if value in (None, "", []):
        return Conversation([])
    prompt = _conversation(value, "user", names["prompt"])
    if prompt.turns[-1][:2] == ("assistant", ""):  # "Human: ... Assistant:", where the answer goes
        prompt.turns.pop()
    return prompt


def _whole(
    row: dict[str, Any], names: dict[str, str], side: str, prompt: Conversation
) -> Conversation:
    """The conversation of a side: the prompt and the answer, whether or not it repeats it.

    Raises:
        BadRowError: it is no answer, or begins with another prompt.
    """
    # After the prompt "1+1?", an answer "2", `user "1+1?", assistant "2"` and this behind a system
    # prompt all become a conversation with one "1+1?"; `user "2+2?", assistant "4"` is refused.
    # Where the prompt ends on an answer or on a system turn, "2+2?" is the next question.
    name = names[side]
    own = _conversation(row[name], "assistant", name)
    turns, before = own.turns, prompt.turns
    num_system = int(turns[0][0] == "system" and before[:1] != turns[:1])
    if turns[num_system : num_system + len(before)] != before:
        first = turns[0][0]
        if first == "system" or (first == "user" and before[-1][0] == "user"):
            detail = f"{name} is a conversation that begins with another prompt"
            raise BadRowError("prompt_differs", detail)
        turns = [*before, *turns]
    system = optional_text(row, names, "system")
    if system and turns[:1] != [text_turn("system", system)]:
        turns.insert(0, text_turn("system", system))
    tools = read_messages([], optional(row, names, "tools"), None).tools
    return Conversation(turns, tools, unread_fields=prompt.unread_fields | own.unread_fields)


@dataclass(frozen=True, kw_only=True)
class _Stated(RowFormat):
    """Rows that only a source which names the format has: `auto` reads their answers as usual."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Never: whether rejected answers are wanted is for the recipe to say."""
        return False


@dataclass(frozen=True, kw_only=True)
class Pairs(_Stated):
    """A prompt with a chosen and a rejected answer: both are read, the chosen one first."""

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read both sides, from a prompt of their own or the turns that both begin with."""
        check_present(row, self.required, names, config)
        prompt = _prompt(row, names)
        sides = [_whole(row, names, side, prompt) for side in ("chosen", "rejected")]
        chosen, rejected = (each.turns for each in sides)
        if chosen == rejected:
            raise BadRowError("same_answers", "the chosen and the rejected answer are the same")
        same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        num_shared = sum(1 for _ in same)
        first, second = (
            _answer_alone(each, num_shared, names[side])
            for each, side in zip(sides, ("chosen", "rejected"), strict=True)
        )
        own = second.unread_fields - first.unread_fields  # a row counts a field once
        return [first, second._replace(unread_fields=own)]


@dataclass(frozen=True, kw_only=True)
class Kto(_Stated):
    """A prompt with an answer, and a label that says whether it is good (1) or bad (0)."""

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the answer behind its prompt, with its verdict as the label."""
        check_present(row, self.required, names, config)
        label = row[names["label"]]
        verdict = _VERDICTS.get(str(label).strip().lower())
        if verdict is None or not isinstance(label, bool | int | float | str):
            detail = f"{names['label']} is {str(label)[:60]!r}, neither true nor false"
            raise BadRowError("label", detail)
        whole = _whole(row, names, "completion", _prompt(row, names))
        alone = _answer_alone(whole, len(whole.turns) - 1, names["completion"])
        return [alone._replace(label=verdict)]


_VERDICTS = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}


def _answer_alone(side: Conversation, num_before: int, name: str) -> Conversation:
    """The conversation with the turns before its one answer weighed 0."""
    before, answer = side.turns[:num_before], side.turns[num_before:]
    if not before:
        raise BadRowError("no_prompt", f"{name} has no prompt before it")
    if [turn[0] for turn in answer] != ["assistant"]:
        roles = ", ".join(turn[0] for turn in answer) or "nothing"
        detail = f"behind the prompt {name} has {roles[:100]}, not one assistant turn"
        raise BadRowError("not_one_answer", detail)
    *_, weight, part_weights = answer[0]
    if weight not in (None, 1) or part_weights is not None:
        raise BadRowError("weight", f"{name} has a loss weight of its own")
    untrained: list[Turn] = [(*turn[:7], 0.0, None) for turn in before]
    return side._replace(turns=[*untrained, *answer])


def _conversation(value: object, role: str, name: str) -> Conversation:
    """Read messages, JSON text that holds some, a transcript, or one text."""
    value = _messages_in_text(value)
    if isinstance(value, str):
        if is_transcript(value):
            return Conversation([text_turn(*said) for said in read_transcript(value)])
        return Conversation([text_turn(role, value)])
    if isinstance(value, dict):  # one message, as some files have it
        value = [value]
    if not isinstance(value, list):
        raise BadRowError("type", f"{name} is {kind_of(value)}, neither text nor messages")
    conversation = read_messages(value, None, None)
    if not conversation.turns:
        raise BadRowError("empty_conversation", f"{name} holds no message")
    return conversation


def _messages_in_text(value: object) -> object:
    """The messages that JSON text holds; other text, and anything else, as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        parsed, bad = parse_text(value)
        if bad is None and parsed and all(speaker_key([item]) for item in parsed):
            return parsed
    return value


_ASIDE = "prompt system|system_prompt tools"
PREFERENCE_FORMATS: dict[str, RowFormat] = {
    "preference": Preference(required=aliases("chosen"), optional=aliases(f"rejected {_ASIDE}")),
    "pairs": Pairs(required=aliases("chosen rejected"), optional=aliases(_ASIDE)),
    "kto": Kto(required=aliases("completion|response label"), optional=aliases(_ASIDE)),
}

STATED = ("pairs", "kto")
"""Formats that a source must name."""
