"""Names of the parts of a question and its answer, and fields that say what no other one says."""

from collections.abc import Collection, Iterator, Mapping

from packhouse.read.records import parse_text

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
