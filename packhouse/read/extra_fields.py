"""Fields that rows have beyond what their format reads: counted, bad rows, or a refusal.

Every field that holds something is reported with its number of rows. A source's `ignored_fields`
makes a row with any other field a bad row. And where nobody chose the format (`format: auto`), a
field that goes by the name of a part of a conversation stops the run: the answer would be trained
without it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from packhouse.errors import SourceError
from packhouse.read.records import Rows, parse_text
from packhouse.read.row_formats import option_names, row_format_called
from packhouse.recipe import SourceConfig

ExtraFields = dict[tuple[str, ...], list[str]]
"""Keys of rows -> those of them that the rows' format does not read."""

MAX_NAMES = 100
"""Names counted for a shard; all beyond are one, named `...`."""

PARTS = {
    "question": frozenset(("question", "query", "instruction", "prompt")),
    "context": frozenset(
        "context input passage paragraph background article document story evidence knowledge "
        "schema sql_context".split()
    ),
    "answer": frozenset(("answer", "response", "output", "completion")),
    "system": frozenset(("system", "system_prompt")),
    "history": frozenset(("history",)),
    "reasoning": frozenset(
        "reasoning thinking reasoning_content rationale explanation thought cot "
        "chain_of_thought".split()
    ),
}
"""Names of the parts of a question and its answer, by `question_answer`'s names for them."""

CONVERSATIONAL = frozenset().union(*PARTS.values()) | frozenset(
    "messages conversations conversation tools functions chosen options choices A B C D".split()
)
"""Names of a conversation's own parts."""

IN_MESSAGES = "messages[]."
"""Before the name of a field that messages have, not rows."""

TRAIN_FLAGS = frozenset("loss_mask mask masked trainable weights".split())
"""Names that other tools give to what says whether a message is trained."""


_MEDIA = frozenset("image images video videos audio audios".split())
"""Names of what a row has beside its text in the data of models that see or hear."""


def find_extra_fields(
    layouts: Iterable[tuple[str, ...]], row_format: str, config: SourceConfig
) -> ExtraFields:
    """Find the fields that a format does not read, for each of the rows' sequences of keys.

    Example:
        >>> config = SourceConfig(path="", fields={"question": "ask"})
        >>> find_extra_fields([("ask", "question", "id")], "question_answer", config)
        {('ask', 'question', 'id'): ['question', 'id']}
    """
    unread = row_format_called(row_format).unread
    extra = {}
    for keys in layouts:
        beside = option_names(keys, config).values()
        extra[keys] = [name for name in unread(keys, config.fields) if name not in beside]
    return extra


_NOTHING: tuple[object, ...] = (None, "", [], {})


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of at most `MAX_NAMES` names, the most frequent ones; all others are `...`."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(sorted((name[:100], number) for name, number in named[:MAX_NAMES]))
    rest = sum(number for _, number in named[MAX_NAMES:])
    return kept | ({"...": rest} if rest else {})


def look_at_extra_fields(
    rows: Rows, extra: ExtraFields, row_format: str, config: SourceConfig
) -> tuple[Counter[str], dict[int, tuple[str, str]]]:
    """Count the rows that hold something in an extra field, and find those that it makes bad.

    Bad are fields beyond format and `ignored_fields`, where a source has them; and images and the
    like, unless `ignored_fields` names their field.

    Returns:
        Name of a field -> rows; index of each bad row -> reason, sentence.
    """
    counts: Counter[str] = Counter()
    bad: dict[int, tuple[str, str]] = {}
    allowed = set(config.ignored_fields or ())
    # By keys, not by row: millions of rows share a few sets of keys.
    unknown = {keys: [n for n in names if n not in allowed] for keys, names in extra.items()}
    for index, row in enumerate(rows) if any(extra.values()) else ():
        if not isinstance(row, dict):
            continue
        held = [name for name in extra[tuple(row)] if row[name] not in _NOTHING]
        counts.update(held)
        names = unknown[tuple(row)]
        media = next((name for name in held if name in names and name in _MEDIA), None)
        if media is not None:
            bad[index] = ("media", f"the field {media!r} holds what is no text")
        elif names and config.ignored_fields is not None:
            detail = f"the field {names[0][:100]!r} is neither of {row_format} nor one of"
            bad[index] = ("unknown_field", f"{detail} ignored_fields")
    return counts, bad


def check_nothing_is_left_out(
    rows: Rows,
    name_of: Callable[[int], str],
    extra: ExtraFields,
    row_format: str,
    config: SourceConfig,
    uri: str,
) -> None:
    """Refuse rows of an `auto` source with a part of the conversation that would not be read.

    So is a `label` that says that an answer is a bad one.

    A field that repeats what the fields that are read say is no loss: many chats come with a
    `prompt` that is their first message.

    Args:
        rows: parsed rows.
        name_of: name of a row by its index, for messages: `line 18`.
        extra: from `find_extra_fields`.
        row_format: what `auto` found.
        config: the source.
        uri: for messages.

    Raises:
        SourceError: names the row, the field, and what to write into the recipe.
    """
    if config.format != "auto" or row_format == "tokenized":  # ids say all that a row teaches
        return
    allowed = set(config.ignored_fields or ())
    labelled = {keys for keys, names in extra.items() if "label" in {*names} - allowed}
    suspects = {keys: CONVERSATIONAL.intersection(names) - allowed for keys, names in extra.items()}
    if not labelled and not any(suspects.values()):
        return
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            continue
        if tuple(row) in labelled and row["label"] is False:
            said = f"source file '{uri}': {name_of(index)} {bad_answer_remedy(row_format)}"
            raise SourceError(said, uri=uri)
        for name in left_out_of(row, suspects[tuple(row)]):
            raise SourceError(
                f"source file '{uri}': {name_of(index)} says something in the field '{name}', "
                f"which the format '{row_format}' does not read, so it would not be trained. "
                f"{_remedy(row, name, row_format)}",
                uri=uri,
            )


def bad_answer_remedy(row_format: str) -> str:
    """Say what to do with rows whose `label` is false, of a format that does not read it."""
    return (
        "has `label: false`, as data for KTO says of a bad answer, and the format "
        f"'{row_format}' would train it as a good one. Write `where: label` to leave such rows "
        "out, or `format: kto` and `pack: {strategy: none}` to publish all with their labels; if "
        f"it says something else, `format: {row_format}`"
    )


def left_out_of(row: Mapping[str, object], unread: Collection[str]) -> list[str]:
    """Return those of a row's unread fields that say what no other field of it says."""
    read = "\n".join(text for name in row if name not in unread for text in _texts(row[name]))
    return [
        name
        for name in sorted(unread)
        if name in row and any(text not in read for text in _texts(row[name]))
    ]


def _texts(value: object) -> Iterator[str]:
    """Every text in a value that is not blank; a column of text may hold JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed, _ = parse_text(value)
        value = value if parsed is None else parsed
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _remedy(row: Mapping[str, object], name: str, row_format: str) -> str:
    leave_out = (
        f"to leave it out, write `format: {row_format}` and `ignored_fields: [{name}]` "
        "for this source"
    )
    fields = {part: [key for key in row if key in names] for part, names in PARTS.items()}
    is_pair = all(len(found) < 2 for found in fields.values())
    if not (is_pair and fields["question"] and fields["answer"]):
        return f"Join it with another field, or, {leave_out}"
    named = {part: found[0] for part, found in fields.items() if found}
    if not any(name == key for key in named.values()):
        return f"`packhouse init` looks at the file and proposes how it is read; {leave_out}"
    mapping = ", ".join(f"{part}: {key}" for part, key in named.items())
    train = f"`format: question_answer` and `fields: {{{mapping}}}`"
    return f"To train with it, write {train}; {leave_out}"
