"""Questions about a text, with answers found in it: the shape of SQuAD.

Of several answers the first is read. Questions without any (SQuAD 2.0 has them) are left out, and
counted as the note `unanswered`.
"""

from packhouse.sources.chat_messages import BadRowError, Conversation, Turn
from packhouse.sources.strict import parse_text

__all__ = ["read_questions"]


def read_questions(paragraphs: object, question: str, answers: str) -> list[Conversation]:
    """Return a conversation for each question that has an answer.

    Args:
        paragraphs: `[{"context": text, "qas": [{question: text, answers: ...}]}]`, or its JSON.
        question: key of the question.
        answers: key of the answers: `[{"text": ...}]`, `{"text": [...]}` or `[...]`.

    Raises:
        BadRowError: they are no such paragraphs, or no question has an answer.
    """
    if isinstance(paragraphs, str):
        paragraphs, _ = parse_text(paragraphs)
    found: list[Conversation] = []
    num_unanswered = 0
    for paragraph in paragraphs if isinstance(paragraphs, list) else [paragraphs]:
        asked = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(paragraph, dict) or not isinstance(asked, list):
            raise BadRowError("type", "paragraphs is not a list of objects with a list 'qas'")
        context = paragraph.get("context")
        for item in asked:
            if not isinstance(item, dict) or not isinstance(context, str | None):
                raise BadRowError("type", "a context is not text, or a question not an object")
            answer, text = _first_answer(item.get(answers)), item.get(question)
            if answer is None:
                num_unanswered += 1
                continue
            if not isinstance(text, str) or not isinstance(answer, str):
                raise BadRowError("type", "a question or an answer is not text")
            found.append(Conversation([_turn("user", text, context), _turn("assistant", answer)]))
    if not found:
        raise BadRowError("no_assistant", "no question of the row has an answer")
    found[-1] = found[-1]._replace(num_unanswered=num_unanswered)
    return found


def _turn(role: str, content: str, context: str | None = None) -> Turn:
    return role, content, context or None, None, None, None, None, None, None


def _first_answer(answers: object) -> object:
    """The first answer; None if there is none."""
    if isinstance(answers, str) and answers.lstrip()[:1] in ("[", "{"):
        answers, _ = parse_text(answers)
    if isinstance(answers, dict):
        answers = answers.get("text")
    first = answers[0] if isinstance(answers, list) and answers else answers
    if isinstance(first, dict):
        first = first.get("text")
    return None if first in ([], "") else first
