"""Fields that rows have beyond their format: counted by name, or bad where the recipe says which.

Nobody learns what a column was that quietly went missing, so every one that holds something is
reported with its number of rows. A source's `allowed_fields` makes any other one a bad row: a file
that gets a new column half-way then says so.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from packhouse.recipe import SourceConfig
from packhouse.sources.rows import Rows
from packhouse.sources.shapes import SHAPES

__all__ = [
    "CONVERSATIONAL",
    "IN_MESSAGES",
    "TRAIN_FLAGS",
    "bounded",
    "count_extra_fields",
    "find_disallowed",
]

MAX_NAMES = 100
"""Names counted for a shard; all beyond are one, named `...`."""

CONVERSATIONAL = frozenset(
    "system system_prompt history messages conversations conversation tools functions input "
    "context question instruction prompt response answer output completion chosen reasoning "
    "thinking reasoning_content".split()
)
"""Names that a conversation's own parts go by: left out, they are worth a look."""

IN_MESSAGES = "messages[]."
"""Before the name of a field that messages have, not rows."""

TRAIN_FLAGS = frozenset("loss loss_mask loss_scale mask masked training trainable weights".split())
"""Names that other tools give to what says whether a message is trained."""

_TREE = frozenset(("deleted", "rank"))  # read in every message of a tree


def extra_names(keys: Collection[str], row_format: str, config: SourceConfig) -> list[str]:
    """Those of a row's fields that its format does not read.

    Example:
        >>> config = SourceConfig(path="", fields={"question": "ask"})
        >>> extra_names(["ask", "question", "answer", "id"], "question_answer", config)
        ['question', 'id']
    """
    if row_format not in SHAPES:
        return []
    used = set(SHAPES[row_format].names(keys, config.fields).values())
    if row_format == "oasst":
        used |= _TREE
    return [name for name in keys if name not in used]


def count_extra_fields(rows: Rows, row_format: str, config: SourceConfig) -> Counter[str]:
    """Rows that hold something in a field beyond the format, by its name."""
    counts: Counter[str] = Counter()
    extra = {keys: extra_names(keys, row_format, config) for keys in rows.layouts}
    if not any(extra.values()):
        return counts
    for row in rows:
        if type(row) is dict:
            counts.update(name for name in extra[tuple(row)] if row[name] not in _NOTHING)
    return counts


_NOTHING: tuple[Any, ...] = (None, "", [], {})


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of at most `MAX_NAMES` names, the most frequent ones; all others are `...`."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(sorted((name[:100], number) for name, number in named[:MAX_NAMES]))
    rest = sum(number for _, number in named[MAX_NAMES:])
    return kept | ({"...": rest} if rest else {})


def find_disallowed(
    rows: Rows, row_format: str, config: SourceConfig
) -> dict[int, tuple[str, str]]:
    """Index of each row that has a field beyond format and `allowed_fields` -> reason, sentence."""
    if config.allowed_fields is None:
        return {}
    allowed = set(config.allowed_fields)
    extra = {keys: extra_names(keys, row_format, config) for keys in rows.layouts}
    unknown = {keys: [name for name in extra[keys] if name not in allowed] for keys in extra}
    bad = {}
    for index, row in enumerate(rows):
        if type(row) is dict and unknown[tuple(row)]:
            name = unknown[tuple(row)][0][:100]
            detail = f"the field {name!r} is neither of {row_format} nor one of allowed_fields"
            bad[index] = ("unknown_field", detail)
    return bad
