"""Which fields of rows hold the question, the answer and the rest, by their names and values.

A format that the rows fit as they are goes first. Else names are compared with those that people
give: `preferred_output` ends in `output`, an answer's name. Where no name tells, the first two
texts of a row are question and answer, as a guess that is said to be one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packhouse.read.chat_messages import SPEAKERS
from packhouse.read.conversation_formats import is_transcript
from packhouse.read.extra_fields import PARTS
from packhouse.read.records import parse_text
from packhouse.read.row_formats import MESSAGE_FIELDS, row_format_of, row_formats
from packhouse.read.text_formats import TextFields

_QUESTION = (
    "question instruction prompt query ask user human problem request input inputs q 问题 提问 问 "
    "指令 質問 질문 frage pregunta pergunta вопрос soal patient customer utterance task title "
    "source src document article text passage"
).split()
_ANSWER = (
    "solution answer output response completion assistant reply bot gpt chosen target targets a "
    "答案 回答 答 输出 回复 答え 답변 antwort respuesta resposta réponse ответ jawaban "
    "doctor agent chatbot tgt summary highlights result translation"
).split()
_PLAIN = ("text", "content", "body")
"""Names of a text that is no answer, whatever stands beside it."""
_CONTEXT = "context input background passage reference material 背景 输入".split()
_SYSTEM = "system sys persona".split()
_REASONING = "reasoning thinking thought thoughts cot".split()
_FILLERS = frozenset("text content body string message msg prompt field".split())
"""Last words of a name that say nothing: `question_text`."""
_OTHER = frozenset(
    "id ids rejected wrong incorrect bad worst negative dispreferred type source score len length "
    "lang language url date time count num model category topic tag name choices options".split()
)
"""Words of names that hold neither question nor answer: `question_id`, `rejected_output`."""

_SPEAKER_KEYS = ("role", "from", "speaker", "sender", "author", "who", "name", "user")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_USERS = frozenset(
    "user human customer client patient person prompter question q student visitor caller kunde me "
    "用户 问 患者".split()
)
_ASSISTANTS = frozenset(
    "assistant gpt bot ai model agent chatgpt chatbot doctor answer a teacher support machine "
    "claude llm response 助手 机器人 答 医生".split()
)
_MAX_EMPTY = 0.1
"""The share of rows that may be of no format; they are bad rows."""
_SLOTS = (
    ("prompt_completion", "prompt", "completion"),
    ("question_answer", "question", "answer"),
)
"""Formats whose fields may go by any name: (format, question, answer)."""


@dataclass(frozen=True)
class Shape:
    """How rows are read: settings of a source."""

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    is_guess: bool = False
    """True where the order of the fields decided, not their names."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of a recipe's source."""
        keys = {"format": self.format, "fields": dict(self.fields), "roles": dict(self.roles)}
        return {key: value for key, value in keys.items() if value}


def shape_of(rows: Sequence[Any], taken: Iterable[str] = ()) -> Shape | None:
    """Return how rows of the same keys are read; None if nothing tells.

    Args:
        rows: at least one; objects of the same keys, or lists.
        taken: formats whose names of fields are in use by other rows of the file.

    Example:
        >>> shape_of([{"id": 1, "query": "1+1?", "preferred_output": "2", "rejected_output": "3"}])
        Shape(format='prompt_completion', fields={'prompt': 'query', ...}, roles={}, is_guess=False)
    """
    known = Counter(row_format_of(row, {}) for row in rows)
    if len(known) == 2 and 0 < known[None] <= _MAX_EMPTY * len(rows):  # messages are null or []
        rows = [row for row in rows if row_format_of(row, {}) is not None]
        del known[None]
    found = next(iter(known)) if len(known) == 1 else None
    if found in ("chat", "sharegpt"):
        of_chat = row_formats()[found]
        names = of_chat.names(rows[0], {})
        messages = names[next(iter(of_chat.required))]
        return _shape_of_messages(messages, [row[messages] for row in rows]) or Shape(found)
    if found == "preference":
        return _shape_of_preference(rows)
    if found not in (None, "text") and _has_texts(found, rows):
        rest = row_formats()[found].unread(rows[0], {}) if isinstance(rows[0], dict) else []
        return Shape(found, _beside(found, rest, rows))
    if not all(isinstance(row, dict) for row in rows):
        return None
    for name in rows[0]:
        if all(is_transcript(row[name]) for row in rows):
            known_names = row_formats()["transcript"].names([name], {})
            return Shape("transcript", {} if known_names else {"transcript": name})
        shape = _shape_of_messages(name, [row[name] for row in rows])
        if shape is not None:
            return shape
    shape = _shape_of_texts(rows, frozenset(taken))
    return Shape("text") if found == "text" and (shape is None or shape.is_guess) else shape


def _shape_of_preference(rows: Sequence[dict[str, Any]]) -> Shape:
    """Rows with a chosen answer, and the prompt by whatever name."""
    rest = [name for name in rows[0] if name not in row_formats()["preference"].names(rows[0], {})]
    is_answer = all(isinstance(row["chosen"], str) for row in rows)
    prompt = None if "prompt" in rows[0] or not is_answer else _best(rest, _QUESTION)
    return Shape("preference", {} if prompt is None else {"prompt": prompt})


def _beside(row_format: str, names: Sequence[str], rows: Sequence[Any]) -> dict[str, str]:
    """The fields that hold a passage to the question and the answer's reasoning, where read."""
    texts = _texts_of(names, rows)
    known = {"reasoning": _best(texts, _REASONING)}
    if "context" not in row_formats()[row_format].names(rows[0], {}):
        known["context"] = next((name for name in texts if name in PARTS["context"]), None)
    optional = row_formats()[row_format].optional
    return {part: name for part, name in known.items() if name is not None and part in optional}


def _texts_of(names: Iterable[str], rows: Sequence[Any]) -> list[str]:
    """The names of fields that hold text in some row, and nothing but text in any."""
    return [
        name
        for name in names
        if all(isinstance(row[name], str | None) for row in rows)
        and any(str(row[name] or "").strip() for row in rows)
    ]


def _has_texts(row_format: str, rows: Sequence[Any]) -> bool:
    """Return True unless a format wants text in fields where no row has any."""
    reader = row_formats()[row_format]
    if not isinstance(reader, TextFields):
        return True
    names = [reader.names(rows[0], {})[ours] for _, ours in reader.turns]
    return any(all(isinstance(row[name], str) for name in names) for row in rows)


def join_shapes(shapes: Iterable[Shape]) -> Shape | None:
    """Return one shape for rows of several; None if their names of fields contradict each other."""
    different = list({(s.format, *s.fields.items()): s for s in shapes}.values())
    fields: dict[str, str] = {}
    roles: dict[str, str] = {}
    for shape in different:
        if any(fields.setdefault(ours, name) != name for ours, name in shape.fields.items()):
            return None
        roles |= shape.roles
    formats = {shape.format for shape in different}
    joined = replace(different[0], fields=fields, roles=roles)
    return joined if len(formats) == 1 else replace(joined, format="mixed")


def _shape_of_messages(name: str, values: Sequence[Any]) -> Shape | None:
    """The shape of rows with messages in the field `name`, whatever these call their parts.

    Example:
        >>> said = [{"speaker": "human", "text": "1+1?"}, {"speaker": "bot", "text": "2"}]
        >>> shape = _shape_of_messages("talk", [said])
        >>> shape.fields, shape.roles
        ({'messages': 'talk', 'role': 'speaker', 'content': 'text'}, {'bot': 'assistant'})
    """
    lists = [
        parse_text(value)[0] if isinstance(value, str) and value.lstrip()[:1] == "[" else value
        for value in values
    ]
    if not all(isinstance(messages, list) and messages for messages in lists):
        return None
    said = [message for messages in lists for message in messages]
    if not all(isinstance(message, dict) for message in said):
        return None
    speaker = _key_in_all(_SPEAKER_KEYS, said)
    content = _key_in_all([key for key in _CONTENT_KEYS if key != speaker], said, is_text=False)
    if speaker is None or content is None:
        return None
    row_format = "sharegpt" if speaker == "from" and content == "value" else "chat"
    ours = {"role": speaker, "content": content}
    usual = {"role": "from", "content": "value"} if row_format == "sharegpt" else {}
    fields = {key: theirs for key, theirs in ours.items() if theirs != usual.get(key, key)}
    if name not in MESSAGE_FIELDS:
        fields = {next(iter(row_formats()[row_format].required)): name, **fields}
    roles = _roles_of([[message[speaker] for message in messages] for messages in lists])
    return None if roles is None else Shape(row_format, fields, roles)


def _key_in_all(
    keys: Iterable[str], said: list[dict[str, Any]], is_text: bool = True
) -> str | None:
    for key in keys:
        if all(key in message and (not is_text or type(message[key]) is str) for message in said):
            return key
    return None


def _roles_of(speakers: list[list[str]]) -> dict[str, str] | None:
    """Role of each speaker that goes by a name of its own; None if nothing tells them apart."""
    unknown = list(dict.fromkeys(n for names in speakers for n in names if n not in SPEAKERS))
    roles: dict[str, str] = {}
    for name in unknown:
        words = set(_words(name))
        role = "user" if words & _USERS else "assistant" if words & _ASSISTANTS else ""
        role = role or ("system" if "system" in words else "")
        if role:
            roles[name] = role
    rest = [name for name in unknown if name not in roles]
    if len(rest) == 2 and not roles:  # who speaks first asks
        first = Counter(names[0] for names in speakers).most_common(1)[0][0]
        return {name: "user" if name == first else "assistant" for name in rest}
    if len(rest) == 1 and "assistant" in roles.values():
        return roles | {rest[0]: "user"}
    return None if rest else roles


def _shape_of_texts(rows: Sequence[dict[str, Any]], taken: frozenset[str]) -> Shape | None:
    """The shape of rows that give question and answer in fields of their own."""
    if {"role", "content"} <= rows[0].keys():  # it is one message
        return None
    texts = _texts_of(rows[0], rows)
    filled = [name for name in texts if all(isinstance(row[name], str) for row in rows)]
    answer = _best(filled, _ANSWER)
    question = _best([name for name in filled if name != answer], _QUESTION)
    is_guess = question is None or answer is None
    if answer is None and (plain := [name for name in filled if name.lower() in _PLAIN]):
        fields = {} if plain[0] == "text" else {"text": plain[0]}
        return Shape("text", fields, is_guess=len(filled) > 1)
    if is_guess:
        likely = [name for name in filled if not _OTHER.intersection(_words(name))]
        numbered = [n for n in likely if n.endswith("1") and f"{n[:-1]}2" in likely]
        if len(numbered) == 1:  # message_1 and message_2, whatever stands beside them
            likely = [numbered[0], f"{numbered[0][:-1]}2"]
        if len(likely) == 1:
            if _is_beside_answers(likely[0], rows[0]):
                return None
            return Shape("text", {} if likely[0] == "text" else {"text": likely[0]})
        if len(likely) != 2:
            return None
        question, answer = likely
    assert question is not None
    assert answer is not None
    rest = [name for name in texts if name not in (question, answer)]
    system, context = _best(rest, _SYSTEM), _best(rest, _CONTEXT)
    free = [slot for slot in _SLOTS if slot[0] not in taken]
    if context is not None or not free:
        free = [_SLOTS[1]]
    row_format, ours_question, ours_answer = free[0]
    fields = {ours_question: question, ours_answer: answer}
    if context is not None:
        fields["context"] = context
    if system is not None:
        fields["system"] = system
    if not is_guess:
        fields |= _beside(row_format, [n for n in rest if n not in (system, context)], rows)
    usual = row_formats()[row_format].names(rows[0], {})
    renamed = {ours: name for ours, name in fields.items() if usual.get(ours) != name}
    if context is None and row_format == "question_answer" and "context" in usual:
        return None  # it would be read as the context, whatever it is
    return Shape(row_format, renamed, is_guess=is_guess)


def _is_beside_answers(name: str, row: Mapping[str, Any]) -> bool:
    """Return True if a text is a question, or a title, and a list or object may hold the rest.

    Example:
        >>> _is_beside_answers("prompt", {"prompt": "1+1?", "responses": ["2", "3"]})
        True
        >>> _is_beside_answers("abstract", {"abstract": "We show ...", "authors": ["A. B."]})
        False
    """
    others = [value for other, value in row.items() if other != name and value]
    is_question = _rank(name, _QUESTION[: _QUESTION.index("document")]) is not None
    return any(
        (isinstance(value, list | dict) and is_question)
        or (isinstance(value, list) and isinstance(value[0], dict))
        for value in others
    )


def _best(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The name that says most clearly that it is one of the known; None: none does."""
    ranked = [(rank, name) for name in names if (rank := _rank(name, known)) is not None]
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def _rank(name: str, known: Sequence[str]) -> int | None:
    words = _words(name)
    if len(words) == 1:
        return known.index(words[0]) if words[0] in known else None
    if _OTHER.intersection(words):
        return None
    while len(words) > 1 and words[-1] in _FILLERS:
        words.pop()
    return len(known) + known.index(words[-1]) if words and words[-1] in known else None


def _words(name: str) -> list[str]:
    """Words of a name: `userMessage` -> user, message."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name).lower().split()
