r"""Learn how a template writes turns, from a few conversations rendered with it.

The tokens of a row are joined as bytes, with each control token written as 0xFF, its id, 0xFF.
UTF-8 text never contains 0xFF, so content that spells `<|im_start|>` in ordinary tokens does not
look like the start of a turn.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from packhouse.auditing.inference_prompts import has_prompts
from packhouse.auditing.plain_template import PlainTemplate, open_template
from packhouse.auditing.token_checks import blank_tokens
from packhouse.errors import TemplateError
from packhouse.recipe import Recipe
from packhouse.records.arrays import Bools, Int64s
from packhouse.registry import function_of_addon
from packhouse.render.jinja_sandbox import pinned_date
from packhouse.render.renderer import run_template
from packhouse.tokenize import TokenizerSnapshot, load_snapshot
from packhouse.tokenize.encoders import Pipeline

_U1, _A1 = "Which colour is a tomato?", "Mostly a bright red."
_U2, _A2 = "How heavy may one become?", "Some pass four kilograms."
_SYSTEM, _TOOL = "Be brief and kind.", "sunny, 21 degrees"
_CHAT = [
    {"role": "user", "content": _U1},
    {"role": "assistant", "content": _A1},
    {"role": "user", "content": _U2},
    {"role": "assistant", "content": _A2},
]
_CALL = (
    '[{"type":"function","id":"abcdefghi","function":{"name":"weather",'
    '"arguments":{"city":"Oslo"}}}]'
)
_DEFINITION = (
    '[{"type":"function","function":{"name":"weather","description":"Look out.",'
    '"parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]'
)
# Conversations to render; a template may refuse some, which are then ignored.
PROBES: tuple[dict[str, object], ...] = (
    {"messages": _CHAT[:2]},
    {"messages": _CHAT},
    {"messages": [{"role": "system", "content": _SYSTEM}, *_CHAT]},
    {
        "messages": [
            _CHAT[0],
            {"role": "assistant", "content": "", "tool_calls": _CALL},
            {"role": "tool", "content": _TOOL, "tool_call_id": "abcdefghi", "name": "weather"},
            _CHAT[3],
        ]
    },
    {"tools": _DEFINITION, "messages": _CHAT[:2]},
)

_ANSWERS = ((_U1, _A1), (_U2, _A2))
REASONING_TAGS = "<think>", "</think>"
_MARK = b"\xff"
_LEAST = 4  # minimum number of bytes of a header without a control token


def _marked(token: int) -> bytes:
    """Return the bytes of a control token."""
    return b"%s%d%s" % (_MARK, token, _MARK)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBytes:
    """Bytes of each token id, with control tokens marked."""

    texts: tuple[bytes, ...]
    widths: Int64s
    is_control: Bools
    is_blank: Bools
    """Mask of ids that are only white space."""

    @staticmethod
    def of(pipeline: Pipeline) -> "TokenBytes":
        """Build the table; if the bytes of ids are unknown, every id is a space."""
        known = pipeline.token_bytes
        count = len(pipeline.is_control)
        texts = known.to_pylist() if known is not None else [b" "] * count
        for token in np.flatnonzero(pipeline.is_control).tolist():
            texts[token] = _marked(token)
        widths = np.fromiter(map(len, texts), np.int64, count)
        return TokenBytes(tuple(texts), widths, pipeline.is_control, blank_tokens(pipeline))

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the concatenated bytes of tokens."""
        return b"".join(map(self.texts.__getitem__, ids))

    def of_text(self, text: str, control: Mapping[str, int]) -> bytes:
        """Return the bytes of a text in which control tokens are single tokens."""
        longest_first = sorted(control, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text)
        return b"".join(
            self.texts[control[piece]] if piece in control else piece.encode() for piece in pieces
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Text that a template writes around contents, as bytes in the format of `TokenBytes`."""

    answer_opens: tuple[bytes, ...] = ()
    """Text before an answer: `<|im_start|>assistant`; empty if unknown."""
    system_opens: bytes = b""
    """Text before a system prompt, if it occurs only at the start of a conversation."""
    bos_opens: bool = False
    """True if BOS occurs at the start of a conversation and nowhere else."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end answers."""
    after_end: tuple[bytes, ...] | None = None
    """Text that may follow an end token, besides white space and control tokens; None if
    unknown."""
    begins_with_control: bool = False
    """True if conversations start with a control token (after BOS)."""
    begins: bytes = b""
    """Common start of all conversations after BOS: `<|im_start|>system`; empty if text or
    different."""
    user_opens: bytes = b""
    """Text before a user turn: `### Instruction:`; empty if unknown."""
    generation_opens: tuple[bytes, ...] = ()
    """End of the generation prompt: `<|im_start|>assistant\n`; empty if unknown."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens at which generation stops; empty if unknown."""


def learn_turns(
    recipe: Recipe | None, snapshot: TokenizerSnapshot, pipeline: Pipeline, tokenizers: Path
) -> tuple[Turns, list[str]]:
    """Learn what a template writes; also return notes on what could not be learned.

    Args:
        recipe: gives template and tokenizer; None if the template is unknown.
        snapshot: tokenizer snapshot.
        pipeline: tokenization pipeline.
        tokenizers: folder of tokenizer snapshots.
    """
    unknown = partial(turns_of, [], snapshot, pipeline)
    if recipe is None:
        return unknown(), [
            "no template, so prompts and headers were not checked. Pass the template of the rows."
        ]
    if pipeline.token_bytes is None:
        return unknown(), [
            "the tokenizer cannot decode its IDs to text, so prompts and headers were not checked"
        ]
    # Render whole conversations if the template allows it (Nemotron 3 does not). Records of single
    # answers would all include what the template writes only in the prompt (Qwen3's empty thinking
    # block), which would look like a part of the header.
    made: list[dict[str, Any]] = []
    for turns in ("whole", recipe.format.turns):
        rule = recipe.format.model_copy(update={"turns": turns})
        try:
            given = recipe.model_copy(update={"format": rule})
            made = function_of_addon("pin")(PROBES, given, tokenizers)
            break
        except TemplateError as error:
            note = f"prompts and headers were not checked: {error}"
    else:
        return unknown(), [note]
    rendered = [item["input_ids"] for item in made if "input_ids" in item]
    template: dict[str, list[str]] | None = None
    if has_prompts(recipe.format):
        template = run_template(partial(_template_texts, recipe, tokenizers), recipe)
    return turns_of(rendered, snapshot, pipeline, template), []


def _template_texts(recipe: Recipe, cache: Path | None) -> dict[str, list[str]]:
    """Call `template_texts` in a worker."""
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    return template_texts(open_template(recipe, snapshot, pinned_date().isoformat()))


def template_texts(template: PlainTemplate) -> dict[str, list[str]]:
    """Return what a template writes at inference around questions and answers.

    Returns:
        `starts` of conversations, `openings` of answers, and the `stops` of generation.
    """
    starts, openings = template.starts(), template.openings()
    return {"starts": starts, "openings": openings, "stops": [*template.stop_tokens]}


def turns_of(
    rendered: Sequence[Sequence[int]],
    snapshot: TokenizerSnapshot,
    pipeline: Pipeline,
    template: Mapping[str, Sequence[str]] | None = None,
) -> Turns:
    """Return what a template writes around contents.

    Finished answers may all begin with text that the model generates: gpt-oss's
    `<|channel|>final<|message|>` after `<|start|>assistant`, or Qwen3.8's empty reasoning. So if
    prompts are known, a header is the beginning of the generation prompt, up to a tag of reasoning.

    Args:
        rendered: token ids of those of `PROBES` that the template accepts.
        snapshot: tokenizer snapshot.
        pipeline: tokenization pipeline.
        template: result of `template_texts`; None if the template writes no prompts.
    """
    named, added, table = snapshot.special_tokens, snapshot.added_tokens, TokenBytes.of(pipeline)
    eos, bos = (added.get(named.get(name, "")) for name in ("eos_token", "bos_token"))
    turns = _learn(rendered, table, eos, bos)
    if template is None:
        return turns
    starts, opens = (
        [table.of_text(text, added) for text in template[name]] for name in ("starts", "openings")
    )
    if bos is not None and turns.bos_opens:
        starts = [start.removeprefix(table.texts[bos]) for start in starts]
    tags = [table.of_text(tag, added) for tag in REASONING_TAGS]
    header, *_ = re.split(b"|".join(map(re.escape, tags)), opens[0])
    # After a tool result, many templates write no header: Mistral's [/TOOL_RESULTS] comes last.
    others = [_last_control(text) for text in opens if header not in text]
    return replace(
        turns,
        answer_opens=tuple(filter(None, [header.strip(), *others[:1]])),
        begins=_common([turns.begins, *starts]),
        generation_opens=tuple(opens),
        stop_ids=frozenset(added[text] for text in template["stops"] if text in added),
    )


def _last_control(text: bytes) -> bytes:
    """Return the last control token of a text and all after it."""
    return text[text.rfind(_MARK, 0, text.rfind(_MARK)) :].rstrip() if _MARK in text else b""


def _learn(
    rendered: Sequence[Sequence[int]], table: TokenBytes, eos_id: int | None, bos_id: int | None
) -> Turns:
    """Learn what a template writes.

    Args:
        rendered: token ids of those of `PROBES` that the template accepts.
        table: bytes of each token id.
        eos_id: EOS id, which also ends answers; None if there is none.
        bos_id: BOS id; None if there is none.
    """
    opens: list[bytes] = []
    before_questions: list[bytes] = []  # text before questions, reversed
    after_tools: list[bytes] = []
    ends = set() if eos_id is None else {eos_id}
    follows: set[bytes] = set()
    system = b""
    for ids in rendered:
        data = table.join(ids)
        # The first question follows "<|im_start|>user\n", the second
        # "<|im_end|>\n<|im_start|>user\n". The header is their common suffix, so they are compared
        # in reverse.
        if _SYSTEM.encode() not in data:  # Mistral puts it into the last user turn
            before_turns = data.partition(_U1.encode())[0], _between(data, _A1, _U2)
            before_questions += [before[::-1] for before in before_turns if before]
        for question, answer in _ANSWERS:
            if before := _between(data, question, answer):
                opens.append(before)
            following = data.partition(answer.encode())[2].lstrip()
            if following.startswith(_MARK):
                _, end, rest = following.split(_MARK, 2)
                # Cohere's <|END_RESPONSE|> comes right before the EOS that ends the turn.
                if eos_id is None or not rest.startswith(_marked(eos_id)):
                    ends.add(int(end))
                follows.add(rest.lstrip().partition(_U2.encode())[0])
        after_tools.append(_between(data, _TOOL, _A2))
        head, found, _ = data.partition(_SYSTEM.encode())
        head = head.rstrip().removeprefix(b"" if bos_id is None else table.texts[bos_id])
        if found and head.count(_MARK) and data.count(head) == 1:
            system = head
    header = _header(_common(opens), ends)
    known = [header] if header else []
    for before in after_tools:
        if header and _MARK in before and header not in before:  # such as Mistral's [/TOOL_RESULTS]
            known.append(_last_control(before))
    counts = [list(ids).count(bos_id) for ids in rendered if bos_id is not None]
    bos_opens = bool(counts) and all(n == 1 for n in counts) and bos_id not in ends
    talks = [ids[1:] if bos_opens and ids[0] == bos_id else ids for ids in rendered]
    fronts = [ids[0] for ids in talks]
    by_control = bool(fronts) and bool(table.is_control[fronts].all())
    begins = _common([table.join(ids).partition(_U1.encode())[0] for ids in talks if by_control])
    # An odd number of marks: the common part ends inside a control token.
    if begins.count(_MARK) % 2:
        begins = begins[: begins.rindex(_MARK)]
    user = _common(before_questions)[::-1]
    if user.count(_MARK) % 2:  # starts inside a control token: "1\xff" of ids 1 and 21
        user = user.partition(_MARK)[2]
    return Turns(
        answer_opens=tuple(known),
        system_opens=system,
        bos_opens=bos_opens,
        end_ids=frozenset(ends),
        after_end=tuple(sorted(each[:8] for each in follows if each[:1] not in (b"", _MARK)))
        if rendered
        else None,
        begins_with_control=by_control,
        begins=begins.rstrip(),
        user_opens=_header(user, ends),
    )


def _between(data: bytes, first: str, second: str) -> bytes:
    """Return the bytes between two contents, or b"" if they do not occur in this order."""
    begin, end = data.find(first.encode()), data.find(second.encode())
    return data[begin + len(first) : end] if 0 <= begin < end else b""


def _common(texts: Sequence[bytes]) -> bytes:
    """Return the common prefix of all texts."""
    # The prefix shared by the smallest and the greatest is shared by all: "ab1", "ab2", "abc".
    least, most = min(texts, default=b""), max(texts, default=b"")
    pairs = zip(least, most, strict=False)
    return least[: next((n for n, (a, b) in enumerate(pairs) if a != b), len(least))]


def _header(common: bytes, ends: set[int]) -> bytes:
    """Extract a header from the text common before turns, without the previous turn's end token."""
    header = common.strip()
    for end in ends:
        header = header.removeprefix(_marked(end)).lstrip() or header
    return header if header.count(_MARK) or len(header) >= _LEAST else b""
