"""Loss weights that messages and parts of their contents give, in the forms that files have."""

import math
from collections.abc import Sequence

import orjson

from packhouse.plugins import BadRowError

__all__ = ["WEIGHTS", "read_weight", "weigh_parts"]

WEIGHTS = ("weight", "loss_weight", "train", "loss")
"""Fields that are read; `train` is Axolotl's and others', `loss` xtuner's."""

_OTHERS = ("loss_scale", "training", "training_detail", "train_detail")
"""Of ms-swift and Axolotl; the last two hold character offsets. Not read: where one says other than
that all is trained as it is, the message would be trained as nobody meant."""

_TRAIN_ALL: tuple[object, ...] = (None, True, 1, [])
_FLAGS = ("train", "loss")
_MAX_WEIGHT = 1e6  # far below what float32 holds


def read_weight(message: object, number: int) -> float | None:
    """Return the loss weight: `weight`, `loss_weight` (a number), `train`, `loss` (true or false).

    If several are given, they must agree; beside a weight, a flag says whether it may be 0. A
    `loss` that is a number is what some model had, and no weight.

    Args:
        message: a message, or a part of its content; a part that is text has none.
        number: of the message.

    Example:
        >>> read_weight({"role": "assistant", "content": "No.", "train": False}, 1)
        0.0
    """
    given: dict[str, float] = {}
    if not isinstance(message, dict):
        return None
    for key in _OTHERS:
        value = message.get(key)
        if value not in _TRAIN_ALL:
            what = f"message {number}: {key} is {str(value)[:40]!r}, which is not read"
            raise BadRowError("type", f"{what}; say with `train` or `weight` what is trained")
    for key in WEIGHTS:
        value = message.get(key)
        if value is None or (key == "loss" and type(value) in (int, float)):
            continue
        is_number = type(value) is bool if key in _FLAGS else type(value) in (int, float)
        if not is_number or not math.isfinite(value) or not 0 <= value <= _MAX_WEIGHT:
            what = str(value)[:40]
            raise BadRowError("type", f"message {number}: {key} is {what!r}, not a weight")
        given[key] = float(value)
    weights = {weight for key, weight in given.items() if key not in _FLAGS}
    is_trained = {weight > 0 for weight in given.values()}
    if len(weights) > 1 or len(is_trained) > 1:
        says = ", ".join(f"{key} is {message[key]}" for key in given)
        raise BadRowError("type", f"message {number}: {says}, which contradict each other")
    return next(iter(given.values()), None)


def weigh_parts(
    parts: Sequence[tuple[int | None, float | None]], weight: float | None, role: str, number: int
) -> tuple[float | None, str | None]:
    """Weight of a message, and of its parts as factors of it, where these differ.

    Args:
        parts: characters (None: no text) and own weight of each part of a content.
        weight: of the message.
        role: of the message.
        number: of the message.

    Raises:
        BadRowError: what is no text has a weight, or a part of an untrained turn.

    Example:
        >>> weigh_parts([(3, 0.0), (5, None)], None, "assistant", 0)
        (None, '[[3,0.0],[5,null]]')
        >>> weigh_parts([(3, 0.0), (5, 0.0)], None, "assistant", 0)
        (0.0, None)
    """
    if any(size is None and own is not None for size, own in parts):
        raise BadRowError("type", f"message {number}: a part that is no text has a weight")
    texts = [(size, own) for size, own in parts if size]
    given = {own for _, own in texts}
    if given <= {None}:
        return weight, None
    if len(given) == 1:
        (own,) = given
        return own if weight is None or own is None else own * weight, None
    if weight is None and role != "assistant" and any(given - {None}):
        detail = f"message {number}: a part of a turn of {role} is trained; give the turn a weight"
        raise BadRowError("type", detail)
    return weight, orjson.dumps(texts).decode()
