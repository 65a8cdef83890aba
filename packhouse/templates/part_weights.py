r"""Weights of parts of a content: the trained spans of its turn, cut where another weight begins.

    parts "Let me see. " (weight 0) and "Four." of an answer  ->  span "Four.<|im_end|>"

What a template writes around the parts (the end token) weighs what the message weighs.
"""

import json
from collections.abc import Iterator
from typing import Any

from packhouse.templates.rendering import Rendering
from packhouse.templates.results import RefusedError
from packhouse.templates.spans import Trained

__all__ = ["weigh_spans"]


def weigh_spans(
    raw: list[dict[str, Any]], rendering: Rendering, trained: list[Trained]
) -> tuple[list[Trained], list[float]]:
    """Trained spans and their weights, by those of messages and of parts.

    Args:
        raw: canonical messages, each with the weight decided for it.
        rendering: as it is trained.
        trained: spans of whole turns.

    Raises:
        RefusedError: the template rewrites a content that has parts, or nothing is left.
    """
    if not any("part_weights" in message for message in raw):
        return trained, [1.0 if s.message < 0 else raw[s.message]["weight"] for s in trained]
    spans: list[Trained] = []
    weights: list[float] = []
    for span in trained:
        at, pieces = span.start, list[tuple[int, int, float]]()
        for start, end, factor in _parts(raw[span.message], rendering, span):
            pieces += [(at, start, 1.0), (start, end, factor)]
            at = end
        for start, end, factor in (*pieces, (at, span.end, 1.0)):
            weight = raw[span.message]["weight"] * factor
            if start == end or not weight:
                continue
            if (
                start > span.start
                and spans[-1:]
                and (spans[-1].end, weights[-1]) == (start, weight)
            ):
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(Trained(start, end, span.message))
                weights.append(weight)
    if not spans:
        raise RefusedError("nothing_trained", "no part of the conversation is trained")
    return spans, weights


def _parts(
    message: dict[str, Any], rendering: Rendering, span: Trained
) -> Iterator[tuple[int, int, float]]:
    """Where the parts of a message stand in its span, in bytes of the rendering; their factors."""
    if "part_weights" not in message:
        return
    parts = json.loads(message["part_weights"])
    for start, end, field, first, last in (
        (o.start, o.end, o.field, o.first, o.last)
        for o in rendering.occurrences
        if o.field.kind == "content" and o.field.message == span.message
    ):
        text = str(field.value)
        whole = text[first:last].encode()
        is_same = len(text) == sum(size for size, _ in parts)
        if not is_same or rendering.text[start:end] != whole:
            raise RefusedError(
                "template",
                f"the parts of message {span.message} have weights of their own, and it is not "
                "written as it stands",
            )
        at = 0
        for size, factor in parts:
            low, high = max(at, first), min(at + size, last)
            at += size
            if low < high:
                begin = start + len(text[first:low].encode())
                stop = begin + len(text[low:high].encode())
                begin, stop = max(begin, span.start), min(stop, span.end)
                if begin < stop:
                    yield begin, stop, 1.0 if factor is None else factor
