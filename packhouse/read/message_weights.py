"""Loss weights that messages, their parts and spans give, in the forms of several tools.

All that a message says of its training is read here, and refused here: nothing of it is left out.
"""

import math
from collections.abc import Sequence

import orjson

from packhouse.system.plugins import BadRowError

WEIGHTS = ("weight", "loss_weight", "loss_scale", "train", "training", "loss")
"""Fields that are read; `loss_scale` is ms-swift's, `train` and `training` Axolotl's and others',
`loss` xtuner's and ms-swift's."""

SPANS = ("train_detail", "training_detail")
"""Axolotl's fields of spans of a content."""

Pieces = list[tuple[str, float | None]]
"""Text and own weight (None: the turn's) of each part of a message."""

Parts = Sequence[tuple[int, float | None]]
"""The same with characters for text."""

_FLAGS = ("train", "training", "loss")
MAX_WEIGHT = 1e6
"""Of a message, a part, a row or a token; far below what float32 holds."""


def read_weight(message: object, number: int, *, is_answer: bool = True) -> float | None:
    """Return the loss weight: `weight`, `loss_weight` or `loss_scale`; or a flag, true or false.

    If several are given, they must agree; beside a weight, a flag says whether it may be 0. A
    `loss` that is a number is what some model had, and no weight.

    Args:
        message: a message, or a part of its content; a part that is text has none.
        number: of the message.
        is_answer: whether it is an answer, or a part of any message. The `loss_scale` of another
            message says nothing where it is 0 or 1, as in ms-swift; any other is refused.

    Example:
        >>> read_weight({"role": "assistant", "content": "No.", "train": False}, 1)
        0.0
    """
    stated: dict[str, float] = {}
    if not isinstance(message, dict):
        return None
    for key in WEIGHTS:
        value = message.get(key)
        if value is None or (key == "loss" and type(value) in (int, float)):
            continue
        is_number = type(value) is bool if key in _FLAGS else type(value) in (int, float)
        if not is_number or not math.isfinite(value) or not 0 <= value <= MAX_WEIGHT:
            what = str(value)[:40]
            raise BadRowError("type", f"message {number}: {key} is {what!r}, not a weight")
        if is_answer or key != "loss_scale":
            stated[key] = float(value)
        elif value not in (0, 1):
            raise BadRowError("type", f"message {number}: loss_scale is of answers alone")
    weights = {weight for key, weight in stated.items() if key not in _FLAGS}
    is_trained = {weight > 0 for weight in stated.values()}
    if len(weights) > 1 or len(is_trained) > 1:
        says = ", ".join(f"{key} is {message[key]}" for key in stated)
        raise BadRowError("type", f"message {number}: {says}, which contradict each other")
    return next(iter(stated.values()), None)


def weigh_message(
    message: dict[str, object],
    role: str,
    said: Pieces,
    thought: Pieces,
    *,
    is_text: bool,
    number: int,
) -> tuple[float | None, str | None]:
    """Return the weight of a message, and those of its parts as factors of it, where these differ.

    Args:
        message: as the row has it.
        role: of the message.
        said: its content.
        thought: its reasoning.
        is_text: whether the content is one text, without tool calls beside it.
        number: of the message.

    Raises:
        BadRowError: a mark is none, or some contradict each other.

    Example:
        >>> said = [("Hm. ", 0.0), ("Four.", None)]
        >>> weigh_message({}, "assistant", said, [], is_text=False, number=1)
        (None, '[[3,0.0],[6,null]]')
    """
    weight = read_weight(message, number, is_answer=role == "assistant")
    is_weighed = any(own is not None for _, own in thought)
    spans = _read_spans(message, "".join(text for text, _ in said), number)
    if spans == [] and weight is None:  # as Axolotl reads it: no part is trained
        weight = 0.0
    elif spans:
        if not is_text or is_weighed:
            detail = "spans beside tool calls or parts; say with `train` of parts what is trained"
            raise BadRowError("type", f"message {number}: {detail}")
        said, weight, is_weighed = spans, 1.0 if weight is None else weight, bool(thought)
        thought = [("".join(text for text, _ in thought), 0.0)]
    sizes = [*(_part_sizes(thought) if is_weighed else ()), *_part_sizes(said)]
    return _weigh_parts(sizes, weight, role, number)


def _part_sizes(pieces: Pieces) -> list[tuple[int, float | None]]:
    """Return the characters and the weight of each part of one text.

    A border behind a space is put before it, since tokens begin with the space before a word: the
    whole word is trained, or none of it.

    Example:
        >>> _part_sizes([("Hm. ", 0.0), ("Four.", None)])
        [(3, 0.0), (6, None)]
    """
    sizes = [(len(text), own) for text, own in pieces if text]
    texts = [text for text, _ in pieces if text]
    for at in range(1, len(sizes)):
        (before, own), (size, next_own) = sizes[at - 1 : at + 1]
        if own != next_own and texts[at - 1].endswith(" "):
            sizes[at - 1 : at + 1] = (before - 1, own), (size + 1, next_own)
    return sizes


def _read_spans(message: dict[str, object], content: str, number: int) -> Pieces | None:
    """Return the parts of a content that Axolotl's spans cut it into; None without the field.

    A list without spans has no parts. Offsets count characters, and the last one of a span belongs
    to it. What is in no span that is trained is not trained.

    Raises:
        BadRowError: they are no spans of this content.

    Example:
        >>> spans = [{"begin_offset": 0, "end_offset": 3, "train": False},
        ...          {"begin_offset": 4, "end_offset": 8, "train": True}]
        >>> _read_spans({"train_detail": spans}, "Hm. Four.", 1)
        [('Hm. ', 0.0), ('Four.', 1.0), ('', 0.0)]
    """
    given = [name for name in SPANS if message.get(name) is not None]
    if not given:
        return None
    spans = message[given[0]]
    where = f"message {number}: {given[0]}"
    if any(message[name] != spans for name in given):
        raise BadRowError("type", f"{where} and {given[1]} contradict each other")
    if spans == []:
        return []
    if not isinstance(spans, list):
        raise BadRowError("type", f"{where} is {str(spans)[:40]!r}, not a list of spans")
    trained: list[tuple[int, int]] = []
    for span in spans:
        begin, end, train = (
            span.get(name) if isinstance(span, dict) else None
            for name in ("begin_offset", "end_offset", "train")
        )
        if type(begin) is not int or type(end) is not int or train not in (True, False):
            what = f"{where} holds {str(span)[:60]!r}, not {{begin_offset, end_offset, train}}"
            raise BadRowError("type", what)
        if not 0 <= begin <= end <= len(content):
            what = f"{where}: characters {begin} to {end} of a content of {len(content)}"
            raise BadRowError("type", f"{what}; offsets count from 0, the last one included")
        if train:
            trained.append((begin, min(end + 1, len(content))))
    parts, at = Pieces(), 0
    for begin, stop in sorted(trained):
        begin = max(begin, at)
        if begin < stop:
            parts += [(content[at:begin], 0.0), (content[begin:stop], 1.0)]
            at = stop
    return [*parts, (content[at:], 0.0)]


def _weigh_parts(
    parts: Parts, weight: float | None, role: str, number: int
) -> tuple[float | None, str | None]:
    """Weight of a message, and of its parts as factors of it, where these differ.

    Args:
        parts: of a content; of reasoning and content where parts of the reasoning have weights.
        weight: of the message.
        role: of the message.
        number: of the message.

    Raises:
        BadRowError: a part of an untrained turn has a weight.

    Example:
        >>> _weigh_parts([(3, 0.0), (5, None)], None, "assistant", 0)
        (None, '[[3,0.0],[5,null]]')
        >>> _weigh_parts([(3, 0.0), (5, 0.0)], None, "assistant", 0)
        (0.0, None)
    """
    texts = [(size, own) for size, own in parts if size]
    own_weights = {own for _, own in texts}
    if own_weights <= {None}:
        return weight, None
    if len(own_weights) == 1:
        (own,) = own_weights
        return own if weight is None or own is None else own * weight, None
    if weight is None and role != "assistant" and any(own_weights - {None}):
        detail = f"message {number}: a part of a turn of {role} is trained; give the turn a weight"
        raise BadRowError("type", detail)
    return weight, orjson.dumps(texts).decode()
