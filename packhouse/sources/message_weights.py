"""Loss weights that messages, their parts and spans give, in the forms of several tools."""

import math
from collections.abc import Sequence

import orjson

from packhouse.plugins import BadRowError

__all__ = [
    "MAX_WEIGHT",
    "SPANS",
    "WEIGHTS",
    "Pieces",
    "part_sizes",
    "read_spans",
    "read_weight",
    "weigh_parts",
]

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
_SAY_NOTHING: dict[str, tuple[object, ...]] = {
    "loss_scale": (True, []),  # 1 among them
    "training": (True, []),
}
"""An answer is trained anyway: such a row is called as one that says nothing."""
MAX_WEIGHT = 1e6
"""Of a message, a part, a row or a token; far below what float32 holds."""


def read_weight(message: object, number: int) -> float | None:
    """Return the loss weight: `weight`, `loss_weight` or `loss_scale`; or a flag, true or false.

    If several are given, they must agree; beside a weight, a flag says whether it may be 0. A
    `loss` that is a number is what some model had, and no weight.

    Args:
        message: a message, or a part of its content; a part that is text has none.
        number: of the message.

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
        if value in _SAY_NOTHING.get(key, ()):
            continue
        is_number = type(value) is bool if key in _FLAGS else type(value) in (int, float)
        if not is_number or not math.isfinite(value) or not 0 <= value <= MAX_WEIGHT:
            what = str(value)[:40]
            raise BadRowError("type", f"message {number}: {key} is {what!r}, not a weight")
        stated[key] = float(value)
    weights = {weight for key, weight in stated.items() if key not in _FLAGS}
    is_trained = {weight > 0 for weight in stated.values()}
    if len(weights) > 1 or len(is_trained) > 1:
        says = ", ".join(f"{key} is {message[key]}" for key in stated)
        raise BadRowError("type", f"message {number}: {says}, which contradict each other")
    return next(iter(stated.values()), None)


def part_sizes(pieces: Pieces) -> list[tuple[int, float | None]]:
    """Return the characters and the weight of each part of one text.

    A border behind a space is put before it, since tokens begin with the space before a word: the
    whole word is trained, or none of it.

    Example:
        >>> part_sizes([("Hm. ", 0.0), ("Four.", None)])
        [(3, 0.0), (6, None)]
    """
    sizes = [(len(text), own) for text, own in pieces if text]
    texts = [text for text, _ in pieces if text]
    for at in range(1, len(sizes)):
        (before, own), (size, next_own) = sizes[at - 1 : at + 1]
        if own != next_own and texts[at - 1].endswith(" "):
            sizes[at - 1 : at + 1] = (before - 1, own), (size + 1, next_own)
    return sizes


def read_spans(message: dict[str, object], content: str, number: int) -> Pieces | None:
    """Return the parts of a content that Axolotl's spans cut it into; None without any.

    Offsets count characters, and the last one of a span belongs to it. What is in no span that is
    trained is not trained.

    Raises:
        BadRowError: they are no spans of this content.

    Example:
        >>> spans = [{"begin_offset": 0, "end_offset": 3, "train": False},
        ...          {"begin_offset": 4, "end_offset": 8, "train": True}]
        >>> read_spans({"train_detail": spans}, "Hm. Four.", 1)
        [('Hm. ', 0.0), ('Four.', 1.0), ('', 0.0)]
    """
    field = next((name for name in SPANS if message.get(name) not in _NO_SPANS), None)
    if field is None:
        return None
    spans = message[field]
    where = f"message {number}: {field}"
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


_NO_SPANS: tuple[object, ...] = (None, True, 1, [])


def weigh_parts(
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
        >>> weigh_parts([(3, 0.0), (5, None)], None, "assistant", 0)
        (None, '[[3,0.0],[5,null]]')
        >>> weigh_parts([(3, 0.0), (5, 0.0)], None, "assistant", 0)
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
