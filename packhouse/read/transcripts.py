r"""Conversations written as one text: `"\n\nHuman: Hi\n\nAssistant: Hello"`.

A speaker is one only at the begin of the text or behind an empty line. Nothing in such a text
tells a speaker from a message that says `Human:` there, so it is a new turn.
"""

import re

from packhouse.system.plugins import BadRowError

_FORMS = (
    re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):"),  # Anthropic's hh-rlhf
    re.compile(r"(?:\A\s*|\s*)### (Human|Assistant):"),  # Guanaco
)
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: object) -> bool:
    r"""Return True for text that begins with a human's turn, and has an assistant's.

    Example:
        >>> is_transcript("\n\nHuman: Hi\n\nAssistant: Hello"), is_transcript("Human: Hi")
        (True, False)
    """
    form = _form_of(value) if isinstance(value, str) else None
    if form is None:
        return False
    speakers = form.findall(str(value))
    return speakers[0] == "Human" and "Assistant" in speakers


def read_transcript(text: str) -> list[tuple[str, str]]:
    r"""Return (role, content) of each turn, without the white space around contents.

    Raises:
        BadRowError: the text does not begin with a speaker.

    Example:
        >>> read_transcript("\n\nHuman: Hi\n\nYou?\n\nAssistant: Hello ")
        [('user', 'Hi\n\nYou?'), ('assistant', 'Hello')]
    """
    form = _form_of(text)
    if form is None:
        raise BadRowError("transcript", "the text does not begin with `Human:` or `Assistant:`")
    _, *parts = form.split(text)
    return [(_ROLES[s], c.strip()) for s, c in zip(parts[::2], parts[1::2], strict=True)]


def _form_of(text: str) -> re.Pattern[str] | None:
    for form in _FORMS:
        if (found := form.search(text)) and not text[: found.start()].strip():
            return form
    return None
