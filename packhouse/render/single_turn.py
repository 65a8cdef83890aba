r"""Render templates that are a few constants around the contents, with one Arrow join per shape.

    alpaca          preamble, "### Instruction:", "### Input:", "### Response:", answer, EOS
    alpaca_newline  the same with a line break after "### Response:"
    completion      prompt, answer, EOS
    classification  prompt with the text in it, the label's text, EOS
    sequence_classification   the text between CLS and SEP (or BOS and EOS); nothing is trained
    text            the text, EOS; all of it is trained

Each text begins with BOS if the tokenizer adds it, so that the ids are those of `tokenizer(prompt)`
at inference. A trained span is an answer and its EOS; every trained answer has one. A row with
parts that the template cannot express (tools, reasoning, further turns) is refused; nothing is left
out. 52,000 Alpaca rows take about 0.1 s.

Two additions to Stanford's Alpaca: further turns repeat the blocks without the preamble, after the
EOS of the answer and an empty line; a system prompt replaces the preamble.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import CHAT_TEMPLATES, TEMPLATES
from packhouse.records.conversation_shapes import Conversations, Shape, make_shape
from packhouse.render.compiled_shapes import (
    CompiledTemplate,
    FieldColumns,
    Filling,
    Hole,
    new_numbers,
)
from packhouse.render.rendered_texts import Refusal, Texts, Trained
from packhouse.tokenize.encoders import Ends, TokenizerSnapshot, ends_of

# The two texts of Stanford Alpaca (PROMPT_DICT in its train.py), without the blocks.
PREAMBLE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
# Ends with a line break: a label's first token would swallow a space, and then not be trained.
DEFAULT_PROMPT = "{text}\nLabel:\n"


@dataclass(slots=True)
class SingleTurnEngine:
    """Renders each shape with the template that `build` makes for it."""

    build: Callable[[Shape, Ends], CompiledTemplate | Refusal]
    ends: Ends
    label_names: list[str] | None = None
    needs_label: bool = False
    stop_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, conversations: Conversations) -> Texts:
        """Fill every shape; refuse the shapes, and the labels, that the template cannot express."""
        refused: dict[int, Refusal] = {}
        labels, usable = None, np.ones(len(conversations.row), np.bool_)
        if self.needs_label:
            usable = conversations.label.is_valid().to_numpy(zero_copy_only=False)
            refused |= dict.fromkeys(np.flatnonzero(~usable).tolist(), _UNLABELLED)
        if self.needs_label and self.label_names is not None:
            number = pc.fill_null(conversations.label, 0).to_numpy()
            known = (number >= 0) & (number < len(self.label_names))
            last = len(self.label_names) - 1
            for row in np.flatnonzero(usable & ~known).tolist():
                refused[row] = Refusal("label", f"label {number[row]} is not in 0..{last}")
            names = pa.array(self.label_names, pa.string())
            labels = names.take(pa.array(np.where(known, number, 0)))
            usable = usable & known
        refused |= dict.fromkeys(np.flatnonzero(~conversations.is_plain).tolist(), _RICH)
        usable = usable & conversations.is_plain
        columns = FieldColumns(conversations, new_numbers(), labels=labels)
        filling = Filling(conversations, columns)
        for key, rows in conversations.group(usable, with_context=True):
            shape = make_shape(np.frombuffer(key, np.int64)[:-1])
            if self.label_names and len(shape) == 2:
                shape = shape[:1]
            compiled = self.build(shape, self.ends)
            if isinstance(compiled, Refusal):
                refused.update(dict.fromkeys(rows.tolist(), compiled))
                continue
            # Items ["<s>", " ", Hole(text), "</s>"]: the text begins after BOS and the space.
            first = next(n for n, item in enumerate(compiled.items) if isinstance(item, Hole))
            opening = "".join(map(str, compiled.items[:first]))
            if self.ends.space and opening == self.ends.bos + self.ends.space:
                # A text that begins with a space does not get another one.
                starts = conversations.messages.offsets[rows]
                texts = conversations.messages.content.take(pa.array(starts))
                is_spaced = pc.starts_with(texts, " ").to_numpy(zero_copy_only=False)
                unspaced = self.build(shape, replace(self.ends, space=""))
                assert isinstance(unspaced, CompiledTemplate)
                filling.add(unspaced, rows[is_spaced])
                rows = rows[~is_spaced]
            filling.add(compiled, rows)
        return Texts(filling.filled(), refused, Counter())


_RICH = Refusal(
    "template",
    "tools, documents, arguments, tool calls, reasoning, names and part weights require the "
    "`chat` template",
)
_UNLABELLED = Refusal("template", "the row has no label")
_NOTHING = Refusal("nothing_trained", "no turn of the conversation is trained")


class _Pieces:
    """Items of a compiled template, and the message of each."""

    def __init__(self, ends: Ends, preamble: str = "") -> None:
        self.items: list[str | Hole] = [ends.bos]
        if preamble:
            self.items.append(ends.space + preamble)
        self._space = [] if preamble or not ends.space else [ends.space]
        self._places: list[tuple[int, int, int, int]] = []

    def add(self, message: int, header: list[str | Hole], body: list[str | Hole]) -> None:
        """Append a message (-1 for a label's text): its header, then its own text."""
        if header:
            header = [*self._space, *header]
        else:  # the token of the first word begins with the space, so both are trained or neither
            body = [*self._space, *body]
        self._space = []
        begin, own = len(self.items), len(self.items) + len(header)
        self.items += [*header, *body]
        self._places.append((message, begin, own, len(self.items)))

    def compiled(self, shape: Shape, config: FormatConfig) -> CompiledTemplate | Refusal:
        """Return the template, with spans trained by the weights of the shape's messages."""
        with_headers = config.train_on == "all"
        is_whole = with_headers and not config.never_train
        if is_whole and all(turn.is_trained and not turn.is_scaled for turn in shape):
            return CompiledTemplate(tuple(self.items), (Trained(0, len(self.items), 0),))
        trains_label = "assistant" not in config.never_train
        trained = [
            Trained(begin if with_headers else own, end, message)
            for message, begin, own, end in self._places
            if (shape[message].is_trained if message >= 0 else trains_label)
        ]
        return CompiledTemplate(tuple(self.items), tuple(trained)) if trained else _NOTHING


def _alpaca(shape: Shape, ends: Ends, config: FormatConfig) -> CompiledTemplate | Refusal:
    system, turns = _split_system(shape)
    roles = [turn.role for turn in turns]
    if not turns or roles != (["user", "assistant"] * len(turns))[: len(turns)]:
        return _unfit(shape, f"{config.template} needs alternating user and assistant turns")
    if any(turn.has_context for turn in shape if turn.role != "user"):
        return Refusal("template", f"{config.template} allows context only in user turns")
    # Stanford's text ends with the colon. With Qwen2.5, `:The` is one token in 21,822 of 51,974
    # rows, so the first word is not trained there. The line break of `alpaca_newline` prevents it.
    response = "\n\n### Response:" + "\n" * (config.template == "alpaca_newline")
    preamble = PREAMBLE_WITH_INPUT if turns[0].has_context else PREAMBLE
    pieces = _Pieces(ends, "" if system else preamble)
    if system:
        pieces.add(0, [], [Hole(("text", 0))])
    for number, turn in enumerate(turns, start=system):
        if turn.role == "user":
            body: list[str | Hole] = [Hole(("text", number))]
            if turn.has_context:
                body += ["\n\n### Input:\n", Hole(("context", number))]
            pieces.add(number, ["\n\n### Instruction:\n"], body)
        else:
            pieces.add(number, [response], [Hole(("text", number)), ends.eos])
    return pieces.compiled(shape, config)


def _completion(shape: Shape, ends: Ends, config: FormatConfig) -> CompiledTemplate | Refusal:
    system, turns = _split_system(shape)
    if [turn.role for turn in turns] not in (["user", "assistant"], ["assistant"]):
        return _unfit(shape, "completion takes one prompt and one answer")
    pieces, answer = _Pieces(ends), len(shape) - 1
    if system:
        pieces.add(0, [], [Hole(("text", 0)), "\n"])
    for number in range(system, answer):
        pieces.add(number, [], _whole(shape, number))
    pieces.add(answer, [], [Hole(("text", answer)), ends.eos])
    return pieces.compiled(shape, config)


def _classification(
    shape: Shape, ends: Ends, config: FormatConfig, prompt: str, named: bool
) -> CompiledTemplate | Refusal:
    wanted = ["user"] if named else ["user", "assistant"]
    if [turn.role for turn in shape] != wanted:
        return _unfit(shape, "classification takes one text and one label")
    before, _, after = prompt.partition("{text}")
    pieces = _Pieces(ends)
    pieces.add(0, [before], [*_whole(shape, 0), after])
    message, answer = (-1, Hole(("label",))) if named else (1, Hole(("text", 1)))
    pieces.add(message, [], [answer, ends.eos])
    return pieces.compiled(shape, config)


def _sequence_classification(shape: Shape, ends: Ends) -> CompiledTemplate | Refusal:
    if not shape or shape[0].role != "user" or len(shape) > 2:
        return _unfit(shape, "sequence_classification takes one text")
    return CompiledTemplate((ends.bos, ends.space, *_whole(shape, 0), ends.eos))


def _text(shape: Shape, ends: Ends) -> CompiledTemplate | Refusal:
    if len(shape) != 1 or shape[0].role not in ("user", "assistant"):
        return _unfit(shape, "text takes one message")
    if not shape[0].is_trained:
        return _NOTHING
    items = [ends.bos, ends.space, *_whole(shape, 0), ends.eos]
    return CompiledTemplate(tuple(items), (Trained(0, len(items), 0),))


def _whole(shape: Shape, message: int) -> list[str | Hole]:
    if shape[message].has_context:
        return [Hole(("text", message)), "\n", Hole(("context", message))]
    return [Hole(("text", message))]


def _split_system(shape: Shape) -> tuple[int, Shape]:
    has_system = bool(shape) and shape[0].role == "system"
    return int(has_system), shape[int(has_system) :]


def _unfit(shape: Shape, what: str) -> Refusal:
    roles = ", ".join([*(turn.role for turn in shape[:6]), *["..."] * (len(shape) > 6)])
    return Refusal("template", f"{what}, got {roles or 'no message'}")


SINGLE_TURN = tuple(n for n in TEMPLATES if not n.startswith((*CHAT_TEMPLATES, "dart-math/")))


def make_single_turn(
    config: FormatConfig, snapshot: TokenizerSnapshot, label_names: list[str] | None
) -> SingleTurnEngine:
    """Return the engine of one of SINGLE_TURN.

    Raises:
        TemplateError: the template trains an end of text and the tokenizer has no EOS token.
        ConfigError: the classification prompt does not contain `{text}` exactly once.
    """
    name, tokens = config.template, snapshot.special_tokens
    eos = tokens.get("eos_token", "")
    if name == "sequence_classification":
        ends = Ends(tokens.get("cls_token", ""), tokens.get("sep_token", ""))
        ends = ends if ends.bos and ends.eos else ends_of(snapshot, eos)
        return SingleTurnEngine(_sequence_classification, ends, needs_label=True)
    if not eos:
        what = f"template '{name}' ends answers with EOS, but the tokenizer ({snapshot.class_name})"
        fix = "Set eos_token in its tokenizer_config.json, or use `sequence_classification`."
        raise TemplateError(f"{what} has none, so the model would never learn to stop. {fix}")
    ends = ends_of(snapshot, eos)
    if name == "text":
        return SingleTurnEngine(_text, ends)
    if name != "classification":
        build = partial(_completion if name == "completion" else _alpaca, config=config)
        return SingleTurnEngine(build, ends)
    prompt = DEFAULT_PROMPT if config.prompt is None else config.prompt
    if (times := prompt.count("{text}")) != 1:
        raise ConfigError(f"format.prompt contains {{text}} {times} times. Write it exactly once")
    build, named = partial(_classification, config=config, prompt=prompt), label_names is not None
    return SingleTurnEngine(partial(build, named=named), ends, label_names, needs_label=named)
