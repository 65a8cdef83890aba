"""Formats whose rows are conversations: messages, transcripts, preferences."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal

import orjson

from packhouse.read.chat_messages import (
    Conversation,
    Turn,
    kind_of,
    optional_text,
    read_messages,
    read_tools,
    rename_messages,
    speaker_key,
    text_turn,
)
from packhouse.read.json_parsing import parse_text, value_of
from packhouse.read.row_formats import MESSAGE_FIELDS, Names, Row, RowFormat, aliases, check_present
from packhouse.recipe import SourceConfig
from packhouse.system.plugins import BadRowError


@dataclass(frozen=True, kw_only=True)
class Messages(RowFormat):
    """Rows with a field of messages, whose speakers are named by `role` or `from`."""

    speaker: Literal["role", "from"]

    def holds(self, row: Row, names: Names) -> bool:
        """Return True if the messages name their speakers by this format's key.

        False if the messages end with a question that the row's `chosen` and `rejected` answer.
        """
        messages = row[names[next(iter(self.required))]]
        if isinstance(messages, str) and messages.lstrip()[:1] == "[":
            messages = value_of(messages)
        if {"chosen", "rejected"} <= row.keys() and isinstance(messages, list) and messages:
            last = messages[-1]
            if isinstance(last, dict) and last.get(self.speaker) in ("user", "human"):
                return False
        return speaker_key(messages) == self.speaker

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the messages, after the row's system prompt."""
        check_present(row, self.required, names, config)
        system = optional_text(row, names.get("system"))
        messages = row[names[next(iter(self.required))]]
        if config.roles or not {"role", "content"}.isdisjoint(config.fields):
            messages = rename_messages(messages, self.speaker, config.fields, config.roles)
        return [read_messages(messages, row.get(names.get("tools")), system)]


@dataclass(frozen=True, kw_only=True)
class BareMessages(RowFormat):
    """Rows that are themselves a list of messages."""

    takes_lists: ClassVar[bool] = True
    is_detected: ClassVar[bool] = False  # a list has no keys; see `row_format_of`

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Return nothing: a list has no keys."""
        return []

    def read(self, row: object, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the messages."""
        return [read_messages(row, None, None)]


@dataclass(frozen=True, kw_only=True)
class Transcript(RowFormat):
    """Rows whose conversation is one text."""

    def fits(self, keys: Collection[str], renamed: Mapping[str, str]) -> bool:
        """Return True if a field's name suggests a conversation.

        A plain `text` may be meant as plain text, and next to a `prompt` it is a preference.
        """
        name = self.names(keys, renamed).get("transcript")
        is_named = name in ("chosen", "transcript") or "transcript" in renamed
        return is_named and "prompt" not in keys

    def holds(self, row: Row, names: Names) -> bool:
        """Return True if the text begins with a human's turn."""
        return is_transcript(row.get(names.get("transcript")))

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the turns, after the row's system prompt."""
        check_present(row, self.required, names, config)
        text = row[names["transcript"]]
        if not isinstance(text, str):
            raise BadRowError("type", f"{names['transcript']} is {kind_of(text)}, not text")
        system = optional_text(row, names.get("system"))
        turns = [("system", system)] if system else []
        return [Conversation([text_turn(*turn) for turn in turns + read_transcript(text)])]


# Conversations written as one text: `"\n\nHuman: Hi\n\nAssistant: Hello"`.
#
# `Human:` begins a turn only at the start of the text or after an empty line. A message that
# contains `Human:` there cannot be distinguished from a new turn, so it counts as one.


_FORMS = (
    re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):"),  # Anthropic's hh-rlhf
    # Not only after a line break: openassistant-guanaco has `### Human: Hi### Assistant: Hello`.
    re.compile(r"(?:\A\s*|\s*)### (Human|Assistant):"),  # Guanaco
)
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: object) -> bool:
    r"""Return True for text that begins with a human turn and has an assistant turn.

    Example:
        >>> is_transcript("\n\nHuman: Hi\n\nAssistant: Hello"), is_transcript("Human: Hi")
        (True, False)
    """
    form = _form_of(value) if isinstance(value, str) else None
    speakers = form.findall(str(value)) if form else []
    return speakers[:1] == ["Human"] and "Assistant" in speakers


def read_transcript(text: str) -> list[tuple[str, str]]:
    r"""Return (role, content) of each turn, with contents stripped.

    Raises:
        BadRowError: the text does not begin with a speaker.

    Example:
        >>> read_transcript("\n\nHuman: Hi\n\nYou?\n\nAssistant: Hello ")
        [('user', 'Hi\n\nYou?'), ('assistant', 'Hello')]
    """
    form = _form_of(text)
    if form is None:
        raise BadRowError("transcript", "the text does not begin with `Human:` or `Assistant:`")
    _, *parts = form.split(text)
    return [(_ROLES[s], c.strip()) for s, c in zip(parts[::2], parts[1::2], strict=True)]


def _form_of(text: str) -> re.Pattern[str] | None:
    for form in _FORMS:
        if (found := form.search(text)) and not text[: found.start()].strip():
            return form
    return None


# Three formats read preferences. `preference` reads only the chosen answer, which is trained like
# any other. `pairs` reads both answers, and `kto` reads one answer with its verdict; each becomes
# a conversation that ends with one assistant turn. The turns before it are the prompt, with
# weight 0, so that they are not trained:
#
#     {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
#     -> [user "1+1?" weight 0, assistant "2"], [user "1+1?" weight 0, assistant "3"]
#
# The prompt of a pair is everything that both sides begin with. Shared turns say nothing about
# which side is better: their probabilities cancel out. Other layouts that are read:
#
#     {"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}
#     {"conversations": [...], "chosen": {"from": "gpt", ...}, "rejected": {"from": "gpt", ...}}
#     {"prompt": "1+1?", "response_a": "3", "response_b": "2", "winner": "b"}


_ANSWER = "response|answer|output|completion|candidate|reply|conversation"
_CANDIDATE = re.compile(rf"({_ANSWER})[_ -]?([abAB012])")
_WINNER = re.compile(rf"(?:(?:model|option|assistant|{_ANSWER})[\W_]*)?([ab012])")
_QUESTIONS = ("question", "query", "instruction", "input")


@dataclass(frozen=True, kw_only=True)
class _Sides(RowFormat):
    """A prompt with a chosen and a rejected answer."""

    def names(self, keys: Collection[str], renamed: Mapping[str, str]) -> dict[str, str]:
        """Map our fields to the file's; with two candidates, the first one is `chosen` for now."""
        found = super().names(keys, renamed)
        if found.get("chosen") == "preferred_output" and "input" in keys:
            found.setdefault("prompt", "input")
        if "chosen" in found or "winner" not in found:
            return {ours: n for ours, n in found.items() if ours != "winner" or ours in renamed}
        pairs: dict[str, dict[str, str]] = {}
        for key in keys:
            if candidate := _CANDIDATE.fullmatch(key):
                pairs.setdefault(candidate[1], {})[candidate[2].lower()] = key
        known = [pair for pair in pairs.values() if "".join(sorted(pair)) in ("ab", "12", "01")]
        # Two pairs of candidates, such as response_a/b and output_1/2: `winner` may mean either.
        if len(known) != 1:
            return found
        asked = [name for name in _QUESTIONS if name in keys]
        if len(asked) == 1:
            found.setdefault("prompt", asked[0])
        sides = (known[0][which] for which in sorted(known[0]))
        return found | dict(zip(("chosen", "rejected"), sides, strict=True))

    def sides(self, row: Row, names: Names, config: SourceConfig) -> Names:
        """Return the names of a row's fields, with the winner as `chosen`.

        Raises:
            BadRowError: a field is missing, or neither candidate has won.
        """
        check_present(row, self.required, names, config)
        if "winner" not in names or not _CANDIDATE.fullmatch(names["chosen"]):
            return names
        # `preference` reads only the chosen answer, so `rejected` may be missing.
        winner, first, second = names["winner"], names["chosen"], names.get("rejected", "")
        won = str(row[winner])
        said = _WINNER.fullmatch(won.strip().lower())
        if said and said[1] == first[-1].lower():
            return names
        if said and said[1] == second[-1:].lower():
            return names | {"chosen": second, "rejected": first}
        sides = f"neither {first} nor {second}" if second else f"not {first}"
        name = winner if winner.isidentifier() else '"' + winner.replace('"', '""') + '"'
        value = won.replace("'", "''")
        test = f"{name} is not null" if row[winner] is None else f"{name} != '{value}'"
        if not re.fullmatch(r"[\w !=()']+", test):  # in quotes for YAML
            test = orjson.dumps(test).decode()
        detail = f"{winner} is {won[:60]!r}, which is {sides}"
        raise BadRowError("winner", f"{detail}; to leave such rows out, set `where: {test}`")


@dataclass(frozen=True, kw_only=True)
class Preference(_Sides):
    """A prompt with a chosen and a rejected answer, of which the chosen one is read."""

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the chosen conversation; the prompt is added unless it begins with it."""
        names = self.sides(row, names, config)
        return [_whole(row, names, "chosen", _prompt(row, names))]


def _prompt(row: Row, names: Names) -> Conversation:
    """Read the row's prompt: messages, a transcript or a question; no turns without a prompt."""
    value = row.get(names.get("prompt"))
    if value in (None, "", []):
        return Conversation([])
    value = _messages_in_text(value)
    if isinstance(value, dict) and "messages" in value:
        return read_messages(value["messages"], value.get("tools"), None)
    prompt = _conversation(value, "user", names["prompt"])
    if names["prompt"] in MESSAGE_FIELDS and prompt.turns[-1][0] == "assistant":
        return Conversation([])  # it is a whole conversation, not a prompt
    if prompt.turns[-1][:2] == ("assistant", ""):  # "Human: ... Assistant:", before the answer
        prompt.turns.pop()
    return prompt


def _whole(row: Row, names: Names, side: str, prompt: Conversation) -> Conversation:
    """Return the prompt and one side's answer as a conversation; the answer may repeat the prompt.

    Raises:
        BadRowError: it is not an answer, or begins with another prompt.
    """
    # With the prompt "1+1?", the answers "2" and `user "1+1?", assistant "2"`, also after a system
    # prompt, give a conversation with one "1+1?", and `user "2+2?", assistant "4"` is refused. If
    # the prompt ends with an answer or a system turn, "2+2?" is the next question.
    name = names[side]
    own = _conversation(row[name], "assistant", name)
    turns, before = own.turns, prompt.turns
    if not before and names.get("prompt") in MESSAGE_FIELDS and turns[0][0] == "assistant":
        raise BadRowError("no_prompt", f"{names['prompt']} ends with an answer, not a prompt")
    num_system = int(turns[0][0] == "system" and before[:1] != turns[:1])
    if turns[num_system : num_system + len(before)] != before:
        first = turns[0][0]
        if first == "system" or (first == "user" and before[-1][0] == "user"):
            detail = f"{name} is a conversation whose prompt differs from the row's prompt"
            raise BadRowError("prompt_differs", detail)
        turns = [*before, *turns]
    system = optional_text(row, names.get("system"))
    if system and turns[:1] != [text_turn("system", system)]:
        turns.insert(0, text_turn("system", system))
    tools = read_tools(row.get(names.get("tools"))) or prompt.tools
    return Conversation(turns, tools, unread_fields=prompt.unread_fields | own.unread_fields)


@dataclass(frozen=True, kw_only=True)
class Pairs(_Sides):
    """A prompt with a chosen and a rejected answer, which are both read, the chosen one first."""

    is_detected: ClassVar[bool] = False  # `auto` reads such rows as ordinary answers

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read both sides; the prompt is a field of the row, or the turns that both begin with."""
        names = self.sides(row, names, config)
        prompt = _prompt(row, names)
        sides = {side: _whole(row, names, side, prompt) for side in ("chosen", "rejected")}
        chosen, rejected = (each.turns for each in sides.values())
        if chosen == rejected:
            raise BadRowError("same_answers", "the chosen and rejected answers are identical")
        same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        num_shared = sum(1 for _ in same)
        first, second = (_answer_alone(sides[n], num_shared, names[n]) for n in sides)
        own = second.unread_fields - first.unread_fields  # a row counts a field once
        return [first, second._replace(unread_fields=own)]


@dataclass(frozen=True, kw_only=True)
class Kto(RowFormat):
    """A prompt with an answer and a label: good (1) or bad (0)."""

    is_detected: ClassVar[bool] = False  # `auto` reads such rows as ordinary answers

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the prompt and the answer, with the verdict as the label."""
        check_present(row, self.required, names, config)
        label = row[names["label"]]
        verdict = _VERDICTS.get(str(label).strip().lower())
        if verdict is None or not isinstance(label, bool | int | float | str):
            detail = f"{names['label']} is {str(label)[:60]!r}, not true or false"
            raise BadRowError("label", detail)
        whole = _whole(row, names, "completion", _prompt(row, names))
        alone = _answer_alone(whole, len(whole.turns) - 1, names["completion"])
        return [alone._replace(label=verdict)]


_VERDICTS = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}


def _answer_alone(side: Conversation, num_before: int, name: str) -> Conversation:
    """Return a conversation in which all turns before the one answer have weight 0."""
    before, answer = side.turns[:num_before], side.turns[num_before:]
    if not before:
        raise BadRowError("no_prompt", f"{name} has no prompt")
    if [turn[0] for turn in answer] != ["assistant"]:
        roles = ", ".join(turn[0] for turn in answer) or "none"
        detail = f"{name} must have one assistant turn after the prompt; its roles: {roles[:100]}"
        raise BadRowError("not_one_answer", detail)
    *_, weight, part_weights = answer[0]
    if weight not in (None, 1) or part_weights is not None:
        raise BadRowError("weight", f"the answer in {name} has a loss weight")
    untrained: list[Turn] = [(*turn[:7], 0.0, None) for turn in before]
    return side._replace(turns=[*untrained, *answer])


def _conversation(value: object, role: str, name: str) -> Conversation:
    """Read messages, messages as JSON text, a transcript, or plain text."""
    value = _messages_in_text(value)
    if isinstance(value, str):
        if is_transcript(value):
            return Conversation([text_turn(*said) for said in read_transcript(value)])
        return Conversation([text_turn(role, value)])
    if isinstance(value, dict):  # some files have one message without a list
        value = [value]
    if not isinstance(value, list):
        raise BadRowError("type", f"{name} is {kind_of(value)}, not text or messages")
    conversation = read_messages(value, None, None)
    if not conversation.turns:
        raise BadRowError("empty_conversation", f"{name} has no message")
    return conversation


def _messages_in_text(value: object) -> object:
    """Parse JSON text with messages; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed, bad = parse_text(value)
        if isinstance(parsed, dict):
            return parsed if any(keys <= parsed.keys() for keys in _OF_OBJECTS) else value
        if bad is None and parsed and all(speaker_key([item]) for item in parsed):
            return parsed
    return value


_OF_OBJECTS = ({"role", "content"}, {"from", "value"}, {"messages"})


_TALK = aliases("tools|functions system|system_prompt")
_ASIDE = "system|system_prompt tools"
_CHOSEN = "chosen|preferred_output"
_REJECTED = "rejected|non_preferred_output"
_PROMPT = f"prompt|conversations|conversation|messages winner|preferred {_ASIDE}"
CONVERSATION_FORMATS: dict[str, RowFormat] = {
    "messages": BareMessages(required={}),
    "chat": Messages(
        required=aliases("messages|conversations|conversation"), optional=_TALK, speaker="role"
    ),
    "sharegpt": Messages(
        required=aliases("conversations|messages|conversation"), optional=_TALK, speaker="from"
    ),
    "transcript": Transcript(
        required=aliases("transcript|chosen|text|conversation"),
        optional=aliases("rejected system|system_prompt"),
    ),
    "preference": Preference(required=aliases(_CHOSEN), optional=aliases(f"{_REJECTED} {_PROMPT}")),
    "pairs": Pairs(required=aliases(f"{_CHOSEN} {_REJECTED}"), optional=aliases(_PROMPT)),
    "kto": Kto(required=aliases("completion|response label"), optional=aliases(f"prompt {_ASIDE}")),
}
"""Formats in the order in which they are tried."""
